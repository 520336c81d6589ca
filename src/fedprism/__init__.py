"""fedprism shows what a federated-learning update gives away, and what a defense really buys.

    import fedprism as fp

    scenario = fp.Scenario(model=model, clients=[fp.Batch(x, y)], defense=fp.chain(fp.defenses.Prune(0.9)))
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0)
    reconstruction = fp.run(fp.attacks.inverting_gradients(), observation, seed=0)
    print(fp.score(reconstruction, truth))

Names are imported when they are first used, so that `import fedprism` and `fedprism --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedprism import (
        attacks,
        captures,
        client,
        data,
        defenses,
        errors,
        inspection,
        integrations,
        losses,
        metrics,
        models,
        optimizers,
        report,
        runtime,
        solvers,
        threats,
        types,
        utility,
    )
    from fedprism.attacks.reduction import then
    from fedprism.client.update import FedAvg, FedSGD, local_update
    from fedprism.defenses.base import chain
    from fedprism.errors import FedprismError, MissingKnowledge, NotApplicable
    from fedprism.evaluation.ceiling import Ceiling, ceiling
    from fedprism.evaluation.residuals import residual
    from fedprism.evaluation.scoring import Scores, match, score, score_participation, score_updates
    from fedprism.evaluation.showing import show
    from fedprism.evaluation.texts import TextScores, score_texts
    from fedprism.recorder import Recorder, record
    from fedprism.report.auditing import audit
    from fedprism.runner import run
    from fedprism.simulation.federation import simulate
    from fedprism.simulation.scenario import Scenario
    from fedprism.threats import ThreatModel
    from fedprism.truth import Truth, keep_truth, load_truth, save_truth
    from fedprism.types import Batch, Knowledge, Observation, Reconstruction, Record, Round

__version__ = "0.1.0"

_HOME = {
    "attacks.reduction": ("then",),
    "client.update": ("FedAvg", "FedSGD", "local_update"),
    "defenses.base": ("chain",),
    "errors": ("FedprismError", "MissingKnowledge", "NotApplicable"),
    "evaluation.ceiling": ("Ceiling", "ceiling"),
    "evaluation.residuals": ("residual",),
    "evaluation.scoring": ("Scores", "match", "score", "score_participation", "score_updates"),
    "evaluation.showing": ("show",),
    "evaluation.texts": ("TextScores", "score_texts"),
    "recorder": ("Recorder", "record"),
    "runner": ("run",),
    "simulation.federation": ("simulate",),
    "simulation.scenario": ("Scenario",),
    "threats": ("ThreatModel",),
    "truth": ("Truth", "keep_truth", "load_truth", "save_truth"),
    "types": ("Batch", "Knowledge", "Observation", "Reconstruction", "Record", "Round"),
}
"""Where names are defined; all others are modules."""

__all__ = [
    "Batch",
    "Ceiling",
    "FedAvg",
    "FedSGD",
    "FedprismError",
    "Knowledge",
    "MissingKnowledge",
    "NotApplicable",
    "Observation",
    "Reconstruction",
    "Record",
    "Recorder",
    "Round",
    "Scenario",
    "Scores",
    "TextScores",
    "ThreatModel",
    "Truth",
    "attacks",
    "audit",
    "captures",
    "ceiling",
    "chain",
    "client",
    "data",
    "defenses",
    "errors",
    "inspection",
    "integrations",
    "keep_truth",
    "load_truth",
    "local_update",
    "losses",
    "match",
    "metrics",
    "models",
    "optimizers",
    "record",
    "report",
    "residual",
    "run",
    "runtime",
    "save_truth",
    "score",
    "score_participation",
    "score_texts",
    "score_updates",
    "show",
    "simulate",
    "solvers",
    "then",
    "threats",
    "types",
    "utility",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedprism' has no attribute '{name}'")
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        return importlib.import_module(f"fedprism.{name}")
    value = getattr(importlib.import_module(f"fedprism.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
