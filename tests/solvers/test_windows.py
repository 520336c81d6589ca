"""Images from the extremes and means of windows, against loops over pixels and scipy's morphology."""

from __future__ import annotations

import pytest
import torch
from scipy import ndimage
from torch import Tensor

import fedprism as fp
from fedprism.solvers import windows
from fedprism.solvers.windows import Bend, Lattice, Smoothest, WindowStatus

LATTICES = [
    Lattice(top=0, pitch=4, size=8, height=16, width=24),
    Lattice(top=0, pitch=1, size=3, height=9, width=7),
    Lattice(top=3, pitch=1, size=4, height=12, width=12),
    Lattice(top=-2, pitch=2, size=6, height=12, width=10),
    Lattice(top=0, pitch=3, size=2, height=9, width=9),
]


def image(lattice: Lattice) -> Tensor:
    return torch.rand(2, 1, lattice.height, lattice.width, generator=torch.Generator().manual_seed(0))


def counts(lattice: Lattice) -> tuple[int, int]:
    """As many windows as hold a pixel of the image."""
    rows, columns = (-(-(side - lattice.top) // lattice.pitch) for side in (lattice.height, lattice.width))
    return rows, columns


def spans(lattice: Lattice) -> list[tuple[int, int, slice, slice]]:
    def span(number: int) -> slice:
        start = lattice.top + lattice.pitch * number
        return slice(max(0, start), start + lattice.size)

    rows, columns = counts(lattice)
    return [(i, j, span(i), span(j)) for i in range(rows) for j in range(columns)]


@pytest.mark.parametrize("lattice", LATTICES)
def test_extremes_are_those_of_every_window(lattice: Lattice) -> None:
    pixels = image(lattice)
    high, low = windows.extremes(pixels, lattice, counts(lattice))
    for i, j, rows, columns in spans(lattice):
        inside = pixels[:, :, rows, columns].flatten(2)
        assert torch.equal(high[:, :, i, j], inside.amax(2))
        assert torch.equal(low[:, :, i, j], inside.amin(2))


def test_windows_that_were_cut_out_bound_nothing_and_black_ones_do() -> None:
    lattice = Lattice(top=0, pitch=4, size=4, height=8, width=8)
    pixels = image(lattice) / 2 + 0.25
    pixels[:, :, 4:, 4:] = 0
    high, low = windows.extremes(pixels, lattice, (2, 2))
    high[:, :, 0, 0], low[:, :, 0, 1] = 0, 1
    lower, upper = windows.bounds(*windows.without_removed(high, low), lattice)
    assert bool((upper[:, :, :4, :4] == 1).all() & (lower[:, :, :4, 4:] == 0).all())
    assert bool((upper[:, :, 4:, 4:] == 0).all())
    assert bool(((lower <= pixels) & (pixels <= upper)).all())


@pytest.mark.parametrize("lattice", LATTICES)
def test_bounds_are_the_tightest_that_the_windows_give(lattice: Lattice) -> None:
    pixels = image(lattice)
    high, low = windows.extremes(pixels, lattice, counts(lattice))
    upper, lower = torch.ones_like(pixels), torch.zeros_like(pixels)
    for i, j, rows, columns in spans(lattice):
        upper[:, :, rows, columns] = upper[:, :, rows, columns].minimum(high[:, :, i : i + 1, j : j + 1])
        lower[:, :, rows, columns] = lower[:, :, rows, columns].maximum(low[:, :, i : i + 1, j : j + 1])
    answer = windows.bounds(high, low, lattice)
    assert torch.equal(answer[0], lower)
    assert torch.equal(answer[1], upper)


def test_bounds_on_every_pixel_are_opening_and_closing() -> None:
    lattice = Lattice(top=-4, pitch=1, size=5, height=20, width=20)
    pixels = image(lattice)
    lower, upper = windows.bounds(*windows.extremes(pixels, lattice, (24, 24)), lattice)
    inner = (slice(4, -4), slice(4, -4))  # scipy treats the border its own way
    for number in range(len(pixels)):
        closed = torch.from_numpy(ndimage.grey_closing(pixels[number, 0].numpy(), size=5))
        opened = torch.from_numpy(ndimage.grey_opening(pixels[number, 0].numpy(), size=5))
        assert torch.equal(upper[number, 0][inner], closed[inner])
        assert torch.equal(lower[number, 0][inner], opened[inner])


def test_the_smoothest_image_is_nearer_to_an_enlarged_photograph_than_the_middle() -> None:
    small = fp.data.load("photos", size=16).batch(range(4)).inputs
    photos = torch.nn.functional.interpolate(small, size=64, mode="bilinear")
    lattice = Lattice(top=0, pitch=4, size=16, height=64, width=64)
    high, low = windows.extremes(photos, lattice, (16, 16))
    middle, fitted = windows.midpoint(high, low, lattice), Smoothest(iterations=60)(high, low, lattice)
    assert middle.status is WindowStatus.MIDPOINT
    assert fitted.status is WindowStatus.FITTED
    assert bool((fitted.misfit < middle.misfit).all())
    gained = fp.metrics.psnr(fitted.images, photos) - fp.metrics.psnr(middle.images, photos)
    assert float(gained.mean()) > 2
    lower, upper = windows.bounds(high, low, lattice)
    assert bool((fitted.images >= lower - 1e-6).all())
    assert bool((fitted.images <= upper + 1e-6).all())


def test_crossed_bounds_are_reported_and_taken_in_the_middle() -> None:
    lattice = Lattice(top=0, pitch=2, size=4, height=8, width=8)
    high, low = torch.full((1, 1, 4, 4), 0.2), torch.full((1, 1, 4, 4), 0.6)
    decoders = windows.midpoint, windows.interpolated_midpoint, windows.softened_midpoint, Smoothest(iterations=2)
    for decode in decoders:
        answer = decode(high, low, lattice)
        assert answer.status is WindowStatus.CROSSED
        assert torch.allclose(answer.images, torch.full_like(answer.images, 0.4))


def test_softening_is_a_mean_of_five_by_five() -> None:
    lattice = Lattice(top=0, pitch=4, size=8, height=16, width=16)
    high, low = windows.extremes(image(lattice), lattice, (4, 4))
    sharp, soft = (decode(high, low, lattice).images for decode in (windows.midpoint, windows.softened_midpoint))
    expected = ndimage.uniform_filter(sharp[0, 0].double().numpy(), 5, mode="nearest")
    assert torch.allclose(soft[0, 0].double(), torch.from_numpy(expected), atol=1e-6)


@pytest.mark.parametrize("lattice", LATTICES)
def test_interpolation_keeps_to_the_bounds_and_to_the_middle_of_each_cell(lattice: Lattice) -> None:
    high, low = windows.extremes(image(lattice), lattice, counts(lattice))
    lower, upper = windows.bounds(high, low, lattice)
    images = windows.interpolated_midpoint(high, low, lattice).images
    assert bool(((images >= lower) & (images <= upper)).all())
    sharp = windows.midpoint(high, low, lattice).images
    if lattice.cell == 1:
        assert torch.allclose(images, sharp)


def test_interpolation_puts_a_ramp_where_it_is() -> None:
    """Windows that start in every cell of four, on a ramp: the middle of each cell is known, and the rest between."""
    lattice = Lattice(top=-4, pitch=4, size=8, height=64, width=64)
    ramp = ((torch.arange(64) + 0.5) / 64).expand(1, 1, 64, 64)
    high, low = windows.extremes(ramp, lattice, (17, 17))
    sharp, smooth = (
        (decode(high, low, lattice).images - ramp)[..., 12:-12].abs().max()
        for decode in (windows.midpoint, windows.interpolated_midpoint)
    )
    assert float(sharp) == pytest.approx(1.5 / 64, abs=1e-6)
    assert float(smooth) < 0.2 * float(sharp)


BENDS = [Bend(True, ((2, 1),)), Bend(True, ((2, 2),))]


def test_means_of_windows_are_those_of_the_network() -> None:
    lattice = Lattice(top=0, pitch=1, size=4, height=12, width=12)
    pixels = image(lattice)
    answer = windows.window_means(pixels, lattice, (9, 9), BENDS)
    once = torch.nn.functional.avg_pool2d(torch.sigmoid(pixels), 2)
    twice = torch.nn.functional.avg_pool2d(torch.sigmoid(once), 2)
    assert torch.allclose(answer[:, :, ::4, ::4], twice)


def test_means_determine_a_photograph() -> None:
    photos = fp.data.load("photos", size=32).batch(range(2)).inputs
    lattice = Lattice(top=0, pitch=1, size=4, height=32, width=32)
    means = windows.window_means(photos, lattice, (29, 29), BENDS)
    rough = windows.spread_means(means, lattice, BENDS)
    fitted = windows.smoothest_means(means, lattice, BENDS, Smoothest(iterations=100))
    assert rough.status is WindowStatus.MEANS
    assert (
        float(fp.metrics.psnr(fitted.images, photos).mean()) > float(fp.metrics.psnr(rough.images, photos).mean()) + 5
    )
