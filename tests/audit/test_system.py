"""Where weights come from, told by what a factory makes of several seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprism.audit import Setup, parse_plan
from fedprism.audit.system import system, weights_of

CODE = """
import torch
from torch import nn


def fresh():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.LayerNorm(4), nn.Linear(4, 10))


def loaded():
    model = fresh()
    drawn = torch.Generator().manual_seed(5)
    for tensor in model.parameters():
        tensor.data = torch.rand(tensor.shape, generator=drawn)
    return model


def head():
    model = loaded()
    model[3].reset_parameters()
    return model
"""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ('name = "fc2"', "random weights"),
        ('name = "fc2"\nweights = "trained/best.safetensors"', "trained weights (best.safetensors)"),
        ('factory = "CODE:fresh"', "random weights"),
        ('factory = "CODE:loaded"', "fixed weights from the factory"),
        ('factory = "CODE:head"', "partly random weights"),
    ],
)
def test_weights_are_told_apart(model: str, words: str, tmp_path: Path) -> None:
    code = f"weights_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{code}.py").write_text(CODE)
    plan = parse_plan(f'[model]\n{model.replace("CODE", code)}\n[data]\nname = "digits"\n')
    assert weights_of(Setup(plan, tmp_path)) == words
    assert f", {words}, simulated clients holding digits." in system(plan.as_json(), words)


def test_recordings_and_factories_of_data_are_named() -> None:
    recorded = parse_plan('[captures]\nfolders = ["a"]\n')
    assert weights_of(Setup(recorded, Path())) == "recorded weights"
    own = parse_plan('[model]\nname = "fc2"\n[data]\nfactory = "code:samples"\n')
    assert "clients holding code:samples." in system(own.as_json(), "random weights")
