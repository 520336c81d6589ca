"""Captures on disk, `fedprism-capture/1`: a folder with capture.json beside safetensors files, untrusted until read."""

from fedprism.captures.reading import load
from fedprism.captures.writing import save

__all__ = ["load", "save"]
