"""Every family against transformers in float32: logits of every position, and 24 greedy tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import build_model, greedy, hf_greedy, load_saved, random_hf_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel

from diptych.shared.config import ModelConfig, MoEConfig, RopeConfig, parse_config, read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession

ASSETS = Path(__file__).parents[2] / "shared" / "assets"
PROMPT_LEN, NUM_NEW = 80, 24
CHUNKS = (1, 33)  # and the remaining 46: uneven, and across every window's and trained length's border

# float32 rounds to 6e-8. A logit of size 10 is a sum of 100 products behind up to 4 layers of such sums,
# taken in another order by transformers: up to 7e-5 apart were seen. A window that is off by one, or one RoPE
# parameter that is ignored, moves logits by more than 1e-2 (`test_a_wrong_model_does_not_pass`).
TOLERANCE = 2e-4


def make_prompt(length: int = PROMPT_LEN, seed: int = 1) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SECOND = ("gemma3-layer-types", "gpt-oss-layer-types", "llama4-no-norm")  # of a family


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.full] * (name in SECOND)) for name in CONFIGS])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, CausalLM]:
    """A random transformers model, and ours with the same weights."""
    hf_model = random_hf_model(CONFIGS[request.param])
    return hf_model, load_saved(hf_model, tmp_path)


def assert_same_greedy(ours: tuple[list[int], torch.Tensor], theirs: tuple[list[int], torch.Tensor]) -> None:
    (our_ids, our_logits), (their_ids, their_logits) = ours, theirs
    best, second = their_logits[-NUM_NEW - 1 : -1].topk(2).values.unbind(-1)
    assert (best - second).min() > 2 * TOLERANCE, "a near tie: the texts could differ for no reason"
    torch.testing.assert_close(our_logits, their_logits, rtol=0.0, atol=TOLERANCE)
    assert our_ids == their_ids


def test_logits_and_greedy_text(pair: tuple[PreTrainedModel, CausalLM]) -> None:
    hf_model, model = pair
    prompt = make_prompt()
    # With "dynamic" a token's frequencies are those of the sequence up to it: in transformers that is so when
    # tokens come one by one.
    is_dynamic = model.config.rope.rope_type == "dynamic"
    expected = hf_greedy(hf_model, prompt, NUM_NEW, [1] * (len(prompt) - 1) if is_dynamic else ())
    assert_same_greedy(greedy(model, prompt, NUM_NEW), expected)

    assert_same_greedy(greedy(model, prompt, NUM_NEW, CHUNKS), expected)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    if "rope" in changes:
        changes["rope"] = replace(config.rope, **changes["rope"])
    if "moe" in changes:
        assert isinstance(config.moe, MoEConfig)
        changes["moe"] = replace(config.moe, **changes["moe"])
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_windows": (24, 24, 24)}),
        ("mistral-window", {"sliding_windows": (22, 22, 22)}),
        ("phi3", {"rope": {"rotary_dim": 12}}),
        ("phi3", {"sliding_windows": (30, 30, 30)}),
        ("qwen2-window-layers", {"sliding_windows": (16, -1, 16)}),
        ("qwen3-layer-types", {"rms_norm_eps": 1e-2}),
        ("llama-linear", {"rope": {"factor": 2.4}}),
        ("llama-dynamic", {"rope": {"factor": 3.5}}),
        ("llama-llama3", {"rope": {"low_freq_factor": 1.2}}),
        ("llama-yarn", {"rope": {"mscale": None}}),
        ("llama-yarn", {"rope": {"truncate": True}}),
        ("qwen3-yarn", {"rope": {"attention_factor": None}}),
        ("qwen3-yarn", {"rope": {"beta_slow": 1.5}}),
        ("gemma2", {"attn_scale": 24**-0.5}),
        ("gemma2", {"attn_logit_cap": 6.0}),
        ("gemma2", {"final_logit_cap": 0.0}),
        ("gemma2", {"sliding_windows": (-1, 20, -1, 20)}),
        ("gemma3", {"local_rope": None}),
        ("gemma4", {"rope": {"turning_dim": 36}}),
        ("gemma4", {"rope": {"turning_dim": 22}}),
        ("gemma4", {"attn_scale": 20**-0.5}),
        ("gemma4", {"local_rope": RopeConfig("default", 10000.0, 20)}),
        ("gpt-oss", {"sliding_windows": (19, -1, 19)}),
        ("gpt-oss", {"rope": {"truncate": True}}),
        ("gpt-oss", {"moe": {"swiglu_limit": 7.0}}),
        ("llama4", {"attention_chunks": (33, 33, 33, 0)}),
        ("llama4", {"qk_l2_norm": False}),
        ("llama4", {"attn_temperature": None}),
        ("llama4", {"nope_layers": frozenset()}),
        ("llama4", {"rope": {"is_interleaved": False}}),
        ("mixtral", {"moe": {"norm_topk_prob": False}}),
        ("qwen3-moe", {"moe": {"norm_topk_prob": True}}),
        ("qwen3-moe", {"moe": {"num_experts_per_tok": 2}}),
        ("smollm3", {"nope_layers": frozenset()}),
        ("glm", {"rope": {"is_interleaved": False}}),
        ("glm4-moe", {"moe": {"topk_group": 4}}),
        ("granite", {"embed_scale": 1.0}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"logits_scale": 1.0}),
        ("granite", {"rms_norm_eps": 1e-2}),
        ("olmo2", {"rms_norm_eps": 1e-2}),
        ("olmo3", {"local_rope": None}),
        ("minimax-m2", {"rope": {"rotary_dim": 20}}),
        ("minimax-m2", {"moe": {"norm_topk_prob": False}}),
        ("deepseek-v2", {"rope": {"mscale_all_dim": None}}),
        ("deepseek-v2", {"moe": {"routing": "softmax"}}),
        ("deepseek-v2-lite", {"rope": {"is_interleaved": False}}),
        ("deepseek-v3", {"moe": {"routed_scaling_factor": 1.0}}),
        ("deepseek-v3", {"moe": {"topk_group": 4}}),
    ],
)
def test_a_wrong_model_does_not_pass(name: str, changes: dict[str, Any]) -> None:
    config = parse_config(CONFIGS[name])
    logits = []
    for its_config in (config, changed(config, **changes)):
        model = build_model(its_config)
        model.load_weights(dummy_weights(its_config))
        logits.append(ModelSession(model).step({0: make_prompt()})[0])
    assert (logits[0] - logits[1]).abs().max() > 20 * TOLERANCE


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_built_in_models(name: str) -> None:
    """Trained weights, in bfloat16 on disk, run in float32."""
    config = read_config(ASSETS / name)
    model = build_model(config)
    model.load_weights(iterate_weights(ASSETS / name, config))
    hf_model = AutoModelForCausalLM.from_pretrained(
        ASSETS / name, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = make_prompt(40)
    our_ids, our_logits = greedy(model, prompt, 24, chunks=(17,))
    their_ids, their_logits = hf_greedy(hf_model, prompt, 24)
    torch.testing.assert_close(our_logits, their_logits, rtol=0.0, atol=TOLERANCE)
    assert our_ids == their_ids


def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    text_config = {key: value for key, value in CONFIGS["gemma3"].items() if key != "torch_dtype"}
    vision_config = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 16}
    hf_config = Gemma3Config(
        text_config=text_config | {"vocab_size": 331},
        vision_config={**vision_config, "num_attention_heads": 2, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=330,
    )
    hf_model = Gemma3ForConditionalGeneration._from_config(hf_config, attn_implementation="eager").eval()
    model, prompt = load_saved(hf_model, tmp_path), make_prompt(60)[:40]
    prompt = [min(token, 329) for token in prompt]
    assert model.config.architecture == "Gemma3ForCausalLM"
    expected = hf_greedy(hf_model, prompt, 2)[1]
    torch.testing.assert_close(greedy(model, prompt, 2)[1], expected, rtol=0.0, atol=TOLERANCE)


def test_mxfp4_experts_of_gpt_oss(tmp_path: Path) -> None:
    """A checkpoint with packed experts, against transformers with the values that the codes stand for."""
    hf_config = {**CONFIGS["gpt-oss-layer-types"], "intermediate_size": 32}
    hf_model = random_hf_model(hf_config)
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    packed: dict[str, torch.Tensor] = {}
    for name, parameter in hf_model.named_parameters():
        if name.endswith((".gate_up_proj", ".down_proj")):
            num_experts, num_in, num_out = parameter.shape
            codes = torch.randint(0, 16, (num_experts, num_out, num_in // 32, 32), generator=generator)
            scales = torch.randint(122, 125, codes.shape[:3], generator=generator)
            values = magnitudes[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
            values = values * 2.0 ** (scales[..., None] - 127)
            parameter.data.copy_(values.flatten(2).transpose(1, 2))
            packed[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            packed[f"{name}_scales"] = scales.to(torch.uint8)
    others = {n: p.data for n, p in hf_model.named_parameters() if f"{n}_blocks" not in packed}
    save_file({**others, **packed}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps({**hf_config, "quantization_config": quantization}))

    llm = LLM(model=str(tmp_path), device="cpu", panel="reference", max_total_tokens=256)
    prompt = make_prompt(140)
    expected = hf_greedy(hf_model, prompt, 8)[0]
    output = llm.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True, progress=False)
    assert output.output_ids == expected
