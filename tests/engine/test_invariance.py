"""An answer never depends on what happened around it: cache, chunks, pages, mates, order, retraction."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.conformance.whole_engine.switches import (
    GREEDY,
    NGRAM,
    SPECULATION_SWITCHES,
    SWITCHES,
    answers_alone,
    expect_answers,
    prompts,
)
from diptych.shared.types import SamplingParams

MODELS = ("tiny-dense", "tiny-moe")
REFERENCE = {"device": "cpu", "panel": "reference"}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    assert (ASSETS / request.param / "model.safetensors").is_file()
    return request.param


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    return answers_alone(model, **REFERENCE)


IN_FULL: list[dict[str, Any]] = [
    {"page_size": 4},
    {"page_size": 16},
    {"chunked_prefill_size": 7},
    {"chunked_prefill_size": 64},
    {"chunked_prefill_size": None},
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "disable_radix_cache": True},
    {"max_running_requests": 1},
    {"disable_cuda_graph": True},
    {"cuda_graph_bs": (1, 3, 6), "max_running_requests": 7},
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01},
]
"""The fast cut has each of these flags in another combination; the reference has no CUDA graphs."""
FAST = [flags for flags in SWITCHES + SPECULATION_SWITCHES if flags not in IN_FULL]
SETTINGS = [  # the fast cut has a third of them, each on one of the models
    pytest.param(
        model,
        flags,
        id=f"{model}-{','.join(f'{k}={v}' for k, v in flags.items()) or 'default'}",
        marks=[] if flags in FAST[i::6] else pytest.mark.full,
    )
    for i, model in enumerate(MODELS)
    for flags in SWITCHES + SPECULATION_SWITCHES
]


@pytest.mark.parametrize(("model", "flags"), SETTINGS, indirect=["model"], scope="module")
def test_a_switch_changes_nothing(model: str, alone: list[list[int]], flags: dict[str, Any]) -> None:
    expect_answers(model, alone, **REFERENCE, **flags)


def test_a_warm_cache_changes_nothing(model: str, alone: list[list[int]]) -> None:
    llm = LLM(model=model, device="cpu", panel="reference", check_invariants=True)
    for _ in range(2):
        outputs = llm.generate(prompts(llm), GREEDY, progress=False)
        assert [o.output_ids for o in outputs] == alone
    assert all(o.num_cached_tokens == o.num_prompt_tokens - 1 for o in outputs)


ARRIVALS = [
    pytest.param(model, seed, seed >= 4, marks=[] if seed == 4 * i else pytest.mark.full)
    for i, model in enumerate(MODELS)
    for seed in range(6)
]
"""The fast cut has one without speculation and one with it."""


@pytest.mark.parametrize(("model", "seed", "speculates"), ARRIVALS, indirect=["model"], scope="module")
def test_arrival_order_mates_and_forced_retraction_change_nothing(
    model: str, alone: list[list[int]], seed: int, speculates: bool
) -> None:
    """Requests arrive in random order between steps; running ones are retracted at random; and half of the
    others are noise: sampled, penalised, aborted on the way."""
    rng = random.Random(seed)
    llm = LLM(
        model=model, device="cpu", panel="reference", check_invariants=True, chunked_prefill_size=32,
        page_size=rng.choice([1, 4]), enable_mixed_chunk=rng.random() < 0.5 and not speculates,
        **(NGRAM if speculates else {}),
    )  # fmt: skip
    todo = [(i, ids) for i, ids in enumerate(prompts(llm))]
    rng.shuffle(todo)
    watched, noise = {}, []
    while todo or not all(c.is_finished for c in watched.values()):
        if todo and rng.random() < 0.3:
            i, ids = todo.pop()
            watched[i] = llm.submit(ids, GREEDY)[0]
            params = SamplingParams(max_new_tokens=30, temperature=1.5, top_p=0.9, frequency_penalty=0.5)
            noise += llm.submit(rng.choice(prompts(llm)), params)
        if rng.random() < 0.1 and watched:
            llm.scheduler.retract(rng.choice(list(watched.values())).rid)
        if rng.random() < 0.05 and noise:
            llm.abort(rng.choice(noise).rid)
        llm.step()
    assert [watched[i].output_ids for i in range(len(watched))] == alone
