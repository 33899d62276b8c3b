"""An answer never depends on what happened around it: cache, chunks, pages, mates, order, retraction.

Real text on the built-in models, greedy, float32, with the invariants checked after every step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from shared.engine import LLM
from shared.model_path import ASSETS
from shared.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=48, temperature=0.0, ignore_eos=True)
MODELS = ("tiny-dense", "tiny-moe")

STORY = (
    "Mia has a red kite and three apples. Tom went to the harbour with a green box. "
    "Later Mia gave one apple to Tom. The old baker lives near the mill and owns a blue cart. "
)
QUESTIONS = (
    "Who has the kite?",
    "What colour is the box?",
    "How many apples does Mia have now?",
    "Where does the baker live?",
    "Write the facts about Tom as a list.",
    "What is 17 + 25?",
)


def prompts(llm: LLM) -> list[list[int]]:
    """Chats that share a long prefix, one that shares nothing, and one of a single token."""
    chats = [llm.tokenizer.chat([{"role": "user", "content": STORY + q}]) for q in QUESTIONS]
    return [*chats, llm.tokenizer.encode("1 2 3 4 5 6 7"), chats[0][:1]]


def answers(model: str, **flags: Any) -> list[list[int]]:
    llm = LLM(
        model=model,
        device="cpu",
        panel="reference",
        check_invariants=True,
        **{"max_total_tokens": 8192, **flags},
    )
    outputs = llm.generate(prompts(llm), GREEDY, progress=False)
    assert [o.num_output_tokens for o in outputs] == [48] * len(outputs)
    return [o.output_ids for o in outputs]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    assert (ASSETS / request.param / "model.safetensors").is_file()
    return request.param


@pytest.fixture(scope="module")
def alone(model: str) -> list[list[int]]:
    """Each prompt on its own, nothing cached, nothing cut: what every configuration must give."""
    llm = LLM(
        model=model, device="cpu", panel="reference", disable_radix_cache=True, chunked_prefill_size=None
    )
    return [llm.generate(p, GREEDY, progress=False).output_ids for p in prompts(llm)]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"disable_radix_cache": True},
        {"page_size": 4},
        {"page_size": 16},
        {"page_size": 16, "disable_radix_cache": True, "chunked_prefill_size": 64},
        {"chunked_prefill_size": 1},
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 64},
        {"chunked_prefill_size": None},
        {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "max_running_requests": 4},
        {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "page_size": 4},
        {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "disable_radix_cache": True},
        {"schedule_policy": "lpm"},
        {"schedule_policy": "dfs-weight", "page_size": 4},
        {"schedule_policy": "random", "max_running_requests": 3},
        {"max_running_requests": 1},
        {"max_total_tokens": 256, "schedule_conservativeness": 0.01},  # memory is short: retraction
        {
            "max_total_tokens": 256,
            "schedule_conservativeness": 0.01,
            "page_size": 16,
            "chunked_prefill_size": 32,
        },
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()) or "default",
)
def test_configuration_changes_nothing(model: str, alone: list[list[int]], flags: dict[str, Any]) -> None:
    assert answers(model, **flags) == alone


def test_a_warm_cache_changes_nothing(model: str, alone: list[list[int]]) -> None:
    llm = LLM(model=model, device="cpu", panel="reference", check_invariants=True)
    for _ in range(2):
        outputs = llm.generate(prompts(llm), GREEDY, progress=False)
        assert [o.output_ids for o in outputs] == alone
    assert all(o.num_cached_tokens == o.num_prompt_tokens - 1 for o in outputs)


@pytest.mark.parametrize("seed", range(4))
def test_arrival_order_mates_and_forced_retraction_change_nothing(
    model: str, alone: list[list[int]], seed: int
) -> None:
    """Requests arrive in random order between steps; running ones are thrown out at random; and half of the
    mates are noise: sampled, penalised, aborted on the way."""
    rng = random.Random(seed)
    llm = LLM(
        model=model, device="cpu", panel="reference", check_invariants=True, chunked_prefill_size=32,
        page_size=rng.choice([1, 4]), enable_mixed_chunk=rng.random() < 0.5,
    )  # fmt: skip
    todo = [(i, ids) for i, ids in enumerate(prompts(llm))]
    rng.shuffle(todo)
    watched, noise = {}, []
    while todo or not all(c.is_finished for c in watched.values()):
        if todo and rng.random() < 0.3:
            i, ids = todo.pop()
            watched[i] = llm.submit(ids, GREEDY)[0]
            params = SamplingParams(max_new_tokens=40, temperature=1.5, top_p=0.9, frequency_penalty=0.5)
            noise += llm.submit(rng.choice(prompts(llm)), params)
        if rng.random() < 0.1 and watched:
            llm.scheduler.retract(rng.choice(list(watched.values())).rid)
        if rng.random() < 0.05 and noise:
            llm.abort(rng.choice(noise).rid)
        llm.step()
    assert [watched[i].output_ids for i in range(len(watched))] == alone
