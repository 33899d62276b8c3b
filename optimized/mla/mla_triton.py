"""Latent attention by three Triton kernels: absorbed for decoding and drafts, expanded for prompts.

Differs from reference: the form follows the batch. Requests that decode, drafts and short prompts attend to
the pool's rows. For longer prompts keys and values of all heads are made: those of the cached prefix chunk by
chunk, each chunk's result merged into the next. Decoding requests of a mixed step are computed as such. In
CUDA graphs every prompt is absorbed, since lengths are unknown there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from triton.runtime.jit import JITFunction

from diptych.optimized.kernels.attention.decode_attention import _decode_kernel
from diptych.optimized.kernels.attention.expanded_attention import AttentionState, expanded_attention
from diptych.optimized.kernels.attention.mla_decode import mla_decode
from diptych.optimized.kernels.attention.mla_extend import mla_extend
from diptych.optimized.kernels.attention.mla_small_batch import MAX_TOKENS, absorb_few
from diptych.optimized.mixed_batch import num_decoding, split_mixed
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.interfaces.mla_attention import MLAAttentionBackend
from diptych.shared.modeling.forward import attention_output
from diptych.shared.to_device import to_device
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer, MLALayer

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

EXPAND_FROM = 256
"""The mean number of new tokens per request from which expanding is cheaper. Expanding a key takes 2 * 512 *
256 operations per head and saves 1,536 for each query that sees it. So it pays from 170 queries on; a token
of a prompt is seen by half of the others."""
CHUNK_KEYS = 8192
"""The number of keys of cached prefixes, over all requests, that are expanded together: 67 MB with 16
heads."""
MAX_GROUPS = 128


class Keys(NamedTuple):
    """Some keys of each request."""

    slots: torch.Tensor  # int64 [num_keys]
    indptr: torch.Tensor  # int64 [bs + 1]


class Expansion(NamedTuple):
    """The keys of a batch of prompts: chunks of cached prefixes, then the new tokens."""

    prefix: list[Keys]
    own: Keys


class Part(NamedTuple):
    """Some requests of a batch, its tokens in order."""

    batch: ForwardBatch
    counters: torch.Tensor  # int32, zeros between launches: see mla_decode
    expansion: Expansion | None = None  # None: absorbed
    is_ragged: bool = False  # rows that are no token stay as they are


class TritonMLA(MLAAttentionBackend):
    """Supports every batch of the contract in float16, bfloat16 and float32, FP8 rows, and any sizes."""

    supports_cuda_graph = True
    accepts_seq_len_upper_bounds = True
    supports_ragged_graphs = True

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        if kv_pool.dtype not in (*DTYPES, *FP8_TYPES):
            supported = f"{DTYPES} and {tuple(FP8_TYPES)}"
            raise ValueError(f"dtype {kv_pool.dtype} is not supported: TritonMLA supports {supported}")
        if kv_pool.device.type != "cuda" and isinstance(_decode_kernel, JITFunction):
            raise ValueError(
                f"device {kv_pool.device.type} is not supported: TritonMLA supports cuda, and others in "
                "Triton's interpreter (TRITON_INTERPRET=1)"
            )
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self.counters = self._new_counters(req_to_token_pool.req_to_token.shape[0])

    def plan(self, forward_batch: ForwardBatch) -> list[Part]:
        """Parts of the batch, in the order of its tokens."""
        batch = forward_batch
        if batch.batch_size * MAX_GROUPS > self.counters.numel():
            self.counters = self._new_counters(batch.batch_size)
        if batch.forward_mode is ForwardMode.MIXED and batch.custom_mask is None:
            parts = split_mixed(batch, num_decoding(batch))
            return [self._part(part) for part in parts if part.batch_size > 0]
        return [self._part(batch)]

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> list[Part]:
        return [Part(forward_batch, self.counters)]

    def replan(self, plan: list[Part], forward_batch: ForwardBatch) -> None:
        """Nothing: the kernels read the batch's buffers."""

    def plan_ragged(self, forward_batch: ForwardBatch) -> list[Part]:
        return [Part(forward_batch, self.counters, is_ragged=True)]

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: list[Part],
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if q.dtype not in DTYPES:
            raise ValueError(f"dtype {q.dtype} is not supported: TritonMLA supports {DTYPES}")
        mla, output, start = cast(MLALayer, layer), attention_output(q, layer, out), 0
        for part in plan:
            tokens = slice(start, start + part.batch.num_tokens)
            start = tokens.stop
            if part.expansion is not None:
                self._run_expanded(q[tokens], mla, part.expansion, output[tokens])
                continue
            if part.batch.forward_mode.is_decode and part.batch.batch_size <= MAX_TOKENS:
                self._decode_few(q[tokens], mla, part, output[tokens])
                continue
            latent = self._attend_to_rows(absorb(q[tokens], mla), mla, part)
            if part.is_ragged:
                live = _live_rows(part.batch)[:, None, None]
                output.copy_(torch.where(live, project_values(latent, mla), output))
            else:
                project_values(latent, mla, out=output[tokens])
        return output

    def _part(self, batch: ForwardBatch) -> Part:
        is_causal = batch.custom_mask is None and batch.tree_mask is None
        if not (batch.forward_mode.is_prefill and is_causal):
            return Part(batch, self.counters)
        if batch.num_tokens < EXPAND_FROM * batch.batch_size:
            return Part(batch, self.counters)
        return Part(batch, self.counters, self._expansion(batch))

    def _expansion(self, batch: ForwardBatch) -> Expansion:
        prefix_lens = [n - new for n, new in zip(batch.seq_lens_cpu, batch.extend_seq_lens_cpu)]
        most = max(CHUNK_KEYS // batch.batch_size, 1)  # of a request
        prefix = [
            self._prefix_keys(batch, start, [min(max(n - start, 0), most) for n in prefix_lens])
            for start in range(0, max(prefix_lens), most)
        ]
        own = Keys(batch.out_cache_loc, _indptr(batch.extend_seq_lens))
        return Expansion(prefix, own)

    def _prefix_keys(self, batch: ForwardBatch, start: int, lens: list[int]) -> Keys:
        """lens[i] keys of request i, from position `start` on."""
        num_keys, device = to_device(lens, torch.int64, self.kv_pool.device), self.kv_pool.device
        indptr = _indptr(num_keys)
        requests = torch.arange(len(lens), device=device)
        requests = requests.repeat_interleave(num_keys, output_size=sum(lens))
        positions = torch.arange(sum(lens), device=device) - indptr[requests] + start
        rows = batch.req_pool_indices[requests]
        return Keys(self.req_to_token_pool.req_to_token[rows, positions].long(), indptr)

    def _run_expanded(
        self, q: torch.Tensor, layer: MLALayer, expansion: Expansion, output: torch.Tensor
    ) -> None:
        # --8<-- [start:merge-chunks]
        state = None
        qo_indptr, v_head_dim = expansion.own.indptr, layer.v_head_dim
        if expansion.prefix:
            state = AttentionState(len(q), layer.num_qo_heads, v_head_dim, q.device)
        for keys in (*expansion.prefix, expansion.own):
            rows = self._rows_of(layer, keys.slots, q.dtype)
            c, k_rope = rows.tensor_split([layer.kv_lora_rank], dim=1)
            is_last = keys is expansion.own  # the new tokens
            expanded_attention(
                q,
                layer.kv_b_proj(c),
                k_rope,
                qo_indptr,
                keys.indptr,
                scale=layer.scale,
                v_head_dim=v_head_dim,
                state=state,
                is_causal=is_last,
                out=output if is_last else None,
            )
        # --8<-- [end:merge-chunks]

    def _rows_of(self, layer: MLALayer, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the pool [n, row_size], times the layer's scale."""
        rows = self.kv_pool.k_buffer(layer.layer_id)
        if rows.dtype not in FP8_TYPES:
            return rows[slots, 0].to(dtype)
        wide = rows.view(torch.uint8)[slots, 0].view(rows.dtype).to(torch.float32)
        return (wide * self.kv_pool.kv_scales[layer.layer_id].k).to(dtype)

    def _decode_few(self, q: torch.Tensor, layer: MLALayer, part: Part, output: torch.Tensor) -> None:
        batch, pool = part.batch, self.req_to_token_pool
        mla_decode(
            absorb_few(q, layer.w_k, layer.head_dim - layer.qk_nope_head_dim),
            self.kv_pool.k_buffer(layer.layer_id),
            pool.req_to_token, batch.req_pool_indices, batch.seq_lens, part.counters,
            kv_lora_rank=layer.kv_lora_rank, scale=layer.scale, page_size=self.kv_pool.page_size,
            kv_scale=self.kv_pool.kv_scales[layer.layer_id].k, w_v=layer.w_v, projected=output,
        )  # fmt: skip

    def _attend_to_rows(self, q: torch.Tensor, layer: MLALayer, part: Part) -> torch.Tensor:
        """q absorbed -> weighted sums of c."""
        batch, pool = part.batch, self.req_to_token_pool
        rows = self.kv_pool.k_buffer(layer.layer_id)
        where = (pool.req_to_token, batch.req_pool_indices, batch.seq_lens)
        options: dict[str, Any] = {
            "kv_lora_rank": layer.kv_lora_rank,
            "scale": layer.scale,
            "page_size": self.kv_pool.page_size,
            "kv_scale": self.kv_pool.kv_scales[layer.layer_id].k,
        }
        if batch.forward_mode.is_decode and batch.custom_mask is None:
            return mla_decode(q, rows, *where, part.counters, **options)
        return mla_extend(
            q, rows, *where, batch.extend_seq_lens, batch.extend_start_loc,
            custom_mask=batch.custom_mask, tree_mask=batch.tree_mask, **options,
        )  # fmt: skip

    def _new_counters(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size * MAX_GROUPS, dtype=torch.int32, device=self.kv_pool.device)


def absorb(q: torch.Tensor, layer: MLALayer) -> torch.Tensor:
    """Compute `diptych.shared.modeling.mla.absorb` by one batched GEMM that writes where attention reads."""
    latent = q.new_empty(*q.shape[:-1], layer.absorbed.head_dim)
    q_nope, q_rope = q.tensor_split([layer.qk_nope_head_dim], dim=-1)
    torch.bmm(q_nope.transpose(0, 1), layer.w_k, out=latent[..., : layer.kv_lora_rank].transpose(0, 1))
    latent[..., layer.kv_lora_rank :] = q_rope
    return latent


def project_values(latent: torch.Tensor, layer: MLALayer, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `diptych.shared.modeling.mla.project_values` into `out`."""
    if out is None:
        out = latent.new_empty(*latent.shape[:-1], layer.v_head_dim)
    torch.bmm(latent.transpose(0, 1), layer.w_v.transpose(1, 2), out=out.transpose(0, 1))
    return out


def _indptr(lens: torch.Tensor) -> torch.Tensor:
    return F.pad(lens.cumsum(0), (1, 0))


def _live_rows(batch: ForwardBatch) -> torch.Tensor:
    """bool [num_tokens]: the rows of a ragged batch that are a token."""
    if batch.forward_mode.is_decode:
        return batch.seq_lens > 0
    rows = torch.arange(batch.num_tokens, device=batch.seq_lens.device)[:, None]
    starts = batch.extend_start_loc
    return ((rows >= starts) & (rows < starts + batch.extend_seq_lens)).any(1)
