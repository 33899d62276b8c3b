"""What FlashInfer's wrappers are given: plans, page tables, masks and scales. A stand-in of their signatures
computes in torch, with FlashInfer's order of mask and scale: this checks our side of the boundary."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.graphs.rehearsal import prompts
from diptych.shared.tools.conformance.contracts.attention.batches import DECODE, EXTEND, MIXED
from diptych.shared.tools.conformance.contracts.attention.fp8_pool import SCALES
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase, expect_attention
from diptych.shared.types.attention import KVScales

MASKED = -5e4  # FlashInfer's, of scores that the scale then multiplies
MODULES = ("diptych.optimized.attention.flashinfer_wrappers", "diptych.optimized.attention.flashinfer")


class Wrapper:
    """Decoding or prompts, with the arguments that our side passes."""

    is_cuda_graph_enabled = False

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        self.buffers = options

    def read(self, qo_indptr: torch.Tensor, *arguments: Any, **options: Any) -> None:
        self.qo_indptr, (self.indptr, self.indices, self.last_page_len) = qo_indptr.tolist(), arguments
        assert {x.dtype for x in arguments} == {torch.int32}
        self.options = SimpleNamespace(**options)
        pages = self.indptr.diff()
        assert ((pages - 1) * self.options.page_size + self.last_page_len == self.options.seq_lens).all()

    def run(
        self,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        options, heads = self.options, q.shape[1]
        assert q.dtype == options.q_data_type
        scale = options.sm_scale * k_scale
        for i in range(len(self.qo_indptr) - 1):
            new = slice(self.qo_indptr[i], self.qo_indptr[i + 1])
            mine, num_keys = self.indices[self.indptr[i] : self.indptr[i + 1]].long(), options.seq_lens[i]
            k, v = (
                x[mine].flatten(0, 1)[:num_keys].float().repeat_interleave(heads // x.shape[2], 1)
                for x in pages
            )
            scores = torch.einsum("qhd,khd->qhk", q[new].float(), k)
            if options.logits_soft_cap:
                scores = torch.tanh(scores * (scale / options.logits_soft_cap))
            factor = options.logits_soft_cap or scale
            scores = scores.masked_fill(~self.sees(i, scores.shape[0], int(num_keys))[:, None], MASKED)
            weights = (scores * factor).softmax(-1)
            out[new] = (torch.einsum("qhk,khd->qhd", weights, v) * v_scale).to(out.dtype)
            if lse is not None:
                masked = (scores == MASKED).all(-1)
                lse[new] = torch.where(masked, MASKED, (scores * factor).logsumexp(-1) * 1.4426950408889634)

    def sees(self, i: int, num_new: int, num_keys: int) -> torch.Tensor:
        distance = torch.arange(num_keys - num_new, num_keys)[:, None] - torch.arange(num_keys)
        if "custom_mask_buf" in self.buffers:
            packed = self.buffers["custom_mask_buf"][int(self.buffers["mask_indptr_buf"][i]) :]
            bits = packed[torch.arange(num_new * num_keys) // 8] >> (torch.arange(num_new * num_keys) % 8)
            return (bits & 1).bool().view(num_new, num_keys)
        assert self.options.causal
        within = distance <= self.options.window_left if self.options.window_left >= 0 else distance >= 0
        return (distance >= 0) & within


class Prefill(Wrapper):
    def plan(self, qo_indptr: torch.Tensor, *arguments: Any, **options: Any) -> None:
        self.read(qo_indptr, *arguments, **options)


class Decode(Wrapper):
    def plan(self, indptr: torch.Tensor, *arguments: Any, **options: Any) -> None:
        self.read(torch.arange(len(indptr)), indptr, *arguments, causal=True, **options)


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """FlashInferAttention over the stand-ins, on the CPU."""
    spec = SimpleNamespace(is_compiled=True, is_aot=True)
    made = {
        "flashinfer": module(
            "flashinfer",
            BatchDecodeWithPagedKVCacheWrapper=Decode,
            BatchPrefillWithPagedKVCacheWrapper=Prefill,
        ),
        "flashinfer.decode": module("flashinfer.decode", fast_decode_plan=None),
        "flashinfer.jit": module(
            "flashinfer.jit",
            gen_batch_decode_module=lambda *variant: spec,
            gen_batch_prefill_module=lambda *variant: spec,
        ),
    }
    for name, each in made.items():
        monkeypatch.setitem(sys.modules, name, each)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    )
    backend = importlib.import_module(MODULES[1]).FlashInferAttention
    monkeypatch.setattr(backend, "check_device", staticmethod(lambda device: None))
    yield backend
    for name in MODULES:
        sys.modules.pop(name)


SMALL_K = KVScales(1e-4, 300.0)
TREE = AttentionCase("tree", ((37, 5), (40, 5)), mask="tree")
CASES = [
    DECODE,
    EXTEND,
    replace(MIXED, page_size=4, sliding_window=9),
    replace(EXTEND, logit_cap=5.0),
    TREE,
    replace(TREE, tail=5),
    replace(TREE, mask="blind"),
    *(replace(batch, kv_scales=scales) for batch in (EXTEND, TREE) for scales in (SCALES, SMALL_K)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}, {case.unusual}")
def test_outputs(backend: Any, case: AttentionCase) -> None:
    expect_attention(backend, replace(case, dtype=torch.bfloat16))


def test_a_small_scale_of_k_in_float16(backend: Any) -> None:
    expect_attention(backend, replace(EXTEND, dtype=torch.float16, kv_scales=KVScales(1e-4, 0.5)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k_scale", [1e-4, 0.043, 0.5, 1.0, 300.0])
def test_a_scale_is_split_without_loss(backend: Any, dtype: torch.dtype, k_scale: float) -> None:
    split_k_scale = sys.modules[MODULES[0]].split_k_scale
    power, rest = split_k_scale(k_scale, dtype)
    q = torch.randn(64).to(dtype)
    q = q[q.abs() > 2.0**-2]
    assert power * rest == k_scale
    assert power <= 1.0 <= 2 * rest or dtype == torch.float16
    assert torch.equal((q * power).double(), q.double() * power)


def test_a_mask_is_packed_to_its_last_bit(backend: Any) -> None:
    """Its bits end in the first byte of another CTA."""
    tree = replace(prompts([5], torch.device("cpu")), seq_lens=torch.tensor([410]), seq_lens_cpu=(410,))
    tree = replace(tree, custom_mask=torch.ones(2050, dtype=torch.bool))
    packed = sys.modules[MODULES[0]].PackedMask.empty(tree, 410, torch.device("cpu"))
    packed.bits.zero_()
    packed.fill(tree)
    bits = packed.bits[:, None] >> torch.arange(8) & 1
    assert packed.indptr.tolist() == [0, 257]
    assert torch.equal(bits.flatten()[:2050].bool(), tree.custom_mask)
