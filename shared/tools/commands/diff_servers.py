"""`diptych diff` between two servers, or a server and a panel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.diff.server_diff import ServerDiff

from diptych.shared.tools.commands.diff_precision import print_choices
from diptych.shared.tools.commands.diff_prompts import encode_prompts


def is_url(side: str | None) -> bool:
    return side is not None and side.startswith(("http://", "https://"))


def diff_servers(
    sides: tuple[str, str],
    flags: tuple[dict[str, Any], dict[str, Any]],
    labels: tuple[str, str],
    prompt: list[str] | None,
    raw: bool,
    max_tokens: int,
    api_key: str | None,
    out: Path | None,
) -> int:
    """Compare, print, and write the page into `out`. `flags`: engine flags of a side that is a panel. Returns
    the exit status."""
    from diptych.shared.engine.llm import LLM
    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.text.tokenizer import Tokenizer
    from diptych.shared.tools.conformance.diff.server_diff import (
        PanelSide,
        ScoringSide,
        ServerSide,
        compare_servers,
    )
    from diptych.shared.tools.conformance.diff.server_diff_report import (
        choice_tables,
        write_server_report,
    )
    from diptych.shared.tools.conformance.server.logprob_tolerance import tolerance_of

    model, dtype = flags[0]["model"], flags[0]["dtype"]
    folder = resolve_model_path(model)
    tokenizer = Tokenizer.from_pretrained(folder)
    name, tolerance = tolerance_of(dtype, folder)
    prompts = encode_prompts(tokenizer, prompt, raw)

    def open_side(side: str, its_flags: dict[str, Any], label: str) -> ScoringSide:
        if is_url(side):
            return ServerSide(side, tokenizer, prompts[0], api_key)
        computed = dtype if dtype in ("float32", "bfloat16", "float16") else "auto"
        return PanelSide(label, LLM(**{**its_flags, "dtype": computed, "disable_radix_cache": True}))

    a, b = (open_side(*each) for each in zip(sides, flags, labels))
    found = compare_servers(a, b, prompts, max_tokens, tolerance)
    facts = {
        "A": a.name,
        "B": b.name,
        "model": str(model),
        "tolerance": f"of {name}, on both sides: {tolerance.reason}",
        "texts": f"{len(prompts)}: a prompt and A's greedy answer, at most {max_tokens} tokens",
    }
    _print_summary(found, facts)
    choices = choice_tables(found, tokenizer)
    print_choices(choices)
    if out is not None:
        print("written:", write_server_report(found, out, facts, choices))
    if not found.positions:
        return 2
    return 0 if found.is_same else 1


def _print_summary(found: ServerDiff, facts: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diptych.shared.tools.conformance.diff.server_diff_report import rows

    console = Console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in [*facts.items(), ("", ""), *rows(found)]:
        grid.add_row(label, Text(value))
    console.print(grid)
    console.print()
    console.print(Text(found.sentence(), style="bold green" if found.is_same else "bold red"))
