"""Attached to a federation in three lines: `fp.record`, `Recorder.wrap` or `Recorder.round`, `Recorder.report`."""

from fedprism.recorder.attaching import Recorder, record

__all__ = ["Recorder", "record"]
