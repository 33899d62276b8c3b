"""An attention backend for checking model runners that replay graphs: it fails unless each step was
planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.types import ForwardBatch


def attention_for_graphs(dtype: torch.dtype) -> type[AttentionBackend]:
    """Return a backend that can be captured on a GPU, if there is one for the type. Elsewhere the reference's
    backend with the protocol of a capturable one, which checks the runner's calls without a GPU."""
    on_gpu = check_device().type == "cuda" and dtype is not torch.float64
    if on_gpu and "triton" in registry.choices("attention"):
        return registry.load("attention", "triton")
    reference = registry.load("attention", "reference")
    return reference if on_gpu else _replanned(reference)


@dataclass(eq=False)
class GraphPlan:
    buffers: ForwardBatch
    max_seq_len: int
    plan: Any = None  # of the reference


@dataclass(eq=False)
class RaggedPlan:
    buffers: ForwardBatch

    def live(self) -> tuple[ForwardBatch, torch.Tensor]:
        """The batch without padding rows, from the current buffers, and its rows of q."""
        fb = self.buffers
        num_new = (fb.seq_lens > 0).long() if fb.forward_mode.is_decode else fb.extend_seq_lens
        who = num_new.nonzero().flatten()
        lens, starts = num_new[who], fb.extend_start_loc[who]
        spans = [range(start, start + n) for start, n in zip(starts.tolist(), lens.tolist())]
        rows = torch.tensor([row for span in spans for row in span], dtype=torch.int64, device=who.device)
        batch = ForwardBatch(
            forward_mode=fb.forward_mode,
            input_ids=fb.input_ids[rows],
            positions=fb.positions[rows],
            req_pool_indices=fb.req_pool_indices[who],
            seq_lens=fb.seq_lens[who],
            out_cache_loc=fb.out_cache_loc[rows],
            extend_seq_lens=lens,
            extend_start_loc=lens.cumsum(0) - lens,
            seq_lens_cpu=tuple(fb.seq_lens[who].tolist()),
            extend_seq_lens_cpu=tuple(lens.tolist()),
        )
        return batch, rows


def _replanned(base: type[AttentionBackend]) -> type[AttentionBackend]:
    class ReplannedAttention(base):  # type: ignore[misc,valid-type]
        """Its plan for a graph keeps the batch of the last `replan` and accepts no other buffers. A ragged
        plan reads its buffers when it runs."""

        supports_cuda_graph = True
        supports_ragged_graphs = True

        def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> GraphPlan:
            plan = GraphPlan(forward_batch, max_seq_len)
            self.replan(plan, forward_batch)
            return plan

        def replan(self, plan: GraphPlan, forward_batch: ForwardBatch) -> None:
            for name, value in vars(forward_batch).items():
                if isinstance(value, torch.Tensor):
                    buffer = getattr(plan.buffers, name)
                    assert (value.data_ptr(), value.shape) == (buffer.data_ptr(), buffer.shape), name
            assert list(forward_batch.seq_lens_cpu) == forward_batch.seq_lens.tolist(), "seq_lens_cpu"
            assert max(forward_batch.seq_lens_cpu) <= plan.max_seq_len
            plan.plan = super().plan(forward_batch)

        def plan_ragged(self, forward_batch: ForwardBatch) -> RaggedPlan:
            return RaggedPlan(forward_batch)

        def run(self, q: torch.Tensor, layer: Any, plan: Any, **kv: Any) -> torch.Tensor:
            if isinstance(plan, RaggedPlan):
                batch, rows = plan.live()
                out: torch.Tensor = kv["out"]
                out[rows] = super().run(q[rows], layer, super().plan(batch))
                return out
            return super().run(q, layer, plan.plan if isinstance(plan, GraphPlan) else plan, **kv)

    return ReplannedAttention
