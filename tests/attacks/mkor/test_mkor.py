"""MKOR: what the server reads is compared with the windows of the private images, computed without any network."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.attacks import Disguise, Mkor, Reference, Smoothest, mkor, mkor_inconspicuous
from fedprism.attacks.mkor.filters import Layout, blurs
from fedprism.attacks.mkor.head import Head
from fedprism.attacks.mkor.reading import ReadingStatus, within_range
from fedprism.network.stack import stack_of
from fedprism.solvers import windows
from fedprism.solvers.windows import Lattice

CLASSES = 8
DUMPED = Mkor(reference=Reference.DUMP_CLASS)
LATTICE = Lattice(top=0, pitch=2, size=8, height=32, width=32)
"""Of `chain`: three pools, and channels for two convolutions that shift."""


def chain(
    *, classes: int = CLASSES, hidden: int = 64, dropout: float = 0.0, channels: tuple[int, ...] = (12, 24, 96)
) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in zip((3, *channels), channels, strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        side = 32 // 2 ** len(channels)
        layers += [nn.Flatten(), nn.Linear(channels[-1] * side**2, hidden), nn.ReLU(), nn.Dropout(dropout)]
        layers += [nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, classes)]
        return nn.Sequential(*layers)


def attack(
    method: Mkor, model: nn.Module, batch: fp.Batch, *, seed: int = 0, **changes: Any
) -> tuple[fp.Reconstruction, fp.Truth]:
    scenario = fp.Scenario(model=model, clients=[batch], **changes)
    observation, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=seed, server=method)
    return fp.run(method, observation), truth


def expected(images: Tensor, lattice: Lattice = LATTICE) -> Tensor:
    """The middle of the bounds, from the images themselves."""
    count = lattice.height // lattice.pitch
    return windows.midpoint(*windows.extremes(images, lattice, (count, count)), lattice).images


def by_label(found: fp.Reconstruction, truth: fp.Truth) -> Tensor:
    """Of each answer of a batch with one sample a class: the private image."""
    assert found.labels is not None
    return torch.stack([truth.inputs[truth.labels == label][0] for label in found.labels])


# --- reading with cross-entropy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [mkor(), DUMPED], ids=repr)
def test_every_image_is_what_its_windows_say(method: Mkor, photos: fp.data.ImageSet) -> None:
    found, truth = attack(method, chain(), photos.batch([0, 1, 2, 4, 5]))
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 4, 5]
    assert found.inputs is not None
    assert torch.allclose(found.inputs, expected(by_label(found, truth)), atol=1e-4)
    assert found.diagnostics["counts"] == [1] * 5
    assert found.status.startswith("every class in the batch could be read;")


@pytest.mark.quality
def test_without_an_absent_class_the_range_of_pixels_tells_what_rows_have_in_common(photos: fp.data.ImageSet) -> None:
    found, truth = attack(mkor(), chain(), photos.batch(range(CLASSES)))
    assert found.labels is not None
    assert found.inputs is not None
    assert found.labels.tolist() == list(range(CLASSES))
    assert "between 0 and 1" in found.status
    wanted = expected(by_label(found, truth))
    mean = wanted.mean(0, keepdim=True).expand_as(wanted)
    assert fp.metrics.psnr(found.inputs, wanted).mean() > fp.metrics.psnr(mean, wanted).mean() + 5


@pytest.mark.quality
def test_without_an_absent_class_there_is_nothing_to_compare_with_behind_dropout(photos: fp.data.ImageSet) -> None:
    """Of each sample most is left: where dropout cuts nearly all paths of one, its class is taken for an absent one."""
    found, _ = attack(mkor(), chain(dropout=0.1, hidden=128), photos.batch(range(CLASSES)), training=True)
    assert found.inputs is not None
    assert len(found.inputs) == 0
    assert found.diagnostics["unread_classes"] == list(range(CLASSES))
    assert ReadingStatus.NO_REFERENCE in found.status


@pytest.mark.parametrize("extremes", [False, True])
def test_the_range_tells_all_where_it_leaves_no_room(extremes: bool, rng: torch.Generator) -> None:
    features, counts = torch.rand(6, 2, 5, generator=rng, dtype=torch.float64), torch.tensor([1, 2, 1, 3, 1, 1])
    features[0] = 1.0  # a class of one sample, all white
    if not extremes:
        features[4] = 0.0
    common = torch.rand(2, 5, generator=rng, dtype=torch.float64)
    lacking = features - common / counts.view(-1, 1, 1)
    torch.testing.assert_close(within_range(lacking, counts, extremes=extremes), features)


def test_the_dump_class_is_lost_and_said_to_be(photos: fp.data.ImageSet) -> None:
    found, truth = attack(DUMPED, chain(), photos.batch(range(CLASSES)))
    assert found.labels is not None
    assert found.labels.tolist() == list(range(CLASSES - 1))
    assert found.inputs is not None
    assert torch.allclose(found.inputs, expected(by_label(found, truth)), atol=1e-4)
    assert found.diagnostics["unread_classes"] == [CLASSES - 1]
    assert "but the dump class" in found.status


def test_a_reference_may_be_a_word_and_what_is_none_is_refused(photos: fp.data.ImageSet) -> None:
    spelt = Mkor(reference="dump_class")  # type: ignore[arg-type]
    assert spelt == DUMPED
    found, _ = attack(spelt, chain(), photos.batch(range(3)))
    assert (found.diagnostics["reference"], found.diagnostics["dump_class"]) == ("dump_class", CLASSES - 1)
    for settings, words in (
        ({"reference": "nonsense"}, "reference must be absent_class or dump_class, not 'nonsense'"),
        ({"nodes": 0}, "nodes must be a whole number"),
        ({"layers": -1}, "layers must be a whole number"),
        ({"paths": 0}, "paths must be a whole number"),
    ):
        with pytest.raises(fp.errors.BadInput, match=words):
            Mkor(**settings)


def test_nodes_gated_by_brightness_read_a_batch_that_holds_every_class(photos: fp.data.ImageSet) -> None:
    found, truth = attack(Mkor(nodes=8), chain(), photos.batch(range(CLASSES)))
    assert found.labels is not None
    assert found.labels.tolist() == list(range(CLASSES))
    assert found.inputs is not None
    assert torch.allclose(found.inputs, expected(by_label(found, truth)), atol=1e-3)


def test_samples_of_one_class_are_counted_and_marked_as_blended(photos: fp.data.ImageSet) -> None:
    batch = photos.batch([0, 8, 1, 2, 10, 18])
    found, truth = attack(mkor(), chain(), batch)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 2, 2, 2]
    assert found.diagnostics["blended_classes"] == [0, 2]
    assert found.diagnostics["counts"] == [2, 1, 3]
    assert "2 of 3 answers blend several samples" in found.status
    assert fp.score(found, truth).labels_match


@pytest.mark.quality
def test_nodes_gated_by_brightness_separate_samples_of_one_class(photos: fp.data.ImageSet) -> None:
    batch = photos.batch(range(3 * CLASSES))
    blended, truth = attack(DUMPED, chain(), batch)
    separated, _ = attack(Mkor(nodes=8), chain(), batch)
    assert len(separated.diagnostics["classes"]) > 2 * len(blended.diagnostics["classes"])
    assert fp.score(separated, truth).labels_match
    scores = [fp.score(found, truth, metrics=("psnr",)).mean("psnr") for found in (blended, separated)]
    assert scores[1] > scores[0] + 1


@pytest.mark.parametrize("loss", ["mse", "softmax_mse"])
def test_an_absent_class_works_with_other_losses_and_a_dump_class_does_not(loss: str, photos: fp.data.ImageSet) -> None:
    batch = photos.batch(range(5))
    found, truth = attack(mkor(), chain(), batch, loss=loss)
    assert found.inputs is not None
    assert torch.allclose(found.inputs, expected(by_label(found, truth)), atol=1e-2)
    with pytest.raises(fp.NotApplicable, match="cross-entropy"):
        attack(DUMPED, chain(), batch, loss=loss)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize("numbers", [[0, 1, 2, 4, 5], [0, 8, 1, 2, 10, 18], range(16), [*range(16), 16]], ids=str)
@pytest.mark.parametrize("method", [mkor(), DUMPED, Mkor(nodes=8), mkor_inconspicuous()], ids=repr)
def test_the_scale_of_an_update_need_not_be_known(
    method: Mkor, numbers: list[int], factor: float, photos: fp.data.ImageSet
) -> None:
    scenario = fp.Scenario(model=chain(), clients=[photos.batch(numbers)], defense=fp.defenses.Clip(0.1))
    clipped, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=method)
    update = {name: factor * tensor for name, tensor in clipped.round.update.items()}
    scaled = dataclasses.replace(clipped, rounds=(dataclasses.replace(clipped.round, update=update),))
    first, second = fp.run(method, clipped), fp.run(method, scaled)
    assert first.status == second.status
    assert first.diagnostics["counts"] == second.diagnostics["counts"]
    torch.testing.assert_close(first.inputs, second.inputs, atol=1e-4, rtol=0)
    if first.diagnostics["unread_classes"] != list(range(CLASSES)):
        answered = torch.bincount(first.labels, minlength=CLASSES)
        readable = torch.ones(CLASSES).scatter(0, torch.tensor(first.diagnostics["unread_classes"]).long(), 0.0)
        assert torch.equal(answered, torch.bincount(truth.labels, minlength=CLASSES) * readable.long())


@pytest.mark.parametrize("size", [5, 8, 24])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", [mkor(), DUMPED, Mkor(nodes=8), mkor_inconspicuous()], ids=repr)
def test_noise_in_place_of_an_update_is_not_said_to_be_read(
    method: Mkor, seed: int, size: int, photos: fp.data.ImageSet
) -> None:
    scenario = fp.Scenario(model=chain(), clients=[photos.batch(range(size))])
    observation, _ = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=method)
    rng = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in observation.round.update.items()}
    planted = dataclasses.replace(observation, rounds=(dataclasses.replace(observation.round, update=noise),))
    status = fp.run(method, planted).status
    assert status.startswith((ReadingStatus.NO_REFERENCE, ReadingStatus.NOTHING, ReadingStatus.UNSURE))


def test_one_local_step_is_a_gradient_and_several_are_refused(photos: fp.data.ImageSet) -> None:
    batch = photos.batch(range(5))
    found, truth = attack(mkor(), chain(), batch, protocol=fp.FedAvg(lr=0.05))
    assert found.inputs is not None
    assert torch.allclose(found.inputs, expected(by_label(found, truth)), atol=1e-2)
    with pytest.raises(fp.NotApplicable, match="several steps"):
        attack(mkor(), chain(), batch, protocol=fp.FedAvg(lr=0.05, epochs=2))


@pytest.mark.quality
def test_noise_hides_no_class_and_no_label_is_told(photos: fp.data.ImageSet) -> None:
    model, batch = chain(classes=20), photos.batch(range(CLASSES))
    clean, truth = attack(DUMPED, model, batch)
    assert clean.labels is not None
    for noise in (1e-4, 1e-3):
        found, _ = attack(DUMPED, model, batch, defense=fp.defenses.GaussianNoise(noise))
        assert found.labels is not None
        assert found.labels.tolist() == list(range(CLASSES))
        assert found.diagnostics["noise_in_samples"] > clean.diagnostics["noise_in_samples"]
        assert fp.score(found, truth, metrics=("psnr",)).mean("psnr") > 15


@pytest.mark.quality
@pytest.mark.parametrize("disguise", [None, Disguise()], ids=repr)
def test_the_dump_class_leaves_nothing_that_noise_could_be_relative_to(
    disguise: Disguise | None, photos: fp.data.ImageSet
) -> None:
    batch = photos.batch(range(CLASSES))
    scores = []
    for reference in Reference:
        method = Mkor(reference=reference, disguise=disguise)
        scenario = fp.Scenario(model=chain(classes=20), clients=[batch])
        seen, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=method)
        found = fp.run(method, noised(seen))
        assert found.diagnostics["classes"] == [label for label in range(CLASSES) if label != dump_of(seen)]
        scores.append(fp.score(found, truth, metrics=("psnr",)).mean("psnr"))
        if reference is Reference.DUMP_CLASS:
            rows = torch.linalg.vector_norm(seen.rounds[0].update["10.weight"], dim=1)
            assert float(rows[Head.of(seen.trapdoor or {}).rows[dump_of(seen)].flatten()].max()) < 0.01 * rows.max()
    assert abs(scores[0] - scores[1]) < 1


def noised(seen: fp.Observation) -> fp.Observation:
    """With noise of a tenth of each tensor's standard deviation."""
    update, rng = seen.rounds[0].update, torch.Generator().manual_seed(0)
    noisy = {name: t + 0.1 * t.std(correction=0) * torch.randn(t.shape, generator=rng) for name, t in update.items()}
    return dataclasses.replace(seen, rounds=(dataclasses.replace(seen.rounds[0], update=noisy),))


def dump_of(seen: fp.Observation) -> int:
    """The dump class, or -1."""
    return int((seen.trapdoor or {})["reading"][1])


# --- channels that are left ------------------------------------------------------------------------------------------


def two_a_scale() -> nn.Module:
    """Two convolutions in front of each pool: the last ones shift, the ones before the first of these blur."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 8), (8, 32), (32, 128)):
            layers += [nn.Conv2d(before, after if before > 3 else 8, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(after if before > 3 else 8, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 64), nn.ReLU(), nn.Linear(64, CLASSES))


@pytest.mark.quality
def test_the_blurred_image_comes_along_and_says_more(photos: fp.data.ImageSet) -> None:
    model, batch = two_a_scale(), photos.batch([0, 1, 2, 4, 5])
    scores = []
    for blurred in (False, True):
        method = Mkor(blurred=blurred, decoder=Smoothest(iterations=60))
        scenario = fp.Scenario(model=model, clients=[batch])
        seen, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=method)
        scores.append(fp.score(fp.run(method, seen), truth, metrics=("psnr",)).mean("psnr"))
    assert scores[1] > scores[0] + 1
    layout = Layout.of(seen.trapdoor or {})
    stack = stack_of(model, seen.rounds[0].params)
    assert layout.channels.shape == (2, 4, 4, 4)
    assert blurs(stack, layout) == (1, 1)
    with torch.no_grad():
        filters = {name: tensor for name, tensor in seen.rounds[0].params.items() if int(name.split(".")[0]) < 15}
        features = torch.func.functional_call(model[:15], filters, truth.inputs)  # type: ignore[index]
    maps = features[:, layout.channels[0, 3]].permute(0, 3, 1, 4, 2).reshape(5, 1, 16, 16)
    lattice = Lattice(top=0, pitch=2, size=8, height=32, width=32)
    assert torch.allclose(maps, windows.blurred_extremes(truth.inputs, (1, 1), lattice, (16, 16))[0], atol=1e-5)


def test_without_channels_that_are_left_nothing_can_come_along(photos: fp.data.ImageSet) -> None:
    with pytest.raises(fp.NotApplicable, match="leave blurred off"):
        attack(Mkor(blurred=True), chain(), photos.batch(range(3)))


# --- the inconspicuous form ------------------------------------------------------------------------------------------


@pytest.mark.quality
def test_the_inconspicuous_form_reads_nearly_as_well(photos: fp.data.ImageSet) -> None:
    batch = photos.batch(range(5))
    plain, truth = attack(mkor(), chain(), batch)
    hidden, _ = attack(mkor_inconspicuous(), chain(), batch)
    assert hidden.labels is not None
    assert hidden.labels.tolist() == list(range(5))
    scores = [fp.score(found, truth, metrics=("psnr",)).mean("psnr") for found in (plain, hidden)]
    assert abs(scores[0] - scores[1]) < 0.5


def test_every_path_of_the_inconspicuous_form_is_live(photos: fp.data.ImageSet) -> None:
    model, images = chain(), photos.batch(range(64)).inputs
    params = {name: p.detach() for name, p in model.named_parameters()}
    sent, trapdoor = mkor_inconspicuous().tamper(model, params, torch.Generator().manual_seed(1))
    rows = Head.of(trapdoor).rows
    filters = {name: tensor for name, tensor in sent.items() if int(name.split(".")[0]) < 10}
    features = torch.func.functional_call(model[:10], filters, images)  # type: ignore[index]
    first = torch.relu(features @ sent["10.weight"].T + sent["10.bias"])
    active = first[:, rows.squeeze(2)] > 0
    assert bool((active.sum(2) == 1).all())  # one of each pair, whatever the image
    second = first @ sent["13.weight"].T + sent["13.bias"]
    fed = sent["13.weight"][:, rows[:, 0, 0]].argmax(0)
    assert float((second[:, fed] > 0).double().mean()) > 0.99


def test_the_inconspicuous_form_has_no_zeros_and_shuffles_channels() -> None:
    model = chain()
    params = {name: p.detach() for name, p in model.named_parameters()}
    sent, trapdoor = mkor_inconspicuous().tamper(model, params, torch.Generator().manual_seed(1))
    other, second = mkor_inconspicuous().tamper(model, params, torch.Generator().manual_seed(2))
    assert all(bool((tensor != 0).all()) for name, tensor in sent.items() if name.endswith("weight"))
    assert not torch.equal(trapdoor["channels"], second["channels"])
    assert any(not torch.equal(sent[name], other[name]) for name in sent)
    assert all(torch.equal(params[name], p) for name, p in model.named_parameters())


@pytest.mark.quality
def test_equation_20_to_the_letter_reads_as_well_with_a_large_beta(photos: fp.data.ImageSet) -> None:
    """Honest weights from other channels blur the copies unless these are larger; logits may then be large, too."""
    model, batch = chain(channels=(32, 32, 64, 128), hidden=128), photos.batch(range(5))

    def quality(**disguise: Any) -> float:
        method = Mkor(reference=Reference.DUMP_CLASS, disguise=Disguise(**disguise))
        found, truth = attack(method, model, batch)
        assert set(found.diagnostics["classes"]) == set(range(5)) - {found.diagnostics["dump_class"]}
        return fp.score(found, truth, metrics=("psnr",)).mean("psnr")

    plain, literal = quality(), quality(beta=3.0, untouched=True)
    assert literal > plain - 1
    assert quality(beta=1.0, untouched=True) < literal - 1
    assert quality(beta=10.0, untouched=True) > plain - 1


def test_equation_20_changes_only_what_leads_from_copies_to_copies() -> None:
    model = chain(channels=(32, 32, 128), hidden=128)
    params = {name: p.detach() for name, p in model.named_parameters()}
    disguise = Disguise(beta=3.0, untouched=True)
    method = Mkor(reference=Reference.DUMP_CLASS, disguise=disguise)
    sent, _ = method.tamper(model, params, torch.Generator().manual_seed(1))
    shares = fp.inspection.changed_shares(sent, params)
    # Copies over channels, of both sides: 6 of the first layer's 32 outputs, 6 x 24 of 32 x 32, 24 x 96 of 32 x 128.
    assert shares["0.weight"] == 6 / 32
    assert shares["3.weight"] == 6 * 24 / 32**2
    assert shares["6.weight"] == 24 * 96 / (32 * 128)
    assert shares["10.weight"] == CLASSES / 128
    with pytest.raises(fp.NotApplicable, match="needs a dump class"):
        Mkor(disguise=disguise).tamper(model, params, torch.Generator())


def test_equation_12_to_the_letter_cuts_paths(photos: fp.data.ImageSet) -> None:
    model, batch = chain(channels=(32, 32, 128), hidden=128), photos.batch(range(5))
    read = 0
    for seed in range(3):
        method = Mkor(reference=Reference.DUMP_CLASS, disguise=Disguise(noise=1e-5, own_paths=True))
        found, _ = attack(method, model, batch, seed=seed)
        read += len(found.diagnostics["classes"])
        assert set(found.diagnostics["classes"]) <= set(range(CLASSES))
    assert 0 < read < 13


def test_parameter_noise_is_that_of_the_paper_s_code() -> None:
    model = chain()
    params = {name: p.detach() for name, p in model.named_parameters()}
    plain, trapdoor = mkor().tamper(model, params, torch.Generator().manual_seed(1))
    noisy, same = Mkor(parameter_noise=0.1).tamper(model, params, torch.Generator().manual_seed(1))
    assert all(torch.equal(trapdoor[name], same[name]) for name in trapdoor)
    for name in ("10.weight", "3.weight"):
        added, fan_in = noisy[name] - plain[name], plain[name][0].numel()
        assert float(added.std()) == pytest.approx(0.1 / fan_in**0.5, rel=0.05)
    assert bool((noisy["10.bias"] != plain["10.bias"]).any())


# --- other networks --------------------------------------------------------------------------------------------------


@pytest.mark.quality
@pytest.mark.parametrize("method", [DUMPED, Mkor(reference=Reference.DUMP_CLASS, disguise=Disguise())], ids=repr)
def test_parallel_paths_get_past_dropout(method: Mkor, photos: fp.data.ImageSet) -> None:
    """One path is cut three times out of four; of 1,900 classes with sixteen each, one or two were missed."""
    model, batch = chain(dropout=0.5, hidden=640, classes=20), photos.batch(range(5))
    there, with_many, with_one = 0, 0, 0
    for seed in range(4):
        found, truth = attack(method, model, batch, seed=seed)
        single, _ = attack(dataclasses.replace(method, paths=1), model, batch, seed=seed)
        readable = set(range(5)) - {found.diagnostics["dump_class"]}
        assert set(found.diagnostics["classes"]) <= readable
        assert found.inputs is not None
        assert fp.metrics.psnr(found.inputs, expected(by_label(found, truth))).min() > 40  # 62 dB and more
        there += len(readable)
        with_many += len(found.diagnostics["classes"])
        with_one += len(single.diagnostics["classes"])
        for answer in (found, single):  # nothing tells that the others are not there
            if answer.diagnostics["classes"]:
                assert answer.status.startswith("every class that is clearly in the batch was read")
                assert answer.diagnostics["unread_classes"] == [answer.diagnostics["dump_class"]]
            else:
                assert answer.status.startswith("no class differs from the others")
    assert with_many >= there - 1
    assert with_one <= 14


def test_vgg_shifts_in_the_paper_s_convolutions() -> None:
    """VGG-16's chain with as few channels as the construction needs, on images of 64 pixels."""
    widths = (6, 6, 0, 6, 6, 0, 6, 6, 24, 0, 24, 24, 96, 0, 96, 96, 384, 0)
    layers, before = list[nn.Module](), 3
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)] if width else [nn.MaxPool2d(2)]
        before = width or before
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(384 * 4, 24), nn.ReLU(),
                          nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 10))  # fmt: skip
    smooth = torch.nn.functional.interpolate(torch.rand(4, 3, 5, 5), size=64, mode="bilinear")
    batch = fp.Batch(smooth, torch.tensor([1, 3, 5, 8]))
    found, truth = attack(mkor(), model, batch)
    assert found.inputs is not None
    wanted = expected(by_label(found, truth), Lattice(top=0, pitch=4, size=32, height=64, width=64))
    assert torch.allclose(found.inputs, wanted, atol=1e-4)


@pytest.mark.quality
def test_sigmoids_and_average_pools_of_lenet5(digits: fp.data.ImageSet) -> None:
    options = {"activation": "sigmoid", "pool": "average", "padding": 2}
    model = fp.models.build("lenet5", input_shape=(1, 28, 28), classes=10, seed=0, **options)
    small = digits.draw(8, torch.Generator().manual_seed(0), unique_labels=True)
    batch = fp.Batch(torch.nn.functional.interpolate(small.inputs, size=28, mode="bilinear"), small.labels)
    for method, least in ((mkor(), 13.0), (Mkor(decoder=Smoothest()), 20.0), (mkor_inconspicuous(), 13.0)):
        found, truth = attack(method, model, batch)
        scores = fp.score(found, truth, metrics=("psnr",))
        assert scores.labels_match
        assert scores.mean("psnr") > least


def test_strides_in_place_of_pools_lose_nothing(photos: fp.data.ImageSet) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(12, 48, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(48 * 64, 10),
    )  # fmt: skip
    found, truth = attack(mkor(), model, photos.batch(range(6)))
    assert found.inputs is not None
    assert torch.allclose(found.inputs, by_label(found, truth), atol=1e-4)


def test_normalised_inputs_are_turned_back_into_pixels(photos: fp.data.ImageSet) -> None:
    normalization = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in normalization)
    batch = photos.batch(range(5))
    inputs = fp.Batch((batch.inputs - mean) / std, batch.labels)
    method = Mkor(normalization=normalization)
    found, truth = attack(method, chain(), inputs, normalization=normalization)
    assert found.inputs is not None
    pixels, private = found.inputs * std + mean, by_label(found, truth) * std + mean
    assert torch.allclose(pixels, expected(private), atol=1e-4)
    with pytest.raises(fp.NotApplicable, match="normalised by None"):
        attack(mkor(), chain(), inputs, normalization=normalization)


@pytest.mark.quality
def test_fewer_shifting_layers_are_a_coarser_lattice(photos: fp.data.ImageSet) -> None:
    scores = []
    for layers in (0, 1, 2):
        found, truth = attack(Mkor(layers=layers), chain(), photos.batch(range(5)))
        scores.append(fp.score(found, truth, metrics=("psnr",)).mean("psnr"))
    assert scores == sorted(scores)
    assert scores[2] > scores[0] + 1


def test_the_lattice_of_vgg16() -> None:
    model = fp.models.build("lenet5", input_shape=(3, 32, 32), seed=0)
    params = {name: p.detach() for name, p in model.named_parameters()}
    stack = stack_of(model, params)
    assert [len(stack.convolutions), len(stack.dense), stack.classes] == [2, 3, 10]
    _, trapdoor = mkor().tamper(model, params, torch.Generator())
    layout = Layout.of(trapdoor)
    assert layout.channels.shape == (2, 3, 1, 1)  # six channels are all there are in the first convolution
    assert layout.size == 4
    assert Head.of(trapdoor).rows.flatten().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: fp.models.build("resnet18", classes=10), "branches"),
        (lambda: fp.models.build("fc2", input_shape=(3, 32, 32)), "no convolution"),
        (lambda: chain(channels=(4, 8)), "at least 6 channels"),
        (lambda: chain(hidden=8, classes=10), "nodes per class"),
    ],
)
def test_networks_that_the_construction_does_not_fit_are_refused(model: Any, reason: str) -> None:
    network = model()
    params = {name: p.detach() for name, p in network.named_parameters()}
    with pytest.raises(fp.NotApplicable, match=reason):
        mkor().tamper(network, params, torch.Generator())


def test_a_frozen_dense_layer_is_refused(photos: fp.data.ImageSet) -> None:
    model = chain()
    model[10].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(fp.NotApplicable, match="frozen"):
        attack(mkor(), model, photos.batch(range(5)))


@pytest.mark.quality
@pytest.mark.parametrize("method", [mkor(), DUMPED], ids=repr)
def test_features_that_were_cut_out_only_widen_the_bounds(method: Mkor, photos: fp.data.ImageSet) -> None:
    """As Soteria does to a network with one dense layer: whole columns of its gradient are zero."""
    model = nn.Sequential(*list(chain())[:10], nn.Linear(96 * 16, CLASSES))
    scenario = fp.Scenario(model=model, clients=[photos.batch(range(6))])
    seen, truth = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=method)
    update = dict(seen.rounds[0].update)
    kept = torch.rand(96 * 16, generator=torch.Generator().manual_seed(0)) > 0.3
    cut = dataclasses.replace(seen.rounds[0], update={**update, "10.weight": update["10.weight"] * kept})
    answers = [fp.run(method, dataclasses.replace(seen, rounds=(part,))) for part in (seen.rounds[0], cut)]
    whole, partial = (fp.score(answer, truth, metrics=("psnr",)).mean("psnr") for answer in answers)
    assert partial > whole - 3
    assert torch.equal(answers[1].labels, answers[0].labels)


@pytest.mark.quality
def test_batch_norm_leaves_what_the_histogram_can_set_right(photos: fp.data.ImageSet) -> None:
    layers = list(chain())
    for number in (6, 3, 0):
        layers.insert(number + 1, nn.BatchNorm2d(layers[number].out_channels))  # type: ignore[arg-type]
    model, batch = nn.Sequential(*layers), photos.batch([*range(7)])
    found, truth = attack(DUMPED, model, batch)
    assert found.diagnostics["classes"] == list(range(7))
    plain, _ = attack(DUMPED, chain(), batch)
    scores = [fp.score(answer, truth, metrics=("psnr",)).mean("psnr") for answer in (plain, found)]
    assert scores[1] > scores[0] - 3


# --- what a server holds beside it -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hurt",
    [
        lambda t: {"bins": torch.rand(3)},
        lambda t: t | {"rows": t["rows"] + 1000},
        lambda t: t | {"channels": t["channels"] - 5},
        lambda t: t | {"gain": t["gain"] * 0},
        lambda t: t | {"geometry": torch.tensor([0, 0, 8, 0])},
        lambda t: t | {"geometry": torch.tensor([0, 1, 10**9, 0])},
        lambda t: t | {"slopes": t["slopes"][:2]},
        lambda t: t | {"reading": torch.tensor([0, 99])},
    ],
)
def test_a_trapdoor_of_another_origin_is_refused(hurt: Any, photos: fp.data.ImageSet) -> None:
    scenario = fp.Scenario(model=chain(), clients=[photos.batch(range(3))])
    observation, _ = fp.simulate(scenario, fp.threats.malicious_server, seed=0, server=mkor())
    assert observation.trapdoor is not None
    other = dataclasses.replace(observation, trapdoor=hurt(dict(observation.trapdoor)))
    with pytest.raises(fp.errors.BadInput, match="trapdoor must be the one that mkor made"):
        fp.run(mkor(), other)


def test_lenet5_has_the_published_activations_and_pools_when_asked() -> None:
    model = fp.models.build("lenet5", input_shape=(1, 28, 28), activation="sigmoid", pool="average", padding=2)
    assert model[0].padding == (2, 2)  # type: ignore[index]
    assert [type(layer) for layer in model[1:3]] == [nn.Sigmoid, nn.AvgPool2d]  # type: ignore[index]
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    with pytest.raises(fp.errors.BadInput, match="pool"):
        fp.models.build("lenet5", input_shape=(1, 28, 28), pool="median")


def test_an_image_whose_side_is_no_multiple_of_the_windows_step() -> None:
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(24, 96, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 9 * 9, 20), nn.ReLU(), nn.Linear(20, 10))
    batch = fp.Batch(torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 4, 6]))
    for decoder in (fp.attacks.midpoint, Smoothest(iterations=2)):
        found, _ = attack(Mkor(decoder=decoder), model, batch)
        assert found.labels is not None
        assert found.labels.tolist() == [1, 4, 6]
        assert max(found.diagnostics["misfit"]) < 0.5
