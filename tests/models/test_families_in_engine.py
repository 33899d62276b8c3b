"""Families with their own attention, in the engine: greedy text is that of transformers, whole, in chunks,
beside requests that decode, and from the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import hf_greedy, random_hf_model
from safetensors.torch import save_file

from diptych.shared.config import families, parse_config, parse_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import SamplingParams

SHARED, PROMPT_LENS = 70, (150, 131, 90, 33)
MIXED = {"chunked_prefill_size": 24, "enable_mixed_chunk": True}
FAMILIES = (
    *("gemma2", "gemma3", "gpt-oss", "gpt-oss-layer-types", "llama4", "llama4-no-norm"),
    *("granite", "olmo3", "minimax-m2"),
)
WITHOUT_TREES = (  # of drafts, here
    *("llama-llama3", "mistral-window", "mixtral", "phi3", "qwen2-window-layers", "qwen3-layer-types"),
    *("qwen3-moe", "smollm3", "glm", "glm4", "glm4-moe", "olmo2", "gemma4", "gemma4-k-eq-v", "gemma4-moe"),
)
FAST = ("gpt-oss", "llama4", "gemma4-moe", "glm4-moe")
SETTINGS = [  # the fast cut has some
    *(
        pytest.param(name, page_size, flags, marks=[] if is_fast else pytest.mark.full)
        for name in (*FAMILIES, *WITHOUT_TREES)
        for page_size in (1, 4, 16)
        for flags in ({}, MIXED, {"chunked_prefill_size": 40})
        for is_fast in [flags is MIXED and page_size == 4 and name in FAST]
    )
]


def make_prompts() -> list[list[int]]:
    """They begin alike."""
    generator = torch.Generator().manual_seed(5)
    beginning = torch.randint(0, 331, (SHARED,), generator=generator).tolist()
    rest = [torch.randint(0, 331, (n,), generator=generator).tolist() for n in PROMPT_LENS]
    return [(beginning + ids)[:n] for n, ids in zip(PROMPT_LENS, rest)]


def expect_answers_of_transformers(
    folder: Path, name: str, prompts: list[list[int]], num_new: int, **flags: Any
) -> None:
    """From a cold cache, and from a warm one."""
    hf_model = random_hf_model(CONFIGS[name])
    hf_model.save_pretrained(folder)
    expected = [hf_greedy(hf_model, prompt, num_new)[0] for prompt in prompts]
    llm = LLM(model=str(folder), device="cpu", check_invariants=True, max_total_tokens=1024, **flags)
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    assert [o.output_ids for o in llm.generate(prompts, params, progress=False)] == expected
    outputs = llm.generate(prompts, params, progress=False)
    assert [o.output_ids for o in outputs] == expected
    assert all(o.num_cached_tokens >= o.num_prompt_tokens - llm.config.page_size for o in outputs)


def test_every_family_has_a_grid() -> None:
    """Here, in test_deepseek_engine.py, in test_hybrid.py, or in test_qwen_image_families.py."""
    here = {CONFIGS[name]["architectures"][0] for name in (*FAMILIES, *WITHOUT_TREES)}
    hybrid = {config["architectures"][0] for config in HYBRID_CONFIGS.values()}
    others = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3VLMoeForCausalLM"}
    assert here | hybrid | others == set(families.FAMILIES)


@pytest.mark.parametrize(("name", "page_size", "flags"), SETTINGS)
def test_reference(name: str, page_size: int, flags: dict[str, Any], tmp_path: Path) -> None:
    flags = {"panel": "reference", "page_size": page_size, **flags}
    expect_answers_of_transformers(tmp_path, name, make_prompts(), 16, **flags)


TREES = [  # the fast cut has one
    pytest.param(panel, name, id=f"{panel}-{name}", marks=[] if name == fast else pytest.mark.full)
    for panel, fast in (("reference", "llama4"), ("optimized", ""))
    for name in ("mistral-window", *FAMILIES)
]


@pytest.mark.parametrize(("panel", "name"), TREES)
def test_trees_of_drafts(panel: str, name: str, tmp_path: Path) -> None:
    """The draft model is the target itself: every round has wrong drafts, and right ones, which are kept."""
    lens, num_new = ((61, 29), 9) if panel == "reference" else ((30,), 6)  # kernels may be interpreted
    hf_model = random_hf_model(CONFIGS[name])
    hf_model.save_pretrained(tmp_path)
    prompts = [prompt[:length] for prompt, length in zip(make_prompts(), lens)]
    llm = LLM(
        model=str(tmp_path), device="cpu", panel=panel, page_size=4, max_total_tokens=512,
        speculative="standalone", speculative_draft_model=str(tmp_path), speculative_num_steps=3,
        speculative_topk=2, speculative_num_draft_tokens=7, check_invariants=True,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    assert [o.output_ids for o in outputs] == [hf_greedy(hf_model, p, num_new)[0] for p in prompts]
    assert llm.stats().speculation.num_accepted_tokens >= num_new // 2


HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "rope_theta": 500.0, "hidden_act": "silu",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
}  # fmt: skip
OTHER_TREES = [
    pytest.param(
        panel, speculative, name, id=f"{panel}-{speculative}-{name}",
        marks=[] if (speculative, name) == ("ngram", "gpt-oss") else pytest.mark.full,
    )
    for panel, speculative in (("reference", "ngram"), ("reference", "eagle3"), ("optimized", "eagle3"))
    for name in ("mistral-window", *FAMILIES)
]  # fmt: skip


@pytest.mark.parametrize(("panel", "speculative", "name"), OTHER_TREES)
def test_trees_of_other_drafters(panel: str, speculative: str, name: str, tmp_path: Path) -> None:
    """A head of random weights, whose drafts are wrong; and the reference's n-grams, from answers to the same
    prompts. The optimized panel drafts chains of n-grams only."""
    flags: dict[str, Any] = {"speculative": speculative, "speculative_num_draft_tokens": 5}
    if speculative == "eagle3":
        (tmp_path / "head").mkdir()
        (tmp_path / "head" / "config.json").write_text(json.dumps(HEAD))
        target = parse_config(CONFIGS[name])
        weights = dict(dummy_draft_weights(parse_draft_config(HEAD, target)))
        save_file(weights, tmp_path / "head" / "model.safetensors")
        flags |= {"speculative_draft_model": str(tmp_path / "head"), "speculative_topk": 2}
        flags["speculative_num_steps"] = 3
    lens, num_new = ((61, 29), 9) if panel == "reference" else ((30,), 4)  # kernels may be interpreted
    hf_model = random_hf_model(CONFIGS[name])
    hf_model.save_pretrained(tmp_path)
    prompts = [prompt[:length] for prompt, length in zip(make_prompts(), lens)]
    llm = LLM(
        model=str(tmp_path), device="cpu", panel=panel, page_size=4, max_total_tokens=512,
        check_invariants=True, **flags,
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    expected = [hf_greedy(hf_model, p, num_new)[0] for p in prompts]
    for _ in range(2):
        assert [o.output_ids for o in llm.generate(prompts, params, progress=False)] == expected
    assert speculative == "eagle3" or llm.stats().speculation.num_accepted_tokens >= num_new // 2


@pytest.mark.full
@pytest.mark.parametrize("name", [*FAMILIES, *WITHOUT_TREES])
def test_optimized(name: str, tmp_path: Path) -> None:
    """Few steps: kernels may be interpreted."""
    prompts = [prompt[: len(prompt) // 2] for prompt in make_prompts()[1:]]
    expect_answers_of_transformers(tmp_path, name, prompts, 4, panel="optimized", page_size=4, **MIXED)


def test_a_backend_without_sinks_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gpt-oss"]))
    flags: dict[str, Any] = {"device": "cpu", "panel": "reference", "load_format": "dummy"}
    backend = str(Path(__file__).parents[2] / "docs" / "examples" / "my_paged_decode.py") + ":MyAttention"
    with pytest.raises(ValueError, match=r"sliding_window is not supported"):
        LLM(model=str(tmp_path), max_total_tokens=64, use={"attention": backend}, **flags)
