"""Attention batches over poisoned pools, and dense attention in float64 to compare them with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch

from diptych.shared import registry
from diptych.shared.interfaces import AttentionBackend, ReqToTokenPool, TokenToKVPool
from diptych.shared.scheduling.pages import num_pages_of
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_close, expect_form
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import poison_, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import FP8, AttentionLayer, KVScales

T = TypeVar("T")
Mask = Literal["causal", "tree", "chain", "random", "blind"]
LAYER_ID, NUM_LAYERS = 1, 2
PLAIN_HEAD_DIMS, PLAIN_GROUP_SIZES = (64, 128), (1, 2, 4, 8)


@dataclass(frozen=True)
class AttentionCase:
    """The shape of an attention batch and its layer.

    `requests`: (cached tokens, new tokens) of each. `scale` multiplies head_dim ** -0.5. `sinks`: one logit
    for each head, repeated. `mask`: with "tree" a new token sees its ancestors among the new tokens and all
    cached tokens; "chain" is a tree without branches; with "random" it sees some tokens; with "blind" some
    rows see no token. `is_prefill`: EXTEND although each request has one new token. `tail`: the mask is a
    tree_mask of the last `tail` positions. `kv_scales`: the scales of the layer in an FP8 pool; None: a pool
    of `dtype`."""

    name: str
    requests: tuple[tuple[int, int], ...]
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    scale: float = 1.0
    sliding_window: int = -1
    attention_chunk: int = 0
    logit_cap: float = 0.0
    sinks: tuple[float, ...] = ()
    mask: Mask = "causal"
    is_prefill: bool = False
    tail: int | None = None
    kv_scales: KVScales | None = None
    kv_dtype: torch.dtype = FP8  # of an FP8 pool
    seed: int = 0

    def __post_init__(self) -> None:
        if any(len(request) != 2 or request[0] < 0 or request[1] < 1 for request in self.requests):
            raise ValueError(f"requests are pairs of (cached tokens, new tokens >= 1), not {self.requests}")
        if min(self.page_size, self.num_qo_heads, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError("sizes are at least 1")
        if self.num_qo_heads % self.num_kv_heads or self.mask not in get_args(Mask):
            raise ValueError("no such heads, or no such mask")

    @property
    def seq_lens(self) -> list[int]:
        return [cached + new for cached, new in self.requests]

    @property
    def extend_seq_lens(self) -> list[int]:
        return [new for _, new in self.requests]

    @property
    def forward_mode(self) -> ForwardMode:
        if not self.requests:
            return ForwardMode.IDLE
        if self.mask != "causal":
            return ForwardMode.TARGET_VERIFY
        if max(self.extend_seq_lens) == 1 and not self.is_prefill:
            return ForwardMode.DECODE
        is_mixed = min(self.extend_seq_lens) == 1 and max(self.extend_seq_lens) > 1
        return ForwardMode.MIXED if is_mixed else ForwardMode.EXTEND

    @property
    def unusual(self) -> list[str]:
        """The features that a backend may refuse. If it is empty, no backend may refuse the case."""
        found = {
            "dtype": self.dtype not in HALF_TYPES,
            "head_dim": self.head_dim not in PLAIN_HEAD_DIMS,
            "num_qo_heads": self.num_qo_heads // self.num_kv_heads not in PLAIN_GROUP_SIZES,
            "scale": self.scale != 1.0,
            "sliding_window": self.sliding_window >= 0,
            "attention_chunk": self.attention_chunk > 0,
            "logit_cap": self.logit_cap > 0,
            "sinks": bool(self.sinks),
            "custom_mask": self.mask != "causal",
            "tree_mask": self.tail is not None,
            "kv_cache_dtype": self.kv_scales is not None,
        }
        return [name for name, is_unusual in found.items() if is_unusual]

    def make(self) -> AttentionBatch:
        return AttentionBatch(self)


Span = tuple[int, int, int]  # request, first position, end


class RefusalWarning(UserWarning):
    """A backend does not support a case, and raised the error that its contract requires."""


class AttentionBatch:
    """The tensors of a case. Pages are scattered over the pool. Every slot that is not live holds NaN, and so
    do the dummy page and the other layer. Unwritten positions of a row name such slots."""

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        inputs, device, page_size = Inputs(case.seed), check_device(), case.page_size
        pools = registry.load("memory_pool", "reference")
        num_pages = sum(num_pages_of(n, page_size) for n in case.seq_lens) + 8
        self.kv_pool = self._kv_pool(pools, num_pages * page_size)
        for i in range(NUM_LAYERS):
            poison_(self.kv_pool.k_buffer(i))
            poison_(self.kv_pool.v_buffer(i))
        self.req_to_token_pool: ReqToTokenPool = pools.ReqToTokenPool(
            len(case.requests) + 2, max(case.seq_lens, default=1) + 3, device
        )
        pages = (inputs.permutation(num_pages) + 1).tolist()
        dead_slot = pages.pop() * page_size
        self.req_to_token_pool.req_to_token[1:] = dead_slot
        self.rows: list[int] = self.req_to_token_pool.alloc(len(case.requests))[::-1]
        self.slots: list[torch.Tensor] = []
        for row, seq_len in zip(self.rows, case.seq_lens):
            starts = torch.tensor([pages.pop() * page_size for _ in range(0, seq_len, page_size)])
            slots = (starts[:, None] + torch.arange(page_size)).flatten()[:seq_len].to(device)
            self.slots.append(slots)
            self.req_to_token_pool.write(row, 0, slots)
        self.store_kv(LAYER_ID, inputs)
        num_tokens = sum(case.extend_seq_lens)
        self.q = inputs.normal(num_tokens, case.num_qo_heads, case.head_dim, dtype=case.dtype)
        self.masks = [self._mask(inputs, cached, new) for cached, new in case.requests]
        whole = [(i, cached, cached + new) for i, (cached, new) in enumerate(case.requests)]
        self.forward_batch = self.forward_batch_of(whole, case.forward_mode)
        self.layer = self._layer(inputs)

    def _kv_pool(self, pools: Any, size: int) -> TokenToKVPool:
        case = self.case
        sizes = size, case.page_size, NUM_LAYERS, case.num_kv_heads, case.head_dim
        if case.kv_scales is None:
            pool: TokenToKVPool = pools.TokenToKVPool(*sizes, case.dtype, check_device())
        else:  # the scales of the other layer would change every result
            other = KVScales(3 * case.kv_scales.k, 5 * case.kv_scales.v)
            pool = pools.TokenToKVPool(*sizes, case.kv_dtype, check_device(), [other, case.kv_scales])
        return pool

    def _layer(self, inputs: Inputs) -> AttentionLayer:
        case, device = self.case, check_device()
        sinks = [case.sinks[h % len(case.sinks)] for h in range(case.num_qo_heads)] if case.sinks else None
        return AttentionLayer(
            LAYER_ID,
            case.num_qo_heads,
            case.num_kv_heads,
            case.head_dim,
            scale=case.scale * case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            attention_chunk=case.attention_chunk,
            logit_cap=case.logit_cap,
            sinks=None if sinks is None else torch.tensor(sinks, dtype=torch.float32, device=device),
        )

    def store_kv(self, layer_id: int, inputs: Inputs) -> None:
        """Random K and V for every live token."""
        for slots in self.slots:
            shape = (len(slots), self.case.num_kv_heads, self.case.head_dim)
            k, v = (inputs.normal(*shape, dtype=self.case.dtype) for _ in range(2))
            self.kv_pool.store(layer_id, slots, k, v)

    def forward_batch_of(self, spans: list[Span], forward_mode: ForwardMode) -> ForwardBatch:
        """A step in which request i computes its positions [start, end), for each (i, start, end)."""
        device = check_device()

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        empty = tensor([])
        extend_seq_lens = [end - start for _, start, end in spans]
        positions = tensor([p for _, start, end in spans for p in range(start, end)])
        masks = [mask for mask in self.masks if mask is not None]
        flat = torch.cat([mask.flatten() for mask in masks]).to(device) if masks else None
        tail = self.case.tail
        return ForwardBatch(
            forward_mode=forward_mode,
            input_ids=torch.zeros_like(positions),
            positions=positions,
            req_pool_indices=tensor([self.rows[i] for i, _, _ in spans]),
            seq_lens=tensor([end for _, _, end in spans]),
            out_cache_loc=torch.cat([empty, *(self.slots[i][start:end] for i, start, end in spans)]),
            extend_seq_lens=tensor(extend_seq_lens),
            extend_start_loc=tensor(extend_seq_lens).cumsum(0) - tensor(extend_seq_lens),
            seq_lens_cpu=tuple(end for _, _, end in spans),
            extend_seq_lens_cpu=tuple(extend_seq_lens),
            custom_mask=flat if tail is None else None,
            tree_mask=None
            if tail is None
            else torch.stack([last_columns(mask, tail) for mask in masks]).to(device),
        )

    def rows_of(self, spans: list[Span]) -> list[int]:
        """The rows of q and of the output for these positions."""
        firsts = [sum(self.case.extend_seq_lens[:i]) for i in range(len(self.rows))]
        return [
            firsts[i] + p - self.case.requests[i][0] for i, start, end in spans for p in range(start, end)
        ]

    def backend(self, impl: type[AttentionBackend]) -> AttentionBackend:
        return impl(self.req_to_token_pool, self.kv_pool)

    def run(self, impl: type[AttentionBackend]) -> torch.Tensor:
        backend = self.backend(impl)
        return self.run_planned(backend, backend.plan(self.forward_batch))

    def run_planned(self, backend: AttentionBackend, plan: Any, **options: Any) -> torch.Tensor:
        output: torch.Tensor = run_poisoned(partial(backend.run, self.q, self.layer, plan, **options))
        return output

    def new_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the new tokens as they are in the pool."""
        new = self.forward_batch.out_cache_loc
        return self.kv_pool.k_buffer(LAYER_ID)[new], self.kv_pool.v_buffer(LAYER_ID)[new]

    def output_like(self, num_tokens: int | None = None) -> torch.Tensor:
        """A tensor with the form of the output and `num_tokens` rows; None: as many as q has."""
        n = self.q.shape[0] if num_tokens is None else num_tokens
        return self.q.new_empty(n, self.layer.num_qo_heads, self.layer.v_head_dim or self.layer.head_dim)

    def expect(self, output: torch.Tensor, what: str = "output") -> None:
        expect_form(what, output, self.output_like())
        expect_close(what, output, self.expected(), tolerance("attention", self.case.dtype))

    def expected(self) -> torch.Tensor:
        """Dense attention in float64, a request and a head at a time."""
        case = self.case
        layer, pool = self.layer, self.kv_pool
        scales = pool.kv_scales[layer.layer_id]
        k_buffer = scales.k * pool.k_buffer(layer.layer_id).cpu().to(torch.float64)
        v_buffer = scales.v * pool.v_buffer(layer.layer_id).cpu().to(torch.float64)
        q = self.q.cpu().to(torch.float64)
        output = torch.zeros_like(q)
        start = 0
        for slots, (cached, new), mask in zip(self.slots, case.requests, self.masks):
            keys, values = k_buffer[slots.cpu()], v_buffer[slots.cpu()]
            query_positions = torch.arange(cached, cached + new)[:, None]
            key_positions = torch.arange(cached + new)[None]
            sees = key_positions <= query_positions if mask is None else mask
            if case.tail is not None:  # positions along the branch
                key_positions = sees.cumsum(dim=1) - 1
                query_positions = key_positions[:, -1:]
            if layer.sliding_window >= 0:
                sees = sees & (query_positions - key_positions <= layer.sliding_window)
            if layer.attention_chunk > 0:
                chunk = layer.attention_chunk
                sees = sees & (query_positions // chunk == key_positions // chunk)
            for h in range(case.num_qo_heads):
                kv_head = h // (case.num_qo_heads // case.num_kv_heads)
                scores = layer.scale * (q[start : start + new, h] @ keys[:, kv_head].T)
                if layer.logit_cap > 0:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                scores = scores.masked_fill(~sees, -torch.inf)
                if layer.sinks is not None:
                    sink = layer.sinks[h].cpu().to(torch.float64).expand(new, 1)
                    scores = torch.cat([scores, sink], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : cached + new]
                weights = torch.where(sees.any(1, keepdim=True), weights, 0.0)
                output[start : start + new, h] = weights @ values[:, kv_head]
            start += new
        return output

    def _mask(self, inputs: Inputs, cached: int, new: int) -> torch.Tensor | None:
        if self.case.mask == "causal":
            return None
        if self.case.mask in ("random", "blind"):
            sees = inputs.uniform(new, cached + new).cpu() < 0.3
            sees[torch.arange(new), torch.arange(cached, cached + new)] = True
            if self.case.mask == "blind":
                sees[::2] = False
            return sees
        if self.case.mask == "chain":
            parents = list(range(-1, new - 1))
        else:
            parents = [-1, *(int(inputs.integers(i, 1)) for i in range(1, new))]
        return tree_mask(parents, cached)


def tree_mask(parents: list[int], prefix_len: int) -> torch.Tensor:
    """bool [n, prefix_len + n]: every node sees the prefix, itself and its ancestors. -1: no parent."""
    mask = torch.zeros(len(parents), prefix_len + len(parents), dtype=torch.bool)
    mask[:, :prefix_len] = True
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            mask[node, prefix_len + ancestor] = True
            ancestor = parents[ancestor]
    return mask


def last_columns(mask: torch.Tensor, num: int) -> torch.Tensor:
    """The last `num` columns of a mask, with meaningless columns in front if the mask has fewer."""
    return torch.nn.functional.pad(mask, (max(num - mask.shape[1], 0), 0), value=True)[:, -num:].contiguous()


def run_or_refuse(impl: type[AttentionBackend], batch: AttentionBatch) -> torch.Tensor | None:
    """The output; None if the backend refuses, and the contract allows it."""
    return or_refusal(batch.case, partial(batch.run, impl))


def or_refusal(case: AttentionCase, call: Callable[[], T]) -> T | None:
    """The result of call(); None for an allowed refusal: the case has an unusual feature, and the error names
    the feature and what is supported. Each refusal emits a `RefusalWarning`."""
    try:
        return call()
    except ValueError as error:
        unusual, message = case.unusual, str(error)
        named = [name for name in unusual if name in message or name.replace("_", " ") in message]
        if not unusual:
            raise Mismatch("a plain layer is supported", "an output", f"ValueError: {error}") from error
        if "support" not in message or not named:
            wanted = f"what is supported, and one of {', '.join(unusual)}"
            raise Mismatch("what a refusal names", wanted, message) from error
        warnings.warn(f"refused: {case.name}: {message}", RefusalWarning, stacklevel=2)
        return None


def expect_attention(impl: type[AttentionBackend], case: AttentionCase) -> None:
    """Check that the batch's output equals dense attention, or that the refusal is allowed by the
    contract."""
    batch = case.make()
    output = run_or_refuse(impl, batch)
    if output is not None:
        batch.expect(output)


def in_types(case: AttentionCase, *dtypes: torch.dtype) -> tuple[AttentionCase, ...]:
    return tuple(replace(case, name=f"{case.name}, {type_name(dtype)}", dtype=dtype) for dtype in dtypes)
