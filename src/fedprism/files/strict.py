"""What a file from anywhere must look like: the base of every model that one is read into."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Refuses unknown keys and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
