"""fedprism in a Flower app (flwr >= 1.41): record what the server sees, defend and inspect on the client.

On the server, with a recorder (`fp.record`):

    strategy = recorder.wrap(FedAvg(...))       # message API or older API
    grid = recorder.wrap(grid)                  # below any strategy or workflow: SecAgg+

On the client, mods:

    @app.train(mods=[flower.InspectionMod(), flower.DefenseMod(fp.chain(fp.defenses.Clip(1.0)))])
"""

from fedprism.errors import BadInput

try:
    import flwr
except ImportError as missing:
    raise BadInput('Flower is not installed. Run: pip install "fedprism[flower]"') from missing

from fedprism.integrations.flower.attaching import SOURCE, attached
from fedprism.integrations.flower.mods import DefenseMod, InspectionMod
from fedprism.integrations.flower.truth_mod import TruthMod

__all__ = ["SOURCE", "DefenseMod", "InspectionMod", "TruthMod", "attached"]

del flwr
