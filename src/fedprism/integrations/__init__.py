"""Attached to federated-learning software: `fp.record` records, and `integrations.flower` has mods for clients."""

from fedprism.integrations.findings import load_findings
from fedprism.integrations.leakage import LeakageLimit, Watch

__all__ = ["LeakageLimit", "Watch", "load_findings"]
