"""Deterministic mode: the bits of an answer depend on the request alone.

A GEMM of one row may add in another order than one of sixteen rows, and so may a softmax over 40 keys and one
over 64. So the same token can get other bits in a larger batch, in a chunk, or behind a cached prefix. Here
the model computes one token at a time, as a separate decode step. Then shapes, and so the bits, follow from
the token's position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch

from diptych.reference.model_runner import ModelRunner
from diptych.reference.sampler import Sampler
from diptych.shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.model_runner import NO_FEATURES, RunnerFeatures
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.sampling.logprobs import input_logprobs_of
from diptych.shared.sampling.processors import ProcessorRows
from diptych.shared.types import (
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    LogprobsOutput,
    SampleOutput,
    SamplingBatchInfo,
)


class DeterministicModelRunner(ModelRunner):
    """Supports causal batches: EXTEND, MIXED, DECODE, and TARGET_VERIFY of chains."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        features: RunnerFeatures = NO_FEATURES,
    ) -> None:
        super().__init__(model, attention, kv_pool, features)
        self.behind_drafts: dict[int, tuple[int, list[list[torch.Tensor]]]] = {}
        """Row of the pool of states -> position of its first draft, and the states behind 0, 1, ... drafts"""

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            return super().forward(forward_batch)
        # --8<-- [start:deterministic-model]
        hidden, captured = [], []
        tokens = each_token_alone(forward_batch)
        if self.linear_attention is not None:
            tokens = self._with_draft_states(forward_batch, tokens)
        for token in tokens:
            if self.lora is not None:
                self.lora.prepare(token)
            plan = self.attention.plan(token)
            linear = None if self.linear_attention is None else self.linear_attention.for_batch(token)
            loc = token.out_cache_loc
            attention = BatchAttention(self.attention, plan, self.kv_pool, loc, linear=linear)
            states, states_captured = run_model(self.model, token, attention, self.capture_hidden)
            hidden.append(states)
            captured.append(states_captured)
        is_verify = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        rows = range(len(hidden)) if is_verify else forward_batch.last_token_rows.tolist()
        logits = torch.cat([self.model.compute_logits(hidden[row]) for row in rows])
        # --8<-- [end:deterministic-model]
        input_logprobs = None
        if forward_batch.input_logprob_rows is not None:
            states = torch.cat(hidden)
            input_logprobs = input_logprobs_of(forward_batch, states, self.model.compute_logits, 1)
        if self.capture_hidden is None:
            return LogitsOutput(logits, input_logprobs, None)
        empty = no_hidden_states(self.model, self.capture_hidden)
        return LogitsOutput(logits, input_logprobs, torch.cat([empty, *captured]))  # type: ignore[list-item]

    def _with_draft_states(
        self, batch: ForwardBatch, tokens: Iterable[ForwardBatch]
    ) -> Iterator[ForwardBatch]:
        """The same tokens, each to be computed before the next one is asked for. Drafts are computed as other
        tokens are, one after the other. So a verify step keeps the state behind each, and the next step of
        the row goes on from that behind the last accepted one."""
        linear: Any = self.linear_attention
        pool, is_verify = linear.pool, batch.forward_mode is ForwardMode.TARGET_VERIFY
        buffers = pool.inputs, pool.recurrent

        def keep(row: int) -> None:
            self.behind_drafts[row][1].append([buffer[:, row].clone() for buffer in buffers])

        def go_on_from(row: int, states: list[torch.Tensor]) -> None:
            for buffer, state in zip(buffers, states):
                buffer[:, row] = state

        rows = batch.req_pool_indices.tolist()
        for row, end, num in zip(rows, batch.seq_lens_cpu, batch.extend_seq_lens_cpu):
            start, (first, states) = end - num, self.behind_drafts.pop(row, (0, []))
            if states and start > 0 and row not in pool.loads:  # the request that had the row
                go_on_from(row, states[start - first])
                pool.num_seen[row] = start
            if is_verify:
                self.behind_drafts[row] = (start, [])
                keep(row)
        for token in tokens:
            yield token
            if is_verify:
                keep(int(token.req_pool_indices))
        for row in rows if is_verify else ():
            go_on_from(row, self.behind_drafts[row][1][0])


def each_token_alone(batch: ForwardBatch) -> Iterable[ForwardBatch]:
    """One decode batch of a single token for each token of the batch, those of a request in order, so that a
    token's KV is written before the next token reads it. Raises `ValueError` for a mask, whose order of keys
    is not that of positions."""
    if batch.custom_mask is not None or batch.tree_mask is not None:
        raise ValueError("a mask is not supported: deterministic=True supports causal attention")
    one = torch.ones(1, dtype=torch.int64, device=batch.input_ids.device)
    tokens = []
    row = 0
    for i, num_tokens in enumerate(batch.extend_seq_lens_cpu):
        for num_later in reversed(range(num_tokens)):
            seq_lens = batch.seq_lens[i : i + 1] - num_later
            tokens.append(
                ForwardBatch(
                    forward_mode=ForwardMode.DECODE,
                    input_ids=batch.input_ids[row : row + 1],
                    positions=batch.positions[row : row + 1],
                    req_pool_indices=batch.req_pool_indices[i : i + 1],
                    seq_lens=seq_lens,
                    out_cache_loc=batch.out_cache_loc[row : row + 1],
                    extend_seq_lens=one,
                    extend_start_loc=one - 1,
                    seq_lens_cpu=(batch.seq_lens_cpu[i] - num_later,),
                    extend_seq_lens_cpu=(1,),
                )
            )
            row += 1
    return tokens


class DeterministicSampler(Sampler):
    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        rows = [
            super(DeterministicSampler, self).sample(logits[i : i + 1], row_of(info, i), positions[i : i + 1])
            for i in range(len(logits))
        ]
        if not rows:
            return super().sample(logits, info, positions)
        ids = torch.cat([row.next_token_ids for row in rows])
        if not info.return_logprob:
            return SampleOutput(ids)
        found = [row.logprobs for row in rows if row.logprobs is not None]
        return SampleOutput(ids, LogprobsOutput(*(torch.cat(parts) for parts in zip(*found))))


def row_of(info: SamplingBatchInfo, row: int) -> SamplingBatchInfo:
    """The sampling parameters of one row."""
    tensors: dict[str, Any] = {
        field.name: value[row : row + 1]
        for field in fields(info)
        if isinstance(value := getattr(info, field.name), torch.Tensor)
    }
    processors = tuple(
        ProcessorRows(group.function, [0], [group.output_ids[group.rows.index(row)]])
        for group in info.processors
        if row in group.rows
    )
    return replace(info, **tensors, processors=processors)
