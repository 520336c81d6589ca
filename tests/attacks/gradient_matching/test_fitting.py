"""A batch that memory does not hold is worked on in parts: the same answer, and a sentence where that cannot be."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import BatchNorm, Engine, GradientMatching, Labels, Pull, TotalVariation
from fedprism.attacks.gradient_matching.fitting import bytes_per_sample
from fedprism.attacks.gradient_matching.forward import PreparedForward, forward_model
from fedprism.attacks.gradient_matching.two_losses import ClientLosses

SIZE, CLASSES = 5, 4
ATTACK = GradientMatching(labels=Labels.KNOWN, iterations=20, lr=0.02, priors=(TotalVariation(1e-4),))


def observed(*layers: nn.Module, **scenario: object) -> fp.Observation:
    torch.manual_seed(0)
    first, last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 6 * 6, CLASSES)
    model = nn.Sequential(first, *layers, nn.Sigmoid(), nn.Flatten(), last).double()
    rng = torch.Generator().manual_seed(1)
    inputs = torch.rand(SIZE, 1, 6, 6, generator=rng, dtype=torch.float64)
    batch = fp.Batch(inputs, torch.randint(CLASSES, (SIZE,), generator=rng))
    made = fp.Scenario(**{"model": model, "clients": [batch], **scenario})  # type: ignore[arg-type]
    return fp.simulate(
        made, fp.threats.honest_but_curious.granting("labels", "defense", "batchnorm_running"), device="cpu"
    )[0]


def found(attack: GradientMatching, observation: fp.Observation, device: str = "cpu") -> tuple[Tensor, str]:
    answer = fp.run(attack, observation, seed=0, device=device)
    assert answer.inputs is not None
    return answer.inputs, answer.status


@pytest.mark.parametrize("labels", [Labels.KNOWN, Labels.JOINT])
def test_parts_lead_where_the_whole_batch_leads(labels: Labels) -> None:
    attack, observation = dataclasses.replace(ATTACK, labels=labels), observed()
    whole, told = found(attack, observation)
    assert "at a time" not in told
    parts, told = found(dataclasses.replace(attack, engine=Engine(memory=1)), observation)
    assert told.endswith("1 of the 5 samples at a time, to save memory")
    torch.testing.assert_close(parts, whole, rtol=1e-7, atol=1e-9)


def test_as_many_samples_go_together_as_memory_holds() -> None:
    observation = observed()
    forward = forward_model(observation, observation.rounds[0])
    prepared = PreparedForward(forward)
    batch = fp.Batch(torch.zeros(SIZE, 1, 6, 6, dtype=torch.float64), observation.knowledge.labels)  # type: ignore[arg-type]
    each = bytes_per_sample(prepared, batch, ClientLosses(prepared, batch).passes)
    # The images themselves, what the convolution made of them and what the sigmoid did, at the very least.
    assert each > 8 * (36 + 2 * 4 * 36)
    params = 8 * sum(tensor.numel() for tensor in forward.params.values())
    always = 8 * params + 9 * 8 * SIZE * 36  # what does not depend on how many there are: the images of all count too
    _, told = found(
        dataclasses.replace(ATTACK, iterations=1, engine=Engine(memory=int(always + 1.5 * 2.5 * each))), observation
    )
    assert "2 of the 5 samples at a time" in told
    _, told = found(
        dataclasses.replace(ATTACK, iterations=1, engine=Engine(memory=int(always + 1.5 * 5.5 * each))), observation
    )
    assert "at a time" not in told


def test_counting_leaves_nothing_in_memory() -> None:
    observation = observed()
    prepared = PreparedForward(forward_model(observation, observation.rounds[0]))
    batch = fp.Batch(torch.zeros(SIZE, 1, 6, 6, dtype=torch.float64), observation.knowledge.labels)  # type: ignore[arg-type]
    gc.collect()
    before = _tensors()
    bytes_per_sample(prepared, batch, prepared)
    assert _tensors() == before


def _tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("case", ["batch norm", "defense", "pull"])
def test_samples_that_cannot_be_told_apart_stay_together(case: str) -> None:
    layers = () if case == "defense" else (nn.BatchNorm2d(4),)
    observation = observed(*layers, **({"defense": fp.defenses.Clip(1.0)} if case == "defense" else {}))
    attack = dataclasses.replace(
        ATTACK, iterations=3, batchnorm=BatchNorm(pull=Pull.RUNNING if case == "pull" else Pull.NONE)
    )
    whole, told = found(attack, observation)
    tight, warned = found(dataclasses.replace(attack, engine=Engine(memory=1)), observation)
    assert warned == f"{told}; the whole batch at once, although memory may not hold it: its gradient is no plain mean"
    torch.testing.assert_close(tight, whole, rtol=0, atol=0)


def test_memory_is_some_memory() -> None:
    with pytest.raises(fp.errors.BadInput, match="at least one byte"):
        Engine(memory=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_parts_are_captured_too() -> None:
    observation = observed()
    whole, _ = found(ATTACK, observation, "cuda")
    answer = fp.run(dataclasses.replace(ATTACK, engine=Engine(memory=1)), observation, seed=0, device="cuda")
    assert answer.diagnostics["stepping"] == "every iteration is one CUDA graph"
    torch.testing.assert_close(answer.inputs, whole, rtol=1e-6, atol=1e-7)
