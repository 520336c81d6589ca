"""The convolutions of MKOR: filters that carry copies of the image to the dense layers, and where each copy looks.

A copied channel is a filter with one tap. Through maximum pools it becomes the maximum of a window of the image; its
companion, of one minus the image, becomes one minus the minimum (section 3.4.1 of the paper). Some convolutions are
"4-direction": each channel goes on as four, shifted by nothing, right, down, and both, so that the windows of the next
layers overlap on a finer lattice.

Differs from the paper in: which convolutions shift is decided for any chain of layers, from the last pool backwards, as
many as the channels allow; for average pools there are no companions, because a mean needs none; channels that are left
may carry the grey image, blurred, which says more about it than the same extremes once more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedprism.errors import BadInput, NotApplicable
from fedprism.network.stack import Convolution, Pool, Stack
from fedprism.types import Update

LIFT = 10.0
"""What batch norm adds to a centred copy, in standard deviations: no image is that much darker than the mean."""
BLURRED_PIXELS = 9
"""Taps of a blurring kernel, which is 3 x 3."""
DIRECTIONS = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Down and right, in taps: how the four copies of a channel that shifts are moved."""

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Disguise:
    """How tampered parameters are made to look like others (sections 3.2.3 and 3.4.3 of the paper).

    gain: taps are drawn between this and its inverse. noise: standard deviation of what would be zero, relative to the
    layer's honest weights. ratio: a dense layer's second row of a pair is minus the first, times up to its inverse.
    beta: taps of convolutions are so many times larger. untouched: weights that lead from elsewhere into a copy, or to
    the logits, stay as they were, as in the paper's equation 20; without, they become noise, too. own_paths: paths use
    a dense layer's own weights, and what leads into them stays as well, which is equation 12 to the letter; ReLUs then
    cut about every second path.
    """

    gain: float = 0.8
    noise: float = 1e-3
    ratio: float = 0.8
    beta: float = 1.0
    untouched: bool = False
    own_paths: bool = False

    def __post_init__(self) -> None:
        if not (self.gain > 0 and self.noise >= 0 and self.ratio > 0 and self.beta > 0):
            raise BadInput(
                f"gain, ratio and beta must be above 0 and noise at least 0, not {self.gain}, "
                f"{self.ratio}, {self.beta} and {self.noise}; change the one that is out of range."
            )


class Layout(NamedTuple):
    """Where the copies end up among the features, all (polarities, colours, phases, phases); polarity 1 is 1 - image.

    There is one colour more than the image has where the blurred grey image was sent along.

    Channel [p, c, i, j] has at (h, w) the extreme, or the mean, over the window of `size` pixels that starts at
    top + pitch * (phases * h + i), and so across, times `gain`, plus `shift`.
    """

    channels: Tensor
    gain: Tensor
    shift: Tensor
    top: int
    pitch: int
    size: int
    stretched: bool = False
    """Whether batch norm changed gain and shift to what only the clients know, the same for all their samples."""

    @property
    def averages(self) -> bool:
        return self.channels.shape[0] == 1

    def tensors(self) -> dict[str, Tensor]:
        """As a trapdoor holds it."""
        geometry = torch.tensor([self.top, self.pitch, self.size, int(self.stretched)])
        return {"channels": self.channels, "gain": self.gain, "shift": self.shift, "geometry": geometry}

    @classmethod
    def of(cls, trapdoor: Mapping[str, Tensor]) -> Layout:
        top, pitch, size, stretched = map(int, trapdoor["geometry"].tolist())
        gain, shift = trapdoor["gain"], trapdoor["shift"]
        return cls(trapdoor["channels"].long(), gain, shift, top, pitch, size, bool(stretched))


class _Copy(NamedTuple):
    """One copied channel on its way through the network."""

    channel: int
    polarity: int
    colour: int
    down: int
    right: int
    gain: float
    shift: float


_Line: TypeAlias = tuple[float, float]
"""(slope, offset) of pixel = slope * input + offset"""


def plant_filters(
    stack: Stack,
    params: Update,
    rng: torch.Generator,
    *,
    disguise: Disguise | None,
    layers: int | None,
    blurred: bool,
    normalization: Normalization | None,
) -> tuple[dict[str, Tensor], Layout]:
    """The convolutions' changed parameters, and where the copies end up; at most `layers` convolutions shift.

    `blurred`: the grey image is sent along as one colour more, blurred before the first convolution that shifts.
    """
    polarities, steps = _polarities(stack), _steps(stack)
    colours = stack.convolutions[0].layer.in_channels
    shifting = _shifting(stack, steps, polarities * colours, layers)
    if blurred:
        _check_blurring(stack, shifting, polarities * (colours + 1))
    pixels = _pixels(colours, normalization)
    copies = [_Copy(c, p, c, 0, 0, 1.0, 0.0) for p in range(polarities) for c in range(colours + blurred)]
    changed: dict[str, Tensor] = {}
    for number, convolution in enumerate(stack.convolutions):
        shifted = _shifted(convolution, copies, steps[number], number in shifting)
        sources = [copy.channel for copy in copies] if number else None
        filters = _emptied(convolution, params, len(shifted), sources, disguise, rng)
        blurring = number < min(shifting, default=len(stack.convolutions))
        copies = [
            _planted(filters, out, copy, tap, pixels if number == 0 else None, blurring and copy.colour == colours, rng)
            for out, (copy, tap) in zip(filters.chosen.tolist(), shifted, strict=True)
        ]
        changed |= {f"{convolution.name}.weight": filters.weight, f"{convolution.name}.bias": filters.bias}
        if convolution.norm:  # lifts what it centres back above the ReLU
            for name, value in ((f"{convolution.norm}.weight", 1.0), (f"{convolution.norm}.bias", LIFT)):
                changed[name] = params[name].detach().index_fill(0, filters.chosen.to(params[name].device), value)
    return changed, _layout(copies, polarities, colours + blurred, steps, len(shifting), stack, filters.weight)


class _Filters(NamedTuple):
    """The parameters of one convolution on their way to being changed."""

    weight: Tensor
    bias: Tensor
    chosen: Tensor
    """Output channels that become copies."""
    varied: Disguise | None
    """How their gains vary, if they do."""


def _emptied(
    convolution: Convolution,
    params: Update,
    count: int,
    sources: list[int] | None,
    disguise: Disguise | None,
    rng: torch.Generator,
) -> _Filters:
    """The first `count` filters set to zero or, in disguise, any of them to little noise; `sources`: whose copies they
    hear, the pixels if None."""
    weight, bias = (params[f"{convolution.name}.{end}"].detach().clone() for end in ("weight", "bias"))
    chosen = torch.randperm(len(weight), generator=rng)[:count] if disguise else torch.arange(count)
    emptied = (float(weight.std()) * disguise.noise if disguise else 0.0) * normal_like(weight[chosen], rng)
    if disguise and disguise.untouched and sources is not None:
        heard = weight[chosen]
        heard[:, sources] = emptied[:, sources]
        emptied = heard
    weight[chosen] = emptied
    # The bend of a sigmoid would have to be undone by gain.
    return _Filters(weight, bias, chosen, disguise if convolution.activation != "sigmoid" else None)


def _planted(
    filters: _Filters,
    out: int,
    copy: _Copy,
    tap: tuple[int, int],
    pixels: tuple[list[_Line], list[_Line]] | None,
    blurs: bool,
    rng: torch.Generator,
) -> _Copy:
    """Let output channel `out` copy, or blur, another channel, or read `pixels` in the first layer."""
    kernel, varied, (down, right) = filters.weight[out], filters.varied, tap
    gain = varied.beta * math.exp(uniform_within(rng, math.log(varied.gain))) if varied else 1.0
    base = abs(float(filters.bias[out])) if varied and not blurs else 0.0  # would fade at the border
    offset = 0.0
    if pixels is not None:
        offset = _read_pixels(kernel[:, down, right], gain, pixels[copy.polarity], copy.colour)
    elif blurs:
        kernel[copy.channel, down - 1 : down + 2, right - 1 : right + 2] = gain / BLURRED_PIXELS
    else:
        kernel[copy.channel, down, right] = gain
    filters.bias[out] = gain * offset + base
    return copy._replace(channel=out, gain=gain * copy.gain, shift=gain * copy.shift + base)


def _pixels(colours: int, normalization: Normalization | None) -> tuple[list[_Line], list[_Line]]:
    """How the inputs of each colour become pixels, and how they become one minus the pixels."""
    mean, std = normalization or ((0.0,) * colours, (1.0,) * colours)
    if {len(mean), len(std)} != {colours}:
        raise NotApplicable(
            f"mkor needs a mean and a std for each of {colours} channels, not {len(mean)} and {len(std)}; "
            "correct its normalization."
        )
    return list(zip(std, mean, strict=True)), [(-s, 1.0 - m) for m, s in zip(mean, std, strict=True)]


def _read_pixels(taps: Tensor, tap: float, pixels: list[_Line], colour: int) -> float:
    """Let a filter of the first layer read one colour, or the mean of all; returns what the pixel lacks."""
    colours = [colour] if colour < len(pixels) else range(len(pixels))
    for number in colours:
        taps[number] = tap * pixels[number][0] / len(colours)
    return sum(pixels[number][1] for number in colours) / len(colours)


def blurs(stack: Stack, layout: Layout) -> tuple[int, ...]:
    """How often the blurred image was blurred before each pool, and after the last one in front of any that shifts."""
    steps, first = _steps(stack), len(stack.convolutions)
    if layout.channels.shape[2] > 1:
        first = max((number for number in range(first) if steps[number] == layout.pitch), default=first)
    counts = [0]
    for number, convolution in enumerate(stack.convolutions[:first]):
        counts[-1] += number > 0
        counts += [0] * len(convolution.pools)
    return tuple(counts)


def _check_blurring(stack: Stack, shifting: frozenset[int], copies: int) -> None:
    layers = [convolution.layer for convolution in stack.convolutions]
    pools = {pool for convolution in stack.convolutions for pool in convolution.pools}
    shapes = {(c.kernel_size[0], c.stride[0], c.padding[0], c.dilation[0], c.padding_mode) for c in layers}
    norms = any(convolution.norm for convolution in stack.convolutions)
    if (
        shapes != {(3, 1, 1, 1, "zeros")}
        or norms
        or pools != {Pool(False, 2, 2, 0)}
        or not _fits(stack, shifting, copies)
    ):
        raise NotApplicable(
            "mkor needs convolutions of 3 x 3 padded by 1, maximum pools of 2 x 2, no batch norm and a third more "
            "channels than copies to send the blurred image along, but this model has others or fewer; leave "
            "blurred off."
        )


def _polarities(stack: Stack) -> int:
    """2 where windows have maxima and minima, 1 where they have means or are single pixels; refuses the rest."""
    pools = [pool for convolution in stack.convolutions for pool in convolution.pools]
    kinds = {pool.average for pool in pools}
    activations = {convolution.activation for convolution in stack.convolutions}
    if any(convolution.norm for convolution in stack.convolutions) and (True in kinds or "sigmoid" in activations):
        raise NotApplicable("mkor needs ReLUs and maximum pools behind batch norm, not others; use class-fishing.")
    if len(kinds) > 1 or (False in kinds and "sigmoid" in activations):
        raise NotApplicable(
            "mkor needs maximum pools behind ReLUs, or average pools throughout, not a mixture; use class-fishing."
        )
    if any(pool.padding for pool in pools if pool.average):
        raise NotApplicable("mkor needs average pools without padding, but some have it; use class-fishing.")
    return 2 if False in kinds else 1


def _steps(stack: Stack) -> list[int]:
    """How many pixels apart neighbours are before each convolution, and in the features at the end."""
    strides = [math.prod(pool.stride for pool in c.pools) * c.layer.stride[0] for c in stack.convolutions]
    return list(accumulate(strides, operator.mul, initial=1))


def _shifting(stack: Stack, steps: list[int], copies: int, layers: int | None) -> frozenset[int]:
    """Which convolutions shift: the last one of each of the coarsest scales, halving each time, as channels allow."""
    last_of_scale = {
        steps[number] * convolution.layer.dilation[0]: number
        for number, convolution in enumerate(stack.convolutions)
        if convolution.layer.kernel_size[0] > 1
    }
    candidates: list[int] = []
    while (scale := steps[-1] / 2 ** (len(candidates) + 1)) in last_of_scale:
        candidates.append(last_of_scale[int(scale)])
    for count in range(len(candidates), -1, -1):
        chosen = frozenset(candidates[:count])
        if _fits(stack, chosen, copies) and (layers is None or count <= layers):
            return chosen
    raise NotApplicable(
        f"mkor needs at least {copies} channels in every convolution, but some have fewer; use class-fishing."
    )


def _fits(stack: Stack, shifting: frozenset[int], copies: int) -> bool:
    for number, convolution in enumerate(stack.convolutions):
        copies *= len(DIRECTIONS) if number in shifting else 1
        if copies > convolution.layer.out_channels:
            return False
    return True


def _shifted(
    convolution: Convolution, copies: list[_Copy], step: int, shifts: bool
) -> list[tuple[_Copy, tuple[int, int]]]:
    """What each output channel copies, with where that looks afterwards, and the tap it copies with."""
    layer, padding = convolution.layer, int(convolution.layer.padding[0])
    centre, dilation = (layer.kernel_size[0] - 1) // 2, layer.dilation[0]
    shifted = []
    for down, right in DIRECTIONS if shifts else DIRECTIONS[:1]:
        tap = centre + down, centre + right
        move_down, move_right = (step * (along * dilation - padding) for along in tap)
        shifted += [(c._replace(down=c.down + move_down, right=c.right + move_right), tap) for c in copies]
    return shifted


def _layout(
    copies: list[_Copy], polarities: int, colours: int, steps: list[int], shifts: int, stack: Stack, like: Tensor
) -> Layout:
    top, phases = min(copy.down for copy in copies), 2**shifts
    pitch, size = steps[-1] // phases, 1
    before = 0
    for number, convolution in enumerate(stack.convolutions):
        step = steps[number] * convolution.layer.stride[0]
        for pool in convolution.pools:
            before += step * pool.padding
            size += step * (pool.kernel - 1)
            step *= pool.stride
    channels = torch.zeros(polarities, colours, phases, phases, dtype=torch.long)
    gain, shift = torch.zeros(channels.shape, dtype=like.dtype), torch.zeros(channels.shape, dtype=like.dtype)
    for copy in copies:
        place = copy.polarity, copy.colour, (copy.down - top) // pitch, (copy.right - top) // pitch
        channels[place], gain[place], shift[place] = copy.channel, copy.gain, copy.shift
    stretched = any(convolution.norm for convolution in stack.convolutions)
    return Layout(channels, gain, shift, top - before, pitch, size, stretched)


def uniform_within(rng: torch.Generator, bound: float) -> float:
    """Between -|bound| and |bound|."""
    return bound * (2 * float(torch.rand((), generator=rng)) - 1)


def normal_like(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape of `like`, drawn on the CPU."""
    return torch.randn(like.shape, generator=rng).to(like)
