"""Experiments: a trial is simulated or loaded, attacked and scored, and its outcome is kept."""

from fedprism.experiments.execution import run_trial, run_trials
from fedprism.experiments.outcome import Outcome
from fedprism.experiments.store import ResultStore
from fedprism.experiments.trial import Judgement, Scoring, Setting, Trial, summarised

__all__ = [
    "Judgement",
    "Outcome",
    "ResultStore",
    "Scoring",
    "Setting",
    "Trial",
    "run_trial",
    "run_trials",
    "summarised",
]
