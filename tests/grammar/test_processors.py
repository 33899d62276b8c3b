"""Custom logit processors: batched by function, at every step and every drafted node, in both schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.types import FinishError, SamplingParams
from tests.grammar.test_llm import CHAIN, CPU, EAGLE3, OVERLAP, PROMPTS

NUM_TOKENS = 24


def no_repeats(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Bans the last eight tokens."""
    for row, ids in enumerate(output_ids):
        logits[row, list(ids[-8:])] = float("-inf")
    return logits


def count_up(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Forces token 100 + the number of tokens so far."""
    forced = torch.full_like(logits, float("-inf"))
    for row, ids in enumerate(output_ids):
        forced[row, 100 + len(ids)] = 0.0
    return forced


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    return LLM("tiny-dense", **CPU)  # type: ignore[return-value]


def run(llm: LLM, *processors: Any, **params: Any) -> list[list[int]]:
    """One request for each processor and prompt."""
    asked = SamplingParams(
        **{"max_new_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 5, "ignore_eos": True, **params}
    )
    collectors = []
    for prompt in PROMPTS:
        for processor in processors:
            collectors += llm.submit(prompt, asked, logit_processor=processor)
    while llm.step():
        pass
    return [collector.whole().output_ids for collector in collectors]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> tuple[list[list[int]], ...]:
    """The answers without a processor, with `no_repeats`, and with `count_up`."""
    return run(llm, None), run(llm, no_repeats), run(llm, count_up)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        CHAIN,
        {**EAGLE3, **OVERLAP},
        {"chunked_prefill_size": 4, **OVERLAP},
        *(pytest.param(more, marks=pytest.mark.full) for more in (OVERLAP, {**CHAIN, **OVERLAP}, EAGLE3)),
    ],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()) or "plain",
)
def test_each_gets_what_it_gets_alone(alone: tuple[list[list[int]], ...], flags: dict[str, Any]) -> None:
    plain, different, forced = alone
    both = run(LLM("tiny-dense", **{**CPU, **flags}), None, no_repeats, count_up)
    assert both[0::3] == plain
    assert both[1::3] == different != plain
    assert both[2::3] == forced == [list(range(100, 100 + NUM_TOKENS))] * len(PROMPTS)
    for ids in different:
        assert all(token_id not in ids[max(i - 8, 0) : i] for i, token_id in enumerate(ids))


def test_one_call_for_all_rows_of_a_step(llm: LLM) -> None:
    calls: list[int] = []

    def watch(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape == (len(output_ids), llm.assembly.parts.num_token_ids)
        assert logits.dtype == torch.float32
        calls.append(len(output_ids))
        return logits

    assert run(llm, watch, watch) == [ids for ids in run(llm, None) for _ in range(2)]
    assert max(calls) == 2 * len(PROMPTS)
    assert len(calls) < 2 * NUM_TOKENS


def test_with_a_grammar_the_mask_comes_first(llm: LLM) -> None:
    def check(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        assert logits.isinf().any(dim=1).all()
        return logits

    output = llm.generate(PROMPTS[0], regex="[ab]{5}", logit_processor=check, progress=False)
    assert len(output.text) == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("flags", [{}, OVERLAP], ids=["normal", "overlap"])
@pytest.mark.parametrize(
    "bad",
    [lambda ids, logits: logits[:, :-1], lambda ids, logits: None, lambda ids, logits: 1 / 0],
    ids=["shape", "nothing", "error"],
)
def test_a_bad_processor_ends_its_batch(flags: dict[str, Any], bad: Any) -> None:
    llm = LLM("tiny-dense", **CPU, **flags)
    output = llm.generate(PROMPTS[0], logit_processor=bad, progress=False)
    assert isinstance(output.finish_reason, FinishError)  # type: ignore[union-attr]
    assert llm.generate(PROMPTS[0], max_tokens=3, ignore_eos=True, progress=False).num_output_tokens == 3  # type: ignore[union-attr]


def test_only_functions_are_taken(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logit_processor must be a function"):
        llm.generate(PROMPTS[0], logit_processor=3, progress=False)
