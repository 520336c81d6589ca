"""The server of an ordinary Flower app, and two lines that record what it sees."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedprism as fp
from fedprism.integrations import Watch
from recorded.task import SHAPE, network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings, model = context.run_config, network()
    folder = Path(str(settings["captures"]) or Path.home() / "fedprism-captures") / f"run-{context.run_id}"
    optimizer = torch.optim.SGD(model.parameters(), lr=float(settings["rate"]))  # as clients step
    recorder = fp.record(
        folder, model=model, sample=torch.zeros(1, *SHAPE), loss="cross_entropy", optimizer=optimizer, watch=Watch()
    )
    strategy = recorder.wrap(FedAvg(fraction_evaluate=0.0))
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=int(settings["rounds"]))
    print(f"Recorded. Next: fedprism attack {recorder.folder} --attack dense-inversion")
