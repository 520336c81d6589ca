"""A client looks at the model it was sent before it trains: an honest one passes, three malicious servers' do not."""

import torch

import fedprism as fp
from fedprism.inspection import Suspicious, inspect

photos = fp.data.load("photos", size=32)
own = photos.draw(12, seed=0)
model = fp.models.build("lenet5", input_shape=(3, 32, 32), classes=photos.classes, seed=0)
honest = {name: tensor.detach() for name, tensor in model.named_parameters()}


def train_if_clean(sent: dict[str, torch.Tensor]) -> str:
    """What a client's code does with the parameters of a round; `honest` are those of the round before."""
    try:
        inspect(sent, reference=honest, model=model, batch=own).require_clean()
    except Suspicious as reason:
        return f"refused: {reason}"
    return "trains"


print(f"an honest server: {train_if_clean(honest)}")
servers = (fp.attacks.mkor(), fp.attacks.mkor_inconspicuous(), fp.attacks.ClassFishing(target=3))
for server in servers:
    sent, _ = server.tamper(model, honest, torch.Generator().manual_seed(0))
    print(f"{server.name}: {train_if_clean(dict(sent))}")

# The same from the command line: fedprism inspect MODEL.safetensors --reference BEFORE.safetensors
sent, _ = fp.attacks.mkor_inconspicuous().tamper(model, honest, torch.Generator().manual_seed(0))
for finding in inspect(sent).serious:
    print(f"  {finding.tensor}: {finding.sentence}")
