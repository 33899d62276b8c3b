"""Memory of the MLA backend on Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from diptych.optimized.mla.mla_triton import MAX_GROUPS, TritonMLA


def test_a_graph_has_counters_for_as_many_requests_as_there_are_rows() -> None:
    """They are not replaced later: a graph keeps the address."""
    rows: Any = SimpleNamespace(req_to_token=torch.zeros(9, 2, dtype=torch.int32))
    kv_pool: Any = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    (part,) = TritonMLA(rows, kv_pool).plan_for_graph(SimpleNamespace(), 2)  # type: ignore[arg-type]
    assert part.counters.numel() >= 9 * MAX_GROUPS
    assert not part.counters.any()
