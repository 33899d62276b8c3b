"""Drafting blocks: texts are those of plain decoding, whatever the scheduler does, and what cannot work is
refused when the engine starts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.contracts.drafter.drafting import random_block_head
from diptych.shared.types import SamplingParams

PROMPTS = [
    "Repeat this sentence: Mara has the red kite.",
    "Count from 3 to 9.",
    "Repeat this sentence: Mara has the blue drum.",  # what it shares with the first comes from the cache
]
CASES: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.0, {"page_size": 4, "chunked_prefill_size": 12}),
    (1.0, {"page_size": 16, "speculative_num_steps": 3}),
    (0.0, {"max_total_tokens": 96, "schedule_conservativeness": 0.01}),  # retracts
    (0.0, {"speculative_auto": True}),
    (1.0, {"context_len": 48}),  # blocks reach behind the context's end
)


def engine(panel: str, head: str | None, **flags: Any) -> LLM:
    drafts = {} if head is None else {"speculative": "dflash", "speculative_draft_model": head}
    common = {"max_total_tokens": 1024, "check_invariants": True}
    return LLM(model="tiny-dense", panel=panel, device="cpu", **{**common, **drafts, **flags})


def answers(llm: LLM, **params: Any) -> list[list[int]]:
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=3, **params)
    return [output.output_ids for _ in range(2) for output in llm.generate(prompts, sampling)]


@cache
def plain(temperature: float, **flags: Any) -> list[list[int]]:
    return answers(engine("reference", None, **flags), temperature=temperature)


@pytest.mark.parametrize(("temperature", "flags"), CASES, ids=str)
def test_texts_are_those_of_plain_decoding(temperature: float, flags: dict[str, Any]) -> None:
    limits = {name: flags[name] for name in ("context_len",) if name in flags}
    llm = engine("reference", random_block_head(), **flags)
    assert answers(llm, temperature=temperature) == plain(temperature, **limits)
    assert llm.scheduler.stats().speculation.num_verifications > 10
    assert (llm.scheduler.stats().num_retractions > 0) == ("max_total_tokens" in flags)


@pytest.mark.full
def test_the_optimized_panel_writes_the_same_texts() -> None:
    llm = engine("optimized", random_block_head(), page_size=4, chunked_prefill_size=12)
    assert answers(llm, temperature=0.0) == answers(engine("reference", None), temperature=0.0)


def test_drafts_fill_the_block_of_the_head() -> None:
    assert engine("reference", random_block_head()).config.speculative_num_steps == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_topk": 2}, "speculative_topk=2: speculative=dflash drafts chains only"),
        ({"speculative_num_steps": 8}, "speculative_num_steps=8: .* blocks of 8 tokens, .* at most 7"),
        ({"deterministic": True}, "deterministic=True does not work with speculative=dflash"),
        ({"pp": 2}, "pp=2 .*speculative"),
        ({"speculative_draft_model": "tiny-moe"}, "tiny-moe is a language model .*, not a DFlash head"),
        ({"speculative_draft_model": "tiny-dense-eagle3"}, "of format eagle3, not dflash"),
        ({"model": "tiny-hybrid"}, "linear attention is not supported"),
    ],
)
def test_refused(flags: dict[str, Any], message: str) -> None:
    head = random_block_head()
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": "tiny-dense", "panel": "reference", "device": "cpu", "speculative": "dflash",
               "speculative_draft_model": head, **flags})  # fmt: skip
