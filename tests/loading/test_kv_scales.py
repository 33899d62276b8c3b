"""The scales of an FP8 KV cache in a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych import LLM
from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.loading.kv_scales import kv_cache_of, read_kv_scales
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types.attention import FP8, KVScales
from diptych.shared.types.quant_scheme import QuantScheme


def folder_with(folder: Path, scales: dict[str, Any], scheme: Any = None) -> tuple[Path, ModelConfig]:
    """tiny-dense with more tensors, named behind model.layers."""
    shutil.copytree(ASSETS / "tiny-dense", folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in scales.items():
        tensors[f"model.layers.{name}"] = torch.as_tensor(value, dtype=torch.float32)
    save_file(tensors, path, {"format": "pt"})
    config = read_config(folder)
    if scheme is not None:
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        (folder / "config.json").write_text(json.dumps(values))
    return folder, config


def all_layers(**by_end: float) -> dict[str, Any]:
    """Scales that differ in each layer."""
    num_layers = read_config(ASSETS / "tiny-dense").num_hidden_layers
    return {
        f"{layer_id}.self_attn.{end.replace('__', '.')}": [value * (layer_id + 1)]
        for layer_id in range(num_layers)
        for end, value in by_end.items()
    }


@pytest.mark.parametrize(
    "ends",
    [
        {"k_scale": 0.5, "v_scale": 0.25},
        {"k_proj__k_scale": 0.5, "v_proj__v_scale": 0.25},
        {"k_proj__output_scale": 0.5, "v_proj__output_scale": 0.25},
    ],
    ids=lambda ends: next(iter(ends)),
)
def test_names_of_scales(tmp_path: Path, ends: dict[str, float]) -> None:
    folder, config = folder_with(tmp_path, all_layers(**ends))
    found = read_kv_scales(folder, config)
    assert found == [KVScales(0.5 * (i + 1), 0.25 * (i + 1)) for i in range(config.num_hidden_layers)]
    assert not any("scale" in name for name, _ in iterate_weights(folder, config))


def test_one_scale_for_both(tmp_path: Path) -> None:
    folder, config = folder_with(tmp_path, all_layers(kv_scale=0.5))
    assert read_kv_scales(folder, config)[1] == KVScales(1.0, 1.0)


def test_a_checkpoint_without_scales() -> None:
    folder = ASSETS / "tiny-dense"
    assert read_kv_scales(folder, read_config(folder)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1.self_attn.v_scale": None}, r"layers\.1\.self_attn\.v_scale is missing"),
        ({"1.self_attn.v_scale": [0.0]}, r"layers\.1\.self_attn\.v_scale is 0\.0.*above 0"),
        ({"0.self_attn.k_scale": [float("nan")]}, r"layers\.0\.self_attn\.k_scale is nan"),
        ({"0.self_attn.k_scale": [1.0, 2.0]}, r"layers\.0\.self_attn\.k_scale has shape \(2,\)"),
    ],
)
def test_scales_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    scales = all_layers(k_scale=0.5, v_scale=0.25) | changes
    folder, config = folder_with(tmp_path, {name: x for name, x in scales.items() if x is not None})
    with pytest.raises(ValueError, match=message):
        read_kv_scales(folder, config)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"num_bits": 4, "type": "int"}, r"kv_cache_scheme has {'num_bits': 4, 'type': 'int'}"),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, "'strategy': 'channel'"),
        ({"num_bits": 8, "type": "float", "dynamic": True}, "'dynamic': True"),
        ({"num_bits": 8, "type": "float"}, "k_scale is missing"),
        ("fp8", "kv_cache_scheme is 'fp8'"),
    ],
)
def test_schemes_that_are_refused(tmp_path: Path, scheme: Any, message: str) -> None:
    folder, config = folder_with(tmp_path, {}, scheme)
    with pytest.raises(ValueError, match=message):
        read_kv_scales(folder, config)


def test_the_engine_uses_them(tmp_path: Path) -> None:
    """The pool has the scales, half the bytes, and prefixes from the cache give the same answer."""
    folder, config = folder_with(tmp_path, all_layers(k_scale=0.03, v_scale=0.01))
    llm = LLM(str(folder), kv_cache_dtype="fp8_e4m3", max_total_tokens=512, chunked_prefill_size=16)
    pool = llm.assembly.kv_pool
    assert pool.dtype == FP8
    assert pool.kv_scales[1] == pytest.approx((0.06, 0.02))
    assert llm.assembly.memory.bytes_per_token == pool.num_bytes_per_token
    assert pool.num_bytes_per_token == 2 * config.num_hidden_layers * config.num_kv_heads * config.head_dim
    prompt = llm.chat_prompt([{"role": "user", "content": "What is 12 + 30?"}])
    options = {"temperature": 0, "max_new_tokens": 8, "return_logprob": True}
    cold, warm = (llm.generate(prompt, **options) for _ in range(2))
    assert warm.num_cached_tokens > 0
    assert cold.text == warm.text == "12 + 30 = 42"[: len(cold.text)]
    first, second = ([token.logprob for token in output.output_logprobs] for output in (cold, warm))
    assert second == pytest.approx(first, abs=0.01)


def test_a_stage_has_the_scales_of_its_layers(tmp_path: Path) -> None:
    folder, _ = folder_with(tmp_path, all_layers(k_scale=0.03, v_scale=0.01))
    config = EngineConfig(
        model=str(folder), panel="reference", device="cpu", kv_cache_dtype="fp8_e4m3", max_total_tokens=512
    )
    whole = assemble(config).kv_pool.kv_scales
    first, last = on_ranks(2, lambda ranks: assemble(config.updated(pp=2), tp=ranks).kv_pool.kv_scales)
    assert [*first, *last] == whole
    assert first
    assert last


@pytest.mark.parametrize(
    "flags",
    [
        {"speculative": "ngram"},
        {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"},
        {"page_size": 4, "disable_radix_cache": True, "enable_mixed_chunk": True, "chunked_prefill_size": 8},
    ],
    ids=lambda flags: next(iter(flags.values())),
)
def test_an_fp8_pool_gives_the_same_answer_in_every_way(flags: dict[str, Any]) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24}
    message = [{"role": "user", "content": "Count from 3 to 12."}]
    texts = [
        LLM("tiny-dense", kv_cache_dtype="fp8_e4m3", max_total_tokens=512, **more)
        .chat(message, **options)
        .text
        for more in ({}, flags)
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("3, 4, 5")


def test_scales_beside_quantized_weights(tmp_path: Path) -> None:
    """As compressed-tensors writes them: FP8 weights by channel, and a kv_cache_scheme."""
    folder, _ = folder_with(tmp_path, all_layers(k_scale=0.05, v_scale=0.02))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = quantize_weight(weight.float(), QuantScheme("fp8", inputs="token"))
            tensors |= {name: parts["weight"], f"{name}_scale": parts["weight_scale"]}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": fp8 | {"strategy": "channel"},
        "input_activations": fp8 | {"strategy": "token", "dynamic": True},
    }
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": fp8 | {"strategy": "tensor", "dynamic": False},
    }
    (folder / "config.json").write_text(json.dumps(values))
    llm = LLM(str(folder), kv_cache_dtype="fp8_e4m3", max_total_tokens=512)
    assert llm.assembly.kv_pool.kv_scales[0] == pytest.approx((0.05, 0.02))
    answer = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], temperature=0, max_new_tokens=12)
    assert answer.text == "12 + 30 = 42"


def test_latent_rows_have_one_scale(tmp_path: Path) -> None:
    """That of K: V is part of the row."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-v3"]))
    config = read_config(tmp_path)
    scales = {
        f"model.layers.{i}.self_attn.{which}_scale": torch.tensor([0.5 + i + (which == "v")])
        for i in range(config.num_hidden_layers)
        for which in "kv"
    }
    save_file(scales, tmp_path / "model.safetensors")
    dtype, found = kv_cache_of(tmp_path, config, EngineConfig(kv_cache_dtype="fp8_e4m3"))
    assert dtype == FP8
    assert found == [KVScales(0.5 + i, 0.5 + i) for i in range(config.num_hidden_layers)]


@pytest.mark.parametrize("config", ["llama-biases", pytest.param("deepseek-v2", marks=pytest.mark.full)])
def test_a_bfloat16_pool(config: str, tmp_path: Path) -> None:
    """Half the bytes of a float32 model's; both panels give the same tokens, and other than with float32."""
    folder = tmp_path / config
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[config]))
    flags = {"load_format": "dummy", "device": "cpu", "max_total_tokens": 256, "dtype": "float32"}
    found = {}
    for panel, dtype in (("reference", "bfloat16"), ("optimized", "bfloat16"), ("reference", "auto")):
        llm = LLM(str(folder), panel=panel, kv_cache_dtype=dtype, **flags)
        output = llm.generate(
            [5, 7, 11, 13] * 6, temperature=0, max_tokens=8, progress=False, return_logprob=True
        )
        found[panel, dtype] = output.output_ids, [each.logprob for each in output.output_logprobs]
        wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        assert llm.assembly.kv_pool.dtype == wanted
    ids, logprobs = found["reference", "bfloat16"]
    assert found["optimized", "bfloat16"][0] == ids
    assert found["optimized", "bfloat16"][1] == pytest.approx(logprobs, abs=2e-2)
    assert found["reference", "auto"][1] != logprobs
