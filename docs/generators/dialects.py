"""The table of dialects, from the classes."""

from __future__ import annotations

import inspect

from diptych.shared.dialects.parts.choose import dialects
from docs.generators.tables import cell, table, wrapping


def dialect_table() -> str:
    """Every dialect that reads calls, in the order in which templates are tried."""
    rows = []
    for module, cls in dialects().items():
        if module == "plain":
            continue
        about = (inspect.getdoc(inspect.getmodule(cls)) or "").partition("\n")[0].rstrip(".")
        names = ", ".join(f"`{name}`" for name in cls.tool_parsers)
        markers = cls.reasoning[:2] if cls.reasoning is not None else ()
        shown = " ".join(f"`{marker}`" for marker in markers) or "none"
        rows.append([cell(about), names, shown, f"`shared/dialects/{module}.py`"])
    return wrapping(table(["Family", "`--tool-call-parser`", "Reasoning", "File"], rows))
