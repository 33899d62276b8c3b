"""The rows of the table of `diptych bench serve`, which has a column for each load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diptych.shared.tools.bench.serve_load import LATE, METRICS, LoadResult

Row = tuple[str, Callable[[LoadResult], str]]
LABELS = {
    "first": "first turn: ",
    "later": "later turns: ",
    "alone": "new tokens alone: ",
    "steady": "steady ",
    "": "",
}


def rows(results: Sequence[LoadResult]) -> list[Row]:
    found: list[Row] = [
        ("requests/s", lambda result: f"{result.request_rate:.2f}"),
        ("goodput, requests/s", lambda result: f"{result.goodput:.2f}"),
        ("output tokens/s", lambda result: f"{result.output_rate:,.0f}"),
        ("hit rate", lambda result: f"{result.hit_rate:.1%}"),
        ("failed", lambda result: str(len(result.outcomes) - len(result.good))),
    ]
    if any(result.values("later_ttft") for result in results):
        return found + turn_rows(has_ids=any(result.new_len is not None for result in results))
    return found + summaries(METRICS, "mean", "p50", "p90", "p99", "max")


def turn_rows(has_ids: bool) -> list[Row]:
    """The figures of conversations of several turns; some exist for prompts of token ids only."""
    history: list[Row] = [("hit rate, whole history", lambda result: share(result.history_rate))]
    alone = [
        *summaries(["alone_ttft"], "p50"),
        ("later turns / alone", lambda result: times(result.later_to_alone)),
    ]
    return [
        *(history if has_ids else []),
        ("tokens/s per user", lambda result: f"{result.user_rate:,.1f}"),
        *summaries(["ttft", "first_ttft", "later_ttft"], "p50", "p99"),
        *(alone if has_ids else []),
        *summaries(["tpot", "e2e"], "p50", "p99"),
        *summaries(["itl", "steady_itl"], "p50", "p99", "max"),
        ("steady ITL max / p50", lambda result: times(result.max_itl_to_median)),
        (f"steady ITL above {LATE:g} x p50", lambda result: f"{result.late_itl:.1%}"),
    ]


def summaries(metrics: Sequence[str], *names: str) -> list[Row]:
    return [(f"{label(each)} {name}, ms", summary_cell(each, name)) for each in metrics for name in names]


def label(metric: str) -> str:
    kind, _, base = metric.rpartition("_")
    return LABELS[kind] + base.upper()


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def summary_cell(metric: str, name: str) -> Callable[[LoadResult], str]:
    def text(result: LoadResult) -> str:
        summary = result.summary(metric)
        return "–" if summary is None else f"{summary[name]:,.1f}"

    return text
