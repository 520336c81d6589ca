"""A malicious server's parameters that turn a large batch's gradient into one image a class, read in closed form.

Wang, Velipasalar, Gursoy, "Maximum Knowledge Orthogonality Reconstruction with Gradients in Federated Learning", WACV
2024.

`tamper` chooses the parameters: convolutions that copy the image to the dense layers, and dense layers in which every
class has rows of its own; `run` divides the gradients of these rows and decodes the images.

Differs from the paper in: it works with cross-entropy (see `mkor_head`); any chain of convolutions, ReLUs and maximum
pools, or average pools, with any number of dense layers, not only VGG-16 and LeNet-5; `Smoothest` decodes better than
the middle of the bounds, all the more with the blurred image in channels that the paper leaves; several nodes a class
tell samples of one class apart; nothing is blurred behind the reader's back, and which classes are in the batch is read
from the gradient, noise or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedprism import losses
from fedprism.attacks.base import NOBODY_TAMPERS, Circumstances, UpdateAttack
from fedprism.attacks.choices import OneOf
from fedprism.attacks.gradient_matching.forward import FORWARD_USES
from fedprism.attacks.mkor.calibration import calibrated
from fedprism.attacks.mkor.filters import Disguise, Layout, Normalization, blurs, normal_like, plant_filters
from fedprism.attacks.mkor.head import Gate, Head, Reference, plant_head
from fedprism.attacks.mkor.reading import (
    Reading,
    ReadingStatus,
    batch_scale,
    gate_gradient,
    read_head,
    unlike_pixels,
    within_range,
)
from fedprism.checks import choice, whole
from fedprism.client.observed import direction, local_steps
from fedprism.defenses.base import check_number
from fedprism.errors import BadInput, MissingKnowledge, NotApplicable
from fedprism.naming import preset
from fedprism.network.stack import Stack, stack_of
from fedprism.pixels import to_inputs
from fedprism.solvers.windows import (
    Bend,
    Blurred,
    Decoded,
    Lattice,
    Smoothest,
    interpolated_midpoint,
    midpoint,
    smoothest_means,
    softened_midpoint,
    spread_means,
    without_removed,
)
from fedprism.types import Observation, Reconstruction, Round, Update

MOST_NODES = 4096
"""Most nodes, paths or layers that one may ask for: a bound, beyond the widest dense layer of the networks in use."""
PROBES = 4
"""Random images, from black to noise of full contrast, by which logits are looked at: more change their size little."""
MARGIN = 2.0
"""How many times farther the dump class is set ahead than random images ask: photographs have larger features."""
MOST_WINDOW = 4096
"""The largest window, in pixels, that is looked at: trapdoors may come from files."""

Decoder: TypeAlias = Callable[[Tensor, Tensor, Lattice], Decoded]
"""(maxima, minima (n, colours, rows, columns), lattice) -> images"""
DECODERS: dict[str, Decoder] = {
    "midpoint": midpoint,
    "interpolated": interpolated_midpoint,
    "softened": softened_midpoint,
    "smoothest": Smoothest(),
}
PUBLISHED = Disguise(beta=3.0, untouched=True)
"""Equation 20 to the letter; with a beta of 3 four convolutions let as much through as without disguise."""
DISGUISES = {"none": None, "inconspicuous": Disguise(), "published": PUBLISHED}


@dataclass(frozen=True, kw_only=True, repr=False)
class Mkor(UpdateAttack):
    """The server's method: `tamper` chooses the parameters, `run` reads the answer with the trapdoor.

    reference: what makes the rows of classes comparable. disguise: None is the paper's naive form, of zeros and ones.
    decoder: how images come from the extremes of windows. nodes: rows a class, each for images brighter than a
    threshold; thresholds suit images whose `brightness` has that mean and standard deviation. layers: how many
    convolutions shift; paths: nodes side by side, against dropout; None is as many as help. blurred: channels that the
    copies leave carry the blurred grey image, of which `Smoothest` makes use. normalization: how clients turn pixels
    into inputs. parameter_noise: standard deviation of noise on all that is sent, over the root of how many inputs a
    unit has, as in the paper's code.
    """

    reference: Reference = Reference.ABSENT_CLASS
    disguise: Annotated[Disguise | None, OneOf(DISGUISES)] = None
    decoder: Annotated[Decoder, OneOf(DECODERS)] = midpoint
    nodes: int = 1
    layers: int | None = None
    paths: int | None = None
    blurred: bool = False
    brightness: tuple[float, float] = (0.47, 0.15)
    normalization: Normalization | None = None
    parameter_noise: float = 0.0

    citation: ClassVar[str] = "Wang, Velipasalar, Gursoy 2024 (MKOR)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", Reference(choice(self.reference, "reference", Reference)))
        whole(self.nodes, "nodes", MOST_NODES)
        check_number(self.parameter_noise, "mkor's parameter_noise", "0.001 is small", zero=True)
        for name, least in (("layers", 0), ("paths", 1)):
            if getattr(self, name) is not None:
                whole(getattr(self, name), name, MOST_NODES, least)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"model", "trapdoor", "input_shape", "batch_size"})

    @property
    def uses(self) -> frozenset[str]:
        return frozenset({"loss", "bounds", "normalization"}) | FORWARD_USES - {"defense"}

    def not_worth(self, circumstances: Circumstances) -> str | None:
        if self.disguise is not None:
            return "variant of mkor; a plan can name it"
        if not circumstances.tampers:
            return NOBODY_TAMPERS
        closed_form = circumstances.dense_layer_first
        return "imprint applies to this model; a plan can name it all the same" if closed_form else None

    def tamper(self, model: nn.Module, params: Update, rng: torch.Generator) -> tuple[Update, dict[str, Tensor]]:
        """The parameters to send instead of `params`, and what it takes to read the answer."""
        stack = stack_of(model, params)
        filters, layout = plant_filters(
            stack,
            params,
            rng,
            disguise=self.disguise,
            layers=self.layers,
            blurred=self.blurred,
            normalization=self.normalization,
        )
        head_params, head = plant_head(
            stack,
            params,
            layout,
            rng,
            disguise=self.disguise,
            reference=self.reference,
            nodes=self.nodes,
            paths=self.paths,
            brightness=self.brightness,
        )
        changed = filters | head_params
        sent = {name: changed.get(name, tensor) for name, tensor in params.items()}
        if head.dump is not None and self.disguise is not None and self.disguise.untouched:
            name = f"{stack.dense[-1].name}.bias"
            sent[name] = sent[name].clone()
            sent[name][head.dump] += self._lead(model, sent, stack, head.dump, rng)
        return _noised(sent, self.parameter_noise, rng), layout.tensors() | head.tensors()

    def _lead(self, model: nn.Module, sent: Update, stack: Stack, dump: int, rng: torch.Generator) -> float:
        """What the dump class lacks where weights to the logits stayed: how far others are ahead of it, with a margin.

        Logits are then as large as features, which grow with beta: random images show how large.
        """
        images = torch.rand(PROBES, *stack.shape, generator=rng) * torch.linspace(0, 1, PROBES).view(-1, 1, 1, 1)
        like, training = next(iter(sent.values())), model.training
        try:
            with torch.no_grad():
                logits = functional_call(model.eval(), dict(sent), (to_inputs(images, self.normalization).to(like),))
        finally:
            model.train(training)
        return MARGIN * max(0.0, float((logits.amax(1) - logits[:, dump]).max()))

    def attack_update(self, observation: Observation, rng: torch.Generator) -> Reconstruction:
        round = observation.round
        knowledge, trapdoor, model = observation.knowledge, observation.trapdoor, observation.model
        if trapdoor is None or model is None or knowledge.input_shape is None:
            raise MissingKnowledge(self.name, "trapdoor" if trapdoor is None else "model")
        _check_pixels(self, observation)
        stack = stack_of(model, round.params, knowledge.sample_shape)
        layout, head = _opened(trapdoor, stack)
        if head.dump is not None and not losses.is_cross_entropy(knowledge.loss or "cross_entropy"):
            raise NotApplicable("mkor needs cross-entropy for its dump class, not another loss; use an absent class.")
        reading = _read(observation, round, stack, layout, head)
        images, decoded = self._decode(knowledge.sample_shape, stack, layout, reading)
        blended = reading.counts > 1
        answers = torch.repeat_interleave(torch.arange(len(images), device=images.device), reading.counts)
        return Reconstruction(
            inputs=images[answers],
            labels=reading.classes[answers].cpu(),
            ambiguity=frozenset({"order"}),
            status=_status(reading, decoded, int(blended.sum()), _exact(stack)),
            diagnostics={
                "reference": str(Reference.ABSENT_CLASS if head.dump is None else Reference.DUMP_CLASS),
                "nodes_active": str(head.gate),
                "dump_class": head.dump,
                "unread_classes": list(reading.unread),
                "classes": reading.classes.tolist(),
                "counts": reading.counts.tolist(),
                "blended_classes": reading.classes[blended].tolist(),
                "noise_in_samples": reading.noise,
                "misfit": decoded.misfit.tolist() if decoded is not None else None,
            },
        )

    def _decode(
        self, shape: tuple[int, ...], stack: Stack, layout: Layout, reading: Reading
    ) -> tuple[Tensor, Decoded | None]:
        """Images in the model's input space, one an answer."""
        colours, height, width = shape
        lattice = Lattice(layout.top, layout.pitch, layout.size, height, width)
        features = _on_lattice(reading.features, layout, stack)
        # Windows that start behind the image hold none of it.
        rows, columns = (-(-(side - layout.top) // layout.pitch) for side in (height, width))
        features = features[..., :rows, :columns]
        if not len(features):
            return features.new_zeros(0, colours, height, width), None
        if reading.status is ReadingStatus.WITHIN_RANGE:
            features = within_range(features, reading.counts, extremes=layout.size > 1 and not layout.averages)
        if layout.stretched:
            features = calibrated(features, layout.channels.shape[2])
        if layout.averages and isinstance(self.decoder, Smoothest):
            decoded = smoothest_means(features[:, 0], lattice, _bends(stack), self.decoder)
        elif layout.averages:
            decoded = spread_means(features[:, 0], lattice, _bends(stack))
        else:
            maxima, minima = features[:, 0, :colours], 1 - features[:, 1, :colours]
            if not layout.stretched:  # stretching makes zeros of its own
                maxima, minima = without_removed(maxima, minima)
            soft = features[:, 0, colours:], 1 - features[:, 1, colours:]
            if soft[0].numel() and isinstance(self.decoder, Smoothest) and _whole(*soft):
                decoded = self.decoder(maxima, minima, lattice, Blurred(*soft, blurs(stack, layout)))
            else:
                decoded = self.decoder(maxima, minima, lattice)
        return to_inputs(decoded.images, self.normalization), decoded


def _noised(sent: Update, noise: float, rng: torch.Generator) -> Update:
    """The parameters of every layer with noise on them."""
    fan_in = {name.removesuffix(".weight"): t[0].numel() for name, t in sent.items() if t.dim() > 1 and noise}
    return {
        name: tensor + noise / fan_in[layer] ** 0.5 * normal_like(tensor, rng)
        if (layer := name.rpartition(".")[0]) in fan_in
        else tensor
        for name, tensor in sent.items()
    }


@preset(Mkor)
def mkor() -> Mkor:
    """The paper's naive form, read by an absent class and decoded by the middle of the bounds."""
    return Mkor()


@preset(Mkor)
def mkor_inconspicuous() -> Mkor:
    """The paper's inconspicuous form: random taps, noise for zeros, pairs of opposite rows, channels shuffled."""
    return Mkor(disguise=Disguise())


def _opened(trapdoor: Mapping[str, Tensor], stack: Stack) -> tuple[Layout, Head]:
    """The trapdoor, which may come from a file, if it is one of this network's."""
    shapes = {"channels": 4, "gain": 4, "shift": 4, "geometry": 1, "rows": 3, "slopes": 3, "reading": 1}
    fits = shapes.keys() <= trapdoor.keys() and all(trapdoor[name].dim() == dims for name, dims in shapes.items())
    fits = fits and trapdoor["geometry"].shape == (4,) and trapdoor["reading"].shape == (2,)
    if fits:
        layout, head = Layout.of(trapdoor), Head.of(trapdoor)
        polarities, colours, phases, across = layout.channels.shape
        fits = (
            polarities in (1, 2)
            and (colours - stack.shape[0], across) in ((0, phases), (polarities - 1, phases))
            and (colours == stack.shape[0] or 2 ** (len(blurs(stack, layout)) - 1) == layout.pitch)
            and layout.gain.shape == layout.shift.shape == layout.channels.shape
            and bool((layout.gain != 0).all())
            and min(layout.pitch, layout.size) > 0
            and max(layout.pitch, layout.size) <= MOST_WINDOW
            and abs(layout.top) <= MOST_WINDOW
            and _within(layout.channels, stack.features[0])
            and head.rows.shape == head.slopes.shape
            and len(head.rows) == stack.classes
            and bool((head.slopes.sum(2) != 0).all())
            and _within(head.rows, stack.dense[0].layer.out_features)
            and (head.dump or 0) < stack.classes
        )
    if not fits:
        raise BadInput("the trapdoor must be the one that mkor made for this network; use the one it came with.")
    return layout, head


def _within(numbers: Tensor, limit: int) -> bool:
    return numbers.numel() > 0 and int(numbers.min()) >= 0 and int(numbers.max()) < limit


def _check_pixels(attack: Mkor, observation: Observation) -> None:
    knowledge = observation.knowledge
    if knowledge.bounds not in (None, (0.0, 1.0)):
        raise NotApplicable(f"mkor needs pixels from 0 to 1, not {knowledge.bounds}; scale the images.")
    if knowledge.normalization is not None and knowledge.normalization != attack.normalization:
        raise NotApplicable(
            f"mkor needs inputs normalised by {attack.normalization}, not {knowledge.normalization}; tamper with "
            "an attack that has the clients' normalization."
        )


def _read(observation: Observation, round: Round, stack: Stack, layout: Layout, head: Head) -> Reading:
    batch = observation.knowledge.batch_size
    if not isinstance(batch, int):
        raise NotApplicable(f"mkor needs one batch size, not {batch}; observe one update.")
    name = stack.dense[0].name
    missing = [part for part in ("weight", "bias") if f"{name}.{part}" not in round.update]
    if missing:
        raise NotApplicable(
            f"mkor needs the gradient of '{name}.{missing[0]}', but it is frozen; it has to be trained."
        )
    if (local_steps(round, observation.knowledge) or 1) > 1 and round.kind == "delta":
        raise NotApplicable("mkor needs one gradient step, not several steps; let clients take one step.")
    ranged, exact = not layout.stretched, _exact(stack)
    gradient = direction(round, observation.knowledge)
    biases = gradient[f"{name}.bias"]
    weight_grad = gradient[f"{name}.weight"].view(-1, *stack.features)
    channels = layout.channels.flatten().to(weight_grad.device)

    def tracked(rows: Tensor) -> Tensor:
        return weight_grad[rows.unsqueeze(1), channels].flatten(1)

    def spread() -> float:
        features, _ = gate_gradient(head, 0, tracked, biases)
        gain = layout.gain.flatten().to(features).unsqueeze(1)
        return float(((features.amax(0) - features.amin(0)).view(len(gain), -1) / gain).abs().max())

    # Of a difference it may be unknown what was subtracted from what.
    signs = (1, -1) if round.kind == "delta" else (1,)
    scales = [
        (scaling, sign)
        for sign in signs
        if (scaling := batch_scale(head, sign * biases, batch, exact=exact, spread=spread if ranged else None))
    ]
    scale, sign = min(scales, key=lambda signed: signed[0].misfit, default=(None, 1))
    factor = 0.0 if scale is None else sign * scale.factor
    counted = scale is not None and scale.whole
    reading = read_head(
        head,
        lambda rows: factor * tracked(rows),
        factor * biases,
        batch,
        exact=exact,
        dropped=stack.dropout > 0,
        ranged=ranged,
        whole=counted,
    )
    compared = head.dump is None and head.gate is not Gate.NESTED and reading.status is not ReadingStatus.WITHIN_RANGE
    if compared and ranged and unlike_pixels(_on_lattice(reading.features, layout, stack)):
        return reading.without_reference(stack.classes)
    return reading._replace(unique=scale is None or scale.unique)


def _exact(stack: Stack) -> bool:
    """Whether every sample's error reaches the first dense layer with the same weight."""
    return "sigmoid" not in stack.activations and stack.dropout == 0


def _on_lattice(features: Tensor, layout: Layout, stack: Stack) -> Tensor:
    """(n, tracked features) -> (n, polarities, colours, rows, columns), what the windows have in common with pixels."""
    polarities, colours, phases, _ = layout.channels.shape
    _, height, width = stack.features
    gain, shift = (part.to(features)[..., None, None] for part in (layout.gain, layout.shift))
    maps = features.view(-1, polarities, colours, phases, phases, height, width)
    maps = (maps - shift) / gain
    maps = maps.permute(0, 1, 2, 5, 3, 6, 4)
    return maps.reshape(-1, polarities, colours, height * phases, width * phases)


def _whole(maxima: Tensor, minima: Tensor) -> bool:
    """Whether no window was cut out of the answer."""
    return all(map(torch.equal, without_removed(maxima, minima), (maxima, minima)))


def _bends(stack: Stack) -> list[Bend]:
    """What happens to a mean on its way, convolution by convolution."""
    bends, step = [], 1
    for convolution in stack.convolutions:
        step *= convolution.layer.stride[0]
        pools = []
        for pool in convolution.pools:
            pools.append((pool.kernel, step))
            step *= pool.stride
        bends.append(Bend(convolution.activation == "sigmoid", tuple(pools)))
    return bends


def _status(reading: Reading, decoded: Decoded | None, blended: int, exact: bool) -> str:
    parts = [str(reading.status)]
    if blended:
        parts.append(f"{blended} of {len(reading.classes)} answers blend several samples")
    if not reading.unique:
        parts.append("other counts of samples fit as well")
    if not exact:
        parts.append("dropout or sigmoids weigh samples unequally, so counts are estimates")
    if decoded is not None:
        parts.append(str(decoded.status))
    return "; ".join(parts)
