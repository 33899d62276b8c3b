"""Remake the pictures of the pages: python -m docs.figures [NAME ...]. The same tree gives the same files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
FIGURES = {
    "batching": "batching.make",
    "page-pool": "page_pool.make",
    "radix-tree": "radix_tree.make",
    "online-softmax": "online_softmax.make",
    "sampling": "sampling.make",
    "overlap": "timelines.overlap",
    "chunked-prefill": "timelines.chunked_prefill",
    "draft-tree": "draft_tree.make",
    "expert-load": "expert_load.make",
    "rounding": "rounding.make",
    "streaming": "streaming.make",
    "roofline": "roofline.make",
    "engines": "charts.engines",
}
"""Name of the .html file, which pages include -> the function of this folder that returns its text."""

FILES = {"five-requests.json": "five_requests.make", "batching.svg": "batching.make_file"}
"""The same for the recorded run, and for a file that README.md shows."""


def remake(file: str) -> str:
    """file: NAME.html of a figure, or one of FILES."""
    where = FILES[file] if file in FILES else FIGURES[file.removesuffix(".html")]
    module, _, function = where.partition(".")
    text: str = getattr(importlib.import_module(f"docs.figures.{module}"), function)()
    return text


def main(names: Sequence[str]) -> None:
    unknown = set(names) - set(FIGURES)
    if unknown:
        raise ValueError(f"no figure is named {sorted(unknown)}; there are {', '.join(FIGURES)}")
    for file in [*(() if names else FILES), *(f"{name}.html" for name in names or FIGURES)]:
        path = FOLDER / file
        text = remake(file)
        state = "unchanged" if path.exists() and path.read_text(encoding="utf-8") == text else "written"
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parents[1])}: {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
