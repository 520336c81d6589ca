"""Writes the tables of the documentation: those of the reference from the code, others from stored results.

    python docs/tables.py          # or: make tables

A test finds a page that is behind the code. A table is between `<!-- table: NAME -->` and `<!-- end of table -->`.

What an attack needs, uses and says is read off it; what it works on is told here, and an attack without an entry ends
this program with the name of what is missing.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

from fedprism.attacks import ATTACKS, Attack
from fedprism.attacks.class_fishing import FishingStatus
from fedprism.attacks.embedding_inversion.answer import LookupStatus
from fedprism.attacks.imprint import ImprintStatus
from fedprism.attacks.mkor.reading import ReadingStatus
from fedprism.attacks.row_space_inversion import RowSpaceStatus
from fedprism.attacks.span_inversion.attack import SpanInversionStatus
from fedprism.attacks.token_inversion.attack import TokenStatus
from fedprism.defenses import DEFENSES, Defense
from fedprism.solvers import (
    DecodeStatus,
    DenseStatus,
    ExactStatus,
    MatchingStatus,
    PatchStatus,
    UnmixStatus,
    UserStatus,
)
from fedprism.solvers.properties import PropertyStatus
from fedprism.solvers.windows import WindowStatus
from fedprism.threats import THREATS

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "tests")]

import commands  # noqa: E402
import findings  # noqa: E402
from commands import table as _table  # noqa: E402

import rooms  # noqa: E402

PAGES = (*sorted(HERE.rglob("*.md")), HERE.parent / "research" / "performance.md")
RESULTS = HERE.parent / "benchmarks" / "results"

ANY_NETWORK = "any differentiable network; gradients and FedAvg deltas"
BATCH_NORM = "networks with batch-norm layers"
DENSE_FIRST = "a dense layer that the input feeds"
MIXTURES = "any differentiable network trained on mixtures; several updates"
CHAIN = "a chain of convolutions, ReLUs or sigmoids and pools, then dense layers; one local step"

WORKS_ON = {
    "dense-inversion": DENSE_FIRST,
    "patch-inversion": "patches that do not overlap, with a position parameter (Vision Transformers); one sample",
    "embedding-inversion": "tables that tokens or categories of the input are looked up in, and a dense layer behind",
    "row-space-inversion": "layers at fewer places than units: recurrent, series, few patches, several inputs, LoRA",
    "token-inversion": "transformers that are fed tokens: full gradients and LoRA, embeddings frozen or not",
    "span-inversion": "layers behind others at fewer places than units, such as a ResNet's last stages; few samples",
    "gradient-matching": ANY_NETWORK,
    "dlg": ANY_NETWORK,
    "idlg": ANY_NETWORK,
    "inverting-gradients": ANY_NETWORK,
    "bn-exact": BATCH_NORM,
    "bn-infer": BATCH_NORM,
    "bn-proxy": BATCH_NORM,
    "mixing-l2": ANY_NETWORK,
    "mixing-angle": ANY_NETWORK,
    "mixing-orthogonal": ANY_NETWORK,
    "cocktail-party": "a dense layer with at least as many units as samples, fed by the input or by convolutions",
    "disaggregation": "sums of several rounds with the same model; counts or participation name users",
    "property-inference": "any network",
    "mixup-decoding": MIXTURES,
    "instahide-decoding": MIXTURES,
    "mixup-at-once": MIXTURES,
    "class-fishing": "a last dense layer; one local step",
    "imprint": "a dense layer that the input feeds, a ReLU and another dense layer",
    "mkor": CHAIN,
    "mkor-inconspicuous": CHAIN,
}

ONE_OF_ITS_WAYS = {"disaggregation": frozenset({"windows", "counts"})}
"""If none of several kinds of knowledge is a need on its own: the kind that a threat model grants."""

MATCHING = (MatchingStatus,)
SAYS: dict[str, tuple[type[StrEnum], ...]] = {
    **dict.fromkeys(WORKS_ON, MATCHING),
    "dense-inversion": (DenseStatus,),
    "patch-inversion": (PatchStatus,),
    "embedding-inversion": (LookupStatus,),
    "token-inversion": (TokenStatus,),
    "row-space-inversion": (RowSpaceStatus,),
    "span-inversion": (SpanInversionStatus,),
    "cocktail-party": (ExactStatus, UnmixStatus),
    "disaggregation": (UserStatus,),
    "property-inference": (PropertyStatus,),
    "mixup-decoding": (DecodeStatus,),
    "instahide-decoding": (DecodeStatus,),
    "class-fishing": (FishingStatus, MatchingStatus),
    "imprint": (ImprintStatus,),
    "mkor": (ReadingStatus, WindowStatus),
    "mkor-inconspicuous": (ReadingStatus, WindowStatus),
}

LOCAL = {"local_lr", "local_epochs", "local_batch_size", "local_momentum", "local_optimizer"}
STAGES = ("on_draw", "on_batch", "on_loss", "on_examples", "on_update", "on_aggregate")


def attacks() -> str:
    """One row per attack: what it works on, needs and uses, who knows that, and which statuses it ends with."""
    rows = []
    for name, make in ATTACKS.items():
        attack = make()
        says = ", ".join(f"`{kind.__name__}`" for kind in SAYS[name])
        rows.append(
            (
                f"`{name}`",
                WORKS_ON[name],
                _fields(attack.needs),
                _fields(attack.uses - attack.needs),
                _who(name, attack),
                says,
            )
        )
    return _table(("attack", "works on", "needs to know", "uses if granted", "who knows that", "statuses"), rows)


def _who(name: str, attack: Attack) -> str:
    """The threat models that grant all needs, or else the fewest further grants that are missing."""
    needs = attack.needs | ONE_OF_ITS_WAYS.get(name, frozenset())
    tampers = hasattr(attack, "tamper")
    missing = {threat.name: needs - threat.grants for threat in THREATS.values() if threat.tampers == tampers}
    fewest = min(map(len, missing.values()))
    return ", ".join(
        f"`{who}`" + (f" granting {_fields(fields)}" if fields else "")
        for who, fields in missing.items()
        if len(fields) == fewest
    )


def _fields(names: Iterable[str]) -> str:
    names = set(names)
    if names >= LOCAL:
        names = names - LOCAL | {"local_*"}
    return ", ".join(sorted(names)) or "–"


def statuses() -> str:
    """Every sentence that an attack may end with."""
    kinds = dict.fromkeys(kind for name in ATTACKS for kind in SAYS[name])
    rows = [
        (f"`{kind.__name__}`" if number == 0 else "", status.name, str(status))
        for kind in kinds
        for number, status in enumerate(kind)
    ]
    return _table(("status of", "name", "what it says"), rows)


def defenses() -> str:
    """One row per defense: what it does, where in a round, and its settings."""
    rows = []
    for name, kind in DEFENSES.items():
        stages = [stage for stage in STAGES if getattr(kind, stage) is not getattr(Defense, stage)]
        settings = [
            p.name if p.default is p.empty or p.default is None else f"{p.name}={p.default}"
            for p in inspect.signature(kind).parameters.values()
        ]
        summary = (inspect.getdoc(kind) or "").partition("\n")[0]
        rows.append((f"`{name}`", summary, ", ".join(stages) or "–", f"`{', '.join(settings)}`" if settings else "–"))
    return _table(("defense", "what it does", "stages", "settings"), rows)


def measured(place: str) -> str:
    """What benchmarks/bench.py stored, without what is empty."""
    file = RESULTS / f"bench-{place}.md"
    return file.read_text().strip() if file.exists() else "Not run yet."


def growth(place: str) -> str:
    """What benchmarks/growth.py stored: one row per solver."""
    file = RESULTS / f"growth-{place}.json"
    if not file.exists():
        return "Not run yet."
    rows = []
    for row in json.loads(file.read_text())["rows"]:
        points = ", ".join(f"{size}: {seconds:.2g} s" for size, seconds in row["points"])
        rows.append((row["solver"], row["of"], points, f"{row['slope']:.2f}", f"{row['last slope']:.2f}", row["note"]))
    return _table(("solver", "over", "seconds", "slope", "slope of the last step", ""), rows)


def matching_memory() -> str:
    """What benchmarks/matching_memory.py stored: one row per batch and the memory that it may use."""
    file = RESULTS / "matching_memory.json"
    if not file.exists():
        return "Not run yet."
    rows = []
    for row in json.loads(file.read_text())["rows"]:
        parts = next((told for told in row.get("status", "").split("; ") if "at a time" in told), "the whole batch")
        peak, seconds = (f"{row[key]:.2g}" if key in row else "–" for key in ("peak GiB", "seconds an iteration"))
        rows.append((str(row["batch"]), f"{row['allowed GiB']:g}", row.get("failed", parts), peak, seconds))
    return _table(("batch", "GiB allowed", "worked on", "GiB at most", "seconds an iteration"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "rooms": rooms.table,
    "attacks": attacks,
    "attack-settings": lambda: commands.names("attacks", without=("needs", "uses")),
    "defenses": defenses,
    "threats": lambda: commands.names("threats"),
    "models": lambda: commands.names("models"),
    "data": lambda: commands.names("data"),
    "metrics": lambda: commands.names("metrics"),
    "recipes": lambda: commands.names("recipes"),
    "commands": commands.commands,
    "plan": commands.plan,
    "protocol-findings": findings.protocol,
    "model-findings": findings.models,
    "statuses": statuses,
    "bench-cpu": lambda: measured("cpu"),
    "bench-gpu": lambda: measured("gpu"),
    "growth-cpu": lambda: growth("cpu"),
    "growth-gpu": lambda: growth("gpu"),
    "memory-gpu": matching_memory,
}


def filled(page: str) -> str:
    """The page with every table between its two marks made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n\n{make()}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    for written in PAGES:
        written.write_text(filled(written.read_text()))
