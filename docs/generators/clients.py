"""The page *Works with*: public clients, and their recorded runs."""

from __future__ import annotations

import json

from docs.generators.client_scripts import CLIENTS
from docs.generators.record_clients import RECORD
from docs.generators.tables import cell, table


def clients() -> str:
    """Every client: its version, what its script does, and the result of the recorded run."""
    found = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    rows = []
    for client in CLIENTS:
        facts = found.get(client.name, {"version": "", "date": "", "result": "not run yet"})
        package = f"`{client.packages[0]}` {facts['version']}"
        rows.append([client.name, package, cell(client.does), cell(facts["result"]), facts["date"]])
    return table(["Client", "Package", "What it does", "Result", "Date"], rows)
