"""EAGLE-3 heads in each layout in which they are published load from files, and answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from diptych.shared.config import read_config, read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.types import SamplingParams

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 700}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 700,
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "transformer_layer_config": {"model_type": "llama", "num_attention_heads": 4, "head_dim": 64},
}
NVIDIA = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
# Layout -> config.json, and the name of the layer in the checkpoint.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "EAGLE's authors": ({**PLAIN, LAYER_IDS: None}, "midlayer"),
    "less wide than the target": ({**PLAIN, "hidden_size": 192, "target_hidden_size": 256}, "midlayer"),
    "SpecForge": (
        {**PLAIN, "eagle_config": {LAYER_IDS: [1, 2, 4], "use_aux_hidden_state": True}},
        "midlayer",
    ),
    "NVIDIA, a norm before fc": (
        {**PLAIN, "eagle_config": {**NVIDIA, LAYER_IDS: [1, 3, 5], "norm_before_fc": True}},
        "layers.0",
    ),
    "NVIDIA, the last hidden states": (
        {**PLAIN, "eagle_config": {**NVIDIA, LAYER_IDS: [], "use_aux_hidden_state": False}},
        "layers.0",
    ),
    "speculators": ({**SPECULATORS, "norm_before_residual": True, LAYER_IDS: [1, 3, 5]}, "layers.0"),
    "EAGLE-3.1": ({**SPECULATORS, "fc_norm": True, "norm_output": True, LAYER_IDS: [1, 3, 6]}, "layers.0"),
}
PROMPTS = [[5, 6, 7, 8, 5, 6], [30, 40, 50]]


def engine(panel: str, **flags: Any) -> LLM:
    sizes = {"max_total_tokens": 512, "max_running_requests": 4}
    return LLM(model="tiny-dense", panel=panel, device="cpu", check_invariants=True, **sizes, **flags)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    return [output.output_ids for output in llm.generate(PROMPTS, params)]


# Layouts that the optimized panel tries, for 20 s each in Triton's interpreter. The contract draft_models
# compares both panels for every kind of head.
IN_BOTH = ("EAGLE-3.1", "NVIDIA, the last hidden states")


@pytest.mark.parametrize(
    ("panel", "layout"),
    [
        *(
            pytest.param("reference", layout, marks=() if layout == IN_BOTH[0] else pytest.mark.full)
            for layout in LAYOUTS
        ),
        *(pytest.param("optimized", layout, marks=pytest.mark.full) for layout in IN_BOTH),
    ],
)
def test_a_head_of_each_layout_drafts(panel: str, layout: str, tmp_path: Path) -> None:
    keys, layer = LAYOUTS[layout]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    config = read_draft_config(tmp_path, read_config(ASSETS / "tiny-dense"))
    weights = {
        name.replace("midlayer", layer): tensor.contiguous() for name, tensor in dummy_draft_weights(config)
    }
    save_file(weights, tmp_path / "model.safetensors")
    shape = {"speculative_num_steps": 3, "speculative_topk": 2, "speculative_num_draft_tokens": 5}
    llm = engine(panel, speculative="eagle3", speculative_draft_model=str(tmp_path), **shape)
    assert answers(llm) == answers(engine(panel))
