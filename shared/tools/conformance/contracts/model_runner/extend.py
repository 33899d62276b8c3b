"""Clauses of a prepared model runner: successive prefill steps of every number of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from diptych.shared.interfaces import ModelRunner
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.model_runner.decode import Decoding, PreparedSession
from diptych.shared.tools.conformance.contracts.model_runner.forward import model_for
from diptych.shared.types import ForwardBatch, ForwardMode


class Extending(Decoding):
    """Prefill steps of `token_counts` new tokens, divided at random; every third is mixed. Each is followed
    by a decode step, which reads the written KV."""

    token_counts: tuple[int, ...] = ()
    capture_hidden: tuple[int, ...] | None = None
    is_mixed: bool = False  # in each step half of the requests may decode

    def check(self) -> None:
        super().check()
        if not self.token_counts or min(self.token_counts) < 1:
            raise ValueError("a step has a token")

    def flags(self) -> dict[str, Any]:
        return {"enable_mixed_chunk": self.is_mixed}

    def schedule(self) -> Iterator[tuple[ForwardMode, dict[int, list[int]]]]:
        dice = random.Random(self.seed + 2)
        room = [200] * self.num_reqs  # of a request's MAX_LEN: the rest is decoded
        for number, num_tokens in enumerate(self.token_counts):
            decoding = self.decoding(dice, room, num_tokens) if self.is_mixed else []
            left, lens = num_tokens - len(decoding), {}
            for i in dice.sample(range(self.num_reqs), self.num_reqs):
                if i in decoding:
                    continue
                lens[i] = min(left, room[i], left if dice.random() < 0.3 else dice.randint(1, left))
                room[i] -= lens[i]
                left -= lens[i]
                if not left:
                    break
            assert not left, "requests are too few for so many tokens"
            is_mixed = decoding or (number % 3 == 2 and min(lens.values()) == 1)
            mode = ForwardMode.MIXED if is_mixed else ForwardMode.EXTEND
            lens = {i: n for i, n in lens.items() if n} | dict.fromkeys(decoding, 1)
            yield mode, {i: [dice.randrange(331) for _ in range(n)] for i, n in lens.items()}
            yield ForwardMode.DECODE, {i: [dice.randrange(331)] for i in lens}

    def decoding(self, dice: random.Random, room: list[int], num_tokens: int) -> list[int]:
        """The requests that decode in a mixed step: they have cached tokens, and leave at least one token of
        the step to another request."""
        begun = [i for i in range(self.num_reqs) if 0 < room[i] < 200]
        chosen = dice.sample(begun, min(len(begun), self.num_reqs // 2, num_tokens - 1))
        for i in chosen:
            room[i] -= 1
        return chosen


EDGES = (64, 1, 33, 16, 65, 17, 63, 32, 15, 48, 2, 31)
MIXED: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "pages of 16": {"page_size": 16},
    "windows": {"config": "qwen3-layer-types"},
    "experts": {"config": "mixtral"},
    "hidden states": {"capture_hidden": (2, 0)},
}

CASES = (
    Extending("one prompt", batch_sizes=(1,), token_counts=(40,)),
    Extending("around every size, up and down", batch_sizes=(9,), token_counts=EDGES),
    Extending("pages of 16", batch_sizes=(9,), token_counts=EDGES, page_size=16),
    Extending("windows", batch_sizes=(5,), token_counts=(20, 7, 70), config="qwen3-layer-types"),
    Extending("experts", batch_sizes=(5,), token_counts=(20, 7, 40), config="mixtral"),
    Extending("hidden states", batch_sizes=(5,), token_counts=(40, 7, 16), capture_hidden=()),
    Extending(
        "hidden states of layers", batch_sizes=(5,), token_counts=(40, 7, 16, 64, 70), capture_hidden=(2, 0)
    ),
    Extending("bfloat16", batch_sizes=(9,), token_counts=EDGES, dtype=torch.bfloat16),
    *(
        Extending(
            f"mixed, {name}",
            batch_sizes=(9,),
            token_counts=(30, *EDGES),
            is_mixed=True,
            **options,
        )
        for name, options in MIXED.items()
    ),
)


def batch_of(
    session: PreparedSession, mode: ForwardMode, new_ids: dict[int, list[int]], seed: int
) -> ForwardBatch:
    """Prefill steps return log-probabilities of some of their tokens."""
    fields: dict[str, Any] = {}
    if mode is not ForwardMode.DECODE:
        dice, num_tokens = random.Random(seed), sum(map(len, new_ids.values()))
        rows = sorted(dice.sample(range(num_tokens), min(num_tokens, 3)))
        fields["input_logprob_rows"] = torch.tensor(rows, device=session.device)
        ids = [dice.randrange(331) for _ in rows]
        fields["input_logprob_ids"] = torch.tensor(ids, device=session.device)
    return session.forward_batch(new_ids, forward_mode=mode, **fields)


@contract(
    "Replaying prefill steps changes no bit of their results: at every number of tokens, "
    "behind a smaller or larger step, with cached tokens and decoding requests, whatever the dummy page "
    "holds.",
    CASES,
)
def extend_graphs_change_nothing(impl: type[ModelRunner], case: Extending) -> None:
    model = model_for(case.config, case.dtype)
    replayed, launched = (
        PreparedSession(impl, model, case, graphs, case.capture_hidden) for graphs in (True, False)
    )
    for number, (mode, new_ids) in enumerate(case.schedule()):
        found, expected = (s.run(batch_of(s, mode, new_ids, number)) for s in (replayed, launched))
        what = f"step {number}, {mode.name} of {sum(map(len, new_ids.values()))} tokens"
        expect_equal(f"{what}: logits", found.next_token_logits, expected.next_token_logits)
        expect_equal(f"{what}: hidden states", found.hidden_states, expected.hidden_states)
        for ours, theirs in zip(found.input_logprobs or (), expected.input_logprobs or ()):
            expect_equal(f"{what}: log-probabilities", ours, theirs)


@agreement(
    "Prefill steps of every number of tokens give each request its own logits and hidden states.", CASES
)
def extend_logits(impl: type[ModelRunner], case: Extending, reference: type[ModelRunner]) -> None:
    layers = case.capture_hidden
    ours = PreparedSession(impl, model_for(case.config, case.dtype), case, capture_hidden=layers)
    exact = PreparedSession(
        reference, model_for(case.config, case.dtype).double(), case, capture_hidden=layers
    )
    close = tolerance("logits", case.dtype)
    for number, (mode, new_ids) in enumerate(case.schedule()):
        found, expected = (s.run(batch_of(s, mode, new_ids, number)) for s in (ours, exact))
        what = f"step {number}, {mode.name} of {sum(map(len, new_ids.values()))} tokens"
        expect_close(what, found.next_token_logits, expected.next_token_logits, close)
        if layers is not None:
            expect_close(f"{what}: hidden states", found.hidden_states, expected.hidden_states, close)
        if expected.input_logprobs is not None:
            assert found.input_logprobs is not None
            expect_close(
                f"{what}: log-probabilities", found.input_logprobs[0], expected.input_logprobs[0], close
            )


@contract("A prefill step writes its tokens' slots, the dummy page and nothing else.", CASES[1:3])
def extend_writes_its_slots(impl: type[ModelRunner], case: Extending) -> None:
    session = PreparedSession(impl, model_for(case.config, case.dtype), case)
    for number, (mode, new_ids) in enumerate(case.schedule()):
        batch = session.forward_batch(new_ids, forward_mode=mode)
        before = [buffer.clone() for buffer in session.kv_buffers()]
        session.run(batch)
        for old, new in zip(before, session.kv_buffers()):
            is_other = torch.ones(len(old), dtype=torch.bool, device=old.device)
            is_other[: case.page_size] = False
            is_other[batch.out_cache_loc] = False
            same = (old == new) | (old.isnan() & new.isnan())
            expect_true(f"step {number} leaves other slots alone", bool(same[is_other].all()))


@contract(
    "Rows that a prefill step gives (`embeds`, at `embed_rows`) go into layer 0 in place of embeddings of "
    "its token ids: rows that are embeddings of other ids give what these ids give.",
    (Extending("given rows", batch_sizes=(9,), token_counts=(40, 7, 12), is_mixed=True),),
)
def given_rows(impl: type[ModelRunner], case: Extending) -> None:
    model: Any = model_for(case.config, case.dtype)
    with_rows, with_ids = (PreparedSession(impl, model, case) for _ in range(2))
    for number, (mode, new_ids) in enumerate(case.schedule()):
        expected = with_ids.run(with_ids.forward_batch(new_ids, forward_mode=mode)).next_token_logits
        batch = with_rows.forward_batch(new_ids, forward_mode=mode)
        if mode is not ForwardMode.DECODE:
            given = torch.arange(number % 2, batch.num_tokens, 2, device=with_rows.device)
            embeds = model.embed(batch.input_ids[given])
            placeholders = batch.input_ids.index_fill(0, given, 0)
            batch = replace(batch, input_ids=placeholders, embed_rows=given, embeds=embeds)
        found = with_rows.run(batch).next_token_logits
        expect_close(f"step {number}, {mode.name}", found, expected, tolerance("logits", case.dtype))
