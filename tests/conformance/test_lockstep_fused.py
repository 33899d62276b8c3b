"""Lockstep of models that merge weights: their parts are compared with the reference's, one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from .lockstep_harness import compare, divergence_of, plant

FUSED = {"use": {"models": "optimized", "layers": "optimized"}}
PRODUCTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
BUG = """
    import diptych.optimized.layers
    from diptych.optimized.layers import *
    from diptych.optimized.layers import {base}

    class {base}({base}):
        {body}
"""


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_merged_products_are_compared_part_by_part(model: str) -> None:
    outcome = compare({"model": model}, {"model": model, **FUSED}, num_new=2)
    assert outcome.divergence is None
    assert outcome.finished
    compared = [op for op in outcome.errors if op.startswith("layers.0.")]
    expected = PRODUCTS if model == "tiny-dense" else PRODUCTS[:3]
    assert [op for op in compared if op.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))] == [
        f"layers.0.{op}" for op in expected
    ]
    for op in ("self_attn.rotated_q", "self_attn.stored_k", "self_attn.stored_v", "self_attn.attention"):
        assert f"layers.0.{op}" in compared
    assert {"layers.0", "layers.5", "norm", "logits"} <= set(outcome.errors)
    # What a fused kernel or a sum swallows has no counterpart, and nothing else.
    swallowed = {"q_norm", "k_norm", "o_proj", "down_proj", "mlp"}
    swallowed_for_few = {"input_layernorm", "post_attention_layernorm", "gate_proj", "up_proj", "act_fn"}
    assert {op.split(".")[-1] for op in outcome.only[0]} <= swallowed | swallowed_for_few
    assert outcome.only[1] == set()


@pytest.mark.parametrize("layers", ["optimized", "reference"])
def test_layers_whose_sums_are_left_in_parts_are_compared_too(tmp_path: Path, layers: str) -> None:
    models = plant(
        tmp_path,
        """
        import torch
        from diptych.optimized.layers import Linear
        from diptych.optimized.decoder import DecoderForCausalLM
        from diptych.shared.modeling.stream import PartialSums, Stream

        def in_parts(linear):
            def add_later(residual, x):
                parts = [x[:, i::2] @ linear.weight[:, i::2].T for i in range(2)]
                return Stream(residual, PartialSums(torch.stack(parts).float()))
            return add_later

        class InParts(DecoderForCausalLM):
            def __init__(self, *args):
                super().__init__(*args)
                for module in self.modules():
                    if isinstance(module, Linear):
                        module.add_later = in_parts(module)

        def model_class(architecture):
            return InParts
        """,
    )
    outcome = compare(b={"use": {"models": models, "layers": layers}}, num_new=2)
    assert outcome.divergence is None
    assert outcome.finished
    assert {"layers.0", "layers.5", "norm", "logits"} <= set(outcome.errors)


@pytest.mark.parametrize(
    ("base", "body", "op"),
    [
        (
            "RotaryEmbedding",
            """def rotate_and_store(self, qkv, positions, q_norm, k_norm, attention, layer):
            return super().rotate_and_store(qkv, positions, k_norm, q_norm, attention, layer)""",
            "layers.0.self_attn.rotated_q",
        ),
        (
            "RMSNorm",
            """def forward(self, x):
            return 1.001 * super().forward(x)""",
            "layers.0.input_layernorm",
        ),
        (
            "SiluAndMul",
            """def forward(self, gate, up):
            return 1.001 * super().forward(gate, up)""",
            "layers.0.mlp.act_fn",
        ),
    ],
)
def test_a_bug_is_found_where_it_is(tmp_path: Path, base: str, body: str, op: str) -> None:
    """With user-provided layers the models fuse less, and every op has its counterpart."""
    layers = plant(tmp_path, BUG.format(base=base, body=body))
    outcome = compare(b={"use": {"models": "optimized", "layers": layers}}, num_new=1)
    assert divergence_of(outcome).op == op


def test_rows_of_the_merged_weight_in_another_order(tmp_path: Path) -> None:
    models = plant(
        tmp_path,
        """
        from diptych.optimized.decoder import DecoderForCausalLM

        class Bad(DecoderForCausalLM):
            def load_weights(self, weights):
                super().load_weights(weights)
                qkv_proj = self.model.layers[2].self_attn.qkv_proj
                q, k, v = qkv_proj.weight.split(list(qkv_proj.parts.values()))
                k[:], v[:] = v.clone(), k.clone()

        def model_class(architecture):
            return Bad
        """,
    )
    outcome = compare(b={"use": {"models": models, "layers": "optimized"}}, num_new=1)
    assert divergence_of(outcome).op == "layers.2.self_attn.k_proj"
