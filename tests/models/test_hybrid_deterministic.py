"""Deterministic mode of models with linear attention: a request has the bits that it has alone and cold."""

from __future__ import annotations

from typing import Any

import pytest
import test_hybrid_speculation as drafts
import torch
from model_harness import random_hf_model

from diptych.shared import registry
from diptych.shared.engine.llm import LLM
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import GenerateOutput, SamplingParams
from tests.engine.deterministic_answers import LOGPROBS, expect_same_bits

NUM_NEW = 7


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = tokens(19, 1)
PROMPTS = [[*SHARED, *tokens(4, 2)], [*SHARED, *tokens(11, 3)], tokens(3, 4), [*SHARED, *tokens(2, 5)]]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=NUM_NEW, **LOGPROBS) for i in range(4)
]


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short prompts have checkpoints: at multiples of 8, and of 16 in an answer."""
    monkeypatch.setattr(state_checkpoints, "GRID", 8)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 16)


@pytest.fixture(scope="module", params=["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its states decay slowly, so that a bit of one shows after dozens of tokens."""
    hf_model = random_hf_model(HYBRID_CONFIGS[request.param])
    for name, parameter in hf_model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.sub_(6.0)
    folder = tmp_path_factory.mktemp(request.param)
    hf_model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["reference", pytest.param("optimized", marks=pytest.mark.full)])
def panel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def num_prompts(panel: str) -> int:
    """Kernels may be interpreted."""
    return 4 if panel == "reference" else 2


def engine(model: str, panel: str, **flags: Any) -> LLM:
    flags = {"deterministic": True, "max_total_tokens": 1024, "max_running_requests": 8, **flags}
    dtype = "float32" if panel == "reference" else "bfloat16"  # in which bits can differ
    fields = {"dtype": dtype, "max_kept_states": 16, "check_invariants": True, **flags}
    return LLM(model=model, device="cpu", panel=panel, **fields)


def together(llm: LLM, num: int) -> list[GenerateOutput]:
    return llm.generate(PROMPTS[:num], PARAMS[:num], progress=False)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def alone(model: str, panel: str) -> list[GenerateOutput]:
    """One by one, each cold."""
    llm = engine(model, panel, disable_radix_cache=True)
    asked = list(zip(PROMPTS, PARAMS))[: num_prompts(panel)]
    return [llm.generate(prompt, params, progress=False) for prompt, params in asked]  # type: ignore[misc]


DRAFTS = {
    "speculative": "ngram", "speculative_topk": 1, "speculative_num_steps": 3,
    "use": {"drafter": f"{drafts.__name__}:KnowsAnswers"},
}  # fmt: skip
SHORT = {"max_total_tokens": 57, "schedule_conservativeness": 0.01, "chunked_prefill_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixed chunks": {"chunked_prefill_size": 11, "enable_mixed_chunk": True, "page_size": 4},
    "drafts": {**DRAFTS, "chunked_prefill_size": 24},
    "short memory": SHORT,
}
FAST = ("mixed chunks", "drafts")


@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=[] if s in FAST else pytest.mark.full) for s in SETTINGS]
)
def test_bits_are_those_of_a_request_alone(
    setting: str, model: str, panel: str, alone: list[GenerateOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crowded, then with hits of several lengths. Of three drafts one is wrong."""
    monkeypatch.setattr(drafts, "PROMPTS", PROMPTS)
    monkeypatch.setattr(drafts, "answers", lambda _: [[*o.output_ids, *[0] * 9] for o in alone])
    llm = engine(model, panel, **SETTINGS[setting])
    expect_same_bits("crowded", together(llm, len(alone)), alone)
    warm = together(llm, len(alone))
    expect_same_bits("warm", warm, alone)
    stats = llm.scheduler.stats()
    if setting == "short memory":
        assert panel == "optimized" or stats.num_retractions > 0
    else:
        assert all(output.num_cached_tokens >= 16 for output in warm if output.num_prompt_tokens > 16)
    assert "drafts" not in setting or stats.speculation.num_accepted_tokens > len(alone)


@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_the_engine_has_the_parts_of_the_mode(panel: str, model: str) -> None:
    parts = engine(model, panel).assembly.parts
    runner: Any = parts.model_runner
    found = {"attention": runner.attention, "linear_attention": runner.linear_attention}
    found |= {"model_runner": runner, "sampler": parts.sampler}
    for name in registry.DETERMINISTIC[panel]:
        assert isinstance(found[name], registry.load_deterministic(panel, name)), name


@pytest.mark.full
def test_a_conversation_goes_on_with_the_bits_of_a_cold_run(model: str, panel: str) -> None:
    """A hit ends in the answer, whose tokens were computed one by one: in the cold run they are a prompt."""
    warm, cold = engine(model, panel), engine(model, panel)
    params = SamplingParams(max_new_tokens=14, temperature=0.0, **LOGPROBS)
    answer = warm.generate(PROMPTS[0], params, progress=False)
    longer = [*PROMPTS[0], *answer.output_ids, *tokens(3, 6)]
    output = warm.generate(longer, params, progress=False)
    assert output.num_cached_tokens > len(PROMPTS[0])
    expect_same_bits("the next turn", [output], [cold.generate(longer, params, progress=False)])


def test_without_the_mode_bits_differ(model: str, panel: str, alone: list[GenerateOutput]) -> None:
    """What the other tests compare can tell."""
    llm = engine(model, panel, deterministic=False, **SETTINGS["mixed chunks"])
    with pytest.raises(Mismatch, match="logprobs"):
        expect_same_bits("off", together(llm, len(alone)), alone)
