"""Rows of the tables of docs/generators/measured.py that are about one step or one call."""

from __future__ import annotations

import statistics
from typing import Any

Results = list[dict[str, Any]]
Rows = list[list[object]]


def ms(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e3:,.{digits}f}"


def percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f} %"


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


def layers(results: Results) -> Rows:
    """Microseconds of a layer's GEMMs by number of tokens, and how many times as fast 8 and 4 bits are."""
    by_tokens: dict[int, list[dict[str, float]]] = {}
    for r in results:
        by_tokens.setdefault(r["case"]["num_tokens"], []).append(r["microseconds"])
    rows: Rows = []
    for num_tokens, found in by_tokens.items():
        plain, *others = (sum(each[name] for each in found) for name in ("16 bits", "fp8", "int4"))
        gains = [f"{plain / other:.2f}" for other in others]
        rows.append([f"{num_tokens:,}", *(f"{time:.1f}" for time in (plain, *others)), *gains])
    return rows


def _time_and_bound(result: dict[str, Any]) -> tuple[float, float]:
    return result["step_s"]["median"], result["bound_s"]


def sums(results: Results) -> Rows:
    """Microseconds of a sum over ranks, by its size."""
    rows: Rows = []
    for r in results:
        seconds = [r["seconds"].get(name) for name in ("Triton one-shot", "NCCL", "torch one-shot")]
        times = ["" if each is None else f"{each * 1e6:.1f}" for each in (*seconds, r["bound_s"])]
        rows.append([f"{r['num_bytes'] // 1024:,}", *times])
    return rows


def tp_steps(*files: Results) -> Rows:
    """files: with parts of experts, and with whole experts on each rank."""
    rows: Rows = []
    for parts, whole in zip(*files):
        times = (parts["step_s"]["median"], whole["step_s"]["median"], parts["bound_s"])
        rows.append([parts["batch_size"], *(ms(seconds, 3) for seconds in times)])
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


def pool_steps() -> Rows:
    """Counted now: they do not depend on the computer."""
    from diptych.shared.tools.bench.small_pools import LOADS, count

    rows: Rows = []
    for conservativeness in (1.0, 0.1):
        found = [count(LOADS[1], "reference", share, conservativeness) for share in (10, 50, 100)]
        steps = [one.num_steps for one in found]
        rows.append([f"{conservativeness:g}", *steps, sum(one.num_retractions for one in found)])
    return rows
