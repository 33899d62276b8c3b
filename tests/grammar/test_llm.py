"""Constrained answers of the engine: they parse, disturb no other request, and no switch changes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.types import FinishLength, FinishToken, GenerateOutput, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
CPU = {"device": "cpu", "panel": "reference", "check_invariants": True}
PROMPTS = ("Tell me about Mara.", "Count from 3 to 9.")
ASKS: tuple[dict[str, Any], ...] = (
    {"json_schema": PERSON, "max_new_tokens": 60},
    {"regex": r"\d{3}-\d{2}"},
    {"choice": ("yes", "no", "maybe so")},
    {"ebnf": 'root ::= item | item ", " root\nitem ::= [a-z] [a-z] [a-z]', "max_new_tokens": 10},
    {"json_object": True, "max_new_tokens": 40, "temperature": 0.0},
    {},
)
NGRAM = {"speculative": "ngram", "speculative_num_steps": 3}
CHAIN = {**NGRAM, "speculative_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {**NGRAM, "speculative_topk": 2, "speculative_num_draft_tokens": 6, "page_size": 4}
EAGLE3 = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
OVERLAP = {"use": {"scheduler": "optimized", "drafter": "reference"}}
SWITCHES: tuple[dict[str, Any], ...] = (
    {"chunked_prefill_size": 7, "enable_mixed_chunk": True, **OVERLAP},
    {**CHAIN, **OVERLAP},
)
MORE_SWITCHES: tuple[dict[str, Any], ...] = (
    OVERLAP,
    EAGLE3,
    {**EAGLE3, **OVERLAP},
    {"chunked_prefill_size": 5},
    {"page_size": 4, "max_running_requests": 3},
    CHAIN,
    TREE,
    {**TREE, **OVERLAP},
)


def all_params() -> list[SamplingParams]:
    """Every ask for every prompt, greedy and sampled."""
    return [
        SamplingParams(**{"temperature": temperature, "seed": 7, "max_new_tokens": 24, **ask})
        for _ in PROMPTS
        for ask in ASKS
        for temperature in (0.0, 1.0)
    ]


def engine(llm: LLM, flags: dict[str, Any]) -> LLM:
    """An engine with these flags, whose grammars the compiler of `llm` compiles: its process starts once."""
    other = LLM("tiny-dense", **{**CPU, **flags})
    other.assembly = replace(other.assembly, grammars=llm.assembly.grammars)
    return other


def answers(llm: LLM) -> list[list[int]]:
    prompts = [prompt for prompt in PROMPTS for _ in range(2 * len(ASKS))]
    outputs = llm.generate(prompts, all_params(), progress=False)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("tiny-dense", **CPU)
    yield llm
    llm.assembly.grammars.close()


@pytest.fixture(scope="module")
def outputs_alone(llm: LLM) -> list[GenerateOutput]:
    """Each request by itself."""
    return [
        llm.generate(PROMPTS[i // (2 * len(ASKS))], params, progress=False)  # type: ignore[misc]
        for i, params in enumerate(all_params())
    ]


@pytest.fixture(scope="module")
def alone(outputs_alone: list[GenerateOutput]) -> list[list[int]]:
    return [output.output_ids for output in outputs_alone]


def is_right(params: SamplingParams, text: str) -> bool:
    if params.json_schema is not None:
        jsonschema.validate(json.loads(text), PERSON)
    elif params.json_object:
        return isinstance(json.loads(text), dict)
    elif params.regex is not None:
        return re.fullmatch(params.regex, text) is not None
    elif params.choice:
        return text in params.choice
    elif params.ebnf is not None:
        return re.fullmatch(r"[a-z]{3}(, [a-z]{3})*", text) is not None
    return True


def test_every_complete_answer_parses(outputs_alone: list[GenerateOutput]) -> None:
    num_complete = 0
    for params, output in zip(all_params(), outputs_alone):
        if isinstance(output.finish_reason, FinishToken):
            assert is_right(params, output.text), output
            num_complete += 1
        else:
            assert isinstance(output.finish_reason, FinishLength), output
    assert num_complete > 2 * len(ASKS)


def test_in_one_batch_each_gets_what_it_gets_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert answers(llm) == alone


@pytest.mark.parametrize(
    "flags",
    [*SWITCHES, *(pytest.param(flags, marks=pytest.mark.full) for flags in MORE_SWITCHES)],
    ids=lambda flags: ",".join(f"{k}={v}" for k, v in flags.items()),
)
def test_a_switch_changes_nothing(llm: LLM, alone: list[list[int]], flags: dict[str, Any]) -> None:
    other = engine(llm, flags)
    assert answers(other) == alone
    if "speculative" in flags:
        assert other.stats().speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("flags", [{}, {"use": {"scheduler": "optimized"}}], ids=["normal", "overlap"])
def test_retraction_changes_nothing(llm: LLM, alone: list[list[int]], flags: dict[str, Any]) -> None:
    other = engine(llm, flags)
    collectors = []
    for i, params in enumerate(all_params()[:12]):
        collectors += other.submit(PROMPTS[0], params, rid=f"r{i}")
    num_steps = 0
    while other.step():
        num_steps += 1
        other.scheduler.retract(f"r{num_steps % 12}")
        assert num_steps < 3000
    assert [collector.whole().output_ids for collector in collectors] == alone[:12]
    assert other.stats().num_retractions > 0


def test_a_grammar_ends_a_request_that_ignores_the_end(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], choice=("yes", "no"), ignore_eos=True, max_tokens=50, progress=False)
    assert output.text in ("yes", "no")  # type: ignore[union-attr]
    assert isinstance(output.finish_reason, FinishToken)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "flags", [{}, OVERLAP, {**EAGLE3, **OVERLAP}], ids=["normal", "overlap", "speculation"]
)
def test_a_grammar_begins_behind_the_reasoning_block(llm: LLM, flags: dict[str, Any]) -> None:
    other = engine(llm, flags)
    assert llm.tokenizer is not None
    comma, three = (llm.tokenizer.encode(text, add_special_tokens=False)[0] for text in (",", "3"))
    prompt = llm.chat_prompt([{"role": "user", "content": "Count from 3 to 9."}])

    def begin(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        """The model would begin a block by itself."""
        for row, ids in enumerate(output_ids):
            logits[row, three] += 0 if ids else 100
        return logits

    for span, processor, has_block in (
        ({"reasoning_end": (comma,)}, None, True),  # the prompt has opened a block
        ({"reasoning_end": (comma,), "reasoning_start": three}, begin, True),
        ({}, begin, False),
    ):
        output = other.generate(
            prompt, regex="[ab]{5}", **span, temperature=0, logit_processor=processor, progress=False
        )
        ids = output.output_ids  # type: ignore[union-attr]
        start = ids.index(comma) + 1 if has_block else 0
        behind = llm.tokenizer.decode(ids[start:], skip_special_tokens=True)
        assert re.fullmatch("[ab]{5}", behind), (span, output)


def test_flushing_forgets_grammars(llm: LLM) -> None:
    llm.generate(PROMPTS[0], regex="ab", progress=False)
    assert llm.assembly.grammars._cache
    assert llm.flush_cache()
    assert not llm.assembly.grammars._cache


def test_samples_have_grammars_of_their_own(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS[0], regex=r"\d{6}", n=4, seed=3, temperature=1.5, progress=False)
    assert isinstance(outputs, list)
    assert len({output.text for output in outputs}) > 1
    assert all(re.fullmatch(r"\d{6}", output.text) for output in outputs)


def test_a_stream_and_a_chat(llm: LLM) -> None:
    pieces = [
        piece.text for piece in llm.stream(PROMPTS[0], json_schema=PERSON, temperature=0, max_tokens=80)
    ]
    jsonschema.validate(json.loads("".join(pieces)), PERSON)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    output = llm.chat(messages, json_schema=PERSON, temperature=0, max_tokens=80, progress=False)
    jsonschema.validate(json.loads(output.text), PERSON)  # type: ignore[union-attr]


def test_bad_grammars_are_refused_at_the_call(llm: LLM) -> None:
    for bad in ({"regex": "(a"}, {"ebnf": "x"}, {"json_schema": {"type": "nothing"}}, {"regex": "(" * 99}):
        with pytest.raises(ValueError, match=r"cannot be compiled|nested"):
            llm.generate(PROMPTS[0], progress=False, **bad)
    assert not llm.scheduler.has_work()
    assert llm.generate(PROMPTS[0], regex="ab", progress=False).text == "ab"  # type: ignore[union-attr]


def test_a_grammar_that_allows_nothing_ends_the_request(llm: LLM) -> None:
    output = llm.generate(PROMPTS[0], ebnf='root ::= root "a"', progress=False)
    assert output.finish_reason.status == 400  # type: ignore[union-attr]
    assert "grammar" in output.finish_reason.message  # type: ignore[union-attr]
