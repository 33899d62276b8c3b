"""Bar charts of the results page, from its tables and from the measurements of other engines."""

from __future__ import annotations

from typing import NamedTuple

from diptych.shared.tools.bench import peers
from docs.figures.svg import NARROW, WIDE, Svg, figure, views
from docs.figures.tables import number, read_table

PAGE = "index.md"


class Bar(NamedTuple):
    """share: length, of the whole width."""

    name: str
    share: float
    label: str
    cls: str


def bars(svg: Svg, x: float, y: float, width: float, rows: list[Bar], name_width: float = 92) -> float:
    """Horizontal bars with their names on the left. Returns the next free y."""
    room = width - name_width
    for row in rows:
        svg.text(x, y + 14, row.name)
        svg.rect(x + name_width, y, max(1, room * row.share), 18, row.cls)
        inside = room * row.share > 8 * len(row.label) + 12
        label_x = x + name_width + (6 if inside else room * row.share + 6)
        svg.text(label_x, y + 13.5, row.label, "on" if inside and row.cls[0] == "s" else "")
        y += 22
    return y


class Headline(NamedTuple):
    """One of the two headline measurements."""

    title: str
    header: str
    unit: str
    is_rate: bool  # larger is better


OFFLINE = Headline("Offline throughput, tokens/s", "offline, tokens/s", "tokens/s", True)
STREAM = Headline("Single stream, tokens/s", "single stream, ms/token", "ms", False)


def groups_of(of: Headline) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """(shape, roofline bound, (engine, figure) with Diptych first and then from the best to the worst)."""
    groups = []
    for row in read_table(PAGE, of.header):
        shape = row[of.header]
        other = peers.ROWS[shape].offline if of.is_rate else peers.ROWS[shape].stream
        known = [(name, value) for name, value in zip(peers.ENGINES, other) if value is not None]
        known.sort(key=lambda pair: pair[1], reverse=of.is_rate)
        best, figure = known[0]
        assert row["best other engine"] == f"{text_of(figure)} ({best.split()[0]})", row
        groups.append((shape, number(row["roofline bound"]), [("Diptych", number(row["Diptych"])), *known]))
    return groups


def text_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def rate_of(of: Headline, value: float) -> str:
    """The figure as tokens/s: of one stream, the inverse of its ms per token."""
    return text_of(value) if of.is_rate else f"{1000 / value:,.0f}"


def headline(svg: Svg, x: float, y: float, width: float, of: Headline) -> float:
    """Bars as shares of the roofline bound, which is the right edge."""
    svg.text(x, y + 14, of.title, "h")
    svg.text(x, y + 32, "right edge: what memory and GEMMs allow", "s")
    y += 46
    for shape, bound, engines in groups_of(of):
        svg.text(x, y + 13, shape, "b")
        svg.text(x + width, y + 13, rate_of(of, bound), "s end")
        rows = []
        for name, value in engines:
            share = value / bound if of.is_rate else bound / value
            cls = "sa" if name == "Diptych" else "fg"
            rows.append(Bar(name.split()[0], min(share, 1), rate_of(of, value), cls))
        y += 20
        end = bars(svg, x, y, width, rows)
        svg.line(x + width, y - 2, x + width, end - 2, "lc")
        y = end + 8
    return y


def draw_engines(width: int) -> Svg:
    svg = Svg(width)
    if width == WIDE:
        headline(svg, 0, 0, 320, OFFLINE)
        headline(svg, 356, 0, 322, STREAM)
    else:
        headline(svg, 0, headline(svg, 0, 0, width - 2, OFFLINE) + 14, width - 2, STREAM)
    return svg


def engines() -> str:
    label = "Throughput and latency of four engines. " + " ".join(
        f"{of.title}: "
        + "; ".join(
            f"{shape} " + ", ".join(f"{name} {rate_of(of, value)}" for name, value in engines)
            for shape, _, engines in groups_of(of)
        )
        + "."
        for of in (OFFLINE, STREAM)
    )
    with_flashinfer, *shipped = peers.ENGINES
    caption = (
        f"One NVIDIA H200, bf16, random weights, default flags; {' and '.join(shipped)} as they ship, "
        f"{with_flashinfer} with FlashInfer, in separate runs on the same machine type. Left or above: "
        "256 requests of 100 to 1,024 tokens of prompt and of output, output tokens over the whole run. "
        "Right or below: one stream after a prompt of 512 tokens."
    )
    return figure(views(label, draw_engines(WIDE), draw_engines(NARROW)), caption)


def chart(label: str, caption: str, rows: list[Bar], name_widths: tuple[float, float]) -> str:
    """A figure of one group of bars. name_widths: of the wide and of the narrow view."""
    wide, narrow = Svg(WIDE), Svg(NARROW)
    for svg, name_width in zip((wide, narrow), name_widths):
        bars(svg, 0, 0, svg.width - 1, rows, name_width)
    values = "; ".join(f"{row.name}: {row.label}" for row in rows)
    return figure(views(f"{label} {values}.", wide, narrow), caption)


def kernels() -> str:
    rows = []
    for row in read_table(PAGE, "kernel"):
        share = number(row["of the bound"])
        rows.append(Bar(row["kernel"], share / 100, f"{share:.0f} %", "sa"))
    return chart(
        "Share of the roofline bound.",
        "Share of the roofline bound on one H200, which is the right edge.",
        rows,
        (150, 130),
    )


def waiting_queue() -> str:
    rows = []
    table = read_table(PAGE, "policy")
    most = max(number(row["reference, 10,000"]) for row in table)
    for row in table:
        for panel, cls in (("reference", "fg"), ("optimized", "sa")):
            ms = number(row[f"{panel}, 10,000"])
            name = row["policy"] if panel == "reference" else ""
            rows.append(Bar(name, (ms / most) ** 0.5, f"{ms:g} ms", cls))
    return chart(
        "CPU time of scheduling a step. 10,000 waiting requests, reference and optimized.",
        "CPU time of scheduling one step with 10,000 waiting requests: reference (grey) and optimized "
        "(blue). The length of a bar is the square root of its time.",
        rows,
        (150, 122),
    )


def pools() -> str:
    rows = []
    table = read_table("small-pools.md", "pool")
    most = max(number(row["tokens/s"]) for row in table)
    for row in table:
        rate = number(row["tokens/s"])
        rows.append(Bar(row["pool"], rate / most, f"{rate:,.0f} tokens/s", "sa"))
    return chart(
        "Throughput by the size of the KV pool.", "Throughput by the size of the KV pool.", rows, (60, 60)
    )


def goodput() -> str:
    rows = []
    table = read_table("serving.md", "arrivals/s")
    most = max(number(row["arrivals/s"]) for row in table)
    for row in table:
        reached = number(row["goodput, requests/s"])
        rows.append(Bar(f"{row['arrivals/s']}/s", reached / most, f"{reached:.1f} requests/s", "sa"))
    return chart(
        "Goodput by arrivals per second.",
        f"Goodput by arrivals per second; the right edge is {most:.0f} requests per second.",
        rows,
        (60, 60),
    )


def cuda_graphs() -> str:
    table = read_table("../course/08-cuda-graphs.md", "batch")
    kinds = [
        ("one by one, CPU", "one by one, CPU", "fg"),
        ("GPU", "one by one, GPU", "fg"),
        ("replayed, CPU", "replayed, CPU", "sa"),
        ("GPU", "replayed, GPU", "sa"),
    ]
    groups = [
        (f"Batch {row['batch']}", [(name, number(row[header]), cls) for name, header, cls in kinds])
        for row in table
    ]
    label = "Time of a decode step of Qwen3-8B. " + "; ".join(
        f"batch {row['batch']}: " + ", ".join(f"{header} {row[header]} µs" for _, header, _ in kinds)
        for row in table
    )
    caption = (
        "The table as bars: kernels launched one by one (grey) and replayed from a graph (blue). Launched "
        "one by one, the step takes as long as the CPU needs to launch it."
    )
    return groups_of_times(label, caption, groups)


def sums() -> str:
    table = read_table("several-gpus.md", "KB")
    kinds = [("one-shot kernel", "sa"), ("NCCL", "fg"), ("torch one-shot", "fg")]
    groups = [
        (f"{row['KB']} KB", [(name, number(row[f"{name}, µs"]), cls) for name, cls in kinds])
        for row in table
        if row["one-shot kernel, µs"]
    ]
    label = "Time of a sum over two GPUs. " + "; ".join(
        f"{title}: " + ", ".join(f"{name} {us:g} µs" for name, us, _ in times) for title, times in groups
    )
    caption = "Time of a sum over two GPUs, by the size of the tensor: our kernel (blue), NCCL and torch."
    return groups_of_times(label, caption, groups)


def groups_of_times(label: str, caption: str, groups: list[tuple[str, list[tuple[str, float, str]]]]) -> str:
    """A figure of groups of bars: (title, bars as (name, microseconds, class))."""
    most = max(us for _, times in groups for _, us, _ in times)
    digits = int(most < 100)
    wide, narrow = Svg(WIDE), Svg(NARROW)
    for svg in (wide, narrow):
        y = 0.0
        for title, times in groups:
            svg.text(0, y + 14, title, "b")
            rows = [Bar(name, us / most, f"{us:,.{digits}f} µs", cls) for name, us, cls in times]
            y = bars(svg, 0, y + 22, svg.width - 1, rows, 130) + 8
    return figure(views(label, wide, narrow), caption)
