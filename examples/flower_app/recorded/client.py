"""The client of an ordinary Flower app. The mods are the only lines that know of fedprism."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedprism as fp
from fedprism.integrations import flower
from recorded.task import network, photographs

app = ClientApp()
kept = flower.TruthMod(Path.home() / "fedprism-truth")
defense = flower.DefenseMod(fp.chain(fp.defenses.Clip(1.0), fp.defenses.GaussianNoise(0.01)))


def defended_if_asked(message: Message, context: Context, call_next) -> Message:
    return defense(message, context, call_next) if context.run_config["defended"] else call_next(message, context)


@app.train(mods=[flower.InspectionMod(), kept, defended_if_asked])
def train(message: Message, context: Context) -> Message:
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    batch = photographs(int(context.node_config["partition-id"]))
    if context.run_config["scored"]:
        kept.keep(batch.inputs, batch.labels)
    torch.nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
    torch.optim.SGD(model.parameters(), lr=float(context.run_config["rate"])).step()
    metrics = MetricRecord({"num-examples": len(batch)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
