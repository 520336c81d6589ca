"""What notebooks show, as tests read it."""

from __future__ import annotations

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
from PIL import Image

MOST_BYTES = 1_000_000
"""Of one value's page: a notebook with ten of them can still be mailed."""


class Reader(HTMLParser):
    """The tags of a page, and every attribute that could run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("img", "br"):
            self.open.append(tag)
        self.handlers += [name for name, value in attrs if name.startswith("on") or "script:" in (value or "")]
        if tag == "img":
            assert dict(attrs)["alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(page: str) -> Reader:
    """A page that runs nothing, is closed properly and is not too large."""
    reader = Reader(page)
    assert not {"script", "iframe", "object", "style", "link"} & set(reader.tags)
    assert not reader.handlers
    assert not reader.open
    assert len(page.encode()) < MOST_BYTES
    return reader


def pictures(page: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]
