"""Rows of the tables of docs/generators/measured.py: results of files beside each other, or cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

Results = list[dict[str, Any]]
Rows = Iterable[Any]


def ms(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e3:,.{digits}f}"


def each(*files: Results) -> Rows:
    return chain.from_iterable(files)


def beside(*files: Results) -> Rows:
    return zip(*files)


def files(*found: Results) -> Rows:
    """A row has all results of a file."""
    return found


def pairs(*files: Results) -> Rows:
    """The results of the first and of the second file beside each other, then those of the next two."""
    return chain.from_iterable(map(zip, files[::2], files[1::2]))


def of_kind(*kinds: str) -> Callable[..., Rows]:
    """The results of some kinds."""
    return lambda *files: [result for result in each(*files) if result["kind"] in kinds]


def over_first(*files: Results) -> Rows:
    """The first result, and that of each file."""
    return [(files[0][0], results[0]) for results in files]


def by(*keys: str) -> Callable[[Results, Results], Rows]:
    """The results of two files that have the same values of these keys."""

    def join(first: Results, second: Results) -> Rows:
        found = {tuple(r[key] for key in keys): r for r in second}
        return [(r, found[tuple(r[key] for key in keys)]) for r in first]

    return join


def text_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def beside_peers(method: str, *shapes: str) -> Callable[..., Rows]:
    """Each shape with the best public number of other engines."""

    def join(*files: Results) -> Rows:
        from diptych.shared.tools.bench.peers import ROWS

        for shape, (r,) in zip(shapes, files):
            engine, best = getattr(ROWS[shape], method)()
            yield {"shape": shape, "best": f"{text_of(best)} ({engine.split()[0]})", "own": r}

    return join


def of_one_and_64_requests(*files: Results) -> Rows:
    for results in files:
        yield [r for r in results if r["model"] == "Qwen3-8B" and r["batch_size"] in (1, 64)]


def layers(results: Results) -> Rows:
    """Microseconds of a layer's GEMMs by number of tokens."""
    found: dict[int, dict[str, float]] = {}
    for r in results:
        row = found.setdefault(r["case"]["num_tokens"], {"tokens": r["case"]["num_tokens"]})
        for name, microseconds in r["microseconds"].items():
            row[name] = row.get(name, 0.0) + microseconds
    return found.values()


def by_backend(results: Results) -> Rows:
    found: dict[int, dict[str, Any]] = {}
    for r in results:
        found.setdefault(r["batch_size"], {})[r["backend"]] = r
    return found.values()


def with_equal_texts(results: Results) -> Rows:
    return [{**r, "num_equal": r["num_requests"] - len(r["departures"])} for r in results]


def itl(*files: Results) -> Rows:
    """One repeat each. The first file also has the row without arrivals."""
    runs = [results[0]["runs"][0] for results in files]
    for window in (runs[0]["without"], *(run["with_arrivals"] for run in runs)):
        waits = window["times_to_first_token_s"]
        yield {**window["itl_s"], "wait": statistics.median(waits) if waits else None}


def served(engine: Results, http: Results) -> Rows:
    return [engine[0]["tokens_per_s"]["median"]], [http[0]["output_tokens_per_s"]]


def one_client(engine: Results, http: Results) -> Rows:
    yield {"ttft": engine[0]["time_to_first_token_s"], **engine[0]["itl_s"]}
    yield {"ttft": http[0]["ttft_ms"]["p50"] / 1e3, **{k: v / 1e3 for k, v in http[0]["itl_ms"].items()}}


def even_times(*files: Results) -> Rows:
    """files: open and closed loop, with whole prompts, chunks of 256 and of 128."""
    for size, arrivals, (closed,) in zip(("whole prompts", "256", "128"), files[::2], files[1::2]):
        for i, r in enumerate(r for r in arrivals if r["rate"] <= 10):
            yield {"size": size, "open": r, "closed": None if i else closed}


OPERATIONS = ("match", "insert", "evict")
PANELS = ("reference", "optimized")


def cache_calls(results: Results) -> Rows:
    """Microseconds of calls of the prefix cache, minimum / median, by cached tokens and nodes per
    sequence."""
    by_case: dict[tuple[int, int], dict[str, Any]] = {}
    for r in results:
        by_case.setdefault((r["num_tokens"], r["depth"]), {})[r["panel"]] = r["times_s"]
    is_deep = len({depth for _, depth in by_case}) > 1
    for (num_tokens, depth), case in by_case.items():
        calls = (_microseconds(case[panel][each]) for each in OPERATIONS for panel in PANELS)
        yield [f"{num_tokens:,}", depth if is_deep else "", *calls]


def _microseconds(seconds: dict[str, float]) -> str:
    values = (seconds["min"] * 1e6, seconds["median"] * 1e6)
    return " / ".join(f"{value:.1f}" if value < 10 else f"{value:,.0f}" for value in values)


def scheduling(results: Results) -> Rows:
    """Minimum and median of blocks by number of waiting requests, and the first pass over the most."""
    rows: dict[tuple[str, str], list[object]] = {}
    most = max(r["num_waiting"] for r in results)
    for r in sorted(results, key=lambda r: r["num_waiting"]):
        row = rows.setdefault((r["policy"], r["panel"]), [r["policy"], r["panel"]])
        row.append(f"{ms(r['least_s'])} / {ms(r['median_s'])}")
        if r["num_waiting"] == most:
            row.append(ms(r["first_pass_s"], 1))
    return rows.values()


def scheduling_medians(results: Results) -> Rows:
    """By policy: each panel with the fewest and the most waiting requests."""
    numbers = [r["num_waiting"] for r in results]
    medians = {(r["policy"], r["panel"], r["num_waiting"]): r["median_s"] for r in results}
    columns = [(panel, n) for panel in PANELS for n in (min(numbers), max(numbers))]
    for policy in dict.fromkeys(r["policy"] for r in results):
        yield [policy, *(ms(medians[policy, panel, n]) for panel, n in columns)]


def pool_steps() -> Rows:
    """Counted now: they do not depend on the computer."""
    from diptych.shared.tools.bench.small_pools import LOADS, count

    for conservativeness in (1.0, 0.1):
        found = [count(LOADS[1], "reference", share, conservativeness) for share in (10, 50, 100)]
        retractions = sum(one.num_retractions for one in found)
        yield [f"{conservativeness:g}", *(one.num_steps for one in found), retractions]
