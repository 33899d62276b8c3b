"""Remake the pictures of the pages: python -m docs.figures [NAME ...]. The same tree gives the same files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("page_pool", "radix_tree")
"""Modules of this folder; `make()` of each returns the text of NAME.html, which pages include."""


def remake(name: str) -> str:
    text: str = importlib.import_module(f"docs.figures.{name}").make()
    return text


def main(names: Sequence[str]) -> None:
    unknown = set(names) - set(NAMES)
    if unknown:
        raise ValueError(f"no figure is named {sorted(unknown)}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        path = FOLDER / f"{name}.html"
        text = remake(name)
        state = "unchanged" if path.exists() and path.read_text(encoding="utf-8") == text else "written"
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(FOLDER.parents[1])}: {state}")


if __name__ == "__main__":
    main(sys.argv[1:])
