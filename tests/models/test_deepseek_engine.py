"""DeepSeek's families in an engine: greedy tokens of transformers, whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import hf_greedy, random_hf_model

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.oracles.configs import CONFIGS

NUM_NEW = 12
SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"disable_radix_cache": True},
    "chunked": {"chunked_prefill_size": 16},
    "mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "one at a time": {"max_running_requests": 1},
}
FAST = {("deepseek-v3", "reference", "mixed", 4), ("deepseek-v2", "absorbed", "chunked", 16)}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.full)
    for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")
    for form in ("reference", "absorbed", "triton")
    for schedule in SCHEDULES
    for page_size in (1, 4, 16)
    for case in [(name, form, schedule, page_size)]
    if form != "triton" or page_size == 4
]


def prompts() -> list[list[int]]:
    """The second and third share a prefix with the first, which ends inside a page."""
    ids = torch.randint(3, 331, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    return [ids[:50], ids[:37] + ids[60:70], ids[:50] + ids[70:], ids[80:83]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Folders, and the tokens that transformers gives."""
    made = {}
    for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3"):
        hf_model = random_hf_model(CONFIGS[name], seed=1)
        folder = tmp_path_factory.mktemp(name)
        hf_model.save_pretrained(folder)
        answers = []
        for prompt in prompts():
            tokens, logits = hf_greedy(hf_model, prompt, NUM_NEW)
            best, second = logits[-NUM_NEW - 1 : -1].topk(2).values.unbind(-1)
            assert (best - second).min() > 1e-3, "a near tie: the texts could differ for no reason"
            answers.append(tokens)
        made[name] = folder, answers
    return made


@pytest.mark.parametrize("form", ["absorbed", pytest.param("triton", marks=pytest.mark.full)])
def test_fp8_rows(checkpoints: dict[str, tuple[Path, list[list[int]]]], form: str) -> None:
    """All forms read the same rows, which are not those of 32 bits."""
    folder, _ = checkpoints["deepseek-v2-lite"]

    def logprobs(**flags: Any) -> list[float]:
        llm = LLM(str(folder), panel="reference", device="cpu", max_total_tokens=256, **flags)
        output = llm.generate(
            prompts()[0],
            max_tokens=3,
            temperature=0,
            return_logprob=True,
            logprob_start_len=0,
            progress=False,
        )
        return [each.logprob for each in output.input_logprobs[1:]]

    expanded = logprobs(kv_cache_dtype="fp8_e4m3")
    found = logprobs(kv_cache_dtype="fp8_e4m3", use={"mla_attention": form})
    assert found == pytest.approx(expanded, abs=1e-3)
    assert logprobs() != pytest.approx(expanded, abs=1e-2)


@pytest.mark.full
def test_quantized_while_loading(checkpoints: dict[str, tuple[Path, list[list[int]]]]) -> None:
    folder, expected = checkpoints["deepseek-v3"]
    llm = LLM(model=str(folder), panel="reference", device="cpu", max_total_tokens=512, quantization="int8")
    output = llm.generate(prompts()[0], temperature=0, max_tokens=NUM_NEW, ignore_eos=True, progress=False)
    assert len(output.output_ids) == len(expected[0])


@pytest.mark.parametrize(("name", "form", "schedule", "page_size"), CASES)
def test_greedy_tokens(
    name: str,
    form: str,
    schedule: str,
    page_size: int,
    checkpoints: dict[str, tuple[Path, list[list[int]]]],
) -> None:
    folder, expected = checkpoints[name]
    llm = LLM(
        model=str(folder),
        panel="optimized" if form == "triton" else "reference",
        device="cpu",
        page_size=page_size,
        max_total_tokens=512,
        check_invariants=True,
        use={"mla_attention": form},
        **SCHEDULES[schedule],
    )
    num_new = 3 if form == "triton" else NUM_NEW  # Triton's interpreter takes seconds a step
    for _ in range(2):  # the second time from the cache, where there is one
        outputs = llm.generate(prompts(), temperature=0, max_tokens=num_new, ignore_eos=True, progress=False)
        assert [list(output.output_ids) for output in outputs] == [tokens[:num_new] for tokens in expected]
