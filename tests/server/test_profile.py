"""Profiles of a running engine, and traces of requests."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.shared.engine.perfetto import kernel_spans
from diptych.shared.server.http.metrics import Metrics
from diptych.shared.server.http.tracing import RequestFacts, Tracer, tracer_to
from diptych.shared.timeline import Span
from tests.server.running import RunningServer, serving

ASK = {"text": "Count from 3 to 9.", "sampling_params": {"temperature": 0, "max_new_tokens": 12}}


def post(server: RunningServer, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=120)


def test_a_profile_of_a_running_server(tmp_path: Path) -> None:
    with serving("--max-total-tokens", "2048", "--profile-dir", str(tmp_path)) as server:
        assert post(server, "/stop_profile").status_code == 400
        assert post(server, "/start_profile", {"nvtx": True}).status_code == 400  # without a GPU
        file = Path(post(server, "/start_profile").json()["file"])
        assert post(server, "/start_profile").status_code == 400
        post(server, "/generate", ASK)
        found = post(server, "/stop_profile").json()
        assert found == {"file": str(file), "num_steps": 10, "num_kernels": 0}
        events = json.loads(file.read_text())["traceEvents"]
        assert {"schedule", "process results"} <= {event["name"] for event in events if event["ph"] == "X"}
        assert sum(event["ph"] == "X" and event["name"] == "decode" for event in events) == 9
        lives = [event for event in events if event["ph"] in "be"]
        assert [event["ph"] for event in lives].count("b") == 3  # a request, its wait, and its decoding
        post(server, "/start_profile", {"num_steps": 3})
        post(server, "/generate", ASK)
        deadline = time.monotonic() + 20
        while len(list(tmp_path.glob("*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert post(server, "/stop_profile").status_code == 400  # it has stopped by itself
    with serving("--max-total-tokens", "2048") as server:
        assert "--profile-dir" in post(server, "/start_profile").text


def test_kernels_of_torchs_profiler() -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5.0, "dur": 2.0, "args": {"stream": 7}}
    other = {"ph": "X", "cat": "cpu_op", "name": "x"}
    trace = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [kernel, other]}
    (span,) = kernel_spans(trace, start_ns=1_001_000)
    assert span == Span("gemm", pytest.approx(4e-6), pytest.approx(6e-6), {"stream": 7})


FACTS = RequestFacts("a", 2.0, 0.5, None, 7, 3, 0, False)


class FakeProvider:
    """A provider that keeps what its spans get."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def get_tracer(self, name: str) -> FakeProvider:
        return self

    def start_span(self, name: str, start_time: int) -> FakeProvider:
        self.spans.append({"name": name, "start": start_time})
        return self

    def set_attributes(self, attributes: dict[str, Any]) -> None:
        self.spans[-1].update(attributes)

    def add_event(self, name: str, timestamp: int) -> None:
        self.spans[-1][name] = timestamp - self.spans[-1]["start"]

    def end(self, end_time: int) -> None:
        self.spans[-1]["length"] = end_time - self.spans[-1]["start"]


def test_a_span_for_each_request() -> None:
    provider, metrics = FakeProvider(), Metrics()
    metrics.tracer = Tracer(provider)
    metrics.tracer.request(FACTS)
    (span,) = provider.spans
    assert (span["name"], span["length"], span["first token"]) == ("llm_request", 2_000_000_000, 500_000_000)
    assert span["gen_ai.usage.completion_tokens"] == 3
    assert "gen_ai.latency.time_in_queue" not in span


def test_opentelemetry_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer_to(None).request(FACTS)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"needs OpenTelemetry: pip install 'diptych\[otel\]'"):
        tracer_to("http://127.0.0.1:4318/v1/traces")
