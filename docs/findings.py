"""The reference of findings: every check that the code knows, its severity, and one sentence about each."""

from __future__ import annotations

import ast
from pathlib import Path

from commands import table

import fedprism

SOURCE = Path(fedprism.__file__).parent
SEVERITIES = {"serious": "serious", "_serious": "serious", "note": "note"}
"""The functions that make findings, by name."""

ABOUT_THE_PROTOCOL = {
    "participants-in-clear": "The server saw which clients took part in rounds of secure aggregation.",
    "examples-in-clear": "SecAgg+ masks the number of examples, and also sends it in plain text.",
    "metrics-in-clear": "Clients sent metrics, such as the training loss, in plain text beside masked updates.",
    "sums-come-apart": "Several sums of the same model and known cohorts determine the updates of single clients.",
    "masks-from-few-seeds": "The installed SecAgg+ makes the same mask from different seeds.",
    "raw-updates-seen": "The server clips, so it receives raw updates. Only the released model is private.",
    "clipping-left-out": "Clients were asked to clip, and longer updates arrived. The noise is too small for them.",
    "noise-below-configured": "Fewer clients replied than the noise was set for, or one weighs more than its share.",
    "clients-refused": "Clients that inspect models refused to train on the one they were sent.",
    "differences-sent": "Clients sent differences of weights. They are recorded as such.",
    "arrays-passed-by": "Messages held arrays beside the model. These are neither recorded nor attacked.",
    "parts-unsent": "Only a part of the model travels, such as adapters. Attacks take the rest from the given model.",
    "clients-silent": "Answers that the server asked for did not come. The finding counts them by round.",
    "rounds-left-out": "Updates of some rounds are not in the recording.",
    "recorder-failed": "The recorder could not do something. The finding names it.",
    "samples-read-off": "The watch recovered samples from an update while the run was going on.",
}

ABOUT_THE_MODEL = {
    "aligned-rows": "Rows of a dense layer point in one direction, are opposite pairs, or are copies (imprint, MKOR).",
    "single-entries": "Kernels or rows consist of a few entries, so they copy their input (MKOR).",
    "one-live-row": "All classes but one are silenced, or one row is far longer than the others (class fishing).",
    "extreme-biases": "A bias is above 50, or far from all others (class fishing, MKOR with a dump class).",
    "not-finite": "The model holds NaN or infinity.",
    "zero-dominated": "Nearly all entries of a layer are zero. Hard pruning does that, too.",
    "oversized": "One dense layer is nearly the whole model. Small honest models can look like that.",
    "jumps": "Compared with the reference model, a layer or some rows were replaced or emptied. Needs `--reference`.",
    "outputs": "The model's outputs for the client's own batch are not finite. Needs `--model` and `--batch`.",
    "same-logits": "All classes get the same output. Needs `--model` and `--batch`.",
    "classes-ruled-out": "The loss is very high for half of the client's samples. Needs `--model` and `--batch`.",
    "few-samples-dominate": "Most samples hardly contribute to the update. Needs `--model` and `--batch`.",
}


def checks(room: str) -> dict[str, str]:
    """The checks of a room of the code and their severities."""
    calls = (
        node
        for file in sorted((SOURCE / room).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SEVERITIES and node.args
    )
    return {
        str(call.args[0].value): SEVERITIES[call.func.id]  # type: ignore[attr-defined]
        for call in calls
        if isinstance(call.args[0], ast.Constant)
    }


def findings(room: str, sentences: dict[str, str]) -> str:
    """One row per check, in the order of the sentences; a check without a sentence ends the program."""
    severities = checks(room)
    if severities.keys() != sentences.keys():
        raise KeyError(f"docs/findings.py and src/fedprism/{room} differ in {severities.keys() ^ sentences.keys()}")
    return table(
        ("finding", "severity", "meaning"), [(f"`{name}`", severities[name], text) for name, text in sentences.items()]
    )


def protocol() -> str:
    return findings("integrations", ABOUT_THE_PROTOCOL)


def models() -> str:
    return findings("inspection", ABOUT_THE_MODEL)
