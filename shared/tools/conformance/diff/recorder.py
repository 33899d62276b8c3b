"""Records the results of every layer and op of a running engine, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from diptych.shared import interfaces
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import TopKOutput
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.linear_attention import LinearAttention, LinearLayer
from diptych.shared.modeling.stream import PartialSums, RankPart, Stream
from diptych.shared.types import (
    Accepted,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
)
from diptych.shared.types.attention import AttentionLayer

Key = tuple[str, int]
"""(request id, position): one token of a run. What is computed for it depends on neither batch nor step."""

Force = Callable[[list["Key | None"], torch.Tensor], torch.Tensor]

ForceExperts = Callable[[str, list["Key | None"], torch.Tensor, TopKOutput], TopKOutput]

ForceOp = Callable[[str, str, list["Key | None"]], "torch.Tensor | None"]

INPUT_IDS, LOGITS, SAMPLED_IDS = "input_ids", "logits", "sampled_ids"
OPS_PER_COPY = 64
EXPERTS = "experts"  # a kind of op: ids, the choice of a router


@dataclass
class Rows:
    """Tensors with one row for each key; None: a row that is not a token of a request, either padding or a
    rejected draft."""

    keys: list[Key | None]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # op -> [len(keys), ...], as executed

    def to_cpu(self) -> None:
        """Copies many tensors at a time: each copy waits for the device, for long where processes share
        it."""
        by_dtype: dict[torch.dtype, list[str]] = {}
        for op, tensor in self.tensors.items():
            by_dtype.setdefault(tensor.dtype, []).append(op)
        for ops in by_dtype.values():
            for first in range(0, len(ops), OPS_PER_COPY):
                some = ops[first : first + OPS_PER_COPY]
                flat = torch.cat([self.tensors[op].flatten() for op in some]).cpu()
                parts = flat.split([self.tensors[op].numel() for op in some])
                self.tensors.update({op: x.view_as(self.tensors[op]) for op, x in zip(some, parts)})


@dataclass
class StepRecord:
    """One batch. `step` counts from 1."""

    step: int
    forward_mode: ForwardMode
    rids: list[str | None]
    seq_lens: tuple[int, ...]
    tokens: Rows  # of every token: input id, layers, ops
    heads: Rows  # of every request's last token: logits, sampled id
    kinds: dict[str, str]  # op -> kind of op: its row in the tolerance table

    @property
    def schedule(self) -> dict[str, object]:
        """The scheduler's decisions, except for slots."""
        return {
            "forward mode": self.forward_mode.name,
            "requests": self.rids,
            "sequence lengths": list(self.seq_lens),
            "positions": [key and key[1] for key in self.tokens.keys],
            "input ids": self.tokens.tensors[INPUT_IDS].tolist(),
        }


class Recorder:
    """Attached to an engine until `close`. Forward hooks see the model's modules; attention and sampler are
    wrapped. Names are the model's own without the leading "model.": layers.3.mlp, norm, embed_tokens.

    It also records for layer i: layers.i.self_attn.rotated_q (the queries of attention), .stored_k and
    .stored_v (K and V of the new tokens in the pool), .attention (the output of attention), and of a mixture
    of experts layers.i.mlp.topk_ids, ascending. A module's result is recorded if it has one row for each
    token; of a decoder layer that returns a Stream its total. A MergedLinear is recorded as its parts.

    A decode batch may end in padding rows, which are not recorded. A step may take several passes of the
    model, over its tokens in order. While attached, the model runner replays no graphs, so that every op is
    recorded. With `graphs` it replays them, and records only logits and sampled ids of a replayed step. With
    tensor parallelism results of ops are parts, so logits and sampled ids are all that it records. Raises
    `ValueError` for a pipeline and for replicas, of which another process computes some.
    """

    def __init__(self, llm: LLM, graphs: bool = False) -> None:
        self.reqs: dict[str, Req] = {}  # every request submitted while attached
        self.force: Force | None = None  # (keys, sampled ids) -> the ids to go on with
        # (op, keys, router logits, what was chosen) -> the experts to go on with
        self.force_experts: ForceExperts | None = None
        # (op, kind, keys) -> the result to go on with, [len(keys), ...]; None: its own
        self.force_op: ForceOp | None = None
        if llm.config.pp * llm.config.dp > 1:
            raise ValueError(f"pp={llm.config.pp}, dp={llm.config.dp}: one process must compute all layers")
        self._has_parts = llm.config.tp > 1
        self._device = llm.assembly.parts.allocator.device
        self._records: list[StepRecord] = []
        self._undo: list[Callable[[], None]] = []
        self._num_steps = 0
        self._num_rows = 0  # of the batch that the model is computing, padding included
        self._open: StepRecord | None = None  # the batch that the model is computing
        self._last: StepRecord | None = None  # the batch whose logits wait for the sampler
        parts = llm.assembly.parts
        if not graphs:
            self._hide(parts.model_runner, "is_watched", True)
        self._forward = self._hide(parts.model_runner, "forward", self._watched_forward)
        self._forward_and_sample = self._hide(
            parts.model_runner, "forward_and_sample", self._watched_forward_and_sample
        )
        self._sample = self._hide(parts.sampler, "sample", self._watched_sample)
        self._add_request = self._hide(llm.scheduler, "add_request", self._watched_add_request)
        if parts.draft_tree is not None:
            self._accept = self._hide(parts.draft_tree, "accept", self._watched_accept)
        model = llm.assembly.model
        self._attach(model.register_forward_pre_hook(self._before_model, with_kwargs=True))
        for name, module in model.named_modules():
            self._watch(name.removeprefix("model."), module)

    def take(self) -> list[StepRecord]:
        """The batches since the last call, after their computation has ended: a scheduler may use its own
        stream."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # ---- wrappers ----

    def _hide(self, target: Any, name: str, instead: Any) -> Any:
        """Hide a method of the class behind an attribute of the instance, until the attribute is deleted."""
        hidden = getattr(target, name)
        setattr(target, name, instead)
        self._undo.append(lambda: delattr(target, name))
        return hidden

    def _attach(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _watch(self, name: str, module: nn.Module) -> None:
        kind = _kind_of(name, module)
        if kind is None:
            return

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(module, interfaces.MergedLinear):
                for part, its_output in module.split(output).items():
                    self._see(f"{name.rpartition('.')[0]}.{part}", kind, its_output)
            else:
                self._see(name, kind, output)

        self._attach(module.register_forward_hook(after))
        if isinstance(module, interfaces.RMSNorm):
            add_and_norm = module.add_and_norm

            def watched(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                normed, residual = add_and_norm(x, residual)
                self._see(name, kind, normed)
                return normed, residual

            self._hide(module, "add_and_norm", watched)

        elif isinstance(module, interfaces.MoE):
            self._watch_routing(f"{name}.topk_ids", module)

    def _watch_routing(self, op: str, module: interfaces.MoE) -> None:
        choose = module.topk

        def watched(router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None) -> TopKOutput:
            chosen = choose(router_logits, correction_bias)
            self._see(op, EXPERTS, chosen.topk_ids.sort(dim=1).values)
            if self._open is None or self.force_experts is None:
                return chosen
            return self.force_experts(op, self._open.tokens.keys, router_logits, chosen)

        module.topk = watched  # type: ignore[assignment]
        self._undo.append(lambda: setattr(module, "topk", choose))

    def _see(self, op: str, kind: str, output: Any) -> None:
        if self._open is None or self._has_parts:
            return  # a head's GEMM outside the forward pass; or a rank's part
        own = output
        if isinstance(output, Stream):
            output = output.total()
        rows = self._open.tokens
        if isinstance(output, torch.Tensor) and output.shape[:1] == (self._num_rows,):
            result = output[: len(rows.keys)].detach().clone()
            if op in rows.tensors and self._num_rows < len(rows.keys):  # a step of several passes
                result = torch.cat([rows.tensors[op], result])
            rows.tensors[op] = result
            self._open.kinds[op] = kind
            forced = None if self.force_op is None else self.force_op(op, kind, rows.keys)
            if forced is not None:
                _overwrite(own, forced)

    # ---- events of a step ----

    def _watched_add_request(self, req: Req) -> None:
        self._add_request(req)
        self.reqs[req.rid] = req

    def _watched_forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            return self._forward(forward_batch)
        record = self._new_record(forward_batch)
        self._open = record
        try:
            output = self._forward(forward_batch)
        finally:
            self._open = None
        self._note_logits(record, output)
        return output

    def _watched_sample(
        self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor, *args: Any, **more: Any
    ) -> SampleOutput:
        return self._note_sampled(self._sample(logits, info, positions, *args, **more))

    def _watched_forward_and_sample(
        self, forward_batch: ForwardBatch, *args: Any, **more: Any
    ) -> tuple[LogitsOutput, SampleOutput]:
        num_before = self._num_steps
        logits, sampled = self._forward_and_sample(forward_batch, *args, **more)
        if self._num_steps == num_before and forward_batch.forward_mode is not ForwardMode.IDLE:
            self._note_logits(self._new_record(forward_batch), logits)  # `forward` did not do it
        return logits, self._note_sampled(sampled)

    def _note_logits(self, record: StepRecord, output: LogitsOutput) -> None:
        record.heads.tensors[LOGITS] = output.next_token_logits.detach().clone()
        record.kinds[LOGITS] = "logits"
        self._records.append(record)
        self._last = record

    def _note_sampled(self, output: SampleOutput) -> SampleOutput:
        record = self._last
        if record is None or len(record.heads.keys) != len(output.next_token_ids):
            return output  # recorded already
        self._last = None
        record.heads.tensors[SAMPLED_IDS] = output.next_token_ids.detach().clone()
        record.kinds[SAMPLED_IDS] = "ids"
        if self.force is not None:
            output = output._replace(next_token_ids=self.force(record.heads.keys, output.next_token_ids))
        return output

    def _watched_accept(self, *args: Any, **more: Any) -> Accepted:
        """Mark the rejected drafts of the last verified batch: they were computed behind other tokens."""
        accepted = self._accept(*args, **more)
        record, paths = self._records[-1], accepted.node_indices.tolist()
        num_nodes = len(record.tokens.keys) // max(len(paths), 1)
        kept = {i * num_nodes + node for i, nodes in enumerate(paths) for node in nodes if node >= 0}
        keys = [key if row in kept else None for row, key in enumerate(record.tokens.keys)]
        record.tokens.keys = record.heads.keys = keys
        return accepted

    def _before_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the model an attention handle whose backend is recorded."""
        self._num_rows = len(kwargs["input_ids"] if "input_ids" in kwargs else args[0])

        def watched(value: Any) -> Any:
            if self._open is None or not isinstance(value, BatchAttention):
                return value
            watching: Any = _WatchedBackend(value, self._see)
            linear: Any = value.linear
            if linear is not None:
                linear = replace(linear, backend=_WatchedLinear(linear.backend, self._see))
            return replace(value, backend=watching, linear=linear)

        return tuple(map(watched, args)), {name: watched(value) for name, value in kwargs.items()}

    def _new_record(self, forward_batch: ForwardBatch) -> StepRecord:
        by_row = {req.req_pool_idx: rid for rid, req in self.reqs.items() if req.req_pool_idx is not None}
        rids = [by_row.get(row) for row in forward_batch.req_pool_indices.tolist()]
        positions = forward_batch.positions.tolist()
        tokens: list[Key | None] = []
        for rid, num_tokens in zip(rids, forward_batch.extend_seq_lens_cpu):
            first = len(tokens)
            tokens += [rid and (rid, p) for p in positions[first : first + num_tokens]]  # type: ignore[misc]
        is_verify = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        heads = tokens if is_verify else [tokens[row] for row in forward_batch.last_token_rows.tolist()]
        self._num_steps += 1
        return StepRecord(
            step=self._num_steps,
            forward_mode=forward_batch.forward_mode,
            rids=rids,
            seq_lens=forward_batch.seq_lens_cpu,
            tokens=Rows(tokens, {INPUT_IDS: forward_batch.input_ids.clone()}),
            heads=Rows(heads),
            kinds={INPUT_IDS: "ids"},
        )


def _overwrite(output: Any, value: torch.Tensor) -> None:
    """Overwrite a result in place, because the parts of a fused op are views. The total of a Stream becomes
    `value`."""
    if isinstance(output, Stream):
        output, pending = output
        if pending is not None:
            (pending[0] if isinstance(pending, (PartialSums, RankPart)) else pending).zero_()
    output[: len(value)].copy_(value.view_as(output[: len(value)]))


class _WatchedBackend:
    """Wraps an attention backend: records `run` and passes on everything else."""

    def __init__(self, attention: BatchAttention, see: Callable[[str, str, Any], None]) -> None:
        self._attention = attention
        self._see = see

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pool, slots = self._attention.kv_pool, self._attention.out_cache_loc
        name = f"layers.{layer.layer_id}.self_attn"
        self._see(f"{name}.rotated_q", "rotary", q)
        self._see(f"{name}.stored_k", "rotary", pool.k_buffer(layer.layer_id)[slots].to(q.dtype))
        self._see(f"{name}.stored_v", "linear", pool.v_buffer(layer.layer_id)[slots].to(q.dtype))
        output = self._attention.backend.run(q, layer, plan, k=k, v=v, out=out)
        self._see(f"{name}.attention", "attention", output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention.backend, name)


class _WatchedLinear:
    """Wraps linear attention: records what `run` returns."""

    def __init__(self, backend: LinearAttention, see: Callable[[str, str, Any], None]) -> None:
        self._backend = backend
        self._see = see

    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: Any
    ) -> torch.Tensor:
        output = self._backend.run(u, g, beta, layer, plan)
        self._see(f"states.{layer.layer_id}.recurrence", "linear attention", output)
        return output


def _kind_of(name: str, module: nn.Module) -> str | None:
    """The kind of op of a module; None if it is not recorded."""
    parts = name.split(".")
    if not name or isinstance(module, (nn.ModuleList, interfaces.RotaryEmbedding)):
        return None  # all layers share one rotary embedding: rotated_q and stored_k contain its result
    if "experts" in parts[:-1]:
        return None  # a single expert gets some of the tokens, in another order
    if isinstance(module, interfaces.RMSNorm):
        return "norm"
    if isinstance(module, (interfaces.SiluAndMul, interfaces.GeluTanhAndMul)):
        return "elementwise"
    if isinstance(module, nn.Embedding) or parts[-1] == "embed_tokens":
        return "embedding"
    if parts[-2:-1] == ["layers"]:
        return "layer"
    if parts[-1] in ("mlp", "experts", "shared_experts"):
        return "mlp"
    if parts[-1] == "self_attn":
        return None  # its result differs by panel: the values of the heads, or the output of o_proj
    return "linear" if not list(module.children()) else None
