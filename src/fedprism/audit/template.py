"""A plan to start from, with every key explained: what `fedprism init` writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from fedprism.audit.plan import CODE
from fedprism.errors import BadInput
from fedprism.naming import nearest


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """Lengths that strengths of defenses refer to."""

    update: float
    """Median length of an update; clipping there changes half of them."""
    sample: float
    """Median length of one sample's gradient, which DP-SGD clips."""
    entry: float
    """Root mean square of an update's entries, which noise must compare with."""
    origin: str
    mixes_examples: bool = False
    """Whether batch norm mixes the examples of a batch: DP-SGD refuses such a model."""
    least_batch: int = 1
    """The smallest batch that the model trains on."""
    epochs: int = 5
    """Passes over the data that train a little, for measuring what a defense costs."""
    bounds: tuple[float, float] | None = None
    """The range of the inputs, if it is not from 0 to 1."""

    @property
    def weak(self) -> float:
        """Noise that is small beside a typical entry."""
        return float(f"{self.entry / 10:.2g}")


USUAL_LOSS = "cross_entropy"
"""What a plan trains with unless the labels call for something else."""
WITH_ACCURACY = (USUAL_LOSS, "binary_cross_entropy", "softmax_mse")
"""Losses under which a share of right answers says what a defense costs."""

USUAL = Strengths(update=1.0, sample=1.0, entry=0.01, origin="usual values, not measured on this model")

_TEMPLATE = """\
# A plan for fedprism: `fedprism audit {file}` runs it, `--dry-run` shows the grid and how long it will take.
# Every key below is explained; a # marks a default. Paths start at this file's folder.

title = "{title}"

[model]
{model}
# weights = "model.safetensors"  # your trained weights: a state_dict; without them every seed draws new weights
# training = true                # whether clients train in train mode (dropout, batch-norm)

[data]
{data}
# Instead: name = "photos" (`fedprism list data`, or the made-up table "patients"), folder = "images" (images, or one
# folder per class), npz = "samples.npz" (arrays inputs and labels), csv = "table.csv" with label =
# "column", factory = "pkg.module:function" (your code, which returns inputs and labels of any shape and type).
# texts = "notes.txt"            # texts, one per line; of a .csv or .jsonl file, those of column = "note"
# tokenizer = "tokenizer.json"   # the language model's; places = 32 is where longer texts are cut
# categorical = ["postcode"]     # columns of a table that are categories though they are numbers
{bounds}
# normalization = [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25]]   # mean and std per channel
# public = 0                     # samples that an attacker holds, where a threat model is granted public_data

# Recorded updates instead of a model and data:
# [captures]
# folders = ["capture-1", "capture-2"]
# truths = ["truth-1", "truth-2"]  # ground truth, if it is known: adds scores
# most_updates = 12              # updates of a capture that are attacked one by one: those that may leak most
# knowledge = {{ input_shape = [3, 32, 32], loss = "cross_entropy" }}   # what captures do not hold; also batch_size,
#                                # bounds, normalization, local_lr, local_epochs, local_batch_size, local_momentum,
#                                # local_optimizer ("sgd", "adam", "adamw", or {{ name = "adamw", weight_decay = 0.1 }})

[federation]
# rounds = 1
# aggregation = "mean"           # or sum, weighted_mean
# participation = 0.5            # probability that a client takes part in a round; default: everyone does
# frozen = false                 # whether the server sends the same model in every round
# window = 10                    # rounds over which devices report how often they took part
# counts = {{ name = "laplace", epsilon = 1 }}   # how exactly they report it
# drift = 1000                   # half of an update is new after so many rounds
# fraction = 1.0                 # the share of its data that a client trains on in a round

[grid]                           # one run per combination and seed
# clients = [1]
batch_sizes = [{strengths.least_batch}, 8]             # samples that a client trains on
# protocols = ["fedsgd"]         # or {{ name = "fedavg", lr = 0.01, epochs = 1, batch_size = 8, optimizer = "adam" }}
{losses}
defenses = [                     # `fedprism list defenses`; several values: one run each; a list: one after the other
  "none",                        # strengths below: {strengths.origin}
  {{ name = "prune", ratio = [0.9, 0.99] }},
  {dp_sgd}
  [{{ name = "clip", norm = {strengths.update} }},
   {{ name = "gaussian-noise", std = [{strengths.weak}, {strengths.entry}] }}],
                                 # clips at the median update; noise of 0.1 and 1 times its typical entry
]
threats = [                      # `fedprism list threats`; default: those that matter for this plan
  "honest_but_curious",
  {{ name = "honest_but_curious", granting = ["defense"] }},   # withholding = ["batch_size"] takes away
]
{attacks}
seeds = [0, 1]                   # each seed draws data, weights and noise anew; more seeds: narrower intervals

[scores]
# metrics = ["psnr", "ssim", "mse", "avd"]   # `fedprism list metrics`
# tolerance = 0.05               # of its range: how far a number of a table may be off
# ceiling = true                 # bound what any attacker could recover; nothing counts as protected without it
# pictures = 8                   # samples per run to keep with their reconstructions; default for captures: 0

{utility}

[limits]
# seconds = 600                  # after which a run is given up; not with --ray
"""

_UTILITY = """\
[utility]                        # what defenses cost: accuracy, time per step, epsilon; not measured without this part
epochs = EPOCHS                  # passes over the data; by default 10
# batch_size = 64
# clients = 1
lr = "search"                    # the best of a few for each defense and loss; or a number, by default 0.05
# tolerated_points = 10.0        # points of accuracy that a recommended defense may cost
seeds = [0, 1]                   # one training each; by default 0, 1 and 2
# test = 0.25                    # the share of the data held back
# delta = 1e-5                   # at which epsilon is stated
# timed_steps = 21               # steps timed with and without the defense; 0 for none"""

_CHOSEN = """\
# attacks = ["dense-inversion", {{ name = "idlg", iterations = 150 }}]   # `fedprism list attacks`
#                                # default: those that may work on this model""".replace("{{", "{").replace("}}", "}")


def text(
    model: str | None = None, data: str | None = None, strengths: Strengths = USUAL, loss: str = USUAL_LOSS
) -> str:
    """The plan for a model (table name or pkg.module:factory) and data (table name or path)."""
    return _TEMPLATE.format(
        file="plan.toml",
        title="What do this model's updates leak?",
        model=_model(model),
        data=_data(data, model),
        attacks=_CHOSEN,
        strengths=strengths,
        bounds=_bounds(strengths.bounds),
        losses=_losses(loss),
        dp_sgd=_dp_sgd(strengths),
        utility=_utility(strengths, loss),
    )


def _losses(loss: str) -> str:
    setting = f"losses = [{json.dumps(loss)}]"
    said = 'or mse, binary_cross_entropy, l1, huber, or your own "pkg.module:function"'
    return f"{f'# {setting}' if loss == USUAL_LOSS else setting:<32} # {said}"


def _bounds(bounds: tuple[float, float] | None) -> str:
    setting = "# bounds = [0.0, 1.0]" if bounds is None else f"bounds = {list(bounds)}"
    return f"{setting:<32} # the range of the inputs of an npz file or a factory"


def _dp_sgd(strengths: Strengths) -> str:
    if strengths.mixes_examples:
        return "# dp-sgd is left out: it refuses batch norm; put GroupNorm in its place"
    return f'{{ name = "dp-sgd", noise = 1.0, clip = {strengths.sample} }},   # clips at the median sample\'s gradient'


def _utility(strengths: Strengths, loss: str) -> str:
    part = _UTILITY.replace("EPOCHS", f"{strengths.epochs:<6}")
    return part if loss in WITH_ACCURACY else _commented(part)


def _commented(part: str) -> str:
    """The part with every line as a comment; these are left as they are."""
    lines = (line if line.startswith("#") else f"# {line}" for line in part.splitlines())
    return "\n".join(["# Accuracy is counted under cross_entropy, softmax_mse and binary_cross_entropy:", *lines])


def _model(model: str | None) -> str:
    if model is None:
        return 'name = "fc2"                     # `fedprism list models`\nkwargs = { hidden = 64 }'
    if ":" in model:
        return f"factory = {json.dumps(model)}   # your function; auditing imports it"
    from fedprism.models import MODELS

    if model not in MODELS:
        raise BadInput(
            f"no model is called '{model}'; {nearest(model, MODELS)} For a model of your own write pkg.module:factory."
        )
    settings = "# kwargs = {}                    # its settings; input_shape and classes come from the data"
    return f"name = {json.dumps(model)}\n{settings}"


def _data(data: str | None, model: str | None) -> str:
    size = 224 if model == "vgg16" else 32 if model else 16
    if data is None and (model is None or ":" not in model):
        return f'name = "photos"                  # embedded: needs no download\noptions = {{ size = {size} }}'
    if data is None:
        return f'folder = "images"                # your images\noptions = {{ size = {size} }}'
    if re.fullmatch(CODE, data):
        return f"factory = {json.dumps(data)}   # your function; auditing imports it"
    suffix = Path(data).suffix.lower()
    if suffix == ".csv":
        return f'csv = {json.dumps(data)}\nlabel = "label"                   # the column that is learned'
    if suffix == ".npz":
        return f"npz = {json.dumps(data)}"
    from fedprism.data import DATASETS
    from fedprism.data.tabular import TABLES

    key = "name" if data in DATASETS or data in TABLES else "folder"
    options = "" if data in TABLES else f"\noptions = {{ size = {size} }}"
    return f"{key} = {json.dumps(data)}{options}"
