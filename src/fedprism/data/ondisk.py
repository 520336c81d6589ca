"""Data sets that lie in a folder of the user's: as single files, or as torchvision's downloads leave them."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fedprism.checks import choice
from fedprism.data.imageset import ImageSet
from fedprism.data.source import Source, assemble
from fedprism.errors import BadInput

ENVIRONMENT = "FEDPRISM_DATA"
"""Environment variable that names the data folder."""

Reader: TypeAlias = Callable[[Path, str], Source | None]


@dataclass(frozen=True)
class OnDisk:
    """Where a data set may be in the data folder, best first, and who reads it; the first split is the default."""

    name: str
    places: tuple[tuple[str, Reader], ...]
    class_names: tuple[str, ...] = ()
    splits: tuple[str, ...] = ("test", "train")
    size: int | None = None

    def __call__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        split: str | None = None,
        size: int | None = None,
        limit: int | None = None,
    ) -> ImageSet:
        """Read one split, at most `limit` images spread over the classes, resized to squares of `size` if given."""
        wanted = self.splits[0] if split is None else choice(split, "split", self.splits)
        source = self._source(_data_folder(self.name, data_dir), wanted)
        if not source.class_names:
            source = dataclasses.replace(source, class_names=self.class_names)
        return assemble(self.name, source, self.size if size is None else size, limit)

    def _source(self, root: Path, split: str) -> Source:
        for pattern, reader in self.places:
            for place in sorted(glob.glob(pattern, root_dir=root)):
                source = reader(root / place, split)
                if source is not None:
                    return source
        patterns = " or ".join(pattern for pattern, _ in self.places)
        raise BadInput(
            f"{root} does not hold the {split} images of {self.name} as {patterns}. Put them there, name "
            f"another split, or another folder with --data-dir (data_dir=...) or {ENVIRONMENT}."
        )


def _data_folder(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder named by the caller or, failing that, by the environment."""
    given = os.environ.get(ENVIRONMENT) if data_dir is None else data_dir
    if not given or not os.path.isdir(given):
        raise BadInput(
            f"{name} needs a data folder: {f'no folder at {given}' if given else 'none is named'}. Name "
            f"one with --data-dir (data_dir=...) or the environment variable {ENVIRONMENT}."
        )
    return Path(given)
