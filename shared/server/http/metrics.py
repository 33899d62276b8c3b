"""Prometheus metrics, with the stems of SGLang's names and no label that comes from a request."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.shared.server.engine.engine_client import EngineClient
from diptych.shared.server.http.tracing import NoTracer

_LATENCY = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per server, so that two servers in one process do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of ended requests.")
        self.generation_tokens = self._counter("generation_tokens_total", "Generated tokens.")
        self.cached_tokens = self._counter("cached_tokens_total", "Prompt tokens found in the prefix cache.")
        self.num_requests = self._counter("num_requests_total", "HTTP requests that reached the engine.")
        self.num_aborted = self._counter("num_aborted_requests_total", "Of these, aborted or failed ones.")
        self.compiled = self._counter(
            "kernels_compiled_after_ready_total", "Kernels that were compiled while requests waited."
        )
        self._counted = {
            "num_verifications": self._counter("spec_verify_total", "Verifications of drafts."),
            "num_drafted_tokens": self._counter("spec_draft_tokens_total", "Drafted tokens, by depth."),
            "num_accepted_tokens": self._counter("spec_accepted_tokens_total", "Accepted drafts."),
            "num_steps": self._counter("steps_total", "Forward passes."),
            "num_overlapped": self._counter(
                "overlapped_steps_total", "Steps that were launched while the one before was in flight."
            ),
        }
        self._counted_so_far = dict.fromkeys(self._counted, 0)
        self.queue_time = self._histogram("queue_time_seconds", "From arrival to the first step.")
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to token 1.")
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", "Between output tokens.")
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._gauges = {
            name: Gauge(f"diptych:{name}", text, registry=self.registry)
            for name, text in (
                ("num_running_reqs", "Requests that hold KV memory."),
                ("num_queue_reqs", "Requests that wait for memory."),
                ("num_grammar_queue_reqs", "Requests whose grammar is being compiled."),
                ("num_used_tokens", "KV slots of running requests."),
                ("token_usage", "Share of the KV pool that running requests hold."),
                ("cache_hit_rate", "Share of prompt tokens found in the prefix cache."),
                ("gen_throughput", "Generated tokens per second since the last scrape."),
                ("num_replicas", "Engines that share the requests and have not ended."),
                ("num_retracted_reqs", "Retractions since the start."),
                ("spec_accept_length", "Output tokens per verification; 0 without speculation."),
            )
        }
        self.tracer = NoTracer()
        self._last_scrape = (time.monotonic(), 0)
        self._num_compiled = 0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"diptych:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"diptych:{name}", text, buckets=_LATENCY, registry=self.registry)

    def tokens_came(self, num_new_tokens: int, seconds: float, is_first: bool) -> None:
        """One delivery to one sample: `seconds` after the previous one, or if first, after the arrival."""
        if is_first:
            self.time_to_first_token.observe(seconds)
        else:
            for _ in range(num_new_tokens):
                self.inter_token_latency.observe(seconds / num_new_tokens)
        self.generation_tokens.inc(num_new_tokens)

    def request_ended(
        self, num_prompt_tokens: int, num_cached_tokens: int, seconds: float, is_aborted: bool
    ) -> None:
        """An HTTP request ended, `seconds` after its arrival."""
        self.num_requests.inc()
        self.prompt_tokens.inc(num_prompt_tokens)
        self.cached_tokens.inc(num_cached_tokens)
        if is_aborted:
            self.num_aborted.inc()
        else:
            self.e2e_latency.observe(seconds)

    def render(self, client: EngineClient, max_total_tokens: int) -> bytes:
        """The text of /metrics."""
        load, now = client.load, time.monotonic()
        last_time, last_tokens = self._last_scrape
        self._last_scrape = (now, load.num_generated_tokens)
        num_used = load.num_used_tokens - load.num_evictable_tokens
        verifications = max(load.num_verifications, 1)
        accept_length = load.num_accepted_tokens / verifications + (load.num_verifications > 0)
        for name, counter in self._counted.items():
            counter.inc(getattr(load, name) - self._counted_so_far[name])
            self._counted_so_far[name] = getattr(load, name)
        self.compiled.inc(load.num_compiled_kernels - self._num_compiled)
        self._num_compiled = load.num_compiled_kernels
        for name, value in {
            "num_running_reqs": load.num_running,
            "num_queue_reqs": load.num_waiting,
            "num_grammar_queue_reqs": load.num_waiting_for_grammar,
            "num_used_tokens": num_used,
            "token_usage": num_used / max(max_total_tokens, 1),
            "cache_hit_rate": load.num_cached_tokens / max(load.num_prompt_tokens, 1),
            "gen_throughput": (load.num_generated_tokens - last_tokens) / max(now - last_time, 1e-9),
            "num_replicas": load.num_replicas,
            "num_retracted_reqs": load.num_retractions,
            "spec_accept_length": accept_length,
        }.items():
            self._gauges[name].set(value)
        return generate_latest(self.registry)
