"""Runs one cell: simulates or loads, attacks, scores. Everything random in it comes from the cell's own seed."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from fedprism import results, running, utility
from fedprism.attacks import fitted
from fedprism.audit.baselines import guesses
from fedprism.audit.entries import made_chain
from fedprism.audit.grid import AttackCell, CaptureCell, Cell, UtilityCell
from fedprism.audit.materials import Materials, Setup
from fedprism.defenses import EqualLabels
from fedprism.errors import BadInput, FedprismError, MissingKnowledge, NotApplicable, out_of_memory
from fedprism.explaining import unexplained
from fedprism.randomness import generator
from fedprism.scoring import Scores, load_truth, match, score, score_updates
from fedprism.simulation import Scenario, simulate
from fedprism.solvers import memory
from fedprism.tabular import score_columns
from fedprism.types import Batch, Observation, Reconstruction, Record

PICTURES = 8
"""Samples a cell keeps with what came back, unless the plan says otherwise."""
OUT_OF_MEMORY = "out of memory"
LITTLE = 2**30
"""Bytes of a GPU that a worker may keep between cells: looking for garbage takes a quarter of a second each time."""

Outcome = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What came of a cell. `seconds` and `time_factor` are the clock's, and kept apart from what repeats exactly."""

    id: str
    cell: Mapping[str, Any]
    outcome: Outcome
    reason: str = ""
    """Why it was skipped or failed."""
    record: Record | None = None
    baselines: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Mean score of each null baseline."""
    tensors: bytes | None = None
    """A safetensors file with some of the samples and what came back."""
    seconds: float = 0.0
    time_factor: float | None = None
    share: float = 1.0
    """Which part of the usual amount was worked on at a time: less where memory ran out."""
    divisible: bool = False
    """Whether memory ran out of a cell that could work on less at a time."""


class _Drawn(NamedTuple):
    clients: tuple[Batch, ...]
    public: Batch | None
    others: Tensor
    """Samples that nobody holds, for the baselines."""


def run_cell(setup: Setup, device: str | None, cell: Cell, share: float = 1.0) -> Finished:
    """A method that does not apply is a skipped cell, an error of the input a failed one; other errors are raised.

    share: which part of the usual amount is worked on at a time (`solvers.memory`).
    """
    start = time.perf_counter()
    try:
        with one_thread(), repeatable(), memory.taking(share) as taken:
            found: Finished = _RUNNERS[cell.kind](setup, device, cell)
    except (NotApplicable, MissingKnowledge) as reason:
        found = failed(cell, str(reason), "skipped")
    except FedprismError as reason:
        found = failed(cell, str(reason))
    except Exception as error:
        if not out_of_memory(error):
            raise
        found = failed(cell, _too_much(share), divisible=taken.divisible)
    _give_back()
    return dataclasses.replace(found, seconds=time.perf_counter() - start, share=share)


def failed(cell: Cell, reason: str, outcome: Outcome = "failed", *, divisible: bool = False) -> Finished:
    """A cell without a result."""
    reason = " ".join(reason.split())
    return Finished(id=cell.id, cell=cell.described(), outcome=outcome, reason=reason, divisible=divisible)


def _too_much(share: float) -> str:
    tried = "" if share == 1 else f", even with 1/{round(1 / share)} of the usual amount at a time"
    return f"{OUT_OF_MEMORY}: the cell needs more than there is{tried}; use a smaller batch or model"


def _give_back() -> None:
    """Leave a GPU's memory to other workers, and to the next attempt. Little is not worth the search for garbage."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    if any(torch.cuda.memory_reserved(number) > LITTLE for number in range(torch.cuda.device_count())):
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def one_thread() -> Iterator[None]:
    """The order in which threads add up changes the last digits; with one, any number of workers gives the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def repeatable() -> Iterator[None]:
    """Algorithms of a GPU that give the same digits each time, where there are any."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.deterministic = before


def observe(setup: Setup, cell: AttackCell, device: str | None) -> tuple[Observation, Any, Tensor]:
    """What the cell's attacker sees, the truth, and the numbers of samples that nobody holds."""
    plan, materials = setup.plan, setup.materials()
    assert plan.data is not None
    assert plan.model is not None
    drawn = _draw(materials, cell, plan.data.public)
    attack, threat = cell.attack.make(), cell.threat.make()
    scenario = Scenario(
        model=materials.network(cell.seed),
        clients=drawn.clients,
        protocol=cell.protocol.make(),
        defense=made_chain(cell.defense),
        loss=cell.loss,
        rounds=plan.federation.rounds,
        aggregation=plan.federation.aggregation,
        training=plan.model.training,
        public_data=drawn.public,
        bounds=materials.bounds,
        normalization=materials.normalization,
        participation=plan.federation.participation,
        frozen=plan.federation.frozen,
        window=plan.federation.window,
        fraction=plan.federation.fraction,
    )
    server: Any = attack if threat.tampers and hasattr(attack, "tamper") else None
    observation, truth = simulate(scenario, threat, seed=cell.seed, server=server, device=device)
    return observation, truth, drawn.others


def _attacked(setup: Setup, device: str | None, cell: AttackCell) -> Finished:
    observation, truth, others = observe(setup, cell, device)
    found = running.run(fitted(cell.attack.make(), observation), observation, seed=cell.seed, device=device)
    kept, residual = setup.plan.scores.pictures, running.residual(observation, found)
    return _judged(setup, cell, observation, found, truth, others, residual, PICTURES if kept is None else kept)


def _captured(setup: Setup, device: str | None, cell: CaptureCell) -> Finished:
    captures = setup.plan.captures
    assert captures is not None
    observation = setup.observation(captures.folders[cell.number - 1])
    truth = load_truth(setup.base / captures.truths[cell.number - 1]) if captures.truths else None
    attack = fitted(cell.attack.make(), observation)
    found = running.run(attack, observation, seed=cell.seed, device=device)
    residual = unexplained(attack, observation, found)
    # Nobody agreed to see what a capture holds: pictures are kept only where the plan says so.
    return _judged(setup, cell, observation, found, truth, None, residual, setup.plan.scores.pictures or 0)


def _judged(
    setup: Setup,
    cell: AttackCell | CaptureCell,
    observation: Observation,
    found: Reconstruction,
    truth: Any,
    others: Tensor | None,
    residual: float | None,
    kept: int,
) -> Finished:
    scores: dict[str, Any] | None = None
    baselines: dict[str, dict[str, float | None]] = {}
    if truth is not None and found.inputs is not None:
        scores = _scores(found, truth, setup)
        if others is not None:
            freedom = found.ambiguity & {"order"}
            nulls = guesses(setup.materials(), others, len(truth.inputs), cell.seed)
            for name, inputs in nulls.items():
                guess = Reconstruction(inputs=inputs, ambiguity=freedom)
                baselines[name] = _scores(guess, truth, setup)["means"]
    elif truth is not None and found.updates is not None and truth.updates is not None:
        errors = score_updates(found, truth)
        scores = _summed({"update-error": tuple(errors.values())})
    record = Record(
        kind="attack",
        cell=cell.described(),
        knowledge_used=tuple(sorted(found.knowledge_used)),
        scores=scores,
        residual=residual,
        status=str(found.status),
        seed=cell.seed,
        versions=results.versions(),
    )
    return Finished(
        id=cell.id,
        cell=cell.described(),
        outcome="done",
        record=record,
        baselines=baselines,
        tensors=_kept(observation, found, truth, kept),
    )


def _scores(found: Reconstruction, truth: Any, setup: Setup) -> dict[str, Any]:
    """Every sample's scores and their means; tables are judged by column as well."""
    assert found.inputs is not None
    wanted, columns = setup.plan.scores, setup.materials().columns
    judged: Scores = score(found, truth, metrics=wanted.metrics, allow_download=setup.allow_download)
    values = dict(judged.values)
    extra: dict[str, Any] = {}
    if columns is not None:
        table = score_columns(match(found, truth), columns, wanted.tolerance)
        values["columns"] = table.by_row
        extra = {"by_column": table.by_column, "tolerance": wanted.tolerance}
    return {
        **_summed(values),
        "labels_match": judged.labels_match if _one_each(found, truth) else None,
        "resolved": sorted(judged.resolved),
        "unavailable": dict(judged.unavailable),
        **extra,
    }


def _one_each(found: Reconstruction, truth: Any) -> bool:
    """Of a model that stays as it is, every round gives the same samples again: then labels are not counted."""
    return found.labels is not None and len(found.labels) <= len(truth.labels)


def _summed(values: Mapping[str, tuple[float | None, ...]]) -> dict[str, Any]:
    answered = [sum(value is not None for value in each) for each in values.values()]
    samples = [len(each) for each in values.values()]
    return {
        "values": dict(values),
        "means": {name: _mean(each) for name, each in values.items()},
        "samples": max(samples, default=0),
        "answered": min(answered, default=0),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Of the samples that were answered; None where none was. Identical samples make it infinite."""
    present = [value for value in values if value is not None]
    return math.fsum(present) / len(present) if present and math.inf not in present else (math.inf if present else None)


def _kept(observation: Observation, found: Reconstruction, truth: Any, count: int) -> bytes | None:
    """Some samples beside what came back, in pixels: from the one that fared worst for its owner to the best, evenly.

    `indices` says which samples of the batch they are. Images are kept as bytes, other inputs as they are.
    """
    if count == 0 or found.inputs is None or len(found.inputs) == 0:
        return None
    if truth is None:
        return save({"recovered": _stored(results.as_pixels(observation, found)[:count])})
    paired = match(found, truth)
    answered = torch.tensor([row is not None for row in paired.rows])
    errors = (paired.found - paired.truth).flatten(1).square().mean(1).masked_fill(~answered, math.inf)
    places = torch.linspace(0, len(errors) - 1, min(count, len(errors))).round().long()
    chosen = errors.argsort(stable=True)[places]
    return save(
        {
            "originals": _stored(paired.truth[chosen]),
            "recovered": _stored(paired.found[chosen]),
            "answered": answered[chosen],
            "indices": chosen,
        }
    )


def _stored(pixels: Tensor) -> Tensor:
    if pixels.dim() != 4:
        return pixels.float().contiguous()
    return (pixels.double().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()


def _draw(materials: Materials, cell: AttackCell, public: int) -> _Drawn:
    """Who holds what: the same for every defense, threat model and attack of a seed, so that they compare."""
    assert materials.samples is not None
    order = torch.randperm(len(materials.samples), generator=generator(cell.seed, "samples"))
    size, total = cell.batch_size, cell.clients * cell.batch_size
    if any(isinstance(entry.make(), EqualLabels) for entry in cell.defense):
        order = _one_class_each(order, materials.samples.labels, cell.clients, size)
    clients = tuple(materials.batch(part) for part in torch.split(order[:total], size))
    others = order[total + public :]
    return _Drawn(
        clients=clients,
        public=materials.batch(order[total : total + public]) if public else None,
        others=others if len(others) else order,  # all samples are taken: then one of them has to do
    )


def _one_class_each(order: Tensor, labels: Tensor, clients: int, size: int) -> Tensor:
    """The samples in an order whose first batches, one a client, are of one class each: equal labels need such data."""
    own = labels[order]
    counts = torch.bincount(own)
    batches = [
        order[own == number][: counts[number] // size * size].view(-1, size)
        for number in torch.unique(own).tolist()
        if counts[number] >= size
    ]
    turns = [batch[turn] for turn in range(max(map(len, batches), default=0)) for batch in batches if turn < len(batch)]
    if len(turns) < clients:
        raise BadInput(
            f"equal-labels expects {size} samples of one class for each of {clients} clients, found that for "
            f"{len(turns)} of them; lower batch_sizes or clients, or give more data."
        )
    first = torch.cat(turns[:clients])
    return torch.cat([first, order[~torch.isin(order, first)]])


def _trained(setup: Setup, device: str | None, cell: UtilityCell) -> Finished:
    plan, materials = setup.plan, setup.materials()
    wanted = plan.utility
    assert wanted is not None
    assert materials.samples is not None
    order = torch.randperm(len(materials.samples), generator=generator(0, "held back"))
    held_back = max(1, round(wanted.test * len(order)))
    measured = utility.measure(
        materials.network,
        materials.batch(order[held_back:]),
        materials.batch(order[:held_back]),
        made_chain(cell.defense),
        epochs=wanted.epochs,
        batch_size=wanted.batch_size,
        clients=wanted.clients,
        lr=wanted.lr,
        seeds=wanted.seeds,
        device=device,
        loss=cell.loss,
        delta=wanted.delta,
        timed_steps=wanted.timed_steps,
    )
    record = measured.record(cell.described())
    return Finished(
        id=cell.id,
        cell=cell.described(),
        outcome="done",
        record=dataclasses.replace(record, time_factor=None),
        time_factor=record.time_factor,
    )


_RUNNERS: Mapping[str, Callable[..., Finished]] = {"attack": _attacked, "capture": _captured, "utility": _trained}
