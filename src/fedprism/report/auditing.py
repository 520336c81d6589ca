"""`fp.audit`: an audit of objects that are there already, in one call. It runs as every audit does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from torch import nn

from fedprism.attacks import Attack
from fedprism.audit import Audit, given, lay_out, run_audit
from fedprism.audit.execution import AuditProgress
from fedprism.audit.materials import Samples
from fedprism.client.update import FedSGD, Protocol
from fedprism.defenses import Defense
from fedprism.display import html
from fedprism.evaluation.verdict import Verdict
from fedprism.experiments import Outcome
from fedprism.pixels import Normalization
from fedprism.report import conclude
from fedprism.report.gates import concluded
from fedprism.report.page import render_short
from fedprism.runtime import progress as bars
from fedprism.threats import ThreatModel
from fedprism.types import Batch


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What an audit found. A notebook shows its verdict, its defenses and some samples; the whole is in `path`."""

    audit: Audit
    path: Path
    """The report, a page for a browser; results.json and everything else is beside it."""
    show_images: bool

    @property
    def verdict(self) -> Verdict:
        return concluded(self.audit).verdict

    @property
    def outcomes(self) -> Iterator[Outcome]:
        """What came of every run, one at a time."""
        return iter(self.audit)

    def __repr__(self) -> str:
        return f"Report({self.verdict}: {len(self.audit)} outcomes, {self.path})"

    def _repr_html_(self) -> str:
        path = html.paragraph(f"The whole report: {self.path}")
        return html.lines([Markup(render_short(self.audit, show_images=self.show_images)), path])


def audit(
    model: nn.Module | Callable[[], nn.Module],
    data: Batch | Samples,
    *,
    defenses: Sequence[Defense] = (),
    attacks: Sequence[Attack] | None = None,
    threats: Sequence[ThreatModel] | None = None,
    protocol: Protocol = FedSGD(),  # noqa: B008 (frozen)
    loss: str = "cross_entropy",
    clients: Sequence[int] = (1,),
    batch_sizes: Sequence[int] = (1, 8),
    seeds: Sequence[int] = (0, 1, 2),
    metrics: Sequence[str] = ("psnr", "ssim", "mse", "avd"),
    ceiling: bool = True,
    utility: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
    normalization: Normalization | None = None,
    title: str = "",
    folder: str | Path | None = None,
    show_images: bool = False,
    progress: bool = True,
    device: str | None = None,
) -> Report:
    """Test what updates of a model on these data give away, without a defense and with each of those named.

    A model is used as it is; a function that returns one is called for each seed. Data are a `Batch` of all samples, in
    pixels within `bounds`, or a data set of `fp.data.load`. Attacks and threats are chosen by what applies, unless they
    are named. `utility` measures what each defense costs. Results and a report are written to `folder`, a new temporary
    one if none is named; the report shows private samples only with `show_images`.
    """
    grid = given.grid_of(
        defenses=defenses,
        attacks=attacks,
        threats=threats,
        protocol=protocol,
        losses=(loss,),
        clients=clients,
        batch_sizes=batch_sizes,
        seeds=seeds,
    )
    setup = given.setup_of(
        model,
        data,
        grid,
        bounds=bounds,
        normalization=normalization,
        scores={"metrics": metrics, "ceiling": ceiling},
        utility=utility,
        title=title,
    )
    setup.require_metrics()
    cells = lay_out(setup)
    place = Path(folder if folder is not None else tempfile.mkdtemp(prefix="fedprism-audit-"))
    with bars.showing("audit") if progress else nullcontext():
        bar = bars.listener()

        def listen(state: AuditProgress) -> None:
            bar(state.done, state.total)

        with bars.listening(lambda done, total: None):  # the bar counts runs, not the steps of each
            finished = run_audit(setup, place, device=device, listen=listen, grid=cells)
    return Report(audit=finished, path=conclude(setup, place, show_images=show_images), show_images=show_images)
