"""A report's page taken apart, and an audit whose every word is hostile."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import torch

from fedprism.audit import Audit
from planted_audits import NAMED, attack, figure, plant

HOSTILE = [
    "<script>window.hurt=1</script>",
    "</script><script>window.hurt=1</script>",
    "\"'><img src=x onerror=window.hurt=1>",
    "{{ 7*7 }}{% raw %}",
    "<!--<script>",
    "javascript:window.hurt=1",
    "\u202ethgir\u2066\x00\x1b[31m",
]


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._inside == "script" else self.words).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def hostile_audit(folder: Path, pictures: torch.Tensor | None = None) -> Audit:
    entries = [
        attack(psnr=40.0 - k, attack=word, threat=word, defense=word, settings=word, protocol=word, loss=word)
        for k, word in enumerate(HOSTILE)
    ]
    for word, entry in zip(HOSTILE, entries, strict=True):
        entry |= {"reasons": [word], "statuses": [word], "knowledge_used": [word], "by_column": {word: 0.5}}
        entry["metrics"] |= {word: figure(1.0)}
    skipped = [{"what": word, "why": word} for word in HOSTILE]
    plan = {**NAMED, "title": HOSTILE[1], "model": {"name": HOSTILE[0]}, "scores": {"metrics": ["psnr", *HOSTILE]}}
    return plant(folder, entries, plan=plan, skipped=skipped, pictures=pictures)
