"""Batch-norm knowledge, private labels and defenses as studies: their parts with planted answers, and small runs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import fedprism as fp
from fedprism.errors import BadInput
from fedprism_papers import Measured, Settings
from fedprism_papers.gradattack import adaptive as adapting
from fedprism_papers.gradattack import attackers as attackers
from fedprism_papers.gradattack import fig_1 as fig_1
from fedprism_papers.gradattack import fig_2 as fig_2
from fedprism_papers.gradattack import inversion as study
from fedprism_papers.gradattack import labels as labels
from fedprism_papers.gradattack import table_2 as table
from fedprism_papers.gradattack import table_2_trials as parts
from fedprism_papers.shared.base import Row
from fedprism_papers.shared.victims import IMAGENET

QUICK = Settings(quick=True, device="cpu")


def say(doing: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def data() -> study.Data:
    return study.photos()


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_average_best_and_spread_are_over_all_images(data: study.Data) -> None:
    images = data.attacked[:3]
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in data.normalization)
    pixels = images.inputs * std + mean
    moved = (torch.where(pixels < 0.5, pixels + 0.1, pixels - 0.1) - mean) / std  # 20 dB off

    def outcome(*parts: torch.Tensor) -> Measured:
        answers = study.Answers(parts=tuple(fp.Reconstruction(inputs=part) for part in parts), seconds=(1.0,))
        return study.scored(answers, images, data.normalization, QUICK)

    assert outcome(moved[:2], images.inputs[2:]).mean("PSNR") > 20.1
    alike = outcome(moved)
    assert [alike.mean(name) for name in ("PSNR", "best PSNR", "std of PSNR")] == pytest.approx([20, 20, 0], abs=1e-3)


def test_images_that_nobody_attacked_are_not_the_attacked_ones(data: study.Data) -> None:
    outcome = study.scored_strangers(data, data.attacked[:4], 2, QUICK)
    assert len(outcome.statuses) == 2, "batches of two"
    assert outcome.mean("PSNR") < 15


# --- figure 1: batch-norm knowledge ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photograph() -> fig_1.Scene:
    return fig_1.photograph(QUICK)[0]


@pytest.mark.quality
def test_exact_statistics_show_more_of_a_photograph_than_running_ones(photograph: fig_1.Scene) -> None:
    def decibels(knowledge: str) -> float:
        method = fig_1.attack(knowledge, fig_1.PUBLISHED_WEIGHTS, 120)
        answers = study.invert(method, photograph.target(), [photograph.images], fig_1.THREAT, QUICK)
        return study.scored(answers, photograph.images, IMAGENET, QUICK).mean("PSNR")

    assert decibels("exact") > decibels("proxy") + 3


def test_weights_are_chosen_without_the_attacked_images(photograph: fig_1.Scene) -> None:
    settings = replace(QUICK, iterations=20)
    found = fig_1.choose(photograph, "exact", settings)
    assert found.trials[0].values == fig_1.PUBLISHED_WEIGHTS, "the published weights are tried first"
    assert found.score >= found.trials[0].score
    noise = fp.Batch(torch.randn(1, 3, 16, 16), torch.tensor([0]))
    assert fig_1.choose(replace(photograph, images=noise), "exact", settings) == found
    assert set(fig_1.choose(photograph, "proxy", settings).values) == {fig_1.TV}, "there is nothing to pull towards"
    assert not torch.equal(photograph.rehearsed.inputs, photograph.images.inputs)


def test_figure_1_says_what_was_chosen(photograph: fig_1.Scene) -> None:
    settings = replace(QUICK, iterations=3)
    row = fig_1.row(photograph, "infer", settings, say)
    assert isinstance(row.entries[fig_1.TV], float)
    assert isinstance(row.entries[fig_1.BN], float)
    chosen = row.entries[fig_1.CHOSEN]
    assert isinstance(chosen, Measured)
    assert repr(row.entries[fig_1.TV]) in chosen.settings
    assert "pulled towards the running statistics" in chosen.statuses[0]
    assert "labels known" in chosen.statuses[0]


# --- figure 2: repeated labels ---------------------------------------------------------------------------------------


def test_the_birthday_problem() -> None:
    assert fig_2.chance_of_repeat(23, 365) == pytest.approx(0.507297, abs=1e-6)
    assert fig_2.chance_of_repeat(1, 10) == 0
    assert fig_2.chance_of_repeat(11, 10) == 1


def test_repeats_are_counted() -> None:
    counts = torch.tensor([[2, 1, 1], [4, 0, 0], [2, 2, 0], [0, 1, 3]])
    shares = fig_2.repeats(counts)
    assert shares[fig_2.REPEATS] == 1
    assert shares[fig_2.SHARING] == pytest.approx((2 + 4 + 4 + 3) / 16)
    assert shares[fig_2.MISSING] == pytest.approx(4 / 12)
    assert fig_2.repeats(torch.eye(3, dtype=torch.int64))[fig_2.REPEATS] == 0


def test_an_epoch_shows_every_image_once_and_drawing_agrees_with_the_formula() -> None:
    balanced = torch.arange(10).repeat(100)
    epoch = fig_2.drawn_counts(balanced, 10, 4, 250, torch.Generator().manual_seed(0))
    assert epoch.sum(0).tolist() == [100] * 10
    many = fig_2.drawn_counts(balanced, 10, 4, 4000, torch.Generator().manual_seed(0))
    assert fig_2.repeats(many)[fig_2.REPEATS] == pytest.approx(fig_2.chance_of_repeat(4, 10), abs=0.03)


# --- private labels --------------------------------------------------------------------------------------------------


def test_batches_have_the_labels_they_are_said_to_have(data: study.Data) -> None:
    def drawn(kind: str, size: int) -> list[int]:
        found: list[int] = labels.compose(kind, size, data.train, 0, 0).labels.tolist()
        return found

    even = drawn(labels.EVEN, 12)
    assert sorted(even.count(number) for number in range(8)) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len(set(drawn(labels.ONE_CLASS, 12))) == 1
    random = drawn(labels.AS_DRAWN, 24)
    assert len(set(random)) > 1
    assert max(random.count(number) for number in range(8)) > 3
    with pytest.raises(BadInput, match="500 images of one class are needed"):
        labels.compose(labels.ONE_CLASS, 500, data.train, 0, 0)


def test_labels_are_right_as_often_as_they_are_there(data: study.Data) -> None:
    batch = fp.Batch(torch.zeros(4, 3, 16, 16), torch.tensor([1, 1, 2, 3]))
    guess = fp.Reconstruction(inputs=batch.inputs, labels=torch.tensor([3, 1, 4, 2]))
    answers = study.Answers(parts=(guess,), seconds=(0.0,))
    assert labels.labels_right(answers, [batch]) == 0.75


@pytest.mark.quality
def test_labels_optimised_with_the_images_show_less_of_them(data: study.Data) -> None:
    settings = replace(QUICK, iterations=200)
    target = study.Target(model=study.attacked_network(data, settings), normalization=data.normalization)
    batches = labels.composed(labels.EVEN, 4, data, settings)
    answers = {name: labels.observe(name, batches, target, settings) for name in (labels.KNOWN, labels.JOINT)}
    row = labels.row(labels.EVEN, 4, answers, data, settings)
    known, joint = row.entries[labels.KNOWN], row.entries[labels.JOINT]
    assert isinstance(known, Measured)
    assert isinstance(joint, Measured)
    assert known.mean(labels.LABELS_RIGHT) == 1
    assert known.mean("PSNR") > joint.mean("PSNR") + 1  # by 3 to 13 dB over twelve draws
    assert "labels known" in known.statuses[0]
    assert "labels optimised jointly" in joint.statuses[0]


def test_the_attacker_without_labels_is_not_given_them(data: study.Data) -> None:
    settings = replace(QUICK, iterations=1)
    target = study.Target(model=data.network(0), normalization=data.normalization)
    batches = labels.composed(labels.AS_DRAWN, 4, data, settings)
    for name in (labels.INFERRED, labels.JOINT):
        assert "labels" not in labels.observe(name, batches, target, settings).parts[0].knowledge_used


# --- table 2: defenses -----------------------------------------------------------------------------------------------


def case_of(label: str) -> attackers.Case:
    return next(case for case in table.CASES if case.label == label)


def test_the_table_has_the_papers_numbers() -> None:
    assert len(table.CASES) == 13
    assert all(len(case.paper) == len(table.SIZES) for case in table.CASES)

    def papers(label: str, size: int) -> str | None:
        return table.paper_lpips(case_of(label), size)

    assert papers("none", 1) == "0.19 / 0.02"
    assert papers("GradPrune 0.9 + Intra-InstaHide 4", 32) == "0.73 / 0.65"
    assert papers("GradPrune 0.95", 16) == "0.55 / 0.43"
    assert papers("MixUp 6", 1) == "0.46 / 0.25"
    assert papers("none", 8) is None
    # The paper's orderings: more pruning leaks less, and InstaHide with pruning leaks least.
    averages = {case.label: [average for average, _ in case.paper] for case in table.CASES}
    pruned = [case.label for case in table.CASES if case.mixing is None]
    for weaker, stronger in pairwise(pruned):
        assert all(a <= b for a, b in zip(averages[weaker], averages[stronger], strict=True))
    assert max(averages, key=lambda label: sum(averages[label])) == "GradPrune 0.9 + Intra-InstaHide 4"


@pytest.mark.quality
def test_perfect_encodings_are_decoded_to_the_images(data: study.Data) -> None:
    """What the decoding stage is told is what was mixed: without an error on the encodings there is none left."""
    case = case_of("Intra-InstaHide 4")
    mixing = case.mixing
    assert mixing is not None
    images = data.attacked[:6]
    epochs = [attackers.encode(mixing, images, data.network(0), 0, epoch) for epoch in range(4)]
    assert not torch.equal(epochs[0][0].inputs, epochs[1][0].inputs), "every epoch mixes anew"
    seen = [
        study.Answers(parts=tuple(fp.Reconstruction(inputs=p) for p in encoded.inputs.split(2)), seconds=(1.0,) * 3)
        for encoded, _ in epochs
    ]

    def decibels(answers: list[study.Answers]) -> float:
        return attackers.leaked(case, answers, images, data, QUICK, adaptive=True).mean("PSNR")

    assert decibels(seen) > 30
    assert decibels(seen[::-1]) < 20, "encodings of one epoch are not those of another"


def test_one_batch_alone_is_that_batch_of_all(data: study.Data) -> None:
    case, model, settings = case_of("GradPrune 0.9 + Intra-InstaHide 4"), data.network(0), replace(QUICK, iterations=2)
    images = data.attacked[:4]
    together = attackers.observe(case, model, data, images, 2, settings, adaptive=True, epoch=1)
    alone = attackers.observe(case, model, data, images, 2, settings, adaptive=True, epoch=1, only=1)
    assert len(together.parts) == 2
    assert len(alone.parts) == 1
    ours, theirs = alone.parts[0].inputs, together.parts[1].inputs
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, theirs)


@pytest.mark.quality
def test_the_adaptive_attacker_keeps_what_explains_the_pruned_update_better(data: study.Data) -> None:
    case, settings = case_of("GradPrune 0.99"), replace(QUICK, iterations=60)
    model, images = study.attacked_network(data, settings), data.first(2)
    naive, adaptive = (
        attackers.observe(case, model, data, images, 2, settings, adaptive=knows).parts[0] for knows in (False, True)
    )
    ignoring, following = (adaptive.diagnostics[f"{way}_pruning"] for way in ("ignoring", "following"))
    assert following < ignoring / 1.2
    assert adaptive.status.endswith("following the pruning explains more")
    assert "defense" in adaptive.knowledge_used
    assert "defense" not in naive.knowledge_used


def test_the_range_of_encodings_is_known_without_any_image() -> None:
    assert attackers.largest_input(((0.5, 0.25), (0.5, 0.25))) == 3.0


def test_the_quick_table_runs_and_says_naive_and_adaptive(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ("none", "GradPrune 0.9", "MixUp 4", "GradPrune 0.9 + Intra-InstaHide 4")
    monkeypatch.setattr(table, "CASES", [case_of(label) for label in shown])
    settings = replace(QUICK, sizes=(2,), iterations=3)
    rows = {row.cell["defense"]: row for row in table.run(settings, say)}
    assert len(rows) == 4
    for label, row in rows.items():
        assert row.entries["accuracy, %, paper"] is None, "the paper's numbers are not for these photographs"
        assert (row.entries["adaptive"] is None) == (label == "none"), "there is nothing to adapt to"
        assert all(math.isfinite(entry.mean("PSNR")) for entry in row.entries.values() if isinstance(entry, Measured))
    assert rows["none"].entries["drop"] == 0.0
    accuracy = rows["none"].entries["accuracy, %"]
    assert isinstance(accuracy, float)
    assert accuracy > 50
    signs = "GradPrune 0.9 + Intra-InstaHide 4"
    for mixed, answers in (("MixUp 4", 1), (signs, 4)):  # all epochs at once; two batches in each of two epochs
        outcome = rows[mixed].entries["adaptive"]
        assert isinstance(outcome, Measured)
        assert len(outcome.seconds) == answers
    at_once = rows["MixUp 4"].entries["adaptive"]
    assert isinstance(at_once, Measured)
    assert "8 mixtures of 4 samples at once" in at_once.statuses[0]
    assert table.figure(list(rows.values())).count("<polyline") == 4


def test_the_figure_shows_the_better_attacker_at_one_batch_size() -> None:
    def row(label: str, size: int, accuracy: float | None, *found: float) -> Row:
        entries = [Measured(values={"LPIPS": (value,), "PSNR": (value,)}, seconds=(1.0,)) for value in found]
        named = dict(zip((parts.NAIVE, parts.ADAPTIVE), entries, strict=False))
        return Row(
            cell={"defense": label, "n": size},
            entries={table.ACCURACY: accuracy, parts.NAIVE: None, parts.ADAPTIVE: None, **named},
        )

    rows = [
        row("none", 16, 90.0, 0.2),
        row("none", 1, 90.0, 0.1),
        row("GradPrune 0.9", 16, 80.0, 0.5, 0.4),
        row("GradPrune 0.99", 16, 70.0, 0.5, 0.6),
        row("GradPrune 0.9 + Intra-InstaHide 4", 16, None, 0.7),
    ]
    drawn = table.figure(rows)
    assert drawn.count("<circle") == 3
    assert drawn.count("<polyline") == 2


# --- naive and adaptive ----------------------------------------------------------------------------------------------


def test_soteria_fools_only_who_does_not_know_it(data: study.Data) -> None:
    settings = replace(QUICK, iterations=100, batches=2)
    target = study.Target(
        model=study.attacked_network(data, settings),
        normalization=data.normalization,
        defense=fp.defenses.Soteria(0.5),
    )
    entries = adapting.row(target, 2, data, settings, say).entries
    naive, adaptive = (entries[name] for name in (adapting.NAIVE, adapting.ADAPTIVE))
    assert isinstance(naive, Measured)
    assert isinstance(adaptive, Measured)
    assert adaptive.mean("PSNR") > naive.mean("PSNR") + 1  # by 2.5 to 5 dB over twelve draws


def test_who_knows_of_pruned_signs_has_more_than_who_does_not(data: study.Data) -> None:
    settings = replace(QUICK, iterations=100, batches=2)
    target = study.Target(
        model=study.attacked_network(data, settings),
        normalization=data.normalization,
        defense=fp.chain(fp.defenses.Prune(0.9), fp.defenses.SignCompression()),
    )
    entries = adapting.row(target, 2, data, settings, say).entries
    naive, adaptive = (entries[name] for name in (adapting.NAIVE, adapting.ADAPTIVE))
    assert isinstance(naive, Measured)
    assert isinstance(adaptive, Measured)
    assert adaptive.mean("PSNR") > naive.mean("PSNR") + 0.25  # by 1.2 to 3.4 dB over twelve draws


def test_where_nothing_is_repeated_the_two_attackers_are_one(data: study.Data) -> None:
    settings = replace(QUICK, iterations=2)
    target = study.Target(model=data.network(0), normalization=data.normalization)

    def entries(defense: fp.defenses.Defense) -> dict[str, object]:
        return dict(adapting.row(replace(target, defense=defense), 2, data, settings, say).entries)

    rounded = entries(fp.defenses.Quantize(4))
    naive, adaptive = rounded[adapting.NAIVE], rounded[adapting.ADAPTIVE]
    assert isinstance(naive, Measured)
    assert isinstance(adaptive, Measured)
    assert adaptive.mean("PSNR") == naive.mean("PSNR")
    assert entries(fp.chain())[adapting.ADAPTIVE] is None, "there is nothing to adapt to"


def test_more_batches_than_images_are_refused() -> None:
    with pytest.raises(BadInput, match="at most 40 images to attack, not 80"):
        next(table.run(replace(QUICK, sizes=(16,), batches=5, iterations=1), say))
