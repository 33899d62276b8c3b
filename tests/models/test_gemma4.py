"""Gemma-4 beyond the parity of all families: published checkpoints, the pool, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import build_model, greedy, hf_greedy, random_hf_model
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from diptych.optimized.moe import MoE as OptimizedMoE
from diptych.reference.layers import SiluAndMul
from diptych.reference.models.gemma4_model import Gemma4DecoderLayer
from diptych.reference.moe import MoE
from diptych.shared import registry
from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.kv_sizing import kv_bytes_per_token
from diptych.shared.loading.weights import dummy_weights
from diptych.shared.modeling.kv_pool import build_kv_pool
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types.attention import FP8
from diptych.shared.types.quant_scheme import QuantScheme
from tests.changed_modules import Change
from tests.planted import Bug, Bugs, Words

EXERCISES = Path(__file__).parents[2] / "docs" / "exercises"
SHARED, EQUAL, EXPERTS = CONFIGS["gemma4"], CONFIGS["gemma4-k-eq-v"], CONFIGS["gemma4-moe"]
PROMPT = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(2)).tolist()
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 64,
}  # fmt: skip
AUDIO = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16, "attention_chunk_size": 4, "attention_context_left": 5,
}  # fmt: skip


def engine(folder: Path, **flags: Any) -> LLM:
    flags = {"panel": "reference", "max_total_tokens": 512, **flags}
    return LLM(model=str(folder), device="cpu", **flags)


def answer(llm: LLM, num_new: int = 8) -> list[int]:
    output = llm.generate(PROMPT, max_tokens=num_new, temperature=0, ignore_eos=True, progress=False)
    found: list[int] = output.output_ids
    return found


def test_a_multimodal_checkpoint_with_the_kv_of_layers_that_share_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As published: prefixes, towers for images and audio, keys of the text config by kind of layer, and
    projections that layers with the KV of an earlier one do not use."""
    text_config = {key: value for key, value in SHARED.items() if key != "architectures"}
    hf_config = Gemma4Config(
        text_config=text_config, vision_config=VISION, audio_config=AUDIO,
        image_token_id=330, video_token_id=329, audio_token_id=328,
    )  # fmt: skip
    hf_model = Gemma4ForConditionalGeneration._from_config(hf_config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in hf_model.model.language_model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)
    hf_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in config["text_config"]
    config["text_config"] = text_config | {"use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    unused = ("k_proj", "v_proj", "k_norm")
    for name in unused:
        source = f"model.language_model.layers.1.self_attn.{name}.weight"
        weights[source.replace("layers.1", "layers.4")] = torch.full_like(weights[source], 9.0)
    save_file(weights, tmp_path / "model.safetensors")

    expected = hf_greedy(hf_model, PROMPT, 8)[0]
    assert len(set(expected)) > 2
    assert answer(engine(tmp_path)) == expected
    num = {part: sum(name.startswith(part) for name in weights) for part in ("model.vision", "model.audio")}
    assert (
        f"{len(unused)} for KV that an earlier layer gives, {num['model.audio'] + 1} for audio, "
        f"{num['model.vision'] + 1} for images"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize(
    ("hf_config", "shapes"),
    [(SHARED, [(2, 20), (2, 20), (2, 36)]), (EQUAL, [(4, 16), (1, 32)] * 2)],
    ids=["gemma4", "gemma4-k-eq-v"],
)
def test_the_pool_has_a_layer_for_each_that_computes_kv(
    panel: str, hf_config: dict[str, Any], shapes: list[tuple[int, int]]
) -> None:
    config = parse_config(hf_config)
    for dtype in (torch.float32, FP8):
        pool = build_kv_pool(lambda name: registry.load(name, panel), config, 8, 4, dtype, "cpu")
        assert [tuple(pool.k_buffer(i).shape) for i in range(pool.num_layers)] == [(12, *s) for s in shapes]
        num_bytes = sum(2 * heads * dim for heads, dim in shapes) * dtype.itemsize
        assert pool.num_bytes_per_token == kv_bytes_per_token(config, dtype) == num_bytes
        assert pool.largest_heads == tuple(map(max, zip(*shapes)))
        for layer_id, shape in enumerate(shapes):
            k = torch.full((2, *shape), layer_id + 1.0)
            pool.store(layer_id, torch.tensor([5, 7]), k, -k)
        pool.move(torch.tensor([6, 5]), torch.tensor([5, 11]))
        for layer_id in range(pool.num_layers):
            for buffer, sign in ((pool.k_buffer, 1), (pool.v_buffer, -1)):
                kept = buffer(layer_id).float().flatten(1)
                expected = torch.zeros(12)
                expected[[6, 7]] = sign * (layer_id + 1.0)
                assert torch.equal(kept, expected[:, None].expand_as(kept))


def logits(config: ModelConfig, model: CausalLM) -> torch.Tensor:
    model.load_weights(dummy_weights(config))
    return ModelSession(model).step({0: PROMPT})[0]


BUGS = Bugs("experts of Gemma 4")
_MODULES = "shared.modeling.gemma4_modules"
for _name, _before, _after in (
    ("NoScale", "eps=moe.eps) * moe.scale *", "eps=moe.eps) *"),
    ("NoScaleOfExperts", "* moe.per_expert_scale.float()[topk.topk_ids.long()]", "* 1.0"),
    ("RouterReadsTheNorm", "moe.topk(moe.gate(router_x))", "moe.topk(moe.gate(x))"),
    ("ExpertsReadTheStream", "moe.experts(normed, ", "moe.experts(x, "),
    ("NormsSwapped", "feedforward_layernorm_2(routed)", "feedforward_layernorm_1(routed)"),
):
    BUGS.add(_name, Words(f"{_MODULES}:LayerInput", (Change(_MODULES, _before, _after),)))
BUGS.add("Silu", SiluAndMul, where="act_fn")


@BUGS.found_by(honest=True)
def test_each_part_of_the_experts_counts(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> bool:
    hf_model = random_hf_model(EXPERTS)
    model = build_model(parse_config(EXPERTS))
    model.load_weights(hf_model.state_dict().items())
    if bug.name == "Silu":
        for layer in model.model.layers:
            layer.moe.experts.act_fn = SiluAndMul()
    elif bug.plant is not None:
        monkeypatch.setattr(Gemma4DecoderLayer, "add_experts", bug.planted.add_experts)
    found, expected = greedy(model, PROMPT, 1)[1], hf_greedy(hf_model, PROMPT, 1)[1]
    return bool((found - expected).abs().max() > 1e-3)  # the right model is within 1e-4


def test_experts_without_gelu_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    use = {"moe": f"{EXERCISES / 'my_moe.py'}:MoE"}
    with pytest.raises(ValueError, match="MoE: its experts have no hidden_act=gelu_tanh"):
        engine(tmp_path, load_format="dummy", use=use)


@pytest.mark.parametrize("num_tokens", [1, 9, 70])
def test_experts_with_gelu(num_tokens: int) -> None:
    """The kernels of the optimized panel: pair by pair, and in blocks."""
    config = parse_config(EXPERTS).moe
    assert config is not None
    inputs, ours, other = Inputs(0), MoE(config, 64), OptimizedMoE(config, 64)
    inputs.fill_(ours)
    other.load_state_dict(ours.state_dict())
    x = inputs.normal(num_tokens, 64)
    expect_close("y", other(x), ours(x), tolerance("moe", torch.float32))
    silu = MoE(replace(config, hidden_act="silu"), 64)
    silu.load_state_dict(ours.state_dict())
    assert (silu(x) - ours(x)).abs().max() > 1e-2


@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_quantized_experts_with_gelu_are_refused(panel: str) -> None:
    config = parse_config(EXPERTS).moe
    assert config is not None
    experts = registry.load("quantized_experts", panel)
    with pytest.raises(ValueError, match="quantized experts with hidden_act=gelu_tanh are not supported"):
        experts.like(MoE(config, 64).experts, QuantScheme("fp8", inputs="token"))
    with pytest.raises(ValueError, match="hidden_act=gelu_tanh with swiglu_limit=7"):
        registry.load("moe", panel)(replace(config, swiglu_limit=7.0), 64)


def test_each_part_of_a_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the right model, which has the parity of the other families, are not those of wrong ones."""
    config = parse_config(SHARED)
    right = logits(config, build_model(config))
    model = build_model(config)
    model.model.layers[5].self_attn.layer = replace(model.model.layers[5].self_attn.layer, sliding_window=16)
    wrong = [logits(config, model)]
    model = build_model(config)
    layer = model.model.layers[4].self_attn
    layer.layer = replace(layer.layer, layer_id=0)  # an earlier layer of its kind, and not the last one
    wrong.append(logits(config, model))
    with monkeypatch.context() as patch:
        patch.setattr("torch.nn.functional.rms_norm", lambda x, shape, eps: x)
        wrong.append(logits(config, build_model(config)))
    model = build_model(config)
    model.load_weights(dummy_weights(config))
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)
    wrong.append(ModelSession(model).step({0: PROMPT})[0])
    model.load_weights(dummy_weights(config))
    model.model.embed_tokens_per_layer.weight.zero_()
    wrong.append(ModelSession(model).step({0: PROMPT})[0])
    for found in wrong:
        assert (found - right).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (SHARED, {"enable_moe_block": True}, "num_experts is missing"),
        (EXPERTS, {"top_k_experts": 7}, r"top_k_experts \(7\) exceeds num_experts \(6\)"),
        (SHARED, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (SHARED, {"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input is 300; .* 331"),
        (SHARED, {"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4 of 6 layers"),
        (SHARED, {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6 of 6 layers"),
        (EQUAL, {"num_global_key_value_heads": 3}, "3 KV heads of 32 numbers .* 8 query heads"),
        (SHARED, {"global_head_dim": 35}, "2 KV heads of 35 numbers"),
        (SHARED, {"per_layer_config": {"2": {"head_dim": 24}}}, r"head_dim \[20, 24\] .* full attention"),
        (
            SHARED,
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}
                }
            },
            "partial_rotary_factor 2 leaves",
        ),
    ],
)
def test_configs_that_are_refused(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(base | changes)


def test_defaults_of_a_config() -> None:
    """They are those of transformers' `Gemma4TextConfig`."""
    keys = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    keys += ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    hf_config = {key: SHARED[key] for key in keys} | {"vocab_size": 262_144, "num_hidden_layers": 8}
    config = parse_config(hf_config)
    assert config.sliding_windows == (511,) * 5 + (-1, 511, -1)
    assert set(config.kv_heads) == {(2, 256), (2, 512)}
    assert (config.rope.rope_type, config.rope.theta, config.rope.turning_dim) == ("proportional", 1e6, 128)
    assert (config.layer_input_size, config.num_kv_shared_layers, config.final_logit_cap) == (256, 0, 0.0)
    assert config.tie_word_embeddings


FLAGS: list[tuple[str, dict[str, Any]]] = [
    ("lora_paths", {"max_loras_per_batch": 2, "max_lora_rank": 8}),
    ("hicache_tokens", {"hicache_tokens": 1024}),
    ("deterministic", {"deterministic": True}),
    ("speculative", {"speculative": "ngram"}),
    ("quantization", {"quantization": "int8"}),
    ("disaggregation", {"disaggregation": True}),
]


@pytest.mark.parametrize(("name", "flags"), FLAGS, ids=[name for name, _ in FLAGS])
def test_flags_that_are_refused(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHARED))
    with pytest.raises(ValueError, match=f"{name} does not work with the layers of Gemma4ForCausalLM"):
        engine(tmp_path, load_format="dummy", **flags)


def test_fp8_kv_of_unequal_layers(tmp_path: Path) -> None:
    random_hf_model(EQUAL).save_pretrained(tmp_path)
    flags = {"kv_cache_dtype": "fp8_e4m3"}
    reference, optimized = (engine(tmp_path, panel=panel, **flags) for panel in ("reference", "optimized"))
    assert answer(reference, 3) == answer(optimized, 3)


def test_prompts_of_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHARED))
    llm = engine(tmp_path, load_format="dummy")
    with pytest.raises(ValueError, match="input_embeds do not work with Gemma4ForCausalLM"):
        llm.generate(input_embeds=torch.zeros(3, 72), max_tokens=2, progress=False)
