"""Records a Flower run and attacks what the server saw, then the same run with a defense on the clients."""

import copy
import os
import tempfile
from pathlib import Path

import torch

import fedprism as fp

try:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # this example tells nobody that it runs
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from fedprism.integrations import Watch, flower, load_findings
except (ImportError, fp.FedprismError):
    raise SystemExit(print('this example needs Flower: pip install "fedprism[flower]"')) from None

photos = fp.data.load("photos", size=16)
model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=64, classes=photos.classes, seed=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # as clients step
batches = [photos.draw(2, seed=seed, unique_labels=True) for seed in range(3)]


def train(message: Message, context) -> Message:
    """The client of an ordinary Flower app: one step of gradient descent on its own photographs."""
    local = copy.deepcopy(model)
    local.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batch = batches[context.node_config["partition-id"]]
    torch.nn.functional.cross_entropy(local(batch.inputs), batch.labels).backward()
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    metrics = MetricRecord({"num-examples": len(batch)})
    return Message(RecordDict({"arrays": ArrayRecord(local.state_dict()), "metrics": metrics}), reply_to=message)


def recorded(client: ClientApp, capture: Path) -> None:
    recorder = fp.record(
        capture, model=model, sample=batches[0].inputs[:1], loss="cross_entropy", optimizer=optimizer, watch=Watch()
    )

    def main(grid, context):
        strategy = recorder.wrap(FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3))
        strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1)

    (server := ServerApp()).main()(main)
    run_simulation(server, client, num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
    found = fp.run(fp.attacks.dense_inversion(), fp.captures.load(recorder.folder))
    print(f"{capture.name}: {found.status}", *(f.sentence for f in load_findings(capture)), sep="\n  ")


plain, defended = ClientApp(), ClientApp()
plain.train()(train)
defense = fp.chain(fp.defenses.Clip(1.0), fp.defenses.GaussianNoise(0.01))
defended.train(mods=[flower.InspectionMod(), flower.DefenseMod(defense)])(train)
with tempfile.TemporaryDirectory() as folder:
    recorded(plain, Path(folder) / "plain")
    recorded(defended, Path(folder) / "defended")
