"""What FlashInfer's wrapper for latent attention is given. A stand-in of its signature computes in torch:
this checks indices, lengths and causality, and not FlashInfer."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.mla.mla_flashinfer import FlashInferMLA
from diptych.shared.tools.conformance.contracts.mla_attention.batches import DECODE, EXTEND, MIXED, SMALL
from diptych.shared.tools.conformance.oracles.attention_batches import expect_attention
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase


class StandIn:
    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype is torch.int8

    def plan(
        self, qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int,
        head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 1)
        assert (kv_indptr.diff() == kv_len_arr).all()
        self.planned = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any) -> torch.Tensor:
        p, out = self.planned, torch.empty_like(q_nope)
        assert q_nope.shape[1] == p.num_heads
        assert ckv_cache.shape[1] == kpe_cache.shape[1] == 1
        for i in range(len(p.kv_len_arr)):
            tokens = slice(int(p.qo_indptr[i]), int(p.qo_indptr[i + 1]))
            slots = p.kv_indices[int(p.kv_indptr[i]) : int(p.kv_indptr[i + 1])].long()
            c, k_r = ckv_cache[slots, 0].float(), kpe_cache[slots, 0].float()
            scores = q_nope[tokens].float() @ c.T + q_pe[tokens].float() @ k_r.T
            num_new, num_keys = scores.shape[0], scores.shape[2]
            sees = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_keys - num_new)
            if p.causal:
                scores = scores.masked_fill(~sees[:, None].to(scores.device), -torch.inf)
            out[tokens] = ((scores * p.sm_scale).softmax(-1) @ c).to(out.dtype)
        return out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(FlashInferMLA, "check_device", staticmethod(lambda device: None))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", [DECODE, EXTEND, MIXED, MLACase("idle", ())], ids=lambda case: case.name)
def test_what_the_wrapper_is_given(case: MLACase, page_size: int) -> None:
    expect_attention(FlashInferMLA, replace(case, dtype=torch.bfloat16, page_size=page_size))


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("dtype", {"dtype": torch.float32}),
        ("kv_lora_rank", SMALL),
        ("custom_mask", {"mask": "tree", "requests": ((9, 3),)}),
        ("tree_mask", {"mask": "tree", "requests": ((9, 3),), "tail": 3}),
    ],
)
def test_what_is_refused(what: str, changes: dict[str, Any]) -> None:
    case: MLACase = replace(DECODE, **{"dtype": torch.bfloat16, **changes})
    with pytest.raises(ValueError, match=f"{what}.*not supported; FlashInferMLA supports"):
        case.make().run(FlashInferMLA)
