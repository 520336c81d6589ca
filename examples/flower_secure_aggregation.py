"""Records SecAgg+ rounds of a model that the Flower server does not change, takes the sums apart and inverts them."""

import os
import tempfile

import torch

import fedprism as fp

try:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # this example tells nobody that it runs
    from flwr.client import ClientApp, NumPyClient, mod
    from flwr.common import ndarrays_to_parameters
    from flwr.server import LegacyContext, ServerApp, ServerConfig, strategy, workflow
    from flwr.simulation import run_simulation

    from fedprism.integrations import load_findings
except (ImportError, fp.FedprismError):
    raise SystemExit(print('this example needs Flower: pip install "fedprism[flower]"')) from None

photos = fp.data.load("photos", size=16)
model = fp.models.build("fc2", input_shape=(3, 16, 16), hidden=32, classes=photos.classes, seed=0)


class Client(NumPyClient):
    def __init__(self, number):
        self.own = photos.batch([number])  # one photograph, on which it takes one step

    def fit(self, parameters, config):
        for parameter, sent in zip(model.parameters(), parameters, strict=True):
            parameter.data, parameter.grad = torch.tensor(sent), None
        torch.nn.functional.cross_entropy(model(self.own.inputs), self.own.labels).backward()
        return [(p.data - p.grad).numpy() for p in model.parameters()], 1, {"train_loss": 0.0}


class Frozen(strategy.FedAvg):
    def configure_fit(self, server_round, *rest, **named):
        asked = sorted(super().configure_fit(server_round, *rest, **named), key=lambda pair: pair[0].node_id)
        return [pair for number, pair in enumerate(asked) if number != server_round % 4]  # three of the four clients

    def aggregate_fit(self, server_round, results, failures):
        return None, {}  # the model stays as it is


client = ClientApp(lambda node: Client(node.node_config["partition-id"]).to_client(), mods=[mod.secaggplus_mod])
first = ndarrays_to_parameters([tensor.numpy() for tensor in model.state_dict().values()])
frozen = Frozen(min_fit_clients=4, min_available_clients=4, fraction_evaluate=0.0, initial_parameters=first)
with tempfile.TemporaryDirectory() as place:
    recorder = fp.record(f"{place}/run", model=model, sample=photos.batch([0]).inputs, loss="cross_entropy")

    def main(grid, context):
        grid = recorder.wrap(grid)  # the line to add
        rounds = LegacyContext(context, ServerConfig(num_rounds=4), frozen)
        workflow.DefaultWorkflow(workflow.SecAggPlusWorkflow(3, 2, max_weight=1.0))(grid, rounds)

    (server := ServerApp()).main()(main)
    run_simulation(server, client, num_supernodes=4, backend_config={"client_resources": {"num_cpus": 1}})
    split = fp.then(fp.attacks.disaggregation(), fp.attacks.dense_inversion())
    answer = fp.run(split, fp.captures.load(recorder.folder))
    print(*(finding.sentence for finding in load_findings(f"{place}/run")), answer.status, sep="\n")
print("PSNR in dB:", [int(fp.metrics.psnr(answer.inputs, photos.batch([n] * 4).inputs).max()) for n in range(4)])
