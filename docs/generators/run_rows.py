"""Rows of the tables of docs/generators/measured.py that are about runs of an engine or a server."""

from __future__ import annotations

import statistics
from typing import Any

from docs.generators.recordings import SHAPES, TP_SHAPES
from docs.generators.step_rows import Results, Rows, ms, percent


def rate(result: dict[str, Any]) -> float:
    """Output tokens per second of a case of `bench offline`."""
    value: float = result["tokens_per_s"]["median"]
    return value


def offline(*files: Results) -> Rows:
    from diptych.shared.tools.bench.peers import ROWS
    from docs.figures.charts import text_of

    rows: Rows = []
    for shape, (r,) in zip(SHAPES, files):
        engine, best = ROWS[shape].best_offline()
        other = f"{text_of(best)} ({engine.split()[0]})"
        rows.append([shape, other, f"**{rate(r):,.0f}**", f"{r['bound']['tokens_per_s']:,.0f}"])
    return rows


def latency(*files: Results) -> Rows:
    from diptych.shared.tools.bench.peers import ROWS
    from docs.figures.charts import text_of

    rows: Rows = []
    for shape, (r,) in zip(SHAPES, files):
        engine, best = ROWS[shape].best_stream()
        other = f"{text_of(best)} ({engine.split()[0]})"
        rows.append([shape, other, f"**{ms(r['time_per_token_s'])}**", ms(r["bound_s"])])
    return rows


def tp_latency(*files: Results) -> Rows:
    rows: Rows = []
    for shape, (r,) in zip(TP_SHAPES, files):
        time, bound = r["time_per_token_s"], r["bound_s"]
        rows.append([shape, ms(time, 3), ms(bound, 3), percent(bound / time)])
    return rows


def tp_offline(*files: Results) -> Rows:
    """files: of one rank, and of several."""
    ((one,), _) = files
    return [
        [
            r["flags"]["model"],
            r["flags"]["tp"],
            f"{rate(r):,.0f}",
            f"{rate(r) / rate(one):.2f}",
            f"{r['bound']['tokens_per_s']:,.0f}",
            percent(r["bound"]["share"]),
        ]
        for (r,) in files
    ]


def deterministic(*files: Results) -> Rows:
    """files: with default flags, and in deterministic mode."""
    names = ("default flags", "`--deterministic`")
    ((default,), _) = files
    return [[name, f"{rate(r):,.0f}", percent(rate(r) / rate(default))] for name, (r,) in zip(names, files)]


def formats(*files: Results) -> Rows:
    """files: of each shape, in 16 bits and with FP8 weights."""
    return [
        [
            plain["flags"]["model"],
            f"{rate(plain):,.0f}",
            f"{rate(quantized):,.0f}",
            f"{rate(quantized) / rate(plain):.2f}",
            f"{quantized['bound']['tokens_per_s']:,.0f}",
        ]
        for (plain,), (quantized,) in zip(files[::2], files[1::2])
    ]


def speculation(results: Results) -> Rows:
    return [
        [
            r["batch_size"],
            f"{r['plain_tokens_per_s']:,.0f}",
            f"{r['speculative_tokens_per_s']:,.0f}",
            f"{r['speedup']:.2f}",
            f"{r['tokens_per_verification']:.2f}",
            f"{r['num_requests'] - len(r['departures'])} of {r['num_requests']}",
        ]
        for r in results
    ]


def itl(*files: Results) -> Rows:
    """One repeat each. The first file also has the row without arrivals."""
    names = ("whole (default)", "chunks of 512, mixed", "chunks of 256, mixed")
    runs = [results[0]["runs"][0] for results in files]
    windows = [("none arrive", runs[0]["without"])]
    windows += [(name, run["with_arrivals"]) for name, run in zip(names, runs)]
    rows: Rows = []
    for name, window in windows:
        waits = window["times_to_first_token_s"]
        times = [ms(window["itl_s"][key]) for key in ("p50", "p90", "p99", "max")]
        rows.append([name, *times, ms(statistics.median(waits), 0) if waits else ""])
    return rows


def overlap(*files: Results) -> Rows:
    """files: sequential and overlapped, of one model after another."""
    return [
        [
            before["flags"]["model"],
            before["num_requests"],
            *(cell for r in (before, after) for cell in (f"{rate(r):,.0f}", percent(r["idle"]["share"]))),
            f"{rate(after) / rate(before):.2f}",
        ]
        for sequential, overlapped in zip(files[::2], files[1::2])
        for before, after in zip(sequential, overlapped)
    ]


def shared_prefixes(*files: Results) -> Rows:
    return [
        [
            without["flags"]["model"],
            f"{rate(without):,.0f}",
            f"{rate(cached):,.0f}",
            f"{rate(cached) / rate(without):.2f}",
            percent(cached["hit_rate"], 2),
            percent(cached["ideal_hit_rate"], 2),
        ]
        for without, cached in files
    ]


def pools(*files: Results) -> Rows:
    """files: the full pool first."""
    full = files[0][0]
    rows: Rows = []
    for (r,) in files:
        (run,) = r["runs"]
        rows.append(
            [
                percent(r["num_pool_tokens"] / full["num_pool_tokens"], 0),
                f"{r['num_pool_tokens']:,}",
                f"{rate(r):,.0f}",
                percent(rate(r) / rate(full), 0),
                f"{run['num_output_tokens'] / run['num_steps']:.1f}",
                run["num_retractions"],
            ]
        )
    return rows


def chunked_rates(*files: Results) -> Rows:
    """files: with default flags and in mixed steps, of one model after another."""
    return [
        [
            default["flags"]["model"],
            changed["flags"]["chunked_prefill_size"],
            f"{rate(default):,.0f}",
            f"{rate(changed):,.0f}",
        ]
        for (default,), (changed,) in zip(files[::2], files[1::2])
    ]


def served(engine: Results, *files: Results) -> Rows:
    names = ("through HTTP, a closed loop of 64 clients (`bench serve`)",)
    rows: Rows = [["the engine alone (`bench offline`)", f"{rate(engine[0]):,.0f}"]]
    return rows + [[name, f"{r['output_tokens_per_s']:,.0f}"] for name, (r,) in zip(names, files)]


def one_client(engine: Results, server: Results) -> Rows:
    itl, http = engine[0]["itl_s"], server[0]
    return [
        [
            "the engine alone (`bench latency`)",
            ms(engine[0]["time_to_first_token_s"], 1),
            *(ms(itl[key]) for key in ("p50", "p99")),
        ],
        [
            "through HTTP",
            f"{http['ttft_ms']['p50']:.1f}",
            *(f"{http['itl_ms'][key]:.2f}" for key in ("p50", "p99")),
        ],
    ]


def goodput(results: Results) -> Rows:
    rows: Rows = []
    for r in results:
        waits = (r["ttft_ms"]["p50"], r["ttft_ms"]["p99"], r["itl_ms"]["p50"], r["itl_ms"]["p99"])
        times = (*waits, r["tpot_ms"]["p99"])
        tokens = f"{r['output_tokens_per_s']:,.0f}"
        rows.append([f"{r['rate']:g}", f"{r['goodput']:.2f}", tokens, *(f"{time:.1f}" for time in times)])
    return rows


def even_times(*files: Results) -> Rows:
    """files: open and closed loop, with whole prompts, chunks of 256 and of 128."""
    rows: Rows = []
    sizes = ("whole prompts", "256", "128")
    for size, open_loop, (closed,) in zip(sizes, files[::2], files[1::2]):
        for i, r in enumerate(r for r in open_loop if r["rate"] <= 10):
            ttft, itl = r["ttft_ms"], r["itl_ms"]
            rows.append(
                [
                    size,
                    f"{r['rate']:g}",
                    *(f"{time:.1f}" for time in (ttft["p50"], itl["p50"], itl["p99"])),
                    f"{itl['p99'] / itl['p50']:.2f}",
                    "" if i else f"{closed['output_tokens_per_s']:,.0f}",
                ]
            )
    return rows
