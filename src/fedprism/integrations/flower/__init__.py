"""fedprism in a Flower app (flwr >= 1.41): record what the server sees, defend and inspect on the client.

On the server, one line:

    strategy = flower.RecordingStrategy(FedAvg(...), "captures/run-1", model=model)
    grid = flower.RecordingGrid(grid, "captures/run-1", model=model)       # below any strategy or workflow: SecAgg+

On the client, mods:

    @app.train(mods=[flower.InspectionMod(), flower.DefenseMod(fp.chain(fp.defenses.Clip(1.0)))])
"""

from fedprism.errors import BadInput

try:
    import flwr
except ImportError as missing:
    raise BadInput(
        'expected the package flwr for fedprism.integrations.flower, found none; pip install "fedprism[flower]".'
    ) from missing

from fedprism.integrations.findings import load_findings
from fedprism.integrations.flower.mods import DefenseMod, InspectionMod
from fedprism.integrations.flower.recorders import RecordingGrid, RecordingStrategy
from fedprism.integrations.leakage import LeakageLimit, Watch

__all__ = [
    "DefenseMod",
    "InspectionMod",
    "LeakageLimit",
    "RecordingGrid",
    "RecordingStrategy",
    "Watch",
    "load_findings",
]

del flwr
