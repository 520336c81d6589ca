"""A federation on Flower's simulation engine that is recorded three times; `python flower_simulated.py FOLDER`.

One engine for all three, since starting it takes most of the time: federated averaging, the same with central
differential privacy, and SecAgg+ with a model that the server does not change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

import fedprism as fp
from fedprism.integrations import flower
from flower_runs import RATE, Frozen, fit_app, message_app, run_secure, small_model, start

CLIENTS = 3


class AnyClient(ClientApp):
    """A client of the message API that also answers SecAgg+, and keeps what it trains on otherwise."""

    def __init__(self, kept: flower.TruthMod) -> None:
        super().__init__()
        self.kept = kept

    def __call__(self, message: Message, context: Context) -> Message:
        secure = "secaggplus_configs" in message.content.config_records
        return (fit_app() if secure else message_app([self.kept], kept=self.kept))(message, context)


class Cohorts(Frozen):
    """Pairs of clients, in an order of the server's own."""

    def __init__(self) -> None:
        super().__init__([[0, 1], [1, 2], [0, 2]])


def simulate(folder: Path) -> None:
    server = ServerApp()
    known = fp.Knowledge(input_shape=(1, 8, 8), loss="cross_entropy", local_lr=RATE, local_epochs=1)

    def averaging() -> FedAvg:
        return FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def recorded(what: Any, name: str) -> Any:
            return fp.record(folder / name, model=small_model(), knowledge=known, strict=True).wrap(what)

        start(recorded(averaging(), "plain"), grid, 2)
        private = DifferentialPrivacyServerSideFixedClipping(averaging(), 0.5, 0.01, 10)
        start(recorded(private, "private"), grid, 1)
        below = recorded(grid, "secure")
        run_secure(below, Cohorts(), context, 3, num_shares=1.0, reconstruction_threshold=1.0)

    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1, "include_dashboard": False}}
    run_simulation(
        server, AnyClient(flower.TruthMod(folder / "truth")), num_supernodes=CLIENTS, backend_config=resources
    )


if __name__ == "__main__":
    simulate(Path(sys.argv[1]))
