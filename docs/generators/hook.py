"""mkdocs hook: the parts of reference pages that are generated from the code.

A page has a marker where the text goes. Lines inside the marker are notes by name, which the generator puts
beside the facts from the code:

    <!-- generate: flags Memory
    page_size: Larger pages need fewer entries in page tables and share less.
    -->

An unknown generator, argument or name raises `ValueError`, which ends the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # mkdocs loads this file by its path

from docs.generators import commands, components, http, measured, mechanisms, tables, works

GENERATORS: dict[str, Callable[..., str]] = {
    "component": components.component,
    "components": components.overview,
    "contract": components.contract,
    "contract-versions": components.contract_versions,
    "shared-types": components.shared_types,
    "card": tables.card,
    "flags": tables.flags,
    "tolerances": tables.tolerances,
    "near-ties": tables.near_ties,
    "accuracy-limits": tables.accuracy_limits,
    "server-checks": tables.server_checks,
    "server-results": tables.server_results,
    "server-faults": tables.server_faults,
    "cheats": tables.cheats,
    "honest-kernels": tables.honest_kernels,
    "families": tables.families,
    "calculator": tables.calculator,
    "dialects": tables.dialect_table,
    "draft-shapes": tables.draft_shapes,
    "labs": commands.labs_table,
    "works-components": works.components,
    "works-tests": works.tests,
    "gpu-cards": works.cards,
    "gpu-runs": works.gpu_runs,
    "measured": measured.measured,
    "mechanisms": mechanisms.mechanisms,
    "recording": measured.recording,
    "command": commands.command,
    "sampling-options": commands.sampling_options,
    "endpoints": http.endpoints,
    "body": http.body,
    "fields": http.fields,
    "clients": tables.clients,
    "public-fields": http.public_fields,
}
"""Name in a marker -> function of the words behind it and of the notes, if it has any."""

_MARKER = re.compile(r"^<!-- generate: ([\w-]+)([^\n]*?)(?:\n(.*?))?-->$", re.MULTILINE | re.DOTALL)


def expand(markdown: str) -> str:
    """A page with each marker replaced by its text."""
    return _MARKER.sub(_generate, markdown)


def _generate(match: re.Match[str]) -> str:
    name, words, body = match.group(1), match.group(2).split(), match.group(3)
    if name not in GENERATORS:
        raise ValueError(f"no generator {name!r}; there are {', '.join(GENERATORS)}")
    if body is None:
        return GENERATORS[name](*words)
    return GENERATORS[name](*words, notes=tables.notes_of(body))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page, before Markdown."""
    return expand(markdown)
