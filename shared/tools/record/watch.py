"""Notes what the components of an engine do, by the methods of their contracts: any implementation of them is
watched in the same way, and none of them knows of it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import AddReqResult, TokenToKVPoolAllocator
from diptych.shared.types import ForwardBatch, Req, ScheduleBatch

NUM_CANDIDATES = 5
ROOT = Path(__file__).resolve().parents[3]


class Call(NamedTuple):
    """A call of a component's method. code: the key of its source in `Watcher.sources`."""

    name: str  # component.method
    code: str
    args: dict[str, Any]  # what the texts of the page need, and no tensor


class Source(NamedTuple):
    file: str  # within the tree of the project, or as Python knows it
    line: int
    text: str


@dataclass
class Sampled:
    """Logits and tokens of a forward pass. The tensors are read when the step is over, so that nothing waits
    for the device before."""

    rids: list[str]
    ends: list[int]  # tokens of each request after the step
    are_whole: list[bool]  # whether its prompt is computed to the end: otherwise the token has no meaning
    candidates: torch.Tensor | None = None  # logits, [bs, k]
    candidate_ids: torch.Tensor | None = None
    chosen_logits: torch.Tensor | None = None  # [bs]
    log_totals: torch.Tensor | None = None  # [bs], logsumexp of the logits
    ranks: torch.Tensor | None = None  # [bs] of the chosen tokens; 0 is the largest logit
    chosen: torch.Tensor | None = None


@dataclass
class Watcher:
    """The calls since the last `take`."""

    llm: LLM
    reqs: dict[str, Req] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)  # name of a watched method -> its key in `sources`
    calls: list[Call] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    _matched: int = 0  # tokens, by the newest match

    def take(self) -> tuple[list[Call], list[Sampled]]:
        taken = self.calls, self.sampled
        self.calls, self.sampled = [], []
        return taken

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Methods are replaced within the block."""
        parts = self.llm.assembly.parts
        cache, allocator, scheduler = parts.tree_cache, parts.allocator, self.llm.scheduler
        with ExitStack() as stack:

            def watch(owner: Any, name: str, note: Callable[..., Any]) -> None:
                stack.enter_context(self._replaced(owner, name, note))

            self._code_of(scheduler.step, "step")
            if hasattr(scheduler, "get_next_batch_to_run"):  # not in the contract
                watch(scheduler, "get_next_batch_to_run", self._choose)
            watch(parts.prefill_adder, "add_one_req", self._add_one)
            watch(parts.prefill_adder, "add_chunked_req", self._add_chunk)
            watch(cache, "match_prefix", self._match)
            watch(cache, "evict", self._evict)
            watch(cache, "cache_unfinished_req", self._cache_req)
            watch(cache, "cache_finished_req", self._cache_req)
            for name in ("alloc_extend", "alloc_decode"):
                watch(allocator, name, self._alloc)
            watch(allocator, "free", self._free)
            watch(parts.model_runner, "forward_and_sample", self._forward_and_sample)
            watch(parts.model_runner, "forward", self._forward)
            watch(parts.sampler, "sample", self._sample)
            yield

    @contextmanager
    def _replaced(self, owner: Any, name: str, note: Callable[..., Any]) -> Iterator[None]:
        """`owner.name` calls note(method, code, ...). owner: an object, or a class whose instances do."""
        method = getattr(owner, name)
        code = self._code_of(method, name)
        was_own = name in vars(owner)

        def in_class(this: Any, *args: Any, **keywords: Any) -> Any:
            return note(partial(method, this), code, this, *args, **keywords)

        replacement = in_class if inspect.isclass(owner) else partial(note, method, code)
        setattr(owner, name, replacement)
        try:
            yield
        finally:
            if was_own:
                setattr(owner, name, method)
            else:
                delattr(owner, name)

    def _code_of(self, method: Any, name: str) -> str:
        function = inspect.unwrap(getattr(method, "__func__", method))
        key = self.codes[name] = f"{function.__module__}.{function.__qualname__}"
        if key not in self.sources:
            try:
                lines, line = inspect.getsourcelines(function)
                path = Path(inspect.getsourcefile(function) or "").resolve()
            except (OSError, TypeError):  # built in a prompt, or in C
                lines, line, path = [f"# no source of {name}"], 0, Path()
            file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
            text = textwrap.dedent("".join(lines)).rstrip()
            self.sources[key] = Source(file, line, text)
        return key

    def _note(self, name: str, code: str, **args: Any) -> None:
        self.calls.append(Call(name, code, args))

    # ---- the batch, and admission to it ----

    def _choose(self, method: Any, code: str) -> ScheduleBatch | None:
        batch: ScheduleBatch | None = method()
        if batch is not None:
            chosen = {req.rid for req in batch.reqs}
            paused = [req.rid for req in self.llm.scheduler.state().running if req.rid not in chosen]
            prompts = [req.rid for req in batch.reqs[: batch.num_extend_reqs]]
            decoding = [req.rid for req in batch.reqs[batch.num_extend_reqs :]]
            self._note("choose", code, prompts=prompts, decoding=decoding, paused=paused)
        return batch

    def _add_one(self, method: Any, code: str, adder: Any, req: Req) -> AddReqResult:
        limits = {"rem_total": adder.rem_total_tokens, "rem_chunk": adder.rem_chunk_tokens}
        self._matched = 0
        result: AddReqResult = method(req)
        admitted = result is AddReqResult.CONTINUE
        cached = len(req.prefix_indices) if admitted else self._matched
        self._note(
            "admit", code, rid=req.rid, result=result.name, cached=cached, tokens=req.num_tokens, **limits,
            now=req.extend_input_len if admitted else 0, answer=req.max_new_tokens - len(req.output_ids),
        )  # fmt: skip
        return result

    def _add_chunk(self, method: Any, code: str, adder: Any, req: Req) -> Req | None:
        before = len(adder.can_run_list)
        result: Req | None = method(req)
        now = req.extend_input_len if len(adder.can_run_list) > before else 0
        self._note("chunk", code, rid=req.rid, now=now, done=len(req.prefix_indices), tokens=req.num_tokens)
        return result

    # ---- memory ----

    def _match(self, method: Any, code: str, *args: Any, **keywords: Any) -> Any:
        result = method(*args, **keywords)
        self._matched = len(result.device_indices)
        return result

    def _evict(self, method: Any, code: str, num_tokens: int) -> int:
        place = len(self.calls)
        evicted: int = method(num_tokens)
        if evicted:
            self.calls.insert(place, Call("evict", code, {"wanted": num_tokens, "evicted": evicted}))
        return evicted

    def _cache_req(self, method: Any, code: str, req: Req, *args: Any, **keywords: Any) -> None:
        before, end, slots = req.cache_protected_len, req.kv_committed_len, self._num_free()
        place = len(self.calls)
        method(req, *args, **keywords)
        name = "finish" if "cache_finished" in code else "cache"
        noted = {"rid": req.rid, "before": before, "after": req.cache_protected_len, "end": end}
        noted["freed"] = self._num_free() - slots
        self.calls.insert(place, Call(name, code, noted))  # before what it did itself

    def _num_free(self) -> int:
        allocator: TokenToKVPoolAllocator = self.llm.assembly.parts.allocator
        return allocator.available_size()

    def _alloc(self, method: Any, code: str, *args: Any, **keywords: Any) -> Any:
        before, place = self._num_free(), len(self.calls)
        slots = method(*args, **keywords)
        if slots is not None:
            del self.calls[place:]  # decoding may be an extension by one token
            after, page_size = self._num_free(), self.llm.assembly.parts.allocator.page_size
            num_pages = (before - after) // page_size
            pages = dict.fromkeys(slot // page_size for slot in slots.tolist())
            new = list(pages)[len(pages) - num_pages :] if num_pages else []
            self._note("alloc", code, pages=new, slots=len(slots), free=after // page_size)
        return slots

    def _free(self, method: Any, code: str, slots: torch.Tensor) -> None:
        method(slots)
        if len(slots):
            page_size = self.llm.assembly.parts.allocator.page_size
            pages = sorted({slot // page_size for slot in slots.tolist()})
            self._note("free", code, pages=pages, free=self._num_free() // page_size)

    # ---- the model and the sampler ----

    def _forward(self, method: Any, code: str, batch: ForwardBatch, *args: Any, **keywords: Any) -> Any:
        self._note_batch(code, batch)
        return method(batch, *args, **keywords)

    def _forward_and_sample(
        self, method: Any, code: str, batch: ForwardBatch, sampler: Any, info: Any, num_token_ids: int
    ) -> Any:
        own = self._note_batch(code, batch)
        num_calls = len(self.calls)
        logits_output, sample_output = method(batch, sampler, info, num_token_ids)
        # The runner may call `forward` and the sampler itself: what these noted is the same pass.
        self.calls[num_calls:] = [call for call in self.calls[num_calls:] if call.name == "sample"][:1]
        del self.sampled[self.sampled.index(own) + 1 :]
        if own.chosen is None:
            self._keep(own, logits_output.next_token_logits[:, :num_token_ids], sample_output.next_token_ids)
        return logits_output, sample_output

    def _sample(self, method: Any, code: str, logits: torch.Tensor, info: Any, positions: Any) -> Any:
        result = method(logits, info, positions)
        num_greedy = len(logits) if info.is_all_greedy else int(info.is_greedy.sum())
        self._note("sample", code, num_greedy=num_greedy, rows=len(logits))
        if self.sampled:
            self._keep(self.sampled[-1], logits, result.next_token_ids)
        return result

    def _note_batch(self, code: str, batch: ForwardBatch) -> Sampled:
        by_row = {req.req_pool_idx: req for req in self.reqs.values() if req.req_pool_idx is not None}
        reqs = [by_row.get(row) for row in batch.req_pool_indices.tolist()]
        rids = ["" if req is None else req.rid for req in reqs]
        counts, ends = list(batch.extend_seq_lens_cpu), list(batch.seq_lens_cpu)
        are_whole = [req is None or end >= len(req.origin_input_ids) for req, end in zip(reqs, ends)]
        rows = list(zip(rids, counts, ends))
        self._note("forward", code, rows=rows, mode=batch.forward_mode.name.lower())
        self.sampled.append(Sampled(rids, ends, are_whole))
        return self.sampled[-1]

    def _keep(self, own: Sampled, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        if len(logits) != len(own.rids) or len(chosen) != len(own.rids):
            return  # nodes of a draft tree
        logits = logits.float()
        own.candidates, own.candidate_ids = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]), dim=-1)
        chosen = chosen.to(logits.device)
        own.chosen_logits = logits.gather(-1, chosen.clamp(min=0)[:, None])[:, 0]
        own.log_totals = logits.logsumexp(dim=-1)
        own.ranks = (logits > own.chosen_logits[:, None]).sum(dim=-1)
        own.chosen = chosen.clone()
