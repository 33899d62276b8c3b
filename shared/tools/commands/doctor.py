"""`diptych doctor`: a table of what this machine can run and why not."""

from __future__ import annotations

import json
from typing import Annotated

import typer

MIN_WIDTH = 72
"""Of the table: on a narrower terminal its lines wrap, because the last column would have no width."""

MARKS = {"ok": "[green]yes[/]", "absent": "[yellow]no[/]", "problem": "[red]problem[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of the table.")] = False,
) -> None:
    """Show what this machine can run, what it would choose, and what to install for the rest."""
    from diptych.shared.tools.commands.doctor_checks import as_json as to_json
    from diptych.shared.tools.commands.doctor_checks import examine

    checks = examine()
    if as_json:
        print(json.dumps(to_json(checks)))
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    table.add_column("")
    table.add_column("", no_wrap=True)
    table.add_column("usable", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    area = ""
    for check in checks:
        if area and check.area != area:
            table.add_section()
        found = escape(check.found) + (f"\n[dim]{escape(check.remedy)}[/]" if check.remedy else "")
        table.add_row(check.area if check.area != area else "", check.name, MARKS[check.state], found)
        area = check.area
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)
