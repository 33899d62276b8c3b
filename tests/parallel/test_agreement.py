"""Rank 0's tokens on every rank, also where another rank computes something else."""

from __future__ import annotations

import threading
import zlib
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import diptych.reference.decoder
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared import registry
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.interfaces import Collectives
from diptych.shared.parallel.agreement import AgreedDrafter, AgreedSampler
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import DraftTree, ForwardBatch
from tests.parallel.tiny_ranks import answers, make_config
from tests.planted import Bug, Bugs

SPECULATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative": "ngram"},
    "eagle": {"speculative": "eagle", "speculative_draft_model": "eagle-draft", "speculative_topk": 2},
}


def with_ties(logits: torch.Tensor, vocab_size: int, tp: Collectives) -> torch.Tensor:
    """Tokens 2i and 2i + 1 tie; on rank 1 the second is larger in its last bit."""
    logits = GATHER(logits, vocab_size, tp)
    pairs = logits[:, : vocab_size // 2 * 2].unflatten(1, (-1, 2))
    pairs[..., 1] = pairs[..., 0]
    if tp.rank == 1:
        pairs[..., 1] = torch.nextafter(pairs[..., 0], torch.tensor(torch.inf))
    return logits


GATHER = diptych.reference.decoder.gather_logits


def checksum(batch: ForwardBatch) -> int:
    """Checksum of what a step computes: mode, ids, lengths, slots."""
    numbers = (batch.input_ids, batch.seq_lens, batch.out_cache_loc, batch.req_pool_indices)
    return zlib.crc32(repr([batch.forward_mode, *(x.tolist() for x in numbers)]).encode())


def run(folders: dict[str, str], flags: dict[str, Any]) -> list[tuple[list[list[int]], list[int]]]:
    """Each rank's output ids, and a checksum of each of its steps."""
    given = {name: folders.get(str(value), value) for name, value in flags.items()}
    config = make_config(folders["llama"], tp=2, **given)

    def of_rank(tp: Collectives) -> tuple[list[list[int]], list[int]]:
        assembly = assemble(config, clock=lambda: 0.0, tp=tp)
        runner: Any = assembly.parts.model_runner
        forward, sums = runner.forward, []
        runner.forward = lambda batch: (sums.append(checksum(batch)), forward(batch))[1]
        return [req.output_ids for req in answers(assembly)], sums

    return on_ranks(2, of_rank)


@pytest.mark.parametrize("flags", SPECULATIVE)
def test_a_rank_that_differs_in_a_last_bit_follows(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setattr("diptych.reference.decoder.gather_logits", with_ties)
    first, second = run(folders, SPECULATIVE[flags])
    assert first == second
    assert len(first[1]) > 11


BUGS = Bugs("agreement", f"{AgreedSampler.__module__}.AgreedSampler.sample", "answers of the other rank")
BUGS.add("there is no broadcast", lambda self, *args: self.sampler.sample(*args))


@BUGS.found_by()
def test_without_the_broadcast_it_does_not(
    bug: Bug, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> bool:
    monkeypatch.setattr("diptych.reference.decoder.gather_logits", with_ties)
    bug.plant_in(monkeypatch)
    first, second = run(folders, {})
    return first[0][0] != second[0][0] and first[1] != second[1]


def test_trees_are_those_of_rank_0() -> None:
    """Every tensor of them, whatever the rank has drafted itself."""
    ops: Any = registry.load("draft_tree", "reference")()
    trees = [
        ops.from_parents(
            torch.randint(9, (2, 4)), torch.tensor([[0, 0, parent, 1]] * 2), torch.tensor([4, 3])
        )
        for parent in (1, 0)
    ]

    def draft(tp: Collectives) -> DraftTree:
        drafter: Any = SimpleNamespace(
            hidden_layers=None, is_bigram=False, runs_ahead=False, num_kv_bytes_per_token=0,
            draft=lambda *args: trees[tp.rank],
        )  # fmt: skip
        return AgreedDrafter(drafter, tp).draft(None, None)  # type: ignore[arg-type]

    assert not torch.equal(trees[0].parents, trees[1].parents)
    for tree in on_ranks(2, draft):
        for field in fields(DraftTree):
            found, expected = getattr(tree, field.name), getattr(trees[0], field.name)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), field.name


def test_a_rank_that_drafts_something_else_follows(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(folders, SPECULATIVE["eagle"])
    draft = EagleDrafter.draft

    def differ(self: EagleDrafter, *args: Any) -> DraftTree:
        tree = draft(self, *args)
        tree.token_ids[:, 1:] += 1 if threading.current_thread().name.endswith("_1") else 0
        return tree

    monkeypatch.setattr(EagleDrafter, "draft", differ)
    assert run(folders, SPECULATIVE["eagle"]) == expected
