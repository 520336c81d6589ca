"""Scores compare what an attack claims: order, sign and scale are resolved when, and only when, they are declared."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprism as fp
from notebook_pages import checked


@pytest.fixture
def truth(photos: fp.data.ImageSet, rng: torch.Generator) -> fp.Truth:
    batch = photos.draw(5, rng, unique_labels=True)
    return fp.Truth(inputs=batch.inputs, labels=batch.labels, owners=("client-0",) * 5)


def test_a_perfect_answer(truth: fp.Truth) -> None:
    scores = fp.score(fp.Reconstruction(inputs=truth.inputs, labels=truth.labels.flip(0)), truth)
    assert set(scores.values["psnr"]) == {math.inf}
    assert scores.mean("ssim") == pytest.approx(1)
    assert scores.mean("avd") == 0
    assert min(v for v in scores.values["avd_floor"] if v is not None) > 0.01
    assert scores.labels_match is True
    assert "5 of 5" in str(scores)


def test_printed_scores_have_units_and_a_direction(truth: fp.Truth) -> None:
    scores = fp.score(fp.Reconstruction(inputs=truth.inputs.roll(1, -1)), truth, metrics=("psnr", "mse", "avd"))
    lines = {line.split()[0]: line for line in str(scores).splitlines()[1:]}
    assert lines["psnr"].split(maxsplit=1)[1].split("  ")[0] == f"mean {scores.mean('psnr'):.1f} dB"
    assert lines["psnr"].endswith("(higher is closer)")
    assert "pixels from 0 to 1, lower is closer" in lines["mse"]
    assert "blank image" in lines["avd_floor"]
    assert repr(scores).startswith("Scores(5 of 5 samples returned; psnr ")
    assert len(repr(scores)) < 200


def test_scores_in_a_notebook_say_what_the_text_says(truth: fp.Truth) -> None:
    page = fp.score(fp.Reconstruction(inputs=truth.inputs[:3], labels=truth.labels), truth)._repr_html_()
    checked(page)
    assert "3 of 5 samples returned" in page
    assert "Labels: all correct." in page
    assert page.count("<th ") == 3 + 5 + 5, "three headings, five samples, five metrics"


def test_a_frame_has_a_line_per_sample(truth: fp.Truth) -> None:
    pandas = pytest.importorskip("pandas", reason="the extra `pandas` is not installed")
    scores = fp.score(fp.Reconstruction(inputs=truth.inputs[:3]), truth)
    frame = scores.to_frame()
    assert list(frame.columns) == [*scores.values, "row"]
    assert frame.index.name == "sample"
    assert frame["row"].tolist()[:3] == [0, 1, 2]
    assert frame["row"].isna().tolist() == [False, False, False, True, True]
    assert frame["ssim"].isna().sum() == 2
    assert frame["mse"].dropna().tolist() == [value for value in scores.values["mse"] if value is not None]
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_the_error_names_what_to_install(truth: fp.Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not there
    with pytest.raises(fp.errors.BadInput, match=r"fedprism\[pandas\]"):
        fp.score(fp.Reconstruction(inputs=truth.inputs), truth).to_frame()


@given(order=st.permutations(range(5)))
@settings(max_examples=20, deadline=None)
def test_order_is_resolved_only_when_declared(order: list[int]) -> None:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand(5, 3, 8, 8, generator=rng)
    truth = fp.Truth(inputs=inputs, labels=torch.arange(5), owners=("c",) * 5)
    shuffled = fp.Reconstruction(inputs=inputs[list(order)], ambiguity=frozenset({"order"}))
    resolved = fp.score(shuffled, truth)
    assert resolved.mean("mse") == 0
    assert [order[found] for found in resolved.rows if found is not None] == list(range(5))
    assert resolved.resolved == {"order"}
    claimed = fp.score(dataclasses.replace(shuffled, ambiguity=frozenset()), truth)
    assert claimed.rows == (0, 1, 2, 3, 4)
    assert all((value == 0) == (order[i] == i) for i, value in enumerate(claimed.values["mse"]))


def test_the_assignment_is_optimal_not_greedy() -> None:
    # Both answers are closest to the first sample; greedy matching would leave the second with the worse of all.
    truth = fp.Truth(inputs=torch.tensor([[0.5], [0.9]]), labels=torch.zeros(2, dtype=torch.long), owners=("c",) * 2)
    found = fp.Reconstruction(inputs=torch.tensor([[0.6], [0.5]]), ambiguity=frozenset({"order"}))
    assert fp.score(found, truth, metrics=["mse"]).rows == (1, 0)


def test_sign_and_scale_are_resolved_only_when_declared(truth: fp.Truth) -> None:
    centred = dataclasses.replace(truth, inputs=truth.inputs - 0.5, bounds=(-0.5, 0.5))
    flipped = fp.Reconstruction(inputs=-centred.inputs)
    assert fp.score(flipped, centred).mean("psnr") < 20
    signed = dataclasses.replace(flipped, ambiguity=frozenset({"sign"}))
    assert fp.score(signed, centred).mean("psnr") > 100
    stretched = torch.stack([(x - x.min()) / (x.max() - x.min()) for x in truth.inputs])
    full_range = dataclasses.replace(truth, inputs=stretched)
    scaled = fp.Reconstruction(inputs=-7 * stretched + 2, ambiguity=frozenset({"sign", "scale"}))
    assert fp.score(scaled, full_range).mean("psnr") > 80
    only_scale = dataclasses.replace(scaled, ambiguity=frozenset({"scale"}))
    assert fp.score(only_scale, full_range).mean("psnr") < 20


def test_samples_without_an_answer_have_no_score(truth: fp.Truth) -> None:
    found = fp.Reconstruction(inputs=truth.inputs[[3, 1]], ambiguity=frozenset({"order"}))
    scores = fp.score(found, truth)
    assert scores.rows == (None, 1, None, 0, None)
    assert scores.values["psnr"] == (None, math.inf, None, math.inf, None)
    assert scores.labels_match is None
    assert "2 of 5" in str(scores)


def test_more_answers_than_samples(truth: fp.Truth) -> None:
    extra = torch.cat([torch.rand(3, 3, 32, 32), truth.inputs])
    scores = fp.score(fp.Reconstruction(inputs=extra, ambiguity=frozenset({"order"})), truth)
    assert scores.rows == (3, 4, 5, 6, 7)


def test_normalised_inputs_are_scored_in_pixels(truth: fp.Truth) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    shaped_mean, shaped_std = (torch.tensor(v).view(1, 3, 1, 1) for v in (mean, std))
    normal = dataclasses.replace(truth, inputs=(truth.inputs - shaped_mean) / shaped_std, normalization=(mean, std))
    off = fp.Reconstruction(inputs=normal.inputs + 0.1)
    plain = fp.Reconstruction(inputs=truth.inputs + 0.1 * shaped_std)
    assert fp.score(off, normal).mean("mse") == pytest.approx(fp.score(plain, truth).mean("mse"), rel=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_answers_that_are_not_finite_do_not_poison_the_rest(value: float) -> None:
    """Scored as black, the second one is nearer to grey than to white, and grey is nearer to white."""
    levels = torch.tensor([0.5, 1.0, 0.1, 0.7, 0.3])
    truth = fp.Truth(inputs=levels.view(5, 1, 1).expand(5, 1, 4), labels=torch.arange(5), owners=("c",) * 5)
    broken = truth.inputs.clone()
    broken[1] = value
    found = fp.Reconstruction(inputs=broken, ambiguity=frozenset({"order"}))
    assert fp.score(found, truth).rows == (0, 1, 2, 3, 4)
    more = dataclasses.replace(found, inputs=torch.cat([broken[1:2], broken, truth.inputs[1:2] - 0.2]))
    assert fp.score(more, truth).rows == (1, 6, 3, 4, 5)
    partly = truth.inputs.clone()
    partly[1, 0, 0] = value  # what else it says counts
    assert fp.score(dataclasses.replace(found, inputs=partly.flip(0)), truth).rows == (4, 3, 2, 1, 0)


def test_metrics_that_do_not_apply_say_why(truth: fp.Truth) -> None:
    rows = fp.Truth(inputs=torch.rand(4, 7), labels=torch.zeros(4, dtype=torch.long), owners=("c",) * 4)
    scores = fp.score(fp.Reconstruction(inputs=rows.inputs), rows)
    assert set(scores.values) == {"mse", "psnr"}
    assert "for images" in scores.unavailable["ssim"]
    with pytest.raises(fp.errors.BadInput, match="did you mean psnr"):
        fp.score(fp.Reconstruction(inputs=rows.inputs), rows, metrics=["pnsr"])


def test_labels_are_compared_as_a_multiset(truth: fp.Truth) -> None:
    wrong = truth.labels.clone()
    wrong[0] = wrong[1]
    scores = fp.score(fp.Reconstruction(inputs=truth.inputs, labels=wrong), truth)
    assert scores.labels_match is False


def test_what_cannot_be_scored_is_refused(truth: fp.Truth) -> None:
    with pytest.raises(fp.errors.BadInput, match="inputs"):
        fp.score(fp.Reconstruction(), truth)
    with pytest.raises(fp.errors.BadInput, match="shape"):
        fp.score(fp.Reconstruction(inputs=torch.rand(5, 3, 16, 16)), truth)
