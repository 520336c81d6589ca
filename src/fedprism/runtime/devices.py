"""Where tensors live: a GPU when there is one, unless the user says otherwise."""

from __future__ import annotations

import torch

from fedprism.errors import BadInput, out_of_memory


def pick(device: str | torch.device | None = None) -> torch.device:
    """The named device, or the best one there is; a device that this machine does not have is a BadInput."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if out_of_memory(error):
            raise  # it is there, and full
        reason = str(error).splitlines()[0].rstrip(".")
        raise BadInput(
            f"this machine has no device '{device}' ({reason}). Leave it out to use the best there is."
        ) from error
    return chosen
