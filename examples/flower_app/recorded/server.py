"""The server of an ordinary Flower app, and one line that records what it sees."""

from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedprism as fp
from fedprism.integrations import flower
from recorded.task import SHAPE, network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, model = context.run_config, network()
    folder = Path(str(settings["captures"]) or Path.home() / "fedprism-captures") / f"run-{context.run_id}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    known = fp.Knowledge(input_shape=SHAPE, loss="cross_entropy", local_lr=float(settings["rate"]), local_epochs=1)
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy = flower.RecordingStrategy(strategy, folder, model=model, knowledge=known, watch=flower.Watch())
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=int(settings["rounds"]))
    print(f"Recorded. Next: fedprism attack {folder} --attack dense-inversion")
