"""Times a round of speculation - draft, verify, accept, extend the drafter - against a plain decode step.

The pieces are the calls that a scheduler makes, on the engine's own components, for requests of a given
length. The scheduler's own work is not included. With random weights almost nothing is accepted. The time of
a round does not depend on what it accepts, so this measures only the cost;
shared/tools/bench/speculation_gain.py measures the gain.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from diptych.shared.config import draft_shape
from diptych.shared.engine.processes.start import on_every_rank
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.speculation.node_sampling import expand_to_nodes
from diptych.shared.tools.bench.step import check_flags, step_of, time_step
from diptych.shared.tools.bench.step_inputs import (
    StepCase,
    check_batch,
    fill_pool,
    make_sampling_info,
    place_requests,
)
from diptych.shared.types import (
    DraftBatch,
    DraftShape,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SampleOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from diptych.shared.engine.build.assembly import Assembly
    from diptych.shared.engine.llm import LLM


@dataclass(frozen=True)
class RoundResult:
    """One measured case. Times are medians in seconds, on the device unless noted."""

    batch_size: int
    context_len: int  # tokens with KV before the round
    shape: DraftShape
    decode: float  # a plain step of the same requests
    pieces: dict[str, float]
    round: float  # all pieces, one after the other
    host: float  # of launching a round on an idle device; hidden where it is below the round's

    @property
    def ratio(self) -> float:
        """The cost of a round in plain steps. Speculation pays if more tokens than this are accepted."""
        return self.round / self.decode


def engine_flags(batches: Sequence[int], flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of an engine that runs these cases; the user's `flags` take precedence."""
    check_flags(flags)
    graphs = {} if "cuda_graph_max_bs" in flags else {"cuda_graph_bs": tuple(sorted(set(batches)))}
    return {"max_running_requests": max(batches), **graphs, **flags}


def check_case(batch_size: int, context_len: int) -> None:
    for name, number in (("batch", batch_size), ("context", context_len)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def measure_round(llm: LLM, batch_size: int, context_len: int, num_repeats: int = 30) -> RoundResult:
    """Measure a round on an idle engine that speculates. The KV pool is overwritten."""
    check_case(batch_size, context_len)
    check_batch(batch_size, llm.config)
    if not llm.flush_cache():
        raise ValueError("the engine is busy: a benchmark needs it for itself")
    if llm.assembly.parts.drafter is None:
        raise ValueError("the engine does not speculate: set speculative=eagle3 or another algorithm")
    return on_every_rank(llm.assembly, time_round, batch_size, context_len, num_repeats)


def time_round(assembly: Assembly, batch_size: int, context_len: int, num_repeats: int) -> RoundResult:
    """Measure a round. All ranks call it."""
    parts, shape = assembly.parts, draft_shape(assembly.config)

    def times_of(call: Callable[[], object]) -> tuple[list[float], list[float]]:
        return time_step(call, parts.allocator.device, num_repeats, assembly.tp)

    fill_pool(assembly.kv_pool)
    with step_of(parts, StepCase("decode", batch_size, context_len + 1), 0.0, 0, assembly.lora) as step:
        decode = statistics.median(times_of(step)[0])
    with pieces_of(parts, shape, batch_size, context_len) as pieces:
        times = {name: statistics.median(times_of(call)[0]) for name, call in pieces.items()}

        def whole() -> None:
            for call in pieces.values():
                call()

        rounds, hosts = times_of(whole)
    whole_time, host_time = statistics.median(rounds), statistics.median(hosts)
    return RoundResult(batch_size, context_len, shape, decode, times, whole_time, host_time)


@contextmanager
def pieces_of(
    parts: SchedulerParts, shape: DraftShape, batch_size: int, context_len: int
) -> Iterator[dict[str, Callable[[], object]]]:
    """The pieces of a round of greedy requests, in order; each can be called repeatedly."""
    drafter, draft_tree = parts.drafter, parts.draft_tree
    assert drafter is not None
    assert draft_tree is not None
    num_nodes, num_kept = shape.num_draft_tokens, min(shape.num_steps + 1, shape.num_draft_tokens)
    num_slots = max(drafter.num_slots(shape), num_nodes)
    case = StepCase("decode", batch_size, context_len + num_slots)
    rows = place_requests(parts, case)
    batch = _draft_batch(parts, rows, context_len, num_slots)
    try:
        before = _draft_batch(parts, rows, context_len - 1, 1)
        newest = _tokens(ForwardMode.EXTEND, before, before.root_ids[:, None], before.seq_lens)
        hidden_states = parts.model_runner.forward(newest).hidden_states
        drafter.extend(batch.reqs, newest, hidden_states, batch.root_ids)
        tree = drafter.draft(batch, shape)
        positions = tree.positions(batch.seq_lens)
        tree_mask = tree.visible.clone() if shape.top_k > 1 else None
        nodes = _tokens(ForwardMode.TARGET_VERIFY, batch, tree.token_ids.clone(), positions)
        verified = replace(nodes, tree_mask=tree_mask)
        info = expand_to_nodes(make_sampling_info(parts, case, 0.0), tree)

        def verify() -> tuple[LogitsOutput, SampleOutput]:
            return parts.model_runner.forward_and_sample(verified, parts.sampler, info, parts.num_token_ids)

        output, sampled = verify()
        target_ids = sampled.next_token_ids.view(batch_size, num_nodes)
        path = batch.seq_lens[:, None] + torch.arange(num_kept, device=positions.device)
        kept = _tokens(ForwardMode.EXTEND, batch, nodes.input_ids.view(-1, num_nodes)[:, :num_kept], path)
        if drafter.runs_ahead:
            kept = replace(kept, num_kept=torch.full_like(batch.seq_lens, num_kept))
        hidden_states = output.hidden_states
        if hidden_states is not None:
            hidden_states = hidden_states[: kept.num_tokens].clone()
        yield {
            "draft": lambda: drafter.draft(batch, shape),
            "verify": verify,
            "accept": lambda: draft_tree.accept(tree, target_ids, num_kept - 1),
            "extend": lambda: drafter.extend(batch.reqs, kept, hidden_states, batch.root_ids),
        }
    finally:
        for req in batch.reqs:
            drafter.forget(req)
        parts.req_to_token_pool.free(rows)


def _draft_batch(parts: SchedulerParts, rows: list[int], context_len: int, num_slots: int) -> DraftBatch:
    """A draft batch of requests with `context_len` tokens of KV and `num_slots` slots behind them."""
    bs, pool, device = len(rows), parts.req_to_token_pool, parts.allocator.device
    slots = torch.stack([pool.read(row, context_len, context_len + num_slots) for row in rows])
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    return DraftBatch(
        reqs=[Req(f"round-{i}", [0], params, i) for i in range(bs)],
        root_ids=torch.randint(parts.num_token_ids, (bs,), generator=torch.Generator().manual_seed(0)).to(
            device
        ),
        req_pool_indices=torch.tensor(rows, device=device),
        seq_lens=torch.full((bs,), context_len, device=device),
        seq_lens_cpu=(context_len,) * bs,
        slots=slots.to(device),
    )


def _tokens(
    mode: ForwardMode, batch: DraftBatch, input_ids: torch.Tensor, positions: torch.Tensor
) -> ForwardBatch:
    """The step that computes input_ids [bs, n] in the first n slots behind each request."""
    bs, num_each = input_ids.shape
    return ForwardBatch(
        forward_mode=mode,
        input_ids=input_ids.flatten(),
        positions=positions.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens + num_each,
        out_cache_loc=batch.slots[:, :num_each].flatten(),
        extend_seq_lens=torch.full_like(batch.seq_lens, num_each),
        extend_start_loc=torch.arange(bs, device=input_ids.device) * num_each,
        seq_lens_cpu=tuple(n + num_each for n in batch.seq_lens_cpu),
        extend_seq_lens_cpu=(num_each,) * bs,
    )
