"""`diptych diff` between two precisions or checkpoints of one model shape: size and place of the errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.shared.tools.commands.diff_prompts import make_prompts

if TYPE_CHECKING:
    from rich.console import Console

    from diptych.shared.tools.conformance.diff.precision import Precision
    from diptych.shared.tools.conformance.diff.precision_report import ChoiceTable

NUMBERS = ("model", "dtype", "quantization", "kv_cache_dtype")
"""Flags that change the values that a correct engine computes, so that kernel tolerances do not apply."""


def is_precision(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two sides, given by all engine flags, compute in different precisions or with different
    weights."""
    return any(a.get(name) != b.get(name) for name in NUMBERS)


def diff_precision(
    flags: tuple[dict[str, Any], dict[str, Any]],
    labels: tuple[str, str],
    prompt: list[str] | None,
    raw: bool,
    max_new_tokens: int,
    ignore_eos: bool,
    max_kl: float | None,
    out: Path | None,
) -> int:
    """Measure, print, and write the page into `out`. Returns the exit status: 1 if the mean KL divergence
    is beyond `max_kl`."""
    from diptych.shared.engine.llm import LLM
    from diptych.shared.tools.conformance.diff.precision import check_same_shape, measure
    from diptych.shared.tools.conformance.diff.precision_report import choice_tables, write_precision_report
    from diptych.shared.types import SamplingParams

    a, b = (LLM(**{**side, "disable_radix_cache": True}) for side in flags)
    check_same_shape(a, b)
    prompts = make_prompts(a, prompt, raw, a.config.random_seed)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=ignore_eos)
    found = measure(a, b, prompts, params)
    facts = {
        "A": f"{flags[0]['model']}, {labels[0]}",
        "B": f"{flags[1]['model']}, {labels[1]}",
        "dtype, device": f"A {_dtype(a)}, B {_dtype(b)}, {b.config.device}",
        "texts": f"{len(prompts)}: a prompt and A's greedy answer, at most {max_new_tokens} tokens",
    }
    choices = choice_tables(found.tokens, found.texts, a.tokenizer)
    print_precision(found, facts, choices)
    if out is not None:
        print("written:", write_precision_report(found, out, facts, choices))
    if max_kl is not None and not found.tokens.mean_kl <= max_kl:
        print(f"mean KL divergence {found.tokens.mean_kl:.2e} is above --max-kl {max_kl:g}")
        return 1
    return 0


def _dtype(llm: Any) -> str:
    parameters = llm.assembly.model.parameters()
    name = next(str(p.dtype) for p in parameters if p.is_floating_point()).removeprefix("torch.")
    methods = [method for method in (llm.config.quantization, llm.config.kv_cache_dtype) if method]
    return " ".join([name, *(method for method in methods if method != "auto")])


def print_rows(console: Console, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    console.print(grid)


def print_precision(found: Precision, facts: dict[str, str], choices: list[ChoiceTable]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diptych.shared.tools.conformance.diff.precision_report import layer_rows, token_rows

    console = Console()

    print_rows(console, list(facts.items()))
    console.print()
    console.print(Text(found.sentence(), style="bold"))
    table = Table(
        "layer", "accumulated", "from A's input", "of what it adds", "op that loses most", "its error"
    )
    for row in layer_rows(found):
        errors = (f"{error:.2e}" for error in (row.accumulated, row.own, row.added))
        table.add_row(str(row.layer), *errors, row.worst_op, f"{row.worst_error:.2e}" if row.worst_op else "")
    console.print(table)
    print_rows(console, token_rows(found.tokens))
    if found.other_experts.count:
        console.print(f"other experts: {found.other_experts.value:.2%} of all routings")
    print_choices(choices)


def print_choices(choices: list[ChoiceTable]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for choice in choices:
        console.print()
        console.print(Text(f"{choice.heading}: {choice.place}"))
        console.print(Text(f"after {choice.before}"))
        table = Table("next token", "A", "B", "best of")
        for token, a, b, best in choice.rows:
            shown = ("–" if p is None else f"{p:.4f}" for p in (a, b))
            table.add_row(Text(token), *shown, best)
        console.print(table)
