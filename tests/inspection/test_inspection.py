"""What a client finds in the model it was sent: every trap, planted signs, and nothing in honest models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.inspection import LAYER_CHECKS, Severity, Suspicious, inspect
from fedprism.randomness import generator
from fedprism.types import Batch, Update

ROOT = Path(__file__).parents[2]


def chain(seed: int = 0) -> nn.Module:
    """A narrow VGG for 3x16x16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            *(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(24 * 16, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)),
        )


def fc2() -> nn.Module:
    return fp.models.build("fc2", input_shape=(3, 16, 16), hidden=64, classes=10, seed=0)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def tampered(attack: Any, model: nn.Module, seed: int = 0) -> Update:
    sent: Update = attack.tamper(model, params_of(model), generator(seed))[0]
    return sent


def found(params: Update, **more: Any) -> set[str]:
    """Names of the checks with a serious finding."""
    return {finding.check for finding in inspect(params, **more).serious}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- traps -----------------------------------------------------------------------------------------------------------

DUMP = fp.attacks.Mkor(reference=fp.attacks.Reference.DUMP_CLASS)
TRAPS: list[tuple[Any, Callable[[], nn.Module], set[str]]] = [
    (fp.attacks.mkor(), chain, {"aligned-rows", "single-entries"}),
    (fp.attacks.mkor_inconspicuous(), chain, {"aligned-rows", "single-entries"}),
    (DUMP, chain, {"aligned-rows", "single-entries", "extreme-biases"}),
    (fp.attacks.class_fishing(), chain, {"one-live-row", "extreme-biases"}),
    (fp.attacks.ClassFishing(bias=5.0), chain, {"one-live-row"}),
    (fp.attacks.imprint(), fc2, {"aligned-rows"}),
]


@pytest.mark.parametrize(("attack", "model", "checks"), TRAPS, ids=[repr(attack) for attack, _, _ in TRAPS])
def test_every_trap_is_found(attack: Any, model: Callable[[], nn.Module], checks: set[str]) -> None:
    for seed in range(3):
        assert found(tampered(attack, model(), seed)) == checks


def test_inconspicuous_mkor_shows_in_each_of_the_ways_it_hides() -> None:
    findings = inspect(tampered(fp.attacks.mkor_inconspicuous(), chain())).serious
    sentences = {finding.tensor: finding.sentence for finding in findings if "columns" not in finding.sentence}
    assert sentences["7.weight"].startswith("10 pairs of rows are opposite")
    assert "6 of 12 kernels" in sentences["0.weight"]
    assert any("columns" in finding.sentence for finding in findings)
    assert all(finding.evidence for finding in findings)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
def test_mkor_is_found_under_noise(noise: float) -> None:
    honest = params_of(chain())
    for attack in (fp.attacks.mkor(), fp.attacks.mkor_inconspicuous()):
        sent = tampered(attack, chain())
        assert found({n: t + noise * honest[n].std() * normal(*t.shape) * (t.dim() > 1) for n, t in sent.items()})


@pytest.mark.quality
@pytest.mark.parametrize(
    ("bias", "noise", "fewest"), [(5.0, 0.3, 5), (2.0, 0.1, 5), (2.0, 0.3, 5), (1.0, 0.4, 5), (1.0, 0.5, 3)]
)
def test_class_fishing_is_found_while_it_works(bias: float, noise: float, fewest: int) -> None:
    """Rows damped instead of emptied, and a bias that no single number gives away: at the last pair 193 of 200."""
    honest = params_of(fc2())
    seen = 0
    for seed in range(5):
        sent = tampered(fp.attacks.ClassFishing(bias=bias, target=4), fc2())
        sent = {n: t + noise * honest[n].std() * normal(*t.shape, seed=seed) * (t.dim() > 1) for n, t in sent.items()}
        assert found(sent) <= {"one-live-row"}
        seen += "one-live-row" in found(sent)
        assert "jumps" in found(sent, reference=honest)
    assert seen >= fewest


@pytest.mark.parametrize("classes", [100, 1000])
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_class_fishing_among_many_classes_needs_no_bias_and_is_found(classes: int, noise: float) -> None:
    model = fp.models.build("fc2", input_shape=(3, 8, 8), hidden=128, classes=classes, seed=0)
    honest = params_of(model)
    sent = dict(tampered(fp.attacks.ClassFishing(bias=0.01, target=4), model))
    last = [name for name, tensor in sent.items() if tensor.dim() == 2][-1]
    sent[last] = sent[last] + noise * honest[last].std() * normal(*honest[last].shape)
    assert found(honest) == set()
    assert found(sent) == {"one-live-row"}
    biases = {name: tensor for name, tensor in honest.items() if tensor.dim() == 1}  # as if the server left them alone
    assert found({**sent, **biases}) == {"one-live-row"}


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_an_imprint_layer_is_found_under_noise_as_large_as_its_weights(noise: float) -> None:
    model = fp.models.build("fc2", input_shape=(3, 32, 32), hidden=128, classes=10, seed=0)
    honest, sent = params_of(model), tampered(fp.attacks.imprint(), model)
    hidden = {n: t + noise * honest[n].std() * normal(*t.shape) * (t.dim() > 1) for n, t in sent.items()}
    assert found(hidden) == {"aligned-rows"}


# --- honest models ---------------------------------------------------------------------------------------------------


def pruned(params: Update, share: float) -> Update:
    return {n: torch.where(t.abs() > t.abs().flatten().quantile(share), t, 0.0) for n, t in params.items()}


def one_bit(params: Update) -> Update:
    return {n: t.sign() * t.abs().mean() if t.dim() > 1 else t for n, t in params.items()}


def zero_head(params: Update) -> Update:
    return {n: torch.zeros_like(t) if n.startswith("11.") else t for n, t in params.items()}


def half_dead(params: Update) -> Update:
    """Every second unit of the first dense layer has decayed."""
    decay = torch.tensor([1.0, 1e-9]).repeat(32)
    return {**params, "7.weight": params["7.weight"] * decay[:, None], "9.weight": params["9.weight"] * decay}


def initialised(how: Callable[[Tensor], Any]) -> Update:
    params = params_of(chain())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for tensor in params.values():
            if tensor.dim() > 1:
                how(tensor)
    return params


HONEST: dict[str, Callable[[], Update]] = {
    "default": lambda: params_of(chain()),
    "Kaiming": lambda: initialised(nn.init.kaiming_normal_),
    "Xavier": lambda: initialised(nn.init.xavier_uniform_),
    "orthogonal": lambda: initialised(nn.init.orthogonal_),
    "uniform": lambda: initialised(lambda t: nn.init.uniform_(t, -0.5, 0.5)),
    "pruned by half": lambda: pruned(params_of(chain()), 0.5),
    "pruned by 95 %": lambda: pruned(params_of(chain()), 0.95),
    "one bit": lambda: one_bit(params_of(chain())),
    "half precision": lambda: {n: t.half() for n, t in params_of(chain()).items()},
    "head of zeros": lambda: zero_head(params_of(chain())),
    "half of the units dead": lambda: half_dead(params_of(chain())),
    "ResNet-18": lambda: params_of(fp.models.build("resnet18", seed=0)),
    "two classes, opposite rows": lambda: {"weight": torch.stack([normal(64), -normal(64)]), "bias": torch.zeros(2)},
    "biases by class frequency": lambda: {"weight": normal(50, 64), "bias": -torch.linspace(0.5, 12, 50)},
    "one long row": lambda: {
        "weight": normal(10, 64) * torch.tensor([4.0] + 9 * [1.0])[:, None],
        "bias": normal(10) / 4,
    },
    "one low bias": lambda: {"weight": normal(10, 64), "bias": torch.tensor([-6.0] + 9 * [0.0])},
    "only buffers": lambda: {"steps": torch.tensor(7)},
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_not_accused(name: str) -> None:
    assert inspect(HONEST[name]()).serious == ()


def test_a_trained_network_is_not_accused(digits: fp.data.ImageSet) -> None:
    model = fp.models.build("lenet5", input_shape=(1, 16, 16), seed=0)
    before, data = params_of(model), digits.batch(list(range(640)))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(60):
        chosen = slice(32 * (step % 20), 32 * (step % 20 + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.inputs[chosen]), data.labels[chosen]).backward()
        optimizer.step()
    params = params_of(model)
    assert found(params, reference=before, model=model, batch=data[:16]) == set()
    assert found(pruned(params, 0.9)) == set()
    assert found(one_bit(params)) == set()


# --- planted signs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "noise", "seen"), [(3, 0.0, False), (4, 0.0, True), (8, 0.4, True), (8, 3.0, False)])
def test_opposite_pairs_are_counted(pairs: int, noise: float, seen: bool) -> None:
    rows = normal(64, 300)
    rows[:pairs] = -1.3 * rows[32 : 32 + pairs] + noise * normal(pairs, 300, seed=1)
    findings = inspect({"fc.weight": rows}).serious
    assert bool(findings) == seen
    if seen:
        assert findings[0].evidence["opposite_pairs"] == pairs


def test_long_rows_are_folded_without_losing_pairs() -> None:
    rows = normal(40, 5000)
    rows[:6] = -rows[20:26]
    (finding,) = inspect({"fc.weight": rows}).serious
    assert finding.evidence["opposite_pairs"] == 6


@pytest.mark.parametrize(
    ("shared", "biases", "seen"), [(1.0, 5.0, True), (0.0, 5.0, False), (1.0, 0.1, False)], ids=["both", "one", "other"]
)
def test_thresholds_and_one_direction_are_evidence_together(shared: float, biases: float, seen: bool) -> None:
    rows = normal(64, 300) + shared * normal(1, 300, seed=1)
    params = {
        "a.weight": rows,
        "a.bias": biases * rows.norm(dim=1).median() * normal(64, seed=2),
        "b.weight": normal(10, 64),
    }
    assert bool(found(params) & {"aligned-rows"}) == seen


def test_classes_without_samples_are_pushed_the_same_way() -> None:
    """Rows of a last layer nearly in one direction are honest; rows of a layer before it are not."""
    rows = normal(1, 200, seed=1) + 0.3 * normal(64, 200)
    assert found({"last.weight": rows}) == set()
    assert found({"first.weight": rows, "last.weight": normal(10, 64)}) == {"aligned-rows"}


def test_a_class_that_is_everywhere_has_the_longest_row_and_the_highest_bias() -> None:
    rows, bias = normal(200, 100), 0.1 * normal(200, seed=1)
    rows[7] *= 3
    for value, checks in ((1.0, set()), (0.0, {"one-live-row"})):
        bias[7] = value
        assert found({"fc.weight": rows, "fc.bias": bias}) == checks


def test_nearly_opposite_kernels_of_a_first_layer_are_no_evidence() -> None:
    kernels = normal(32, 100)
    kernels[:8] = -kernels[8:16] + 0.6 * normal(8, 100, seed=1)  # cosines of about -0.86
    assert found({"conv.weight": kernels.view(32, 4, 5, 5)}) == set()
    assert found({"fc.weight": kernels}) == {"aligned-rows"}


@pytest.mark.parametrize(("noise", "seen"), [(0.0, True), (0.02, True), (1.0, False)])
def test_kernels_of_one_entry_are_counted(noise: float, seen: bool) -> None:
    kernels = 0.05 * normal(32, 8, 3, 3)
    kernels[:5] = noise * normal(5, 8, 3, 3, seed=1)
    for number in range(5):
        kernels[number, number, 1, 1] = 1.0
    findings = inspect({"conv.weight": kernels}).serious
    assert [finding.check for finding in findings] == ["single-entries"] * seen


def test_one_unit_that_grew_too_large_is_no_evidence() -> None:
    rows = 0.05 * normal(64, 64)
    rows[:, 7] = 3.0
    assert "single-entries" not in found({"fc.weight": rows})


def test_a_few_extreme_biases_are_named() -> None:
    params = {"fc.weight": normal(10, 40), "fc.bias": torch.zeros(10)}
    params["fc.bias"][4] = 12.0
    (finding,) = inspect(params).serious
    assert (finding.check, finding.tensor, finding.evidence["value"]) == ("extreme-biases", "fc.bias", 12.0)


def test_notes_are_not_serious() -> None:
    sparse = torch.zeros(50, 50)
    sparse[3, 4], sparse[3, 9] = 1.0, 0.5
    inspection = inspect({"fc.weight": normal(1024, 1100), "other.weight": sparse})
    assert {finding.check for finding in inspection.findings} == {"oversized", "zero-dominated"}
    assert {finding.severity for finding in inspection.findings} == {Severity.NOTE}
    inspection.require_clean()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_a_finding(value: float) -> None:
    params = params_of(chain())
    params["7.weight"][3, 5] = value
    (finding,) = inspect(params, model=chain(), batch=own_batch()).serious
    assert (finding.check, finding.tensor, finding.evidence["values"]) == ("not-finite", "7.weight", 1)


def test_strange_tensors_are_no_crash() -> None:
    strange = {
        "empty.weight": torch.zeros(0, 5),
        "whole.weight": torch.arange(600).view(20, 30),
        "bytes.weight": torch.ones(20, 30, dtype=torch.uint8),
        "signed.weight": (30 * normal(20, 30)).to(torch.int8),
        "logical.weight": torch.ones(20, 30, dtype=torch.bool),
        "scalar.weight": torch.tensor(3.0),
        "huge.weight": torch.full((20, 30), 3e38) * normal(20, 30).sign(),
        "tiny.weight": 1e-42 * normal(20, 30),
        "double.weight": normal(20, 30).double() * 1e30,
        "odd.bias": torch.ones(3, 3, 3),
        "fc.weight": normal(20, 30),
        "fc.bias": torch.ones(7),
    }
    assert found(strange) == set()
    assert found({"double.weight": torch.full((20, 30), 1e300, dtype=torch.float64)}) == {"not-finite"}
    with pytest.raises(fp.errors.BadInput, match="no tensors"):
        inspect({})


def test_copies_hidden_in_small_whole_numbers_are_found() -> None:
    rows = (40 * normal(1, 192)).expand(16, 192).to(torch.int8)
    assert found({"fc.weight": rows, "last.weight": normal(4, 16)}) == {"aligned-rows"}


# --- what changed ----------------------------------------------------------------------------------------------------


def test_a_round_of_training_is_no_jump_but_a_replaced_layer_is() -> None:
    before = params_of(chain())
    moved = {n: t + 0.1 * t.std(correction=0) * normal(*t.shape) for n, t in before.items()}
    assert found(moved, reference=before) == set()
    other = {**moved, "7.weight": params_of(chain(1))["7.weight"]}
    assert found(other) == set()
    assert [f.tensor for f in inspect(other, reference=before).serious] == ["7.weight"]


def test_some_replaced_rows_are_a_jump() -> None:
    before = params_of(chain())
    rows = before["7.weight"].clone()
    rows[:3] = params_of(chain(1))["7.weight"][:3]
    (finding,) = inspect({**before, "7.weight": rows}, reference=before).serious
    assert (finding.check, finding.evidence["turned_rows"]) == ("jumps", 3)


def test_layers_that_appear_or_change_shape_are_jumps() -> None:
    before = {"a.weight": normal(8, 30), "b.weight": normal(8, 30)}
    after = {"a.weight": normal(9, 30), "c.weight": normal(8, 30)}
    assert {f.tensor for f in inspect(after, reference=before).serious} == {"a.weight", "b.weight", "c.weight"}


def test_a_head_that_starts_at_zero_may_move() -> None:
    before = zero_head(params_of(chain()))
    assert found(params_of(chain()), reference=before) == set()


# --- what the model does ---------------------------------------------------------------------------------------------


def own_batch(size: int = 12) -> Batch:
    rng = torch.Generator().manual_seed(0)
    return Batch(torch.rand(size, 3, 16, 16, generator=rng), torch.arange(size) % 10)


def test_behaviour_on_the_clients_own_batch() -> None:
    honest = params_of(chain())
    assert found(honest, model=chain(), batch=own_batch()) == set()
    assert found(zero_head(honest), model=chain(), batch=own_batch()) == set()
    fishing = found(tampered(fp.attacks.ClassFishing(target=5), chain()), model=chain(), batch=own_batch())
    assert "few-samples-dominate" in fishing
    assert "same-logits" in found(tampered(fp.attacks.mkor(), chain()), model=chain(), batch=own_batch())
    assert "classes-ruled-out" in found(tampered(DUMP, chain()), model=chain(), batch=own_batch())


def test_the_fished_sample_is_named() -> None:
    sent = tampered(fp.attacks.ClassFishing(target=5), chain())
    findings = inspect(sent, model=chain(), batch=own_batch(10)).serious
    (finding,) = [finding for finding in findings if finding.check == "few-samples-dominate"]
    assert (finding.evidence["sample"], finding.evidence["heard"]) == (5, 1)


def test_outputs_that_are_not_finite_are_a_finding() -> None:
    params = params_of(chain())
    grown = {n: t * 1e20 if t.dim() > 1 else t for n, t in params.items()}
    assert found(grown, model=chain(), batch=own_batch()) == {"outputs"}


def test_code_and_batch_must_fit() -> None:
    params = params_of(chain())
    with pytest.raises(fp.errors.BadInput, match="together"):
        inspect(params, model=chain())
    with pytest.raises(fp.errors.BadInput, match="factory of this very model"):
        inspect(params, model=fc2(), batch=own_batch())
    with pytest.raises(fp.errors.BadInput, match="does not accept inputs"):
        inspect(params, model=chain(), batch=Batch(torch.rand(4, 1, 5, 5), torch.arange(4)))


# --- the call --------------------------------------------------------------------------------------------------------


def test_require_clean_is_one_sentence() -> None:
    inspect(params_of(chain())).require_clean()
    with pytest.raises(Suspicious, match=r"signs of tampering in .*\. Do not train") as caught:
        inspect(tampered(fp.attacks.mkor(), chain())).require_clean()
    assert "\n" not in str(caught.value)


def test_nothing_is_changed_and_no_random_state_is_touched() -> None:
    params, model, batch = params_of(chain()), chain(), own_batch()
    before, state = {n: t.clone() for n, t in params.items()}, torch.random.get_rng_state()
    first = inspect(params, reference=params, model=model, batch=batch)
    assert first == inspect(params, reference=params, model=model, batch=batch)
    assert all(torch.equal(before[n], params[n]) for n in params)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training


def test_units_that_weight_decay_emptied_may_point_anywhere() -> None:
    before = {"weight": normal(64, 32)}
    length = torch.ones(64, 1)
    length[:9] = 0.05
    after = torch.where(length < 1, normal(64, 32, seed=1), before["weight"])
    assert found({"weight": length * after}, reference=before) == set()
    assert found({"weight": after}, reference=before) == {"jumps"}


@pytest.mark.parametrize("name", LAYER_CHECKS)
def test_checks_are_described(name: str) -> None:
    assert LAYER_CHECKS[name].__doc__


def test_whole_numbers_are_no_layer() -> None:
    assert inspect({"steps": torch.tensor(1)}).findings == ()


def test_the_benchmark_runs_in_its_quick_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module("inspection")
    totals = dict(benchmark.quick())["totals"]
    assert totals["false alarms"]["flagged"] == 0
    assert totals["tampered, plain"]["rate"] == 1.0
    assert benchmark.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert benchmark.wilson(200, 200) == pytest.approx((0.9812, 1.0), abs=1e-3)
