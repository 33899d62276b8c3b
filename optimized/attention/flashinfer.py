"""Attention by FlashInfer's kernels over the paged pool: FlashAttention 2, on any NVIDIA GPU from Ampere on.

Differs from reference: a step is planned on the CPU, from the batch's lengths alone. FlashInfer cuts the work
into pieces that fill the GPU, once for each kind of layer (window, soft-cap, scale), when the first such
layer runs. Page tables are written on the device. Assumes a CUDA GPU, float16 or bfloat16, and a compiler
(nvcc) the first time that a kind is met. Loses where planning on the CPU takes a noticeable share: small
models, few requests.

K and V are always read from the pool, even if `run` gets them. FlashInfer's ragged kernels, which take K and
V, are a tenth faster. But fused layers give no K and V, and the ragged kernels of FlashAttention 3 spread a
NaN of one request to its neighbours, because they load whole tiles and 0 * NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from diptych.optimized.attention.flashinfer_build import Module
from diptych.optimized.attention.flashinfer_wrappers import (
    Kernels,
    Kind,
    PackedMask,
    PlannedWrapper,
    Workspace,
    make_wrapper,
)
from diptych.optimized.attention.page_tables import HostTable, PageTable
from diptych.optimized.kernels.draft.draft_mask import flatten_mask
from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.scheduling.pages import num_pages_of
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8, AttentionLayer

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)


@dataclass
class Tables:
    """The page tables and wrappers of layers with the same window."""

    host: HostTable
    device: PageTable


@dataclass
class FlashInferPlan:
    """The plan of one step. FlashInfer's plan for a kind of layer is added when its first layer runs."""

    forward_batch: ForwardBatch
    max_seq_len: int | None = None  # in a CUDA graph; None: for this batch only
    is_tree: bool = False  # custom_mask was a tree_mask
    tables: dict[int, Tables] = field(default_factory=dict)  # by window
    wrappers: dict[Kind, PlannedWrapper] = field(default_factory=dict)

    @property
    def is_graph(self) -> bool:
        return self.max_seq_len is not None


class FlashInferAttention(interface.AttentionBackend):
    """Supports float16 and bfloat16, pools of these and of FP8, head_dim 64, 128 and 256, windows, soft-caps
    and masks; no sinks, and no window under a tree_mask."""

    supports_cuda_graph = True
    runs_before_capture = True
    kernels: Kernels = "fa2"
    """for batches other than decoding"""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.check_device(kv_pool.device)
        self._check_pool_dtype(kv_pool.dtype)
        for layer_id in range(kv_pool.num_layers):
            head_dim = kv_pool.k_buffer(layer_id).shape[-1]
            self._refuse_unless(head_dim in HEAD_DIMS, f"head_dim {head_dim}", "64, 128 and 256")
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self._workspace = Workspace(kv_pool.device)
        self._wrappers: dict[tuple[Kernels, Kind], PlannedWrapper] = {}  # for batches of any size
        self._masked: dict[Kind, PlannedWrapper] = {}  # for the last batch with a mask
        self._graph_indices: dict[int, torch.Tensor] = {}  # by window

    @staticmethod
    def check_device(device: torch.device) -> None:
        """Raise `ValueError` for a device that these kernels do not support."""
        if device.type != "cuda":
            raise ValueError(f"device {device.type}: not supported; FlashInfer supports cuda")

    def beside(self) -> FlashInferAttention:
        """With a workspace and wrappers of its own, where plans are."""
        return type(self)(self.req_to_token_pool, self.kv_pool)

    def plan(self, forward_batch: ForwardBatch) -> FlashInferPlan:
        if forward_batch.tree_mask is not None:
            num_each, lens = forward_batch.tree_mask.shape[1], forward_batch.seq_lens_cpu
            mask = torch.empty(num_each * sum(lens), dtype=torch.bool, device=self.kv_pool.device)
            flatten_mask(forward_batch.tree_mask, forward_batch.seq_lens, mask)
            forward_batch = replace(forward_batch, custom_mask=mask, tree_mask=None)
            return FlashInferPlan(forward_batch, is_tree=True)
        return FlashInferPlan(forward_batch)

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> FlashInferPlan:
        """Plan for a graph. Layers are planned when they run outside of a capture."""
        self._refuse_unless(forward_batch.tree_mask is None, "tree_mask in a CUDA graph", "custom_mask")
        return FlashInferPlan(forward_batch, max_seq_len)

    def replan(self, plan: FlashInferPlan, forward_batch: ForwardBatch) -> None:
        """The page ids of all graphs are in one buffer, so only the graph of the last `replan` may be
        replayed."""
        plan.forward_batch = forward_batch
        for window, tables in plan.tables.items():
            tables.host = HostTable.of(forward_batch, self.kv_pool.page_size, window)
            self._fill(tables, forward_batch, window)
        for kind, wrapper in plan.wrappers.items():
            tables = plan.tables[self._table_window(plan, kind)]
            wrapper.plan(forward_batch, tables.host, tables.device)

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: FlashInferPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = attention_output(q, layer, out)
        if q.shape[0] == 0:
            return output
        kind = Kind.of(q, layer, self.kv_pool.dtype, self.kv_pool.page_size)
        wrapper = plan.wrappers.get(kind)
        if wrapper is None:
            self._check(q, layer)
            is_narrow = plan.is_tree and layer.sliding_window >= 0
            supported = "a tree_mask without it; attention=triton supports both"
            self._refuse_unless(not is_narrow, "a sliding_window under a tree_mask", supported)
            wrapper = plan.wrappers[kind] = self._planned(plan, kind)
        k_buffer, v_buffer = self.kv_pool.k_buffer(layer.layer_id), self.kv_pool.v_buffer(layer.layer_id)
        wrapper.run(q, k_buffer, v_buffer, self.kv_pool.kv_scales[layer.layer_id], output)
        return output

    def _planned(self, plan: FlashInferPlan, kind: Kind) -> PlannedWrapper:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{type(self).__name__}: run the plan once before it is captured")
        batch = plan.forward_batch
        window = self._table_window(plan, kind)
        if window not in plan.tables:
            plan.tables[window] = self._tables(plan, window)
        tables = plan.tables[window]
        wrapper = self._wrapper(plan, kind, tables)
        wrapper.plan(batch, tables.host, tables.device)
        return wrapper

    def _wrapper(self, plan: FlashInferPlan, kind: Kind, tables: Tables) -> PlannedWrapper:
        batch = plan.forward_batch
        has_mask = batch.custom_mask is not None
        is_decode = batch.forward_mode.is_decode and not has_mask
        kernels: Kernels = "decode" if is_decode else "fa2" if has_mask else self.kernels
        workspace = self._workspace.for_batches(kernels, kind, batch if plan.is_graph or has_mask else None)
        if has_mask:
            # With a mask, wrappers are made for one size of batch, as in a graph.
            max_seq_len = plan.max_seq_len or max(batch.seq_lens_cpu)
            mask = PackedMask.empty(batch, max_seq_len, self.kv_pool.device)
            wrapper = make_wrapper(kernels, kind, workspace, tables.device, mask)
            if not plan.is_graph:
                if kind in self._masked:
                    self._masked[kind].copied.synchronize()  # before its page-locked memory is free
                self._masked[kind] = wrapper
            return wrapper
        if plan.is_graph:
            return make_wrapper(kernels, kind, workspace, tables.device)
        if (kernels, kind) not in self._wrappers:
            self._wrappers[kernels, kind] = make_wrapper(kernels, kind, workspace)
        return self._wrappers[kernels, kind]

    # ---- page tables ----

    @staticmethod
    def _table_window(plan: FlashInferPlan, kind: Kind) -> int:
        """The window of the page table: with a mask none, because a mask has a column for every position."""
        return -1 if plan.forward_batch.custom_mask is not None else kind.window

    def _tables(self, plan: FlashInferPlan, window: int) -> Tables:
        batch, page_size = plan.forward_batch, self.kv_pool.page_size
        host = HostTable.of(batch, page_size, window)
        if plan.max_seq_len is None:
            indices = self._new_indices(host.num_pages)
        else:
            indices = self._indices_for_graph(
                window, batch.batch_size * num_pages_of(plan.max_seq_len, page_size)
            )
        tables = Tables(host, PageTable.empty(batch.batch_size, self.kv_pool.device, indices))
        self._fill(tables, batch, window)
        return tables

    def _fill(self, tables: Tables, batch: ForwardBatch, window: int) -> None:
        tables.device.fill(tables.host, self.req_to_token_pool, batch, self.kv_pool.page_size, window)

    def _indices_for_graph(self, window: int, num_pages: int) -> torch.Tensor:
        """The shared buffer of page ids. Separate ones for fifty batch sizes would take gigabytes."""
        if window not in self._graph_indices or num_pages > len(self._graph_indices[window]):
            self._graph_indices[window] = self._new_indices(num_pages)
        return self._graph_indices[window][:num_pages]

    def _new_indices(self, num_pages: int) -> torch.Tensor:
        return torch.empty(num_pages, dtype=torch.int32, device=self.kv_pool.device)

    # ---- what is refused ----

    def _check_pool_dtype(self, dtype: torch.dtype) -> None:
        supported = "float16, bfloat16 and float8_e4m3fn"
        self._refuse_unless(dtype in (*DTYPES, FP8), f"kv_cache_dtype {dtype}", supported)

    def check_layer(self, layer: AttentionLayer) -> None:
        supported = "layers without them; attention=triton supports sinks"
        self._refuse_unless(layer.sinks is None, "sinks", supported)
        supported = "layers without it; attention=triton supports chunks"
        self._refuse_unless(layer.attention_chunk == 0, "attention_chunk", supported)

    def prefill_module(self, layer: AttentionLayer) -> Module:
        """The compiled module that prompts of a layer need, with q of the pool's dtype."""
        pool = self.kv_pool
        q = torch.empty(0, layer.num_qo_heads, layer.head_dim, dtype=pool.dtype)
        return Kind.of(q, layer, pool.dtype, pool.page_size).module(self.kernels)

    def _check(self, q: torch.Tensor, layer: AttentionLayer) -> None:
        self.check_layer(layer)
        self._refuse_unless(q.dtype in DTYPES, f"dtype {q.dtype}", "float16 and bfloat16")

    def _refuse_unless(self, is_supported: bool, what: str, supported: str) -> None:
        if not is_supported:
            raise ValueError(f"{what}: not supported; {type(self).__name__} supports {supported}")
