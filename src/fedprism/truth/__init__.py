"""What really happened: the samples behind an observation, kept in a folder that no attack reaches."""

from fedprism.truth.folder import load_truth
from fedprism.truth.kept import is_kept, keep_truth
from fedprism.truth.whole import Truth, save_truth

__all__ = ["Truth", "is_kept", "keep_truth", "load_truth", "save_truth"]
