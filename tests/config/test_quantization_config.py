"""quantization_config of public checkpoints, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.config import parse_quantization
from diptych.shared.config.hf_config import parse_config
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.tools.conformance.oracles.moe_configs import MOE_CONFIGS
from diptych.shared.types.quant_scheme import QuantScheme
from tests.planted import Bug, Bugs

Q_PROJ = "model.layers.0.self_attn.q_proj"


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """compressed-tensors' config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, **more}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
    }


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16}
NVFP4_SCHEME = QuantScheme("nvfp4", group_size=16)
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}
BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {
            "_type": "Float8DynamicActivationFloat8WeightConfig",
            "_data": {"granularity": [{"_type": "PerRow", "_data": {}}, {"_type": "PerRow", "_data": {}}]},
        }
    },
}


@pytest.mark.parametrize(
    ("values", "storage", "scheme"),
    [
        (BLOCK, "fp8", QuantScheme("fp8", 128, 128, "group")),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "fp8",
            QuantScheme("fp8", None, None, "static"),
        ),
        (group(FP8, TOKEN), "compressed-tensors", QuantScheme("fp8", 1, None, "token")),
        (group(FP8), "compressed-tensors", QuantScheme("fp8")),
        (
            group(FP8 | {"strategy": "tensor"}, TOKEN | {"strategy": "tensor"}),
            "compressed-tensors",
            QuantScheme("fp8", None, None, "token"),
        ),
        (
            group(FP8 | {"type": "int"}, TOKEN | {"type": "int"}),
            "compressed-tensors",
            QuantScheme("int8", inputs="token"),
        ),
        (group(INT4), "compressed-tensors", QuantScheme("int4", group_size=128, symmetric=False)),
        (TORCHAO, "torchao", QuantScheme("fp8", inputs="token")),
        (GPTQ, "gptq", QuantScheme("int4", group_size=128)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, "gptq_v2", QuantScheme("int4")),
        (group(NVFP4, format="nvfp4-pack-quantized"), "compressed-tensors", NVFP4_SCHEME),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", NVFP4_SCHEME),
        (AWQ | {"version": "GEMM"}, "awq", QuantScheme("int4", group_size=128, symmetric=False)),
    ],
)
def test_schemes(values: dict[str, Any], storage: str, scheme: QuantScheme) -> None:
    config = parse_quantization(values)
    assert (config.storage, config.scheme_of(Q_PROJ)) == (storage, scheme)


def test_targets_and_ignored_names() -> None:
    values = group(FP8, TOKEN) | {"ignore": ["lm_head", "re:.*down_proj"]}
    values["config_groups"]["group_1"] = {"targets": [f"re:.*{Q_PROJ[-6:]}"], "weights": INT4}
    config = parse_quantization(values)
    assert config.scheme_of(Q_PROJ) == QuantScheme("int4", group_size=128, symmetric=False)
    assert config.scheme_of("model.layers.0.mlp.up_proj") == QuantScheme("fp8", inputs="token")
    assert config.scheme_of("model.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize(
    ("model", "entry", "ignored", "others"),
    [
        ("qwen3-next", "linear_attn.in_proj_qkvz", ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "out_proj")),
        ("qwen3-next", "mlp.shared_expert", ("shared_experts.gate_proj",), ("experts.0.gate_proj",)),
        ("qwen3-next", "mlp.shared_expert*", ("shared_experts.gate_proj",), ("experts.0.gate_proj",)),
        ("mixtral", "block_sparse_moe.experts.1.w3", ("experts.1.up_proj",), ("experts.1.gate_proj",)),
        ("kimi-linear", "self_attn.o_proj", ("linear_attn.out_proj",), ("linear_attn.q_proj",)),
    ],
)
def test_names_of_the_checkpoint(
    model: str, entry: str, ignored: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """The family has other names for these layers."""
    values = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"model.layers.0.{entry}"]}
    found = parse_config({**(HYBRID_CONFIGS | MOE_CONFIGS)[model], "quantization_config": values})
    assert found.quantization is not None
    names = [name for name in expected_shapes(found) if name.startswith("model.layers.0.")]
    schemes = {name: found.quantization.scheme_of(name.removesuffix(".weight")) for name in names}
    for parts, is_quantized in ((ignored, False), (others, True)):
        for part in parts:
            (scheme,) = [each for name, each in schemes.items() if name.endswith(f".{part}.weight")]
            assert (scheme is not None) == is_quantized, part


BUGS = Bugs("ignored layers")
BUGS.words(
    "GatesAreQuantized",
    "shared.config.hf_config:parse_config",
    ("shared.config.hf_config", "*(*family.names, *fused)", "*family.names"),
    where=f"{__name__}.parse_config",
)


@BUGS.found_by(AssertionError, honest=True)
def test_planted_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant_in(monkeypatch)
    gates = "in_proj_b", "in_proj_a"
    test_names_of_the_checkpoint("qwen3-next", "linear_attn.in_proj_ba", gates, ("out_proj",))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "mxfp5"}, r"quant_method 'mxfp5'\); supported is one of fp8, compress"),
        ({}, "quant_method is missing"),
        (BLOCK | {"fmt": "e5m2"}, "fmt is 'e5m2'; supported is 'e4m3'"),
        (BLOCK | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        (BLOCK | {"activation_scheme": "static"}, "static with a weight_block_size"),
        (BLOCK | {"weight_block_size": [128]}, "weight_block_size is .128.; it must be two integers"),
        (group(FP8 | {"num_bits": 6}), "6 bits of type 'float' .*supported are 8 bits float or int"),
        (group(FP8 | {"type": "int", "strategy": "group"}), "8 bits of type 'int' with strategy 'group'"),
        (group(INT4 | {"actorder": "group"}), "actorder is 'group'; supported: null"),
        (group(INT4, TOKEN), "8 bits of type 'float' with strategy 'token'.*for int4 weights"),
        (group(FP8, TOKEN | {"symmetric": False}), "supported are symmetric"),
        (group(FP8, TOKEN, format="marlin-24"), "format is 'marlin-24'"),
        (group(FP8) | {"ignore": []}, "ignore does not name lm_head"),
        (group(FP8) | {"sparsity_config": {"format": "marlin"}}, "sparsity_config is not supported"),
        (group(FP8) | {"ignore": ["re:*"]}, "ignore has 're:.*nothing to repeat"),
        (group(NVFP4 | {"group_size": 32}, format="nvfp4-pack-quantized"), "group_size is 32; .* is 16"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo is 'FP8'; supported is NVFP4"),
        (GPTQ | {"bits": 3}, "bits is 3; supported are 4 and 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; it must be"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (TORCHAO | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "is .Int4Weight"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_quantization(values)
