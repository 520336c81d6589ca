"""Captures on disk, `fedprism-capture/1`: a folder with capture.json beside safetensors files.

`save` writes an observation as a capture, `load` reads and checks one. A capture is hostile until checked: nothing in
it is unpickled, imported or executed.
"""

from fedprism.captures.reading import load
from fedprism.captures.writing import save

__all__ = ["load", "save"]
