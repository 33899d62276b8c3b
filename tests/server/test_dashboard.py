"""The Grafana dashboard draws every metric, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import diptych.shared.server
from diptych.shared.server.http.metrics import Metrics

DASHBOARD = Path(diptych.shared.server.__file__).parent / "assets" / "grafana.json"


def test_the_dashboard_draws_the_metrics_that_exist() -> None:
    endings = {"counter": "_total", "histogram": "_bucket", "gauge": ""}
    exported = {metric.name + endings[metric.type] for metric in Metrics().registry.collect()}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {name for each in expressions for name in re.findall(r"diptych:\w+", each)} == exported


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
