"""A Flower app fine-tunes a small language model by LoRA; what its server saw gives the clients' notes back."""

import copy
import os
import tempfile

import torch
from torch import nn

import fedprism as fp

try:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")  # this example tells nobody that it runs
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp, strategy
    from flwr.simulation import run_simulation
except ImportError:
    raise SystemExit(print('this example needs Flower: pip install "fedprism[flower]"')) from None

NOTES = ["please call me at 0151", "the test results are back", "mail anna@example.org or call me"]
WORDS = ["<end>", *dict.fromkeys(" ".join([*NOTES, "keep this quiet"]).split())]


class Language(nn.Module):
    def __init__(self, width=64, rank=16):
        super().__init__()
        self.table, self.place, self.head = nn.Embedding(99, width), nn.Embedding(9, width), nn.Linear(width, 99)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.requires_grad_(False)  # all but the adapters below
        sizes = ((width, rank), (rank, width))
        self.first, self.second = (nn.ModuleList(nn.Linear(*size, bias=False) for _ in range(3)) for size in sizes)

    def forward(self, tokens):
        adapted = lambda number, layer, x: layer(x) + self.second[number](self.first[number](x))  # noqa: E731
        x = self.table(tokens) + self.place(torch.arange(tokens.shape[1]))
        q, v = adapted(0, self.q, x), adapted(1, self.v, x)
        x = x + nn.functional.scaled_dot_product_attention(q, self.k(x), v, is_causal=True)
        return self.head(torch.tanh(adapted(2, self.out, x)))


def train(message: Message, context) -> Message:
    (local := copy.deepcopy(model)).load_state_dict(message.content["arrays"].to_torch_state_dict())
    note = notes[context.node_config["partition-id"]]
    nn.functional.cross_entropy(local(note[None, :-1])[0], note[1:]).backward()
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    answer = {"arrays": ArrayRecord(local.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(answer), reply_to=message)


torch.manual_seed(0)
notes = [torch.tensor([WORDS.index(word) for word in [*note.split(), "<end>"]]) for note in NOTES]
optimizer = torch.optim.SGD((model := Language()).parameters(), lr=0.1)  # as clients step
folder, arrays = tempfile.TemporaryDirectory(), ArrayRecord(model.state_dict())
recorder = fp.record(folder.name, model=model, sample=notes[0][None], loss="cross_entropy", optimizer=optimizer)
(client := ClientApp()).train()(train)
method = recorder.wrap(strategy.FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3))
(server := ServerApp()).main()(lambda grid, _: method.start(grid=grid, initial_arrays=arrays, num_rounds=1))
run_simulation(server, client, num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1}})
for part in fp.attacks.split_updates(fp.captures.load(recorder.folder, model=model)):
    found = fp.run(fp.attacks.token_inversion(), part)
    print([" ".join(WORDS[token] for token in row if token) for row in found.tensor.tolist()], found.status)
