"""Models, losses and data that misbehave: one sentence each, told as the user's own, with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.errors import told, users_place
from fedprism.runtime.replay import Kinks


class Misbehaving(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.dense, self.how, self.calls = nn.Linear(4, 2), how, 0

    def forward(self, rows: Tensor) -> Tensor:
        if self.how == "looks something up":
            {}["weights"]
        if self.how == "changes precision":
            torch.set_default_dtype(torch.float64)
        if self.how == "uses threads":
            torch.set_num_threads(torch.get_num_threads() + 1)
        if self.how == "refuses one sample" and len(rows) == 1:
            raise AssertionError("at least two rows")
        if self.how == "reseeds":
            torch.manual_seed(0)
        if self.how == "writes into its inputs":
            rows.mul_(0.5)
        if self.how == "records no gradient":
            with torch.no_grad():
                return self.dense(rows)
        outputs = self.dense(rows)
        return outputs * torch.nan if self.how == "returns NaN" else outputs


def simulated(how: str, samples: int = 3, **settings: Any) -> tuple[fp.Observation, fp.Truth]:
    rng = torch.Generator().manual_seed(0)
    batch = fp.Batch(torch.rand(samples, 4, generator=rng), torch.arange(samples) % 2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Misbehaving(how)
    scenario = fp.Scenario(model=model, clients=[batch], **settings)
    return fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("looks something up", r"KeyError: 'weights', in test_hostile_models.py, line \d+"),
        ("changes precision", "default dtype"),
        ("uses threads", "number of threads"),
        ("returns NaN", "is nan"),
        ("writes into its inputs", "changes its inputs in place"),
        ("records no gradient", "does not depend on trained parameters"),
    ],
)
def test_a_misbehaving_model_ends_in_one_sentence(how: str, words: str) -> None:
    threads = torch.get_num_threads()
    with pytest.raises(fp.errors.BadInput, match=words):
        simulated(how)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


def test_a_model_that_refuses_one_sample_works_with_more() -> None:
    assert simulated("refuses one sample")[0].round.update
    with pytest.raises(fp.errors.BadInput, match=r"at least two rows, in test_hostile_models.py, line \d+"):
        simulated("refuses one sample", samples=1)


def test_a_model_that_reseeds_changes_nobody_elses_random_numbers() -> None:
    state = torch.get_rng_state()
    noisy, calm = (simulated(how, defense=fp.defenses.GaussianNoise(0.1))[0].round.update for how in ("reseeds", ""))
    for name, tensor in calm.items():
        assert torch.equal(noisy[name], tensor)
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_raises_is_told_with_its_place() -> None:
    def broken(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.nothing  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(fp.errors.BadInput, match=r"AttributeError: .*nothing.*, in test_hostile_models.py, line \d+"):
        simulated("", loss=broken)


@pytest.mark.parametrize("returned", [torch.ones(3), 3.0, None], ids=["a row", "a number", "nothing"])
def test_a_loss_that_returns_no_number_is_refused(returned: object) -> None:
    with pytest.raises(fp.errors.BadInput, match="must return one number"):
        simulated("", loss=lambda outputs, labels: returned)


def test_errors_are_told_apart_by_whose_code_raised_them() -> None:
    def caught(raising: Any) -> BaseException:
        try:
            raising()
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    theirs = caught(lambda: Misbehaving("")(torch.ones(2, 5)))
    assert users_place(theirs) is not None
    assert Path(__file__).name in told(theirs)
    with Kinks():
        watched = caught(lambda: Misbehaving("")(torch.ones(2, 5)))
    assert Path(__file__).name in told(watched)
    ours = caught(lambda: fp.losses.one_hot(None, None))  # type: ignore[arg-type]
    assert users_place(ours) is None
    assert users_place(ValueError("never raised")) is None
