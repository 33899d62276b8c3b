"""Rows of the tables of docs/generators/measured.py, from the results of one or several benchmarks."""

from __future__ import annotations

import statistics
from typing import Any

from docs.generators.record_measurements import SHAPES

Results = list[dict[str, Any]]
Rows = list[list[object]]


def ms(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e3:,.{digits}f}"


def percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f} %"


def rate(result: dict[str, Any]) -> float:
    """Output tokens per second of a case of `bench offline`."""
    value: float = result["tokens_per_s"]["median"]
    return value


def steps(results: Results) -> Rows:
    return [
        [
            r["model"],
            r["batch_size"],
            ms(r["step_s"]["median"], 3),
            ms(r["host_s"]),
            ms(r["bound_s"], 3),
            percent(r["share_of_bound"]),
        ]
        for r in results
    ]


def mixed(results: Results) -> Rows:
    return [
        [
            r["batch_size"],
            r["num_new_tokens"],
            *(ms(s) for s in (r["step_s"]["median"], r["host_s"], r["bound_s"], r["roofline_s"])),
        ]
        for r in results
    ]


def eager_steps(eager: Results, replayed: Results) -> Rows:
    by_batch = {r["batch_size"]: r for r in replayed if r["model"] == eager[0]["model"]}
    return [
        [
            r["batch_size"],
            *(f"{s * 1e6:,.0f}" for each in (r, by_batch[r["batch_size"]]) for s in _times(each)),
        ]
        for r in eager
    ]


def prefill(eager: Results, replayed: Results) -> Rows:
    by_case = {(r["model"], r["num_new_tokens"]): r for r in replayed}
    rows: Rows = []
    for r in eager:
        pieces = by_case[r["model"], r["num_new_tokens"]]
        times = [ms(s) for each in (r, pieces) for s in _times(each)]
        rows.append([r["model"], f"{r['num_new_tokens']:,}", *times, f"{pieces['flops_per_s'] / 1e12:.0f}"])
    return rows


def _times(result: dict[str, Any]) -> tuple[float, float]:
    """Of a step: on the GPU, and on the CPU to launch it."""
    return result["step_s"]["median"], result["host_s"]


def formats(*files: Results) -> Rows:
    names = ("bf16", "`fp8`", "`fp8`, FP8 KV", "`int4`")
    found = [[r for r in results if r["model"] == "Qwen3-8B"] for results in files]
    return [
        [name, *(ms(s) for r in results if r["batch_size"] in (1, 64) for s in _time_and_bound(r))]
        for name, results in zip(names, found)
    ]


def _time_and_bound(result: dict[str, Any]) -> tuple[float, float]:
    return result["step_s"]["median"], result["bound_s"]


def offline(*files: Results) -> Rows:
    from docs.figures.charts import text_of
    from shared.bench.peers import ROWS

    rows: Rows = []
    for shape, (r,) in zip(SHAPES, files):
        engine, best = ROWS[shape].best_offline()
        other = f"{text_of(best)} ({engine.split()[0]})"
        rows.append([shape, other, f"**{rate(r):,.0f}**", f"{r['bound']['tokens_per_s']:,.0f}"])
    return rows


def latency(*files: Results) -> Rows:
    from docs.figures.charts import text_of
    from shared.bench.peers import ROWS

    rows: Rows = []
    for shape, (r,) in zip(SHAPES, files):
        engine, best = ROWS[shape].best_stream()
        other = f"{text_of(best)} ({engine.split()[0]})"
        rows.append([shape, other, f"**{ms(r['time_per_token_s'])}**", ms(r["bound_s"])])
    return rows


def decode_attention(results: Results) -> Rows:
    by_case: dict[int, dict[str, Any]] = {}
    for r in results:
        by_case.setdefault(r["batch_size"], {"bound": r["bound_us"]})[r["backend"]] = r["us"]
    return [
        [
            f"{batch} x 1,024",
            *(f"{case[name]:.1f}" for name in ("bound", "triton", "flashinfer")),
            percent(case["bound"] / case["triton"], 0),
        ]
        for batch, case in by_case.items()
    ]


def rounds(*files: Results) -> Rows:
    return [
        [
            ", ".join(map(str, r["shape"])),
            r["batch_size"],
            *(ms(s, 3) for s in (r["decode"], r["pieces"]["draft"], r["pieces"]["verify"], r["round"])),
            f"{r['ratio']:.2f}",
        ]
        for results in files
        for r in results
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


def scheduling(results: Results) -> Rows:
    """Minimum and median of blocks by number of waiting requests, and the first pass over the most."""
    rows: dict[tuple[str, str], list[object]] = {}
    most = max(r["num_waiting"] for r in results)
    for r in sorted(results, key=lambda r: r["num_waiting"]):
        blocks = r["blocks_s"]
        row = rows.setdefault((r["policy"], r["panel"]), [r["policy"], r["panel"]])
        row.append(f"{ms(min(blocks))} / {ms(statistics.median(blocks))}")
        if r["num_waiting"] == most:
            row.append(ms(r["first_pass_s"], 1))
    return list(rows.values())


def scheduling_medians(results: Results) -> Rows:
    """By policy: each panel with the fewest and the most waiting requests."""
    numbers = {r["num_waiting"] for r in results}
    medians = {
        (r["policy"], r["panel"], r["num_waiting"]): ms(statistics.median(r["blocks_s"])) for r in results
    }
    columns = [(panel, n) for panel in ("reference", "optimized") for n in (min(numbers), max(numbers))]
    policies = dict.fromkeys(r["policy"] for r in results)
    return [[policy, *(medians[policy, panel, n] for panel, n in columns)] for policy in policies]


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


def pool_steps() -> Rows:
    """Counted now: they do not depend on the computer."""
    from shared.bench.small_pools import LOADS, count

    rows: Rows = []
    for conservativeness in (1.0, 0.1):
        found = [count(LOADS[1], "reference", share, conservativeness) for share in (10, 50, 100)]
        steps = [one.num_steps for one in found]
        rows.append([f"{conservativeness:g}", *steps, sum(one.num_retractions for one in found)])
    return rows


OPERATIONS = ("match", "insert", "evict")
PANELS = ("reference", "optimized")


def cache_calls(results: Results) -> Rows:
    """Microseconds of calls of the prefix cache, minimum / median, by cached tokens and nodes per
    sequence."""
    by_case: dict[tuple[int, int], dict[str, Any]] = {}
    for r in results:
        by_case.setdefault((r["num_tokens"], r["depth"]), {})[r["panel"]] = r["times_s"]
    is_deep = len({depth for _, depth in by_case}) > 1
    return [
        [
            f"{num_tokens:,}",
            depth if is_deep else "",
            *(_microseconds(case[panel][operation]) for operation in OPERATIONS for panel in PANELS),
        ]
        for (num_tokens, depth), case in by_case.items()
    ]


def _microseconds(seconds: list[float]) -> str:
    return " / ".join(
        f"{value:.1f}" if value < 10 else f"{value:,.0f}"
        for value in (min(seconds) * 1e6, statistics.median(seconds) * 1e6)
    )
