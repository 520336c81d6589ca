"""Rounding the update, with grids worked out by hand, numpy's own types and the law of large numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedprism as fp
from fedprism.defenses import Cast, Context, Defense, Prune, Quantize, SignCompression, chain
from fedprism.types import detached


def rounded(defense: Defense, tensor: Tensor, seed: int = 0) -> Tensor:
    return defense.on_update({"w": tensor}, Context(), torch.Generator().manual_seed(seed))["w"]


@pytest.mark.parametrize(
    ("bits", "entries", "expected"),
    [
        (1, [3.0, -1.0, 0.0, 2.0], [1.5, -1.5, 1.5, 1.5]),
        (2, [-1.0, -0.4, 0.0, 0.6, 0.9], [-1.0, 0.0, 0.0, 1.0, 1.0]),
        (3, [3.0, -3.0, 1.4, 1.6, -0.4, -2.6], [3.0, -3.0, 1.0, 2.0, 0.0, -3.0]),
        (3, [0.5, 1.5, 2.5, 3.0], [0.0, 2.0, 2.0, 3.0]),
        (8, [127.0, 0.4, -64.2, 100.7], [127.0, 0.0, -64.0, 101.0]),
        (8, [-2.54, 0.013], [-2.54, 0.02]),
    ],
)
def test_entries_land_on_the_grid(bits: int, entries: list[float], expected: list[float]) -> None:
    assert rounded(Quantize(bits), torch.tensor(entries)).tolist() == pytest.approx(expected)


@given(
    bits=st.integers(2, 31),
    size=st.integers(1, 100),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    stochastic=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_rounding_moves_an_entry_by_less_than_a_step(
    bits: int, size: int, scale: float, stochastic: bool, seed: int
) -> None:
    tensor = scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))
    before = tensor.clone()
    found = rounded(Quantize(bits, stochastic=stochastic), tensor, seed)
    assert torch.equal(tensor, before)
    assert found.dtype == tensor.dtype
    largest = float(tensor.abs().max())
    step = largest / (2 ** (bits - 1) - 1)
    moved = float((found.double() - tensor.double()).abs().max())
    # The grid's own values are rounded to single precision, by at most 2^-24 of the largest.
    assert moved <= step * (1 if stochastic else 0.5) + largest * 2**-24
    assert float(found.abs().max()) == largest
    assert len(found.unique()) <= 2**bits - 1
    if bits <= 20:
        multiples = found.double() / step
        torch.testing.assert_close(multiples, multiples.round(), atol=0.1, rtol=0)
        assert torch.equal(rounded(Quantize(bits), found), found), "what is on the grid stays there"


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    n = 40_000
    steps = 2 ** (bits - 1) - 1
    for entry in (-0.9, -0.3, 0.0, 0.25, 0.6, 1.0):
        tensor = torch.full((n + 1,), entry)
        tensor[-1] = 1.0  # the largest magnitude, which sets the grid
        found = rounded(Quantize(bits, stochastic=True), tensor, seed=bits)[:-1].double()
        low, width = (-1.0, 2.0) if bits == 1 else (math.floor(entry * steps) / steps, 1 / steps)
        share = (entry - low) / width
        assert set(np.round(found.unique().tolist(), 5)) <= set(np.round([low, low + width], 5))
        spread = width * math.sqrt(max(share * (1 - share), 0.0) / n)
        assert float(found.mean()) == pytest.approx(entry, abs=5 * spread + 1e-6)
    nearest = rounded(Quantize(2), torch.tensor([0.25] * 100 + [1.0]))[:-1]
    assert float(nearest.mean()) == 0.0, "rounding to the nearest is biased"


def test_randomness_follows_the_generator_alone() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    defense = Quantize(3, stochastic=True)
    torch.manual_seed(1)
    first = rounded(defense, tensor, seed=4)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert torch.equal(first, rounded(defense, tensor, seed=4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first, rounded(defense, tensor, seed=5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thirty_two_bits_change_nothing(dtype: torch.dtype) -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for stochastic in (False, True):
        assert torch.equal(rounded(Quantize(32, stochastic=stochastic), tensor), tensor)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504), min_size=1)
)
@settings(max_examples=100, deadline=None)
def test_half_precision_is_numpys(entries: list[float]) -> None:
    values = np.array(entries, dtype=np.float32)
    found = rounded(Cast("float16"), torch.from_numpy(values.copy()))
    assert np.array_equal(found.numpy(), values.astype(np.float16).astype(np.float32))


def test_bfloat16_keeps_eight_significant_bits() -> None:
    entries = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-9, -3 * 2.0**100, 2.0**-100])
    assert rounded(Cast("bfloat16"), entries).tolist() == [1.0, 1 + 2**-7, 1.0, -3 * 2.0**100, 2.0**-100]


def test_what_lies_beyond_half_precision_stays_finite() -> None:
    assert rounded(Cast("float16"), torch.tensor([1e6, -1e38, 7.0])).tolist() == [65504.0, -65504.0, 7.0]
    assert bool(rounded(Cast("bfloat16"), torch.tensor([3.4028235e38])).isfinite().all())


DEFENSES = [Quantize(1), Quantize(4), Quantize(1, stochastic=True), Quantize(4, stochastic=True), Cast("bfloat16")]


@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
def test_counters_zeros_and_empty_tensors(defense: Defense) -> None:
    update = {
        "w": torch.tensor([0.3, -0.123456]),
        "zero": torch.zeros(3),
        "none": torch.zeros(0, 2),
        "one": torch.tensor(0.3, dtype=torch.float64),
        "count": torch.tensor([257, 3]),
    }
    before = detached(update)
    found = defense.on_update(update, Context(), torch.Generator().manual_seed(0))
    assert all(torch.equal(update[name], before[name]) for name in update)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    assert not found["zero"].any()
    assert torch.equal(found["count"], before["count"])
    assert not torch.equal(found["w"], before["w"])


@pytest.mark.parametrize("defense", DEFENSES, ids=repr)
def test_an_attacker_puts_nothing_flat_into_its_forward_model(defense: Defense) -> None:
    assert defense.deterministic({"w": torch.ones(3)}) == chain()


@pytest.mark.parametrize("defense", [Quantize(4), SignCompression(), chain(Prune(0.5), SignCompression())], ids=repr)
def test_a_client_repeats_its_own_rounding(defense: Defense) -> None:
    """What it sent itself it knows to the last bit, so that the other client's update is what is left."""
    digits = fp.data.load("digits", size=16).batch(range(4))
    held = fp.Batch(digits.inputs.double(), digits.labels)
    model = fp.models.build("fc2", input_shape=(1, 16, 16), hidden=16, classes=10, seed=0).double()
    scenario = fp.Scenario(model=model, clients=[held[:3], held[3:]], defense=defense)
    observation, truth = fp.simulate(scenario, fp.threats.curious_client.granting("defense"), seed=0)
    (part,) = fp.attacks.OtherClients().reduce(observation)
    assert truth.updates is not None
    sent = truth.updates[1] or {}
    assert sent
    assert all(torch.allclose(part.rounds[0].update[name], tensor, atol=1e-12) for name, tensor in sent.items())


def test_chance_is_not_repeated() -> None:
    assert Quantize(4).deterministic() == Quantize(4)
    assert Quantize(4, stochastic=True).deterministic() == chain()


@pytest.mark.parametrize("bits", [0, 33, -1, 2.5, True, "8", None])
def test_bad_bits_are_refused(bits: object) -> None:
    with pytest.raises(fp.errors.BadInput, match=r"^Quantize's bits must be .* from 1 to 32, not .*[.]$"):
        Quantize(bits)  # type: ignore[arg-type]


def test_other_bad_settings_are_refused() -> None:
    with pytest.raises(fp.errors.BadInput, match=r"^Quantize's stochastic must be True or False, not 'no'"):
        Quantize(8, stochastic="no")  # type: ignore[arg-type]
    for dtype in ("float8", "float32", None):
        with pytest.raises(fp.errors.BadInput, match=r"^Cast's dtype must be float16 or bfloat16, not"):
            Cast(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("defense", [*DEFENSES, chain(Cast("float16"), Quantize(8))], ids=repr)
def test_captures_carry_it(defense: Defense, tmp_path: Path) -> None:
    model = fp.models.build("fc2", input_shape=(1, 2, 2), hidden=3, classes=2, seed=0)
    batch = fp.Batch(torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1]))
    scenario = fp.Scenario(model=model, clients=[batch], defense=defense)
    observation, _ = fp.simulate(scenario, fp.threats.honest_but_curious.granting("defense"), device="cpu")
    folder = fp.captures.save(observation, tmp_path / "capture")
    assert fp.captures.load(folder).knowledge.defense == defense
    described = json.loads((folder / "capture.json").read_text())["knowledge"]["defense"]
    assert {entry["name"] for entry in described} <= {"quantize", "cast"}
