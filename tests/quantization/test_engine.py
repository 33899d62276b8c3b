"""Quantized models in the engine: answers, ranks, layers that cannot be merged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diptych import LLM
from diptych.shared import registry
from diptych.shared.config import ModelConfig, QuantConfig, read_config
from diptych.shared.interfaces import QuantizedLinear
from diptych.shared.loading.load_model import build_model
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.pipeline_stages import Stage
from diptych.shared.loading.quantize import (
    num_weight_bytes,
    quantize_linears,
    quantize_weight,
    with_quantization,
)
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from diptych.shared.modeling.dequantized_values import dequantize
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types.quant_scheme import QuantScheme

TINY = ASSETS / "tiny-dense"
FLAGS = {"panel": "reference", "device": "cpu", "max_total_tokens": 256}
ASK = [{"role": "user", "content": "What is 12 + 30?"}]


def answer(llm: LLM) -> tuple[list[int], str]:
    output = llm.chat(ASK, temperature=0, max_tokens=24)
    return output.output_ids, output.text


def test_answers_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    """int4 weights, whose inputs are not quantized: the same tokens as from a plain checkpoint."""
    llm = LLM("tiny-dense", quantization="int4", **FLAGS)
    for name in {path.name for path in TINY.iterdir()} - {"model.safetensors"}:
        shutil.copy(TINY / name, tmp_path)
    weights = dict(iterate_weights(TINY))
    for name, layer in llm.assembly.model.named_modules():
        if isinstance(layer, QuantizedLinear):
            weights[f"{name}.weight"] = layer.dequantized_weight()
    save_file({name: tensor.float() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    assert answer(llm) == answer(LLM(str(tmp_path), **FLAGS))


@pytest.mark.parametrize("method", ["fp8", "fp8-block", "int8"])
def test_8_bits_answer_as_16(method: str) -> None:
    tokens, text = answer(LLM("tiny-dense", quantization=method, **FLAGS))
    assert "42" in text
    assert tokens == answer(LLM("tiny-dense", **FLAGS))[0]


def test_a_quantized_model_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 drafts for 32 bits: the same text, and most drafts are accepted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draft = {"speculative": "standalone", "speculative_draft_model": "tiny-dense-int4"}
    llm = LLM("tiny-dense", **draft, **FLAGS)
    assert answer(llm) == answer(LLM("tiny-dense", **FLAGS))
    stats = llm.chat(ASK, temperature=0, max_tokens=24).speculation
    assert 2 * stats.num_accepted_tokens > stats.num_drafted_tokens


@pytest.mark.parametrize("method", ["fp8", "fp8-block", "int4", "nvfp4"])
def test_ranks_have_parts_of_the_same_quantized_weights(method: str) -> None:
    config = replace(read_config(TINY), hidden_size=256, intermediate_size=512)
    config = with_quantization(config, method)
    whole = dict(dummy_weights(config))
    ranks = [dict(dummy_weights(config, shards=Shards(config, rank, 2))) for rank in range(2)]
    for name, tensor in whole.items():
        parts = [rank[name] for rank in ranks]
        dim = next((d for d in range(tensor.dim()) if parts[0].shape[d] != tensor.shape[d]), None)
        expected = tensor if dim is not None else torch.cat((tensor, tensor))
        assert torch.equal(torch.cat([part.float() for part in parts], dim or 0), expected.float()), name
        if ".layers.0" in name and "_proj" in name:
            is_row_parallel = any(part in name for part in ("o_proj", "down_proj"))
            by_channel = (name.endswith("_scale") and method == "fp8") or name.endswith("_global")
            assert dim == (None if is_row_parallel and by_channel else int(is_row_parallel)), name


def test_stages_have_layers_by_their_own_number() -> None:
    """The second stage's layer 0 is the model's layer 3, which the config ignores."""
    config = with_quantization(read_config(TINY), "fp8")
    assert config.quantization is not None
    config = replace(config, quantization=replace(config.quantization, ignore=("model.layers.3",)))
    stage = Stage(config, 0, 1, stage=1, num_stages=2)
    names = dict(dummy_weights(config, shards=stage))
    assert stage.first_layer == 3
    assert "model.layers.0.mlp.down_proj.weight_scale" not in names
    assert "model.layers.1.mlp.down_proj.weight_scale" in names


def build(config: ModelConfig, panel: str) -> torch.nn.Module:
    def component(name: str) -> object:
        return registry.load(name, panel)

    model = build_model(
        component("models").model_class(config.architecture), config, component, "meta", torch.float32
    )
    assert config.quantization is not None
    with torch.device("meta"):
        quantize_linears(model, config.quantization, component)
    return model


def test_merged_layers_need_one_scheme() -> None:
    config = with_quantization(read_config(TINY), "fp8")
    assert config.quantization is not None
    config = replace(config, quantization=replace(config.quantization, ignore=("v_proj",)))
    kinds = {type(layer).__name__ for layer in build(config, "reference").modules()}
    assert {"Linear", "QuantizedLinear"} <= kinds
    with pytest.raises(ValueError, match=r"qkv_proj has parts.*v_proj: none.*panel=reference does not merge"):
        build(config, "optimized")


def test_weights_take_the_bytes_that_the_memory_check_expects() -> None:
    for method in ("fp8", "fp8-block", "int8", "int4", "nvfp4"):
        config = with_quantization(read_config(TINY), method)
        expected = num_weight_bytes(expected_shapes(config), config.quantization, torch.float32)
        for panel in ("reference", "optimized"):
            parameters = build(config, panel).parameters()
            assert sum(p.numel() * p.element_size() for p in parameters) == expected


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    config = json.loads((TINY / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization=int8: the checkpoint is already quantized \(fp8\)"):
        LLM(str(tmp_path), quantization="int8", load_format="dummy", **FLAGS)
    llm = LLM(str(tmp_path), load_format="dummy", **FLAGS)
    assert llm.generate([1, 2, 3], max_tokens=2, ignore_eos=True).output_ids


def test_names_are_matched_by_parts() -> None:
    online = QuantConfig.online("fp8", [128])
    config = replace(online, ignore=("mlp.gate", "re:.*layers\\.1\\..*q_proj$", "model.layers.10"))
    for name, is_quantized in {
        "model.layers.0.mlp.gate_up_proj": True,
        "model.layers.0.mlp.gate_proj": True,
        "model.layers.0.mlp.gate": False,
        "model.layers.1.self_attn.q_proj": False,
        "model.layers.11.self_attn.q_proj": True,
        "model.layers.10.self_attn.q_proj": False,
        "model.layers.1.self_attn.k_proj": True,
        "lm_head": False,
    }.items():
        assert (config.scheme_of(name) is not None) == is_quantized, name


@pytest.mark.parametrize(
    "method",
    [
        "fp8",
        pytest.param("fp8-block", marks=pytest.mark.full),
        pytest.param("int8", marks=pytest.mark.full),
        pytest.param("int4", marks=pytest.mark.full),
        "nvfp4",
    ],
)
def test_both_panels_have_the_same_tokens(method: str, tmp_path: Path) -> None:
    """Through Triton's interpreter where there is no GPU; a model of one layer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"load_format": "dummy", "max_total_tokens": 128, "device": device, "dtype": "float32"}
    flags |= {"quantization": method, "max_running_requests": 2}
    tokens = []
    for panel in ("reference", "optimized"):
        llm = LLM(str(tmp_path), panel=panel, use={"attention": "reference"}, **flags)
        outputs = llm.generate([[5, 9, 31], [7] * 5], max_tokens=2, temperature=0, ignore_eos=True)
        tokens.append([output.output_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_latent_attention_takes_dequantized_weights(tmp_path: Path) -> None:
    """Attention takes kv_b_proj apart, so it is dequantized when it is loaded."""
    hf_config = CONFIGS["deepseek-v2-lite"] | {"architectures": ["DeepseekV2ForCausalLM"]}
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    quantization["modules_to_not_convert"] = ["experts", "shared_experts"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config | {"quantization_config": quantization}))
    config = read_config(tmp_path)
    plain = dict(dummy_weights(replace(config, quantization=None)))
    weights = dict(dummy_weights(config))
    name = "model.layers.0.self_attn.kv_b_proj"
    scheme = QuantScheme("fp8", 32, 32, "group")
    tensors = quantize_weight(plain[f"{name}.weight"], scheme)
    expected = dequantize(tensors["weight"], tensors["weight_scale"], None, scheme)
    assert torch.equal(weights[f"{name}.weight"].float(), expected)
    assert f"{name}.weight_scale" not in weights
    assert f"{name.replace('kv_b', 'o')}.weight_scale" in weights
    output = LLM(str(tmp_path), load_format="dummy", **FLAGS).generate(
        [1, 2, 3], max_tokens=2, ignore_eos=True
    )
    assert len(output.output_ids) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fp8", "fp8-block", "int8", "int4", "nvfp4"])
def test_answers_on_a_gpu(method: str) -> None:
    """In CUDA graphs, one request and many, short prompts and one of many tokens."""
    llm = LLM("tiny-dense", quantization=method, device="cuda", panel="optimized", max_total_tokens=16_384)
    expected = "12 + 30 = 42"
    assert llm.chat(ASK, temperature=0, max_tokens=24).text == expected
    prompts = [llm.chat_prompt(ASK)] * 80  # more tokens in a step than Triton's GEMM of few tokens takes
    outputs = llm.generate(prompts, temperature=0, max_tokens=24)
    assert [output.text for output in outputs] == [expected] * 80


def test_split_k_has_its_counters_before_graphs() -> None:
    """Graphs of small batches have them although no pass of few tokens ran before: so results are the same
    with and without graphs."""
    for method in ("int4", "nvfp4"):
        llm = LLM("tiny-dense", quantization=method, **{**FLAGS, "panel": "optimized"})
        model = llm.assembly.parts.model_runner.model
        layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
        assert layers
        assert all(each.counters is not None for each in layers)
