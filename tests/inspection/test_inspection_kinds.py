"""Honest models that look odd, of which each was accused once; and traps among few classes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fedprism as fp
from fedprism.inspection import inspect
from fedprism.randomness import generator
from fedprism.types import Update

ROOT = Path(__file__).parents[2]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def found(params: Update, **more: Update) -> set[str]:
    return {finding.check for finding in inspect(params, **more).serious}


def fc2(classes: int, channels: int = 3) -> nn.Module:
    return fp.models.build("fc2", input_shape=(channels, 8, 8), hidden=64, classes=classes, seed=0)


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def masked(structured: bool) -> nn.Module:
    model = fc2(10)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)][:-1]:
        if structured:
            prune.ln_structured(layer, "weight", 0.5, n=2, dim=0)
        else:
            prune.l1_unstructured(layer, "weight", 0.1)
    return model


@pytest.mark.parametrize("structured", [False, True])
def test_masks_of_torchs_pruning_are_no_evidence_but_what_they_cover_is(structured: bool) -> None:
    params = params_of(masked(structured))
    assert any(name.endswith("weight_mask") for name in params)
    assert found(params) == set()
    original = next(name for name in params if name.endswith("weight_orig"))
    params[original] = normal(1, 192).expand(64, 192)
    (finding,) = inspect(params).serious
    assert (finding.check, finding.tensor) == ("aligned-rows", original.removesuffix("_orig"))


def test_a_mask_that_fits_no_weight_hides_nothing() -> None:
    params = {
        "a.weight_orig": normal(1, 192).expand(40, 192),
        "a.weight_mask": torch.ones(3, 3),
        "b.weight": normal(9, 40),
    }
    assert found(params) == {"aligned-rows"}


def test_masks_of_attention_are_no_evidence() -> None:
    head = {"head.weight": normal(10, 64)}
    assert found({"mask": nn.Transformer.generate_square_subsequent_mask(64), **head}) == set()
    assert found({"causal": torch.tril(torch.ones(64, 64)), **head}) == set()
    assert found({"scores": torch.full((8, 8), -torch.inf).fill_diagonal_(0.5), **head}) == {"not-finite"}


def test_one_output_may_be_a_price() -> None:
    assert found({"fc.weight": normal(1, 20), "fc.bias": torch.tensor([213000.0])}) == set()
    assert found({"fc.weight": normal(2, 20), "fc.bias": torch.tensor([0.0, 1000.0])}) == {"extreme-biases"}


def test_classes_without_samples_have_one_row_if_training_starts_at_zero() -> None:
    rows = torch.cat([normal(10, 128), -normal(1, 128, seed=1).expand(52, 128)])
    assert found({"weight": rows, "bias": torch.cat([normal(10), torch.zeros(52)])}) == set()
    assert found({"weight": rows, "next.weight": normal(10, 62)}) == {"aligned-rows"}


def test_rows_of_signs_that_agree_are_no_copies() -> None:
    """What one step of Adam makes of zeros: the few samples of a step decide all signs."""
    signs = (normal(256, 3) @ normal(3, 32, seed=1)).sign()
    assert found({"b.weight": signs, "next.weight": normal(10, 256)}) == set()
    sizes = signs * torch.linspace(0.5, 1, 32)  # the same signs of entries that differ in size
    assert found({"b.weight": sizes, "next.weight": normal(10, 256)}) == {"aligned-rows"}


def test_positive_weights_are_no_imprint_layer() -> None:
    rows = torch.rand(128, 784, generator=torch.Generator().manual_seed(0))
    assert found({"weight": rows, "next.weight": normal(10, 128)}) == set()


def test_weights_drawn_to_zero_everywhere_leave_few_entries() -> None:
    """Four are left of most rows, twelve of every fourth one, and six of all columns."""
    small, large = 1e-4 * normal(96, 100), normal(96, 100, seed=1)
    places = (torch.arange(100) - torch.arange(96)[:, None]) % 96
    kept = (places < torch.where(torch.arange(96) % 4 > 0, 4, 12)[:, None]) & (torch.arange(100) < 96)
    assert kept.sum(0).tolist() == 96 * [6] + 4 * [0]
    assert found({"weight": torch.where(kept, large, small)}) == set()
    copies = small + torch.eye(96, 100)  # and such rows among others that were not shrunk
    rows = torch.where(torch.arange(96)[:, None] < 48, copies, large)
    assert found({"weight": rows}) == {"single-entries"}


def test_a_hidden_unit_that_outgrew_the_others_fishes_for_nothing() -> None:
    rows = normal(8, 64)
    rows[3] *= 20
    params = {"a.weight": rows, "a.bias": torch.zeros(8), "b.weight": normal(2, 8), "b.bias": torch.zeros(2)}
    assert found(params) == set()


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("bias", [1000.0, 30.0, 5.0, 1.0])
@pytest.mark.parametrize("channels", [1, 3])
def test_class_fishing_among_few_classes_is_found(classes: int, bias: float, channels: int) -> None:
    """Also in a network whose first convolution has as many inputs as there are classes."""
    convolution = {"features.weight": normal(16, channels, 3, 3), "features.bias": normal(16)}
    model = fc2(classes, channels)
    honest = {**convolution, **params_of(model)}
    attack = fp.attacks.ClassFishing(target=1, bias=bias)
    sent = {**convolution, **attack.tamper(model, params_of(model), generator(0))[0]}
    assert found(honest) == set()
    assert "one-live-row" in found(sent)


@pytest.mark.parametrize("classes", [2, 10])
def test_rows_that_were_emptied_are_a_jump(classes: int) -> None:
    model = fc2(classes)
    before = params_of(model)
    after = fp.attacks.ClassFishing(target=1, bias=5.0).tamper(model, before, generator(0))[0]
    findings = [finding for finding in inspect(after, reference=before).serious if finding.check == "jumps"]
    assert [finding.sentence for finding in findings] == [f"{classes - 1} of {classes} rows were emptied"]
    first = next(name for name, tensor in before.items() if tensor.dim() == 2)
    pruned = {**before, first: before[first] * (torch.arange(64) % 2)[:, None]}
    assert found(pruned, reference=before) == set()


def test_the_benchmarks_other_kinds_are_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cells = list(importlib.import_module("other_kinds").other_kinds(2))
    assert {cell.variant: found(cell.make(0)) for cell in cells} == {cell.variant: set() for cell in cells}
