"""longrope: frequencies, logits and greedy text of transformers, on either side of the original length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import hf_greedy, random_hf_model
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diptych import LLM, SamplingParams
from diptych.shared.config import parse_config
from diptych.shared.config.hf_rope import for_context
from diptych.shared.modeling.rope import rope_frequencies
from diptych.shared.tools.conformance.oracles.configs import CONFIGS

SHORT, LONG = [1.0, 1.25, 1.5], [2.0, 5.0, 11.5]
PHI = {
    **CONFIGS["phi3"],
    "original_max_position_embeddings": 20,
    "max_position_embeddings": 160,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}


@pytest.mark.parametrize("longest", [160, 20])
@pytest.mark.parametrize("attention_factor", [None, 1.5])
def test_frequencies(longest: int, attention_factor: float | None) -> None:
    scaling = {**PHI["rope_scaling"], "attention_factor": attention_factor}
    values = {**PHI, "max_position_embeddings": longest, "rope_scaling": scaling}
    theirs, ours = AutoConfig.for_model(**values), parse_config(values).rope
    assert ours.is_long == (longest > 20)
    for length in (20, 21):
        expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=length)
        frequencies, factor = rope_frequencies(for_context(ours, length))
        torch.testing.assert_close(frequencies, expected, rtol=2e-7, atol=0.0)
        assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": None}, "short_factor is missing|short_factor is null"),
        ({"long_factor": LONG[:2]}, "it must be a list of 3 numbers above 0"),
        ({"long_factor": [1.0, 0.0, 1.0]}, "long_factor is 0.0; it must be a number > 0"),
        ({"long_factor": "1 2 3"}, "it must be a list of 3 numbers"),
    ],
)
def test_wrong_factors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**PHI, "rope_scaling": {**PHI["rope_scaling"], **changes}})


def test_the_name_of_early_checkpoints() -> None:
    early = parse_config({**PHI, "rope_scaling": {**PHI["rope_scaling"], "type": "su"}})
    assert early == parse_config(PHI)
    assert (early.rope.rope_type, early.context_len) == ("longrope", 160)


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    ids = torch.randint(0, 331, (max(lengths),), generator=torch.Generator().manual_seed(2)).tolist()
    return [[*ids[: n - 3], n, n, n] for n in lengths]


SETTINGS: list[Any] = [
    ("reference", 4, {"chunked_prefill_size": 24, "enable_mixed_chunk": True}),
    *(
        pytest.param(panel, page_size, flags, marks=pytest.mark.full)
        for panel in ("reference", "optimized")
        for page_size in (1, 4, 16)
        for flags in ({}, {"chunked_prefill_size": 24, "enable_mixed_chunk": True})
    ),
]


@pytest.mark.parametrize(("panel", "page_size", "flags"), SETTINGS)
def test_greedy_text(panel: str, page_size: int, flags: dict[str, Any], tmp_path: Path) -> None:
    """Whole or in chunks, beside requests that decode, from a cold and from a warm cache. Prompts beyond the
    original length have the second set of divisors in transformers; answers within it the first."""
    hf_model = random_hf_model(PHI)
    hf_model.save_pretrained(tmp_path)
    num_new = 6 if panel == "reference" else 3
    for context_len, lengths in ((160, (90, 61, 33)), (20, (14, 11, 7))):
        prompts = prompts_of(lengths)
        expected = [hf_greedy(hf_model, prompt, num_new)[0] for prompt in prompts]
        llm = LLM(
            str(tmp_path), panel=panel, device="cpu", page_size=page_size, context_len=context_len,
            max_total_tokens=1024, check_invariants=True, **flags,
        )  # fmt: skip
        params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
        for _ in range(2):
            outputs = llm.generate(prompts, params, progress=False)
            assert [output.output_ids for output in outputs] == expected


def test_logits(tmp_path: Path) -> None:
    hf_model: Any = random_hf_model(PHI)
    hf_model.save_pretrained(tmp_path)
    prompt = prompts_of((90,))[0]
    llm = LLM(str(tmp_path), panel="reference", device="cpu", max_total_tokens=256, chunked_prefill_size=32)
    out = llm.generate(prompt, temperature=0, max_tokens=1, return_logprob=True, logprob_start_len=0)
    ours = torch.tensor([each.logprob for each in out.input_logprobs[1:]])
    with torch.inference_mode():
        logprobs = hf_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    theirs = logprobs[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
