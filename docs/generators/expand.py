"""The parts of reference pages that are generated from the code.

A page has a marker where the text goes. Lines inside the marker are notes by name, which the generator puts
beside the facts from the code:

    <!-- generate: flags Memory
    page_size: Larger pages need fewer entries in page tables and share less.
    -->

An unknown generator, argument or name raises `ValueError`, which ends the build.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from docs.generators import commands, components, http, measured, tables, works

MODULES = (commands, components, http, measured, tables, works)
"""Where the functions are that markers name, with hyphens for underscores. They take the words behind the
name, and the notes if there are any."""

_MARKER = re.compile(r"^<!-- generate: ([\w-]+)([^\n]*?)(?:\n(.*?))?-->$", re.MULTILINE | re.DOTALL)


def expand(markdown: str) -> str:
    """A page with each marker replaced by its text."""
    return _MARKER.sub(lambda match: _generated(*match.groups()), markdown)


@cache
def _generated(name: str, words: str, body: str | None) -> str:
    attribute = name.replace("-", "_")
    found: Any = next((vars(module)[attribute] for module in MODULES if attribute in vars(module)), None)
    if not callable(found):
        raise ValueError(f"no generator {name!r}")
    return str(found(*words.split(), **({} if body is None else {"notes": tables.notes_of(body)})))
