"""The chart of the headline measurements, from the results and from the measurements of other engines."""

from __future__ import annotations

from typing import NamedTuple

from diptych.shared.tools.bench import peers
from docs.figures.blocks import Bar, bars, boxes, heading, span
from docs.figures.svg import figure
from docs.generators.measured import measured
from docs.generators.result_rows import text_of
from docs.generators.tables import cells_of


class Headline(NamedTuple):
    """One of the two headline measurements."""

    title: str
    table: str  # of the results page
    is_rate: bool  # larger is better


HEADLINES = (
    Headline("Offline throughput, tokens/s", "offline", True),
    Headline("Single stream, tokens/s", "latency", False),
)


def chart(of: Headline) -> str:
    """Bars as shares of the roofline bound, which is the right edge: Diptych first, then from the best to the
    worst. A single stream has the inverse of its ms per token."""
    parts = [heading(of.title), span("s", "Right edge: what memory and GEMMs allow.")]
    rows = [cells_of(line) for line in measured(of.table).splitlines() if line.startswith("|")][2:]
    for shape, best_other, *numbers in rows:
        own, bound = (float(each.replace(",", "")) for each in numbers)
        other = peers.ROWS[shape].offline if of.is_rate else peers.ROWS[shape].stream
        known = [(name, value) for name, value in zip(peers.ENGINES, other) if value is not None]
        known.sort(key=lambda pair: pair[1], reverse=of.is_rate)
        best, value = known[0]
        assert best_other == f"{text_of(value)} ({best.split()[0]})", shape
        lines = []
        for name, value in [("Diptych", own), *known]:
            share = value / bound if of.is_rate else bound / value
            text = text_of(value) if of.is_rate else f"{1000 / value:,.0f}"
            lines.append(Bar(name.split()[0], min(share, 1), text, "sa" if name == "Diptych" else "fg"))
        limit = text_of(bound) if of.is_rate else f"{1000 / bound:,.0f}"
        parts += [heading(f"{shape}, bound {limit}"), bars(lines, "edge")]
    return f"<div>{''.join(parts)}</div>"


def engines() -> str:
    with_flashinfer, *shipped = peers.ENGINES
    caption = (
        f"One NVIDIA H200, bf16, random weights, default flags; {' and '.join(shipped)} as they ship, "
        f"{with_flashinfer} with FlashInfer, in separate runs on the same machine type. Left or above: "
        "256 requests of 100 to 1,024 tokens of prompt and of output, output tokens over the whole run. "
        "Right or below: one stream after a prompt of 512 tokens."
    )
    body = f'<div class="side-by-side">{"".join(map(chart, HEADLINES))}</div>'
    return figure(boxes(body), caption)
