"""Records a run: requests that arrive at given steps, until all of them have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.output_collector import OutputCollector
from diptych.shared.timeline import Recording, Span
from diptych.shared.tools.record.snapshot import (
    cached_pages,
    page_tables,
    shortened,
    shown,
    table_changes,
    tree_of,
)
from diptych.shared.tools.record.texts import Words, summary, waits
from diptych.shared.tools.record.watch import Call, Sampled, Watcher
from diptych.shared.types import Req, SamplingParams

MAX_STEPS = 600
"""Later steps are not in the recording: a page of them would be of no use, and large."""

MAX_PIECES = 200
"""Prompt tokens whose text is in the recording."""


@dataclass(frozen=True)
class Arrival:
    """A request, and the step before which it arrives (0: the first)."""

    step: int
    text: str  # what the page shows of its prompt
    prompt: str | list[int]
    params: SamplingParams


class Recorder:
    """`run` gives what the page needs, as plain data."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.watcher = Watcher(llm)
        self.words = Words(llm.assembly.parts.allocator.page_size)
        self.collectors: list[OutputCollector] = []
        self.steps: list[dict[str, Any]] = []
        self.num_steps = 0
        self._tables: dict[str, list[int]] = {}
        self._cached: set[int] = set()
        self._tree: list[list[Any]] = []
        self._num_retractions: dict[str, int] = {}
        self._gone: set[str] = set()

    def run(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        """Raises `ValueError` for a bad request, before any step."""
        llm, left = self.llm, sorted(arrivals, key=lambda arrival: arrival.step)
        bounds: list[tuple[float, float]] = []
        llm.timeline.start(llm.assembly.parts.allocator.device)
        zero = llm.timeline.clock()
        try:
            with self.watcher.watching():
                while left or not all(collector.is_finished for collector in self.collectors):
                    arrived = [arrival for arrival in left if arrival.step <= self.num_steps]
                    left = left[len(arrived) :]
                    start = llm.timeline.clock() - zero
                    new = [self._submit(arrival) for arrival in arrived]
                    waiting = [req.rid for req in llm.scheduler.state().waiting_queue]
                    llm.step()
                    if self.num_steps < MAX_STEPS:
                        self.steps.append(self._step(new, waiting))
                        bounds.append((start, llm.timeline.clock() - zero))
                    self.num_steps += 1
        finally:
            recording = llm.timeline.stop()
        self._drop_what_was_not_used()
        for step, (start, end) in zip(self.steps, bounds):
            step["time"] = times(recording, start, end)
        return {
            "facts": self._facts(),
            "requests": [self._request(*pair) for pair in zip(arrivals, self.collectors)],
            "code": {key: list(source) for key, source in self.watcher.sources.items()},
            "steps": self.steps,
        }

    def _submit(self, arrival: Arrival) -> str:
        number = len(self.collectors)
        name = chr(ord("A") + number) if number < 26 else str(number + 1)
        (collector,) = self.llm.submit(arrival.prompt, arrival.params, rid=name)
        self.collectors.append(collector)
        self.watcher.reqs[name] = collector.req
        return name

    def _step(self, arrived: list[str], waiting: list[str]) -> dict[str, Any]:
        """The step that has just run. waiting: the queue before it."""
        calls, sampled = self.watcher.take()
        llm, reqs = self.llm, self.watcher.reqs
        state = llm.scheduler.state()
        tables = page_tables(llm, [*state.running, *([state.chunked_req] if state.chunked_req else [])])
        cached, tree = cached_pages(llm), tree_of(llm, self._tree)
        retracted = [
            rid for rid, req in reqs.items() if req.num_retractions > self._num_retractions.get(rid, 0)
        ]
        self._num_retractions = {rid: req.num_retractions for rid, req in reqs.items()}
        ended = {
            rid: req.finished_reason.kind
            for rid, req in reqs.items()
            if req.finished_reason is not None and rid not in self._gone
        }
        self._gone |= set(ended)
        allocator, cache = llm.assembly.parts.allocator, llm.assembly.parts.tree_cache
        queue = [(req.rid, self._why(req, calls, waiting)) for req in state.waiting_queue]
        found = {
            "title": summary(calls, arrived, [rid for rid, _ in queue], ended),
            "arrived": arrived,
            "ended": ended,
            "queue": queue,
            "running": [[req.rid, req.kv_committed_len, len(req.output_ids)] for req in state.running],
            "chunked": None if state.chunked_req is None else state.chunked_req.rid,
            "rows": [list(row) for call in calls if call.name == "forward" for row in call.args["rows"]],
            "modes": [call.args["mode"] for call in calls if call.name == "forward"],
            "tokens": [token for each in sampled for token in self._tokens(each)],
            "events": self._events(calls, tree, retracted, queue),
            "tables": table_changes(self._tables, tables),
            "cached": [sorted(cached - self._cached), sorted(self._cached - cached)],  # new, gone
            "tree": None if tree == self._tree else tree,
            "memory": [allocator.available_size(), cache.evictable_size(), cache.protected_size()],
        }
        self._tables, self._cached, self._tree = tables, cached, tree
        return found

    def _events(
        self, calls: list[Call], tree: list[list[Any]], retracted: list[str], queue: list[tuple[str, str]]
    ) -> list[list[str]]:
        """[code, view, text] of what happened, in order."""
        codes, tried = self.watcher.codes, {call.args["rid"] for call in calls if call.name == "admit"}
        scheduler = codes.get("get_next_batch_to_run", codes["step"])
        splits = [
            [
                codes["match_prefix"],
                "tree",
                f"An edge is split behind “{row[2]}”, which two requests share.",
            ]
            for row in tree
            if row[5] == "split"
        ]
        lost = [
            f"Request {rid} is retracted, because the next token of every request does not fit. Its memory "
            "is free, its tokens are kept, and it is computed again later."
            for rid in retracted
        ]
        others = waits([pair for pair in queue if pair[0] not in tried])
        return [
            *self.words.events([call for call in calls if call.name == "admit"]),
            *splits,
            *self.words.events([call for call in calls if call.name != "admit"]),
            *([scheduler, "queue", text] for text in [*lost, *others]),
        ]

    def _why(self, req: Req, calls: Sequence[Call], waiting: Sequence[str]) -> str:
        """Why a request waits after this step."""
        for call in calls:
            if call.name == "admit" and call.args["rid"] == req.rid:
                return self.words.admit(call.args).partition(": ")[2].removesuffix(".")
        if req.rid not in waiting:
            return "it has come back to the queue in this step"
        running, limit = len(self.llm.scheduler.state().running), self.llm.config.max_running_requests
        running += sum(call.name == "finish" for call in calls)  # while the batch was chosen
        if limit is not None and running >= limit:
            return f"{limit} requests run, and no more than {limit} may"
        if waiting and waiting[0] != req.rid:
            return f"request {waiting[0]} is before it in the queue"
        return "no memory has become free since it was tried"

    def _tokens(self, sampled: Sampled) -> list[list[Any]]:
        """[request, position, token, logit, log p, rank, candidates] of each row with a meaning."""
        if sampled.chosen is None:
            return []
        columns = (
            sampled.rids, sampled.ends, sampled.are_whole, sampled.chosen, sampled.chosen_logits,
            sampled.log_totals, sampled.ranks, sampled.candidates, sampled.candidate_ids,
        )  # fmt: skip
        lists = [column.tolist() if isinstance(column, torch.Tensor) else column for column in columns]
        found = []
        for rid, end, is_whole, token, logit, total, rank, logits, ids in zip(*lists):
            if is_whole and rid and token >= 0:
                others = [[shown(self.llm, [i]), round(x, 2), prob(x - total)] for i, x in zip(ids, logits)]
                place = end - len(self.watcher.reqs[rid].origin_input_ids)
                text = shown(self.llm, [token])
                found.append([rid, place, text, round(logit, 2), prob(logit - total), rank, others])
        return found

    def _drop_what_was_not_used(self) -> None:
        """With overlap scheduling a step may compute a token behind the end of a request."""
        lens = {collector.rid: collector.num_output_tokens for collector in self.collectors}
        for step in self.steps:
            step["tokens"] = [[*token, token[1] < lens[token[0]]] for token in step["tokens"]]

    def _request(self, arrival: Arrival, collector: OutputCollector) -> dict[str, Any]:
        reason = collector.finish_reason
        return {
            "name": collector.rid,
            "text": shortened(arrival.text),
            "arrival": arrival.step,
            "prompt": collector.num_prompt_tokens,
            "pieces": [shown(self.llm, [i]) for i in collector.req.origin_input_ids[:MAX_PIECES]],
            "cached": collector.num_cached_tokens,
            "answer": collector.text,
            "tokens": collector.num_output_tokens,
            "reason": "" if reason is None else reason.kind,
        }

    def _facts(self) -> dict[str, Any]:
        llm = self.llm
        parts, config = llm.assembly.parts, llm.config
        allocator, pool = parts.allocator, llm.assembly.kv_pool
        return {
            "model": str(config.model),
            "panel": panel_of(llm.assembly.selection),
            "device": str(allocator.device),
            "dtype": str(llm.assembly.dtype).removeprefix("torch."),
            "page_size": allocator.page_size,
            "num_pages": allocator.size // allocator.page_size,
            "bytes_per_token": pool.num_bytes_per_token,
            "max_running": config.max_running_requests,
            "overlaps": llm.scheduler.overlaps,
            "num_steps": self.num_steps,
        }


def panel_of(selection: dict[str, str]) -> str:
    """The panel of most components, and those that differ."""
    panel = Counter(selection.values()).most_common(1)[0][0]
    others = [f"{component} is {name}" for component, name in selection.items() if name != panel]
    return ", ".join([f"{panel} panel", *others])


def times(recording: Recording, start: float, end: float) -> dict[str, Any]:
    """A step's spans in microseconds from its start: [name, from, to]."""

    def inside(spans: Sequence[Span]) -> list[list[Any]]:
        found = sorted((s for s in spans if start <= s.start < end), key=lambda span: span.start)
        return [[s.name, us(s.start - start), us(s.end - start)] for s in found]

    return {"length": us(end - start), "cpu": inside(recording.host), "device": inside(recording.forward)}


def us(seconds: float) -> int:
    return round(seconds * 1e6)


def prob(logprob: float) -> float:
    return round(float(torch.tensor(logprob).exp()), 4)
