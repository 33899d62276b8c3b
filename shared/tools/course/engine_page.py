"""The pages of own engines: one engine with its charts, a badge, and a table of several. Each is one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from diptych.shared.tools.course.own_engine import Report

NAMES = {"yours": "this engine", "reference": "reference panel", "optimized": "optimized panel"}


def badge(report: Report) -> str:
    """An SVG of 20 pixels' height, for a README: conformance, soak and speed."""
    text = f"{report.share:.0%} · {report.speed:.2f}x" + (" · soak failed" if report.soak.failure else "")
    if report.soak.failure or report.share < 0.5:
        color = "#b3261e"
    else:
        color = "#8a6100" if report.share < 1 else "#1a7f37"
    left, right = 100, 16 + round(6.6 * len(text))
    return _render("badge.svg.jinja", text=text, color=color, left=left, right=right, width=left + right)


def engine_page(report: Report) -> str:
    """The HTML page of one engine."""
    fastest = max(report.tokens_per_s.values())
    speeds = [
        (NAMES[name], speed, 100 * speed / fastest, name == "yours")
        for name, speed in report.tokens_per_s.items()
    ]
    return _render("engine.html", report=report, speeds=speeds, badge=badge(report))


def ranked(reports: Sequence[Report]) -> list[Report]:
    """The best engine first: without a failure in the soak, then by clauses that hold, then by speed."""
    return sorted(reports, key=lambda each: (bool(each.soak.failure), -round(each.share, 4), -each.speed))


def leaderboard_page(reports: Sequence[Report]) -> str:
    """The HTML page of several engines, in the order given."""
    return _render("leaderboard.html", reports=reports, fastest=max(report.speed for report in reports))


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(values)
