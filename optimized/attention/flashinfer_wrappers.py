"""FlashInfer's wrappers for attention backends: kinds of plans, workspace memory, and planning without
waiting for the device. It uses only public names of FlashInfer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan

from diptych.optimized.attention.flashinfer_build import Module, announce
from diptych.optimized.attention.page_tables import HostTable, PageTable
from diptych.optimized.kernels.attention.pack_mask import pack_mask
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8, AttentionLayer, KVScales

Kernels = Literal["decode", "fa2", "fa3"]
"""decode: one token a request. fa2, fa3: any number of tokens, by the kernels of FlashAttention 2 or 3."""

CUDA_CORE_GROUP_SIZES = (1, 2)
"""Query heads a KV head for which decoding does not pay for tensor cores: they would be mostly idle."""

INT_WORKSPACE_BYTES = 1 << 18
"""Where a captured batch's plan lies: 64 bytes for each of 4096 requests. (A prompt's plan may take the 8 MiB
that a wrapper allocates by itself.)"""
NOTHING_SEEN = -4e4
"""Below: the logarithm (base 2) of the softmax's sum for a query that sees nothing. FlashInfer masks with
-5e4, not -inf: such a query gets a mean of all values."""
MIN_EXPONENT = {torch.float16: -12, torch.bfloat16: -100}
"""By which power of two a query of variance 1 may be multiplied, without a loss that its own rounding has
not."""


class Kind(NamedTuple):
    """The properties of a layer and of the pool on which a plan depends."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int
    logit_cap: float
    scale: float

    @staticmethod
    def of(q: torch.Tensor, layer: AttentionLayer, kv_dtype: torch.dtype, page_size: int) -> Kind:
        heads = layer.num_qo_heads, layer.num_kv_heads, layer.head_dim
        window = max(layer.sliding_window, -1)
        return Kind(q.dtype, kv_dtype, *heads, page_size, window, max(layer.logit_cap, 0.0), layer.scale)

    def module(self, kernels: Kernels) -> Module:
        """The module of FlashInfer with the kernels of this kind."""
        if kernels == "decode" and self.decodes_on_tensor_cores:
            kernels = "fa2"
        q_dtype, kv_dtype = (str(dtype).removeprefix("torch.") for dtype in (self.q_dtype, self.kv_dtype))
        return Module(kernels, q_dtype, kv_dtype, self.head_dim, self.window >= 0, self.logit_cap > 0)

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def decodes_on_tensor_cores(self) -> bool:
        """Whether decoding uses the prefill kernels, with the query heads of a KV head in place of several
        tokens."""
        return self.group_size not in CUDA_CORE_GROUP_SIZES

    def plan_arguments(self) -> dict[str, Any]:
        return {
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.page_size,
            "window_left": self.window,
            "logits_soft_cap": self.logit_cap,
            "sm_scale": self.scale,
            "q_data_type": self.q_dtype,
            "kv_data_type": self.kv_dtype,
        }


class Workspace:
    """Memory for partial results where a request's keys are split among CTAs. One for all wrappers, which
    run one after another; a wrapper keeps the one that it was made with, so that graphs stay valid."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def for_batches(self, kernels: Kernels, kind: Kind, captured: ForwardBatch | None) -> torch.Tensor:
        """A workspace for the largest plan. Work is split into at most two CTAs per multiprocessor. In a
        graph, for batches like `captured`, work is always split, for the largest possible number of query
        tiles."""
        group_size = kind.group_size
        tile = 16 if kernels == "decode" and group_size <= 16 else 128  # queries times query heads
        tiles = 2 * self.num_sms // kind.num_kv_heads + 1
        if captured is not None:
            tiles = max(tiles, -(-captured.num_tokens * group_size // tile) + captured.batch_size)
        num_bytes = kind.num_qo_heads * tiles * tile * (kind.head_dim + 1) * 4
        # Kernels on CUDA cores: at most 16 CTAs per multiprocessor, each with the query heads of a KV head.
        num_bytes = max(num_bytes, 16 * self.num_sms * group_size * (kind.head_dim + 1) * 4) + (1 << 20)
        if num_bytes > len(self.buffer):
            self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return self.buffer


@dataclass
class PackedMask:
    """A batch's mask in FlashInfer's form, at fixed addresses."""

    bits: torch.Tensor  # uint8
    indptr: torch.Tensor  # [bs + 1] int32, in bytes

    @staticmethod
    def empty(batch: ForwardBatch, max_seq_len: int, device: torch.device) -> PackedMask:
        num_bytes = sum((new * max_seq_len + 7) // 8 for new in batch.extend_seq_lens_cpu)
        indptr = torch.empty(batch.batch_size + 1, dtype=torch.int32, device=device)
        return PackedMask(torch.empty(num_bytes, dtype=torch.uint8, device=device), indptr)

    def fill(self, batch: ForwardBatch) -> None:
        assert batch.custom_mask is not None
        lens = zip(batch.extend_seq_lens_cpu, batch.seq_lens_cpu)
        max_bytes = max((new * seq_len + 7) // 8 for new, seq_len in lens)
        device_lens = batch.seq_lens, batch.extend_seq_lens
        pack_mask(batch.custom_mask, *device_lens, self.bits, self.indptr, max(max_bytes, 1))


class PlannedWrapper:
    """One wrapper, which is planned again for each batch.

    A plan is written to page-locked memory and copied from there to the device in stream order. So the CPU
    may run ahead by one plan of the same wrapper; before it writes the next one, it waits for that copy.
    """

    def __init__(self, wrapper: Any, kind: Kind, mask: PackedMask | None = None) -> None:
        self.wrapper = wrapper
        self.kind = kind
        self.mask = mask
        self.is_decode = isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper)
        self.is_planned = False
        self.copied = torch.cuda.Event()

    def plan(self, batch: ForwardBatch, host: HostTable, table: PageTable) -> None:
        self.copied.synchronize()
        if self.is_decode:
            self._plan_decode(host, table)
        else:
            self._plan_prefill(batch, host, table)
        self.is_planned = True
        self.copied.record()

    def run(
        self,
        q: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        kv_scales: KVScales,
        out: torch.Tensor,
    ) -> None:
        pages = self._pages(k_buffer), self._pages(v_buffer)
        options: dict[str, Any] = {"out": out}
        if k_buffer.dtype == FP8:
            power, k_scale = split_k_scale(kv_scales.k, q.dtype)
            q = q if power == 1.0 else q * power
            options |= {"k_scale": k_scale, "v_scale": kv_scales.v}
        if self.mask is None:
            self.wrapper.run(q, pages, **options)
            return
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.wrapper.run(q, pages, lse=lse, return_lse=True, **options)
        out.masked_fill_((lse < NOTHING_SEEN)[:, :, None], 0.0)

    def _plan_decode(self, host: HostTable, table: PageTable) -> None:
        arguments = self.kind.plan_arguments()
        if self.is_planned and self.wrapper.is_cuda_graph_enabled:
            # The table is in the wrapper's buffers already.
            arguments |= {"head_dim": self.kind.head_dim, "global_override_indptr_cpu": host.indptr}
            fast_decode_plan(self.wrapper, table.indptr, table.indices, host.last_page_len, **arguments)
            return
        indices = table.indices[: host.num_pages]
        arguments |= {"head_dim": self.kind.head_dim, "seq_lens": host.kv_lens}
        self.wrapper.plan(host.indptr, indices, host.last_page_len, **arguments)

    def _plan_prefill(self, batch: ForwardBatch, host: HostTable, table: PageTable) -> None:
        qo_indptr = torch.zeros(batch.batch_size + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(batch.extend_seq_lens_cpu, dtype=torch.int32), 0, out=qo_indptr[1:])
        arguments = self.kind.plan_arguments() | {"head_dim_qk": self.kind.head_dim, "seq_lens": host.kv_lens}
        if self.mask is not None:
            arguments["packed_custom_mask"] = self.mask.bits
        indices = table.indices[: host.num_pages]
        self.wrapper.plan(
            qo_indptr, host.indptr, indices, host.last_page_len, causal=self.mask is None, **arguments
        )
        if self.mask is not None:
            # For a mask that comes packed, `plan` leaves here where each request starts in bits, not bytes.
            self.mask.fill(batch)

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        """[num_slots, heads, head_dim] -> [num_pages, page_size, heads, head_dim], a view."""
        return buffer.view(-1, self.kind.page_size, *buffer.shape[1:])


def split_k_scale(k_scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """K's scale as a power of two of at most 1, by which q is multiplied exactly, and a rest of at least 0.5
    (less only in float16, of scales below 2^-13).

    FlashInfer masks a score with -5e4 and then multiplies it by the scale. With a scale of 1e-4, masked keys
    would have the weight of a score of about -1."""
    exponent = max(min(math.frexp(k_scale)[1], 0), MIN_EXPONENT[dtype])
    return 2.0**exponent, math.ldexp(k_scale, -exponent)


def make_wrapper(
    kernels: Kernels,
    kind: Kind,
    workspace: torch.Tensor,
    table: PageTable | None = None,
    mask: PackedMask | None = None,
) -> PlannedWrapper:
    """Make a wrapper. With a table: for batches of its size, also in CUDA graphs; the wrapper reads the
    table's and the mask's buffers as long as it lives. Without: for any batch without a mask."""
    announce(kind.module(kernels))
    if kernels == "decode":
        return PlannedWrapper(_decode_wrapper(kind, workspace, table), kind)
    buffers: dict[str, Any] = {}
    if table is not None:
        buffers = {
            "use_cuda_graph": True,
            "qo_indptr_buf": torch.empty_like(table.indptr),
            "paged_kv_indptr_buf": table.indptr,
            "paged_kv_indices_buf": table.indices,
            "paged_kv_last_page_len_buf": table.last_page_len,
        }
    if mask is not None:
        buffers |= {"custom_mask_buf": mask.bits, "mask_indptr_buf": mask.indptr}
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, backend=kernels, **buffers)
    return PlannedWrapper(wrapper, kind, mask)


def _decode_wrapper(kind: Kind, workspace: torch.Tensor, table: PageTable | None) -> Any:
    options = {"use_tensor_cores": kind.decodes_on_tensor_cores}
    if table is None:
        return BatchDecodeWithPagedKVCacheWrapper(workspace, **options)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=table.indptr,
        paged_kv_indices_buffer=table.indices,
        paged_kv_last_page_len_buffer=table.last_page_len,
        **options,
    )
    int_workspace = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=workspace.device)
    wrapper.reset_workspace_buffer(workspace, int_workspace)
    return wrapper
