"""N-gram drafts on the device: the longest suffix that occurred before, and what followed it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.draft.draft_ngram import draft_chains
from diptych.optimized.speculative.ngram_lookup import NgramLookupDrafter
from diptych.optimized.speculative.ngram_table import MULTIPLIERS, NgramTable
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.tools.conformance.whole_engine.switches import answers_alone, expect_answers
from diptych.shared.types import DraftBatch, DraftShape, ForwardBatch, ForwardMode, Req, SamplingParams

CHAIN = DraftShape(4, 1, 5)


def drafter_for(num_token_ids: int = 100, is_private: bool = False) -> NgramLookupDrafter:
    ops = registry.load("draft_tree", "reference")
    parts: Any = SimpleNamespace(
        device=torch.device("cpu"), num_token_ids=num_token_ids, component=lambda name: ops
    )
    config = EngineConfig(
        model="tiny-dense", speculative="ngram", device="cpu", speculative_ngram_private=is_private
    )
    drafter = NgramLookupDrafter(config, parts)
    drafter.allocate(SimpleNamespace(req_to_token=torch.zeros(4, 40)), 0)  # type: ignore[arg-type]
    return drafter


def extend(drafter: NgramLookupDrafter, req: Req, cached: int, row: int = 1) -> None:
    """The target has computed the prompt but for `cached` tokens and the last one."""
    ids = req.origin_input_ids
    seq_len, new = len(ids) - 1, len(ids) - 1 - cached
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.tensor(ids[cached:seq_len], dtype=torch.int64),
        positions=torch.arange(cached, seq_len),
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([seq_len]),
        out_cache_loc=torch.arange(new),
        extend_seq_lens=torch.tensor([new]),
        extend_start_loc=torch.tensor([0]),
        seq_lens_cpu=(seq_len,),
        extend_seq_lens_cpu=(new,),
    )
    drafter.extend([req], batch, None, torch.tensor(ids[-1:]))


def drafts_after(
    tokens: list[int], shape: DraftShape = CHAIN, cached: int = 0, num_token_ids: int = 100
) -> list[int]:
    drafter = drafter_for(num_token_ids)
    req = Req("r", tokens, SamplingParams(), 0)
    extend(drafter, req, cached)
    seq_len = len(tokens) - 1
    root, row, length = torch.tensor(tokens[-1:]), torch.tensor([1]), torch.tensor([seq_len])
    bound = seq_len + 3  # lengths on the CPU are upper bounds
    tree = drafter.draft(DraftBatch([req], root, row, length, (bound,), torch.empty(1, 0)), shape)
    num = int(tree.num_nodes[0])
    assert tree.token_ids[0, 0] == tokens[-1]
    assert tree.parents[0, 1:num].tolist() == list(range(num - 1))
    return tree.token_ids[0, 1:num].tolist()


def test_what_followed_the_longest_match_is_drafted() -> None:
    assert drafts_after([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]) == [4, 9, 2, 3]  # not the later 2 3 5
    assert drafts_after([2, 3, 4, 9, 2, 3, 5, 7, 2, 3]) == [5, 7, 2, 3]  # of equal ones the last


def test_a_repetition_goes_on() -> None:
    assert drafts_after([8, 5, 6, 5, 6]) == [5, 6, 5, 6]
    assert drafts_after([7, 7]) == [7, 7, 7, 7]


def test_without_a_match_there_is_only_the_root() -> None:
    assert drafts_after([1, 2, 3]) == []
    assert drafts_after([1]) == []


def test_tokens_of_a_cached_prefix_are_known() -> None:
    assert drafts_after([1, 2, 3, 4, 9, 1, 2], cached=5) == [3, 4, 9, 1]


def test_ids_that_cannot_be_drafted_end_the_chain() -> None:
    assert drafts_after([1, 2, 3, 50, 4, 1, 2], num_token_ids=50) == [3]
    assert drafts_after([1, 2, 0, 49, 4, 1, 2], num_token_ids=50) == [0, 49, 4, 1]


def test_a_row_has_its_next_owners_tokens() -> None:
    drafter = drafter_for()
    first, second = (
        Req(name, ids, SamplingParams(), 0) for name, ids in (("a", [1, 2, 3, 1, 2, 3]), ("b", [5, 6, 5]))
    )
    extend(drafter, first, 0)
    drafter.forget(first)
    extend(drafter, second, 2)
    assert drafter.tokens[1, :3].tolist() == [5, 6, 5]


def drafts_of(drafter: NgramLookupDrafter, req: Req, row: int = 1) -> list[int]:
    root, length = torch.tensor(req.all_ids[-1:]), torch.tensor([req.num_tokens - 1])
    batch = DraftBatch([req], root, torch.tensor([row]), length, (req.num_tokens,), torch.empty(1, 0))
    tree = drafter.draft(batch, CHAIN)
    return tree.token_ids[0, 1 : int(tree.num_nodes[0])].tolist()


def drafts_after_another(
    tokens: list[int], *others: list[int], keys: tuple[str | None, str | None] = (None, None), **of: bool
) -> list[int]:
    """Drafts for a request after others have ended."""
    drafter = drafter_for(**of)
    for i, ids in enumerate(others):
        other = Req(f"other {i}", ids, SamplingParams(), 0, extra_key=keys[0])
        extend(drafter, other, 0)
        drafter.forget(other)
    req = Req("r", tokens, SamplingParams(), 0, extra_key=keys[1])
    extend(drafter, req, 0, row=2)
    return drafts_of(drafter, req, row=2)


def test_what_followed_in_another_request_is_drafted() -> None:
    other = [1, 2, 3, 4, 5, 6, 7]
    assert drafts_after_another([9, 2, 3], other) == [4, 5, 6, 7]
    assert drafts_after_another([9, 4, 5], other) == [6, 7]  # nothing is known behind its end
    assert drafts_after_another([9, 9, 5], other) == []  # one token is too short a run
    assert drafts_after_another([9, 2, 3], other, keys=("a", "b")) == []
    assert drafts_after_another([9, 2, 3], other, keys=("a", "a")) == [4, 5, 6, 7]
    assert drafts_after_another([9, 2, 3], other, is_private=True) == []


def test_of_equally_long_runs_the_own_one_is_continued_and_else_the_longest() -> None:
    other = [1, 2, 3, 4, 5, 6, 7]
    assert drafts_after_another([2, 3, 9, 8, 2, 3], other) == [9, 8, 2, 3]
    assert drafts_after_another([4, 9, 8, 1, 2, 3, 4], other) == [5, 6, 7]
    assert drafts_after_another([2, 3], other, [2, 3, 8, 8, 8, 8]) == [8, 8, 8, 8]  # the last of others


def test_a_known_continuation_is_not_replaced_by_its_beginning() -> None:
    assert drafts_after_another([2, 3], [2, 3, 4, 5, 6, 7], [2, 3, 4]) == [4, 5, 6, 7]


def learn(table: NgramTable, ids: list[int]) -> None:
    """Enter the runs of a request whose tokens these are."""
    row, last = torch.tensor([0]), torch.tensor([len(ids) - 1])
    multipliers = torch.tensor(MULTIPLIERS)
    table.learn(torch.tensor([ids]), torch.tensor([5]), row, last, last, len(ids) - 1, multipliers)


def followed(table: NgramTable, run: list[int]) -> list[int]:
    """What the table has behind a run, the run itself not continued."""
    row, last = torch.tensor([0]), torch.tensor([len(run) - 1])
    token_ids, _, num_nodes = draft_chains(
        torch.tensor([run]), torch.tensor([5]), row, last, len(run), torch.tensor(MULTIPLIERS),
        table.arrays, table.continuation_len, 1 + table.continuation_len, 99,
    )  # fmt: skip
    return token_ids[0, 1 : int(num_nodes)].tolist()


def test_the_table_has_a_fixed_size_and_forgets_the_oldest() -> None:
    table = NgramTable(2, torch.device("cpu"), num_entries=16)
    for first in range(40):
        learn(table, list(range(first, first + 10)))
        assert followed(table, list(range(first, first + 8))) == [first + 8, first + 9]
    assert len(table.tokens) == 16
    found = [followed(table, list(range(i, i + 8))) != [] for i in range(40)]
    assert 1 <= sum(found) <= 16
    assert sum(found[:20]) < sum(found[20:])


def test_entries_for_one_place_are_written_whole_and_in_order() -> None:
    """The last entry of one call for the same place stays, on any device."""
    table = NgramTable(2, torch.device("cpu"), num_entries=1)
    learn(table, list(range(98)))
    # The newest of the 97 + 1 positions; of its three runs the longest, 8 tokens before the newest.
    assert (int(table.namespaces[0]), int(table.stamps[0])) == (5, table.num_stamps) == (5, 3 * 98)
    assert table.tokens[0].tolist() == [*range(89, 98), -1]


def test_stamps_may_pass_32_bits() -> None:
    table = NgramTable(2, torch.device("cpu"), num_entries=1)
    table.num_stamps = 2**31 - 5
    learn(table, list(range(9)))
    assert int(table.stamps[0]) == table.num_stamps == 2**31 - 5 + 3 * 9


def test_a_cpu_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="device cpu is not supported: n-gram drafts"):
        drafter_for()


def test_a_rehearsal_changes_no_draft() -> None:
    """Neither of the request whose row it names nor of the table."""
    drafter, req = drafter_for(), Req("r", [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], SamplingParams(), 0)
    extend(drafter, req, 0, row=0)
    assert drafter.table is not None
    before = [each.clone() for each in (drafter.tokens, drafter.namespaces, *drafter.table.arrays)]
    drafter.rehearse(CHAIN)
    after = (drafter.tokens, drafter.namespaces, *drafter.table.arrays)
    assert all(map(torch.equal, before, after))
    assert drafts_of(drafter, req, row=0) == [4, 9, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize("shape", [{"speculative_topk": 1}, {}])
def test_answers_are_the_references(shape: dict[str, Any]) -> None:
    """With rounds ahead, retraction and chunks."""
    expect_answers(
        "tiny-dense",
        answers_alone("tiny-dense", device="cpu", panel="reference"),
        device="cpu",
        panel="reference",
        use={"scheduler": "optimized", "drafter": "optimized"},
        speculative="ngram",
        max_total_tokens=320,
        schedule_conservativeness=0.01,
        chunked_prefill_size=16,
        page_size=16,
        **shape,
    )
