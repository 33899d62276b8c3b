"""A backend may refuse what its contract lets it refuse: the suite says so, and lets nothing else pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.optimized.attention.default import DefaultAttention
from diptych.optimized.attention.triton import TritonAttention
from diptych.reference.attention import TorchAttention
from diptych.shared import registry
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from diptych.shared.tools.conformance.oracles.attention_batches import (
    AttentionBatch,
    AttentionCase,
    RefusalWarning,
    expect_attention,
    run_or_refuse,
)
from diptych.shared.types.attention import AttentionLayer

PLAIN = AttentionCase("plain", ((3, 1),), dtype=torch.bfloat16)
WINDOW = AttentionCase("window", ((3, 1),), dtype=torch.bfloat16, sliding_window=2)


class HalfOnly(TorchAttention):
    """Refuses types when it is made, and windows, soft-caps and sinks when it sees them."""

    def __init__(self, req_to_token_pool: Any, kv_pool: Any) -> None:
        if kv_pool.dtype == torch.float32:
            raise ValueError("dtype float32 is not supported: this backend supports float16 and bfloat16")
        if kv_pool.k_buffer(0).shape[-1] not in (64, 128):
            raise ValueError("the head_dim values that are supported are 64 and 128")
        super().__init__(req_to_token_pool, kv_pool)

    def check_layer(self, layer: AttentionLayer) -> None:
        if layer.sliding_window >= 0:
            raise ValueError("sliding_window is not supported")
        if layer.logit_cap > 0:
            raise ValueError("logit_cap is not supported")
        if layer.sinks is not None:
            raise ValueError("sinks are not supported")

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
        self.check_layer(layer)
        return super().run(q, layer, plan, **kv)


def refusing(message: str) -> type[TorchAttention]:
    class Refuses(TorchAttention):
        def run(self, q: torch.Tensor, layer: AttentionLayer, plan: Any, **kv: Any) -> torch.Tensor:
            raise ValueError(message)

    return Refuses


def test_a_backend_for_half_types_holds_its_contract() -> None:
    with pytest.warns(RefusalWarning) as refusals:
        verdicts = list(
            check_implementation(clauses_of("attention"), HalfOnly, TorchAttention, shrink_failures=False)
        )
    assert [v.case.name for v in verdicts if not v.holds] == []
    assert 0 < len(refusals) < len(verdicts)


def test_a_refusal_gives_no_output_and_a_warning() -> None:
    with pytest.warns(RefusalWarning, match="window: sliding_window is not supported"):
        assert run_or_refuse(refusing("sliding_window is not supported"), AttentionBatch(WINDOW)) is None


@pytest.mark.parametrize(
    "message",
    [
        "cannot do that",
        "not supported",  # what is not?
        "sliding_window must be -1",  # what is then?
        "sinks are not supported",  # there are none
    ],
)
def test_a_refusal_must_name_what_it_is_about(message: str) -> None:
    with pytest.raises(Mismatch, match="what a refusal names"):
        expect_attention(refusing(message), WINDOW)


def test_a_plain_layer_cannot_be_refused() -> None:
    with pytest.raises(Mismatch, match="a plain layer is supported"):
        expect_attention(refusing("head_dim 64 is not supported, 128 is"), PLAIN)


@pytest.mark.parametrize("impl", [TritonAttention, DefaultAttention])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 513}, "head_dim 513 is not supported: TritonAttention supports 1 to 512"),
        ({"head_dim": 1024, "dtype": torch.bfloat16}, "head_dim 1024 is not supported"),
        ({"dtype": torch.float64}, r"float64 is not supported.*bfloat16"),
    ],
)
def test_the_constructor_refuses_what_no_kernel_computes(
    impl: type[AttentionBackend], options: dict[str, Any], message: str
) -> None:
    batch = AttentionBatch(AttentionCase("", ((3, 1),), **options))
    with pytest.raises(ValueError, match=message):
        batch.backend(impl)


@pytest.mark.parametrize("choice", ["flashmla", "cutlass_mla", "trtllm_mla", "nsa"])
def test_backends_of_other_engines_say_what_they_need(choice: str) -> None:
    with pytest.raises(ValueError, match=rf"^mla_attention={choice} needs .*\. Choose one of reference, "):
        registry.select("reference", {"mla_attention": choice})
