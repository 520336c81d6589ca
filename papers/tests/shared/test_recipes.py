"""Recipes: the frame with a recipe made up for the test, then every real one as small as it can be made."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

import fedprism as fp
import fedprism_papers
from fedprism import cli
from fedprism.display.html import png
from fedprism.errors import BadInput
from fedprism.pixels import to_pixels
from fedprism_papers import RECIPES, Measured, Recipe, Row, Settings
from fedprism_papers.cocktail_party import features
from fedprism_papers.cocktail_party import tables_1_3_and_4 as tables
from fedprism_papers.cocktail_party.gradients import VictimBatches, histogram, match_features
from fedprism_papers.shared import report, sheets, victims
from fedprism_papers.shared.base import Announce
from fedprism_papers.shared.cells import TableCell, attack_cell, attack_cells
from fedprism_papers.shared.measuring import LPIPS, OVER_40_DB, PSNR
from fedprism_papers.shared.victims import IMAGENET, Victim

TINY = Settings(quick=True, sizes=(4,), iterations=3)


def outcome(psnr: float, seconds: float = 1.5) -> Measured:
    pictures = torch.full((2, 3, 8, 8), 0.25), torch.full((2, 3, 8, 8), 0.75)
    return Measured(values={PSNR: (psnr, psnr + 2)}, seconds=(seconds,), statuses=("done",), pictures=pictures)


def plant(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    """Have the recipe among the others, as if it lay in a module of its own."""
    planted = SimpleNamespace(RECIPE=recipe)
    monkeypatch.setitem(fedprism_papers.MODULES, "made-up", "made_up")
    monkeypatch.setitem(sys.modules, "fedprism_papers.made_up", planted)  # type: ignore[arg-type]


def made_up(rows: int = 2, end: Exception | None = None, seconds: float = 1.5) -> Recipe:
    """A recipe of rows that need no computation; it ends with an exception where one is given."""

    def run(settings: Settings, announce: Announce) -> Iterator[Row]:
        for number in range(rows):
            if not settings.wants({"data": "a|b", "n": number}):
                continue
            announce(f"row {number}")
            entries = {"GMA, paper": settings.paper(0.123), "ours": outcome(20.0 + number + settings.seed, seconds)}
            picture, caption = sheets.contact_sheet(entries)
            yield Row(
                cell={"data": "a|b", "n": number}, entries=entries, notes=("a note",), picture=picture, caption=caption
            )
        if end is not None:
            raise end

    return Recipe(
        name="made-up",
        summary="two rows",
        citation="Doe 2025",
        shown=(PSNR,),
        run=run,
        notes=("a method",),
        options=("sizes", "only"),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    plant(monkeypatch, made_up())
    return tmp_path


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_run_leaves_table_numbers_times_and_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "made-up"]) == 0
    out = folder / "fedprism-made-up"
    names = {"table.md", "results.json", "run.json", "recipe-01-a-b-0.png", "recipe-02-a-b-1.png"}
    assert {file.name for file in out.iterdir()} == names
    page = (out / "table.md").read_text()
    assert "| data | n | GMA, paper | ours |\n|---|---|---|---|\n| a\\|b | 0 | 0.123 | 21.0 dB, 1.5 s |\n" in page
    assert "![data a|b, n 1](recipe-02-a-b-1.png)" in page
    assert page.count("- a note\n") == page.count("- a method\n") == 1
    found = json.loads((out / "results.json").read_text())
    assert found["complete"] is True
    assert found["rows"][1]["entries"]["GMA, paper"] == 0.123
    assert found["rows"][1]["entries"]["ours"]["mean"] == {PSNR: 22.0}
    times = json.loads((out / "run.json").read_text())
    assert times["rows"][0]["seconds a batch"] == {"ours": [1.5]}
    printed = capsys.readouterr().out
    assert "21.0 dB" in printed
    assert "- a note" in printed


def test_only_chosen_rows_are_computed_and_a_dry_run_lists_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reproduce", "made-up", "--dry-run", "-o", "out"]) == 0
    printed = capsys.readouterr().out
    assert "data=a|b, n=0\ndata=a|b, n=1\n2 rows. No time is known" in printed
    assert list(folder.iterdir()) == []
    assert cli.main(["reproduce", "made-up", "--only", "n=1", "--only", "data=a|b", "-o", "out"]) == 0
    assert [row["cell"]["n"] for row in json.loads(Path("out/results.json").read_text())["rows"]] == [1]
    capsys.readouterr()
    assert cli.main(["reproduce", "made-up", "--dry-run", "-o", "out"]) == 0
    assert "from an earlier run into out" in capsys.readouterr().out


def test_same_seed_same_results_and_another_seed_others(folder: Path) -> None:
    for name, seed in (("one", "3"), ("two", "3"), ("three", "4")):
        assert cli.main(["reproduce", "made-up", "--seed", seed, "-o", name]) == 0
    one, two, three = (Path(name, "results.json").read_bytes() for name in ("one", "two", "three"))
    assert one == two
    assert one != three
    assert str(folder).encode() not in one


def test_results_hold_no_time_device_or_folder(folder: Path) -> None:
    report.carry_out(made_up(seconds=99.0), Settings(data_dir=Path("some"), device="cpu"), Path("slow"), print)
    report.carry_out(made_up(seconds=1.0), Settings(), Path("fast"), print)
    assert Path("slow", "results.json").read_bytes() == Path("fast", "results.json").read_bytes()
    assert Path("slow", "table.md").read_bytes() != Path("fast", "table.md").read_bytes()


def test_what_is_finished_outlives_what_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(monkeypatch, made_up(rows=1, end=BadInput("expected more, found less; add some.")))
    assert cli.main(["reproduce", "made-up", "-o", "out"]) == 2
    assert capsys.readouterr().err == "error: expected more, found less; add some.\n"
    assert json.loads(Path("out/results.json").read_text())["complete"] is False
    assert "Unfinished" in Path("out/table.md").read_text()
    plant(monkeypatch, made_up(rows=1))
    assert cli.main(["reproduce", "made-up", "-o", "out"]) == 0
    assert json.loads(Path("out/results.json").read_text())["complete"] is True
    assert "Unfinished" not in Path("out/table.md").read_text()


def test_an_earlier_runs_pictures_do_not_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["reproduce", "made-up", "-o", "out"]) == 0
    plant(monkeypatch, made_up(rows=1))
    Path("out/mine.png").write_bytes(b"mine")
    assert cli.main(["reproduce", "made-up", "-o", "out"]) == 0
    assert {file.name for file in Path("out").glob("*.png")} == {"recipe-01-a-b-0.png", "mine.png"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cpa-tabel-1"], "did you mean cpa-table-1"),
        (["made-up", "--sizes", "32,many"], "--sizes takes whole numbers such as 32,64, not '32,many'"),
        (["made-up", "--sizes", "0"], "at least 1"),
        (["made-up", "--batches", "0"], "--batches"),
        (["made-up", "--batches", "2"], "--batches would change nothing"),
        (["made-up", "--only", "n=7"], "--only: no row of made-up has n=7"),
        (["made-up", "--only", "seven"], "--only takes KEY=VALUE, not 'seven'"),
        (["cpa-table-1"], "cifar10 needs a data folder: none is named"),
        (["cpa-table-2", "--data-dir", "."], "does not hold the test images of imagenet"),
        (["cpa-table-1", "--device", "nowhere", "--quick"], "this machine has no device 'nowhere'"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    arguments: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["reproduce", *arguments]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(folder.iterdir()) == []


def test_paper_numbers_stand_only_beside_the_papers_data(folder: Path) -> None:
    assert cli.main(["reproduce", "made-up", "--quick", "-o", "out"]) == 0
    found = json.loads(Path("out/results.json").read_text())
    assert found["rows"][0]["entries"]["GMA, paper"] is None
    assert report.QUICK_NOTE in Path("out/table.md").read_text()


def test_settings_prefer_what_was_asked_for() -> None:
    asked = Settings(quick=True, sizes=(5,), batches=2, iterations=7, inverted=3)
    assert asked.sizes_or((32,), (8,)) == (5,)
    assert (asked.batches_or(5), asked.iterations_or(100, 10), asked.inverted_or(16, 4)) == (2, 7, 3)
    assert Settings(quick=True).sizes_or((32,), (8,)) == (8,)
    assert Settings().sizes_or((32,), (8,)) == (32,)
    assert (Settings().batches_or(5), Settings(quick=True).batches_or(5)) == (5, 1)


# --- victims ---------------------------------------------------------------------------------------------------------


def test_the_attacked_images_are_the_last_of_each_class() -> None:
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    images = torch.arange(7, dtype=torch.uint8).view(7, 1, 1, 1)
    train, held_out = victims._held_out(fp.data.ImageSet("some", images, labels, ("a", "b")), 2)
    assert train.images.flatten().tolist() == [0, 1, 3]
    assert held_out.images.flatten().tolist() == [2, 4, 5, 6]
    assert held_out.labels.tolist() == [0, 0, 1, 1]


def victim(count: int = 12, client_images: int | None = None, *, frozen: bool = False) -> Victim:
    rng = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 16, 16), generator=rng, dtype=torch.uint8)
    images = fp.data.ImageSet("noise", pixels, torch.arange(count) % 4, ("a", "b", "c", "d"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolutions = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        dense = nn.Sequential(nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 4))
    if frozen:
        convolutions.requires_grad_(False)
    return Victim(
        name="noise",
        model=nn.Sequential(convolutions, dense),
        images=images,
        normalization=IMAGENET,
        note="noise",
        client_images=client_images,
    )


def test_a_batch_that_is_too_large_is_filled_up_with_mirror_images(rng: torch.Generator) -> None:
    batch = victim(5).draw(8, rng)
    torch.testing.assert_close(batch.inputs[5:], batch.inputs[:3].flip(3))
    assert batch.labels[5:].tolist() == batch.labels[:3].tolist()
    assert len(batch.inputs[:5].flatten(1).unique(dim=0)) == 5
    with pytest.raises(BadInput, match="at most 10 images"):
        victim(5).draw(11, rng)


def test_several_clients_answer_with_the_gradient_of_the_whole_batch() -> None:
    alone, _ = VictimBatches(victim=victim(), size=12, batches=1).observe(None, 0, Settings(device="cpu"))
    together, truth = VictimBatches(victim=victim(client_images=5), size=12, batches=1).observe(
        None, 0, Settings(device="cpu")
    )
    assert (alone.rounds[0].clients, together.rounds[0].clients) == (1, 3)
    assert together.knowledge.batch_size == len(truth.inputs) == 12
    for name, tensor in alone.rounds[0].update.items():
        torch.testing.assert_close(together.rounds[0].update[name], tensor)


def test_frozen_layers_are_used_and_neither_trained_nor_sent() -> None:
    free, frozen = victim(), victim(frozen=True)
    inputs = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(free.model(inputs), frozen.model(inputs))
    cell = VictimBatches(victim=frozen, size=4, batches=1, protocol=fp.FedAvg(lr=0.1, epochs=2, batch_size=2))
    observation, _ = cell.observe(None, 0, Settings(device="cpu"))
    assert set(observation.rounds[0].update) == {"1.1.weight", "1.1.bias", "1.3.weight", "1.3.bias"}
    head = Victim(**{**vars(free), "model": nn.Sequential(free.model[1])})
    assert head.features == frozen.features == 1024
    torch.testing.assert_close(free.embed(inputs, "cpu"), free.model[0](inputs).flatten(1))


@pytest.mark.parametrize("content", [None, b"no tensors", save({"features.0.weight": torch.zeros(2)})])
def test_weights_that_are_missing_or_others_are_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / victims.VGG_FILE).write_bytes(content)
    with pytest.raises(BadInput, match=victims.VGG_FILE):
        victims._load_vgg(nn.Sequential(nn.Conv2d(3, 4, 3)), Settings(data_dir=tmp_path))


# --- measuring -------------------------------------------------------------------------------------------------------


def test_features_are_matched_whatever_their_order_sign_and_scale(rng: torch.Generator) -> None:
    truth = torch.randn(5, 20, generator=rng)
    found = torch.stack([-2 * truth[3], truth[0], 0.5 * truth[4]])
    cosines, owners = match_features(found, truth)
    assert owners == (3, 0, 4)
    torch.testing.assert_close(cosines, torch.tensor([1.0, 0, 0, 1, 1], dtype=torch.float64))


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Answer(fp.attacks.Attack):
    """Answers with what the test has planted."""

    make: Callable[[], fp.Reconstruction]

    def run(self, observation: fp.Observation, rng: torch.Generator) -> fp.Reconstruction:
        return self.make()


def planted(cell: VictimBatches) -> fp.Truth:
    return cell.observe(None, 0, TINY)[1]


def test_images_from_features_are_compared_with_their_own_and_not_with_flattering_ones() -> None:
    cell = VictimBatches(victim=victim(), size=6, batches=1)
    truth = planted(cell)
    features = cell.victim.embed(truth.inputs, "cpu")

    def swapped() -> fp.Reconstruction:
        # Features of samples 4 and 2, but rendered as samples 2 and 4: pixels would pair them up perfectly.
        return fp.Reconstruction(
            inputs=truth.inputs[[2, 4]], features=-features[[4, 2, 0]], ambiguity=frozenset({"order"})
        )

    entries, _ = attack_cell(cell, {"swapped": Answer(make=swapped)}, TINY, print, "")
    found = entries["swapped"]
    assert isinstance(found, Measured)
    assert found.mean("cosine") == pytest.approx(0.5)  # three of six
    assert found.mean(PSNR) < 15
    assert found.mean(OVER_40_DB) == 0


def test_every_method_renders_the_same_images() -> None:
    cell = VictimBatches(victim=victim(), size=6, batches=1)
    few = fp.attacks.FeatureInversion(iterations=2)
    exact = fp.attacks.CocktailParty(inversion=few, images=2)
    methods = {"ours": exact, "unscaled": dataclasses.replace(exact, exact=False, bias_scale=False)}
    entries, _ = attack_cell(cell, methods, TINY, print, "")
    shown = to_pixels(planted(cell).inputs[:2], (0.0, 1.0), cell.victim.normalization)
    for name in methods:
        found = entries[name]
        assert isinstance(found, Measured)
        assert found.pictures is not None
        originals, rendered = found.pictures
        torch.testing.assert_close(originals, shown)
        assert rendered.shape == originals.shape


def test_over_40_db_is_out_of_all_private_images() -> None:
    cell = VictimBatches(victim=victim(), size=6, batches=1)
    truth = planted(cell)
    part = fp.Reconstruction(inputs=truth.inputs[[5, 1, 2]] + 1e-4, ambiguity=frozenset({"order"}), status="half")
    entries, _ = attack_cell(cell, {"half": Answer(make=lambda: part)}, TINY, print, "")
    found = entries["half"]
    assert isinstance(found, Measured)
    assert found.mean(OVER_40_DB) == found.mean("answered") == 0.5
    assert found.mean(PSNR) > 60
    assert found.statuses == ("half",)
    assert "50% answered" in report._text(made_up(), found)
    assert math.isnan(found.mean(LPIPS)) or found.mean(LPIPS) < 0.01


def test_a_long_run_without_lpips_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    attack = Answer(make=lambda: fp.Reconstruction(inputs=torch.zeros(4, 3, 16, 16)))
    cell, said = VictimBatches(victim=victim(), size=4, batches=1), list[str]()
    with pytest.raises(BadInput, match="LPIPS needs"):
        attack_cell(cell, {"fine": attack}, Settings(data_dir=tmp_path), said.append, "")
    assert said == []


def test_a_method_that_fails_leaves_a_word_and_the_others_go_on() -> None:
    cell = VictimBatches(victim=victim(), size=4, batches=2)
    calls: list[str] = []

    def fail(error: Exception) -> Callable[[], fp.Reconstruction]:
        def make() -> fp.Reconstruction:
            calls.append(type(error).__name__)
            raise error

        return make

    methods = {
        "large": Answer(make=fail(torch.OutOfMemoryError())),
        "larger": Answer(make=fail(RuntimeError("DefaultCPUAllocator: can't allocate memory"))),
        "other": Answer(make=fail(fp.NotApplicable("expected this, found that."))),
        "fine": Answer(make=lambda: fp.Reconstruction(inputs=torch.zeros(4, 3, 16, 16))),
    }
    entries, notes = attack_cell(cell, methods, TINY, print, "title")
    assert entries["large"] == entries["larger"] == "out of memory"
    assert entries["other"] == "does not apply"
    assert isinstance(entries["fine"], Measured)
    assert len(entries["fine"].seconds) == 2
    assert notes == ("title, other: expected this, found that.",)
    assert list(dict.fromkeys(calls)) == ["OutOfMemoryError", "RuntimeError", "NotApplicable"]
    assert calls.count("NotApplicable") == 1, "the second batch is not tried"


def test_a_slow_method_may_have_fewer_batches() -> None:
    answer = Answer(make=lambda: fp.Reconstruction(inputs=torch.zeros(4, 3, 16, 16)))
    attacked = VictimBatches(victim=victim(), size=4, batches=3)
    cell = TableCell(attacked, {"slow": answer, "quick": answer}, "", {"slow": 1})
    (outcomes,) = attack_cells([cell], TINY, print)
    assert [len(entry.seconds) for entry in outcomes.entries.values() if isinstance(entry, Measured)] == [1, 3]


def test_several_parts_at_a_time_give_the_same_table() -> None:
    alone, together = (
        list(features.updates(dataclasses.replace(TINY, sizes=(4, 5), workers=workers), print)) for workers in (None, 2)
    )
    assert [row.cell["n"] for row in together] == [4, 5]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.cell == theirs.cell
        for name, found in theirs.entries.items():
            entry = ours.entries[name]
            assert isinstance(entry, Measured) == isinstance(found, Measured)
            if isinstance(entry, Measured) and isinstance(found, Measured):
                assert entry.values == found.values
                assert entry.statuses == found.statuses


def test_a_victim_that_was_given_is_sent_whole() -> None:
    sent, given = pickle.loads(pickle.dumps(victim())), victim()
    assert torch.equal(sent.images.images, given.images.images)
    assert all(torch.equal(a, b) for a, b in zip(sent.model.parameters(), given.model.parameters(), strict=True))
    large = victims.cnn_photos(TINY, pool=4)
    assert len(pickle.dumps(large)) < 2_000, "it is made anew where it arrives"
    assert repr(large) == "cnn_photos(pool=4, frozen=False)"


def test_originals_stand_above_what_came_back() -> None:
    picture, caption = sheets.contact_sheet({"paper": 0.1, "first": outcome(1.0), "second": outcome(2.0)})
    assert picture is not None
    assert caption == "From top to bottom: originals, first, second. Black: no answer."
    with Image.open(io.BytesIO(png(picture))) as shown:
        assert shown.size == (2 * 64 + sheets.GAP, 3 * 64 + 2 * sheets.GAP)
        assert [shown.getpixel((5, row * 66 + 5)) for row in range(3)] == [(64,) * 3, (191,) * 3, (191,) * 3]


def test_bars_are_as_high_as_their_share() -> None:
    counts = torch.tensor([0.0, 5.0, 10.0])
    chart = sheets.bar_chart(counts)
    heights = [int((chart[0, :, 24 * bar + 5] < 1).sum()) for bar in range(3)]
    assert heights[0] == 1  # the axis
    assert heights[2] == pytest.approx(2 * heights[1], abs=2)
    assert sheets.sparkline(counts) == " ▄█"


# --- the recipes -----------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_table() -> None:
    assert all(recipe.name == name for name, recipe in RECIPES.items())


def test_every_size_of_the_paper_has_its_number() -> None:
    assert {len(numbers) for numbers in tables.PAPER_1.values()} == {len(tables.SIZES)}
    assert {len(numbers) for numbers in features.PAPER.values()} == {len(features.SIZES)}
    fedavg = features.FEDAVG_PAPER
    assert {len(numbers) for numbers in fedavg.values()} == {len(features.FEDAVG_SIZES)}
    assert tables.paper_1("Tiny-ImageNet", "FedAvg", 128)["CPA objective re-run"] == 0.235
    assert tables.paper_1("CIFAR-10", "gradient", 33)["CPA objective re-run"] is None


def test_epsilon_is_the_papers() -> None:
    found = [tables.epsilon(sigma, 8) for sigma in (0.0, 1e-4, 1e-2)]
    assert found == [math.inf, pytest.approx(6056, rel=1e-3), pytest.approx(60.56, rel=1e-3)]


@pytest.mark.parametrize("make", [tables.unit_norm, tables.clipped_examples])
def test_both_readings_put_the_same_noise_on_the_mean(make: Callable[[float, int], fp.defenses.Defense]) -> None:
    def sent(sigma: float) -> Tensor:
        cell = VictimBatches(victim=victim(), size=8, batches=1, defense=make(sigma, 8))
        observation, _ = cell.observe(None, 0, Settings(device="cpu"))
        return torch.cat([tensor.flatten() for tensor in observation.rounds[0].update.values()])

    assert float((sent(0.01) - sent(0.0)).std()) == pytest.approx(0.01, rel=0.05)


def test_cosines_are_counted_in_equal_steps() -> None:
    counts = histogram(torch.tensor([0.0, 0.01, 0.97, 1.0, 1.0 + 1e-9], dtype=torch.float64))
    assert counts.tolist() == [2, *[0] * 18, 3]


class Watched(Settings):
    """Remembers which options were asked for."""

    read: ClassVar[set[str]] = set()

    def sizes_or(self, *defaults: Any) -> tuple[int, ...]:
        self.read.add("sizes")
        return super().sizes_or(*defaults)

    def batches_or(self, *defaults: Any) -> int:
        self.read.add("batches")
        return super().batches_or(*defaults)

    def iterations_or(self, *defaults: Any) -> int:
        self.read.add("iterations")
        return super().iterations_or(*defaults)

    def inverted_or(self, *defaults: Any) -> int:
        self.read.add("inverted")
        return super().inverted_or(*defaults)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_runs_without_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    said, options = list[str](), RECIPES[name].options
    tiny = {option: value for option, value in {"sizes": (4,), "iterations": 3}.items() if option in options}
    Watched.read.clear()
    rows = report.carry_out(RECIPES[name], Watched(quick=True, **tiny), tmp_path / "out", said.append)  # type: ignore[arg-type]
    assert rows
    assert Watched.read == {"sizes", "batches", "iterations", "inverted"} & set(options)
    if "only" in options:
        listed = report.planned(RECIPES[name], Settings(quick=True, **tiny), print)  # type: ignore[arg-type]
        cells = [{key: str(value) for key, value in row.cell.items()} for row in rows]
        assert len(listed) == len(rows)
        assert all(line.items() <= cell.items() for line, cell in zip(listed, cells, strict=True))
    assert said
    for row in rows:
        measured = [entry for entry in row.entries.values() if isinstance(entry, Measured)]
        assert measured
        for entry in measured:
            assert entry.seconds
            assert any(math.isfinite(entry.mean(metric)) for metric in RECIPES[name].shown)
        if PSNR in RECIPES[name].shown:
            assert [picture for _, own, picture, _ in report._pictures(rows) if own is row]
    if RECIPES[name].figure is not None:
        assert (tmp_path / "out" / "figure.svg").read_text().startswith("<svg")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["complete"] is True
    assert len(found["rows"]) == len(rows)
