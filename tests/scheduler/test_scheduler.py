"""The scheduler's contract, clause by clause, on the ledger model."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shared.conformance.ledger import expected_tokens
from shared.types import FinishAbort, FinishError, FinishLength, FinishToken
from tests.scheduler.harness import VOCAB_SIZE, Harness

PROMPT = [5, 7, 11, 13, 17, 19, 23]


def test_one_request_gets_its_tokens_and_leaves_nothing() -> None:
    harness = Harness()
    rid = harness.submit(PROMPT, 10)
    harness.run()
    harness.expect(rid, 10)
    assert harness.ended[rid] == FinishLength(10)
    harness.expect_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [None, 16, 23])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("disable_radix", [False, True])
def test_many_requests_in_every_configuration(
    page_size: int, chunk: int | None, mixed: bool, disable_radix: bool
) -> None:
    harness = Harness(
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        disable_radix_cache=disable_radix,
    )
    rids = [harness.submit([3, 1, 4, 1, 5][: i % 5 + 1] * (1 + i % 4) + [i], 5 + i) for i in range(12)]
    harness.run()
    for i, rid in enumerate(rids):
        harness.expect(rid, 5 + i)
    harness.expect_idle()


def test_a_second_request_finds_the_first_ones_prefix() -> None:
    harness = Harness()
    harness.submit(PROMPT, 4)
    harness.run()
    computed = harness.model_runner.num_computed_tokens
    rid = harness.submit([*PROMPT, 1, 2], 1)
    harness.run()
    assert harness.reqs[rid].num_cached_tokens == len(PROMPT)
    assert harness.model_runner.num_computed_tokens - computed == 2
    harness.expect(rid, 1)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("length", [4, 7, 8, 9, 15, 16, 17])
def test_a_fully_cached_prompt_computes_its_last_token_again(page_size: int, length: int) -> None:
    """CASES A5: lengths page * k and one beside; at least one token is computed."""
    harness = Harness(page_size=page_size)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(length)]
    for _ in range(3):
        rid = harness.submit(prompt, 3)
        harness.run()
        harness.expect(rid, 3)
    cached = (length - 1) // page_size * page_size
    assert harness.reqs[rid].num_cached_tokens == cached
    harness.expect_idle()


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    harness.submit(PROMPT, 2, extra_key="a")
    harness.run()
    other = harness.submit(PROMPT, 2, extra_key="b")
    same = harness.submit(PROMPT, 2, extra_key="a")
    harness.run()
    assert harness.reqs[other].num_cached_tokens == 0
    assert harness.reqs[same].num_cached_tokens == len(PROMPT) - 1


def test_memory_shortage_retracts_and_everyone_ends_right() -> None:
    """Eight requests want 8 * 27 slots; there are 64."""
    harness = Harness(pool_tokens=64, schedule_conservativeness=0.01)
    rids = [harness.submit([i, i + 1, i + 2], 25) for i in range(8)]
    harness.run()
    assert harness.scheduler.stats().num_retractions > 0
    for rid in rids:
        harness.expect(rid, 25)
    harness.expect_idle()


@pytest.mark.parametrize("page_size", [4, 16])
def test_retraction_with_large_pages_frees_enough(page_size: int) -> None:
    """CASES B9 (SG#9989): pages, not tokens, run out."""
    harness = Harness(pool_tokens=4 * page_size, page_size=page_size, schedule_conservativeness=0.01)
    rids = [harness.submit([i, 2, 3], page_size + 3) for i in range(4)]
    harness.run()
    for rid in rids:
        harness.expect(rid, page_size + 3)
    harness.expect_idle()


def test_a_long_prompt_in_chunks_gives_way_to_the_last_running_request() -> None:
    """CASES B10: a prompt half computed, a request decoding, and no memory for either."""
    harness = Harness(pool_tokens=48, chunked_prefill_size=8, schedule_conservativeness=0.01)
    first = harness.submit([1, 2, 3], 40)
    harness.step()
    second = harness.submit(list(range(1, 41)), 5)
    harness.run()
    harness.expect(first, 40)
    harness.expect(second, 5)
    harness.expect_idle()


def test_finish_on_the_first_token_in_the_last_chunk_and_in_a_mixed_batch() -> None:
    """CASES B8."""
    harness = Harness(chunked_prefill_size=8, enable_mixed_chunk=True)
    background = harness.submit([9, 9], 30)
    harness.step()
    rids = [harness.submit(list(range(1, 20)), 1), harness.submit([4], 1)]
    harness.run()
    for rid in rids:
        harness.expect(rid, 1)
    harness.expect(background, 30)
    harness.expect_idle()


def test_stop_token_ends_a_request_and_is_its_last_id() -> None:
    tokens = expected_tokens(PROMPT, 10, VOCAB_SIZE)
    harness = Harness()
    rid = harness.submit(PROMPT, 10, eos=frozenset([tokens[4]]))
    harness.run()
    first = tokens.index(tokens[4])
    harness.expect(rid, first + 1)
    assert harness.ended[rid] == FinishToken(tokens[4])


def test_max_new_tokens_zero_computes_the_prompt_only() -> None:
    harness = Harness()
    rid = harness.submit(PROMPT, 0)
    harness.run()
    assert harness.tokens[rid] == []
    assert harness.ended[rid] == FinishLength(0)
    harness.expect_idle()


class TestAbort:
    """CASES B7: in every state all memory returns, and one terminal message comes."""

    def finish(self, harness: Harness, rid: str, num_others: int) -> None:
        before = len(harness.tokens[rid])
        assert harness.scheduler.abort(rid)
        assert not harness.scheduler.abort(rid)
        harness.step()
        assert isinstance(harness.ended[rid], FinishAbort)
        assert len(harness.tokens[rid]) == before
        harness.run()
        assert len(harness.ended) == num_others + 1
        harness.expect_idle()

    def test_waiting(self) -> None:
        harness = Harness(max_running_requests=1)
        other = harness.submit([1], 5)
        harness.step()
        rid = harness.submit(PROMPT, 5)
        self.finish(harness, rid, 1)
        harness.expect(other, 5)

    def test_before_the_first_step(self) -> None:
        harness = Harness()
        self.finish(harness, harness.submit(PROMPT, 5), 0)

    def test_mid_chunk(self) -> None:
        harness = Harness(chunked_prefill_size=4)
        rid = harness.submit(list(range(20)), 5)
        harness.step()
        assert harness.scheduler.state().chunked_req is harness.reqs[rid]
        self.finish(harness, rid, 0)

    def test_running(self) -> None:
        harness = Harness()
        rid, other = harness.submit(PROMPT, 20), harness.submit(PROMPT, 6)
        for _ in range(3):
            harness.step()
        self.finish(harness, rid, 1)
        harness.expect(other, 6)

    def test_retracted(self) -> None:
        harness = Harness()
        rid = harness.submit(PROMPT, 20)
        for _ in range(3):
            harness.step()
        assert harness.scheduler.retract(rid)
        self.finish(harness, rid, 0)

    def test_ids_match_exactly(self) -> None:
        harness = Harness()
        harness.submit(PROMPT, 5, rid="req-1")
        harness.submit(PROMPT, 5, rid="req-10")
        assert not harness.scheduler.abort("req")
        assert harness.scheduler.abort("req-1")
        harness.run()
        assert harness.ended["req-10"] == FinishLength(5)


class TestLimits:
    """CASES B12: a clear error, or clamping; never a crash."""

    def test_prompt_of_the_whole_context_is_refused(self) -> None:
        harness = Harness(context_len=32)
        with pytest.raises(ValueError, match="prompt has 32 tokens; the context of 32"):
            harness.submit([1] * 32)

    def test_prompt_of_the_context_less_one_gives_one_token(self) -> None:
        harness = Harness(context_len=32)
        rid = harness.submit([1] * 31, 10)
        harness.run()
        harness.expect(rid, 1)
        assert harness.ended[rid] == FinishLength(1)

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_prompt_of_the_whole_pool_gives_one_token(self, page_size: int) -> None:
        harness = Harness(pool_tokens=32, page_size=page_size)
        rid = harness.submit(list(range(32)), 10)
        harness.run()
        harness.expect(rid, 1)
        harness.expect_idle()

    def test_prompt_above_the_pool_is_refused(self) -> None:
        harness = Harness(pool_tokens=32)
        with pytest.raises(ValueError, match="33 tokens; the KV pool has 32"):
            harness.submit([1] * 33)

    def test_output_is_clamped_to_the_context(self) -> None:
        harness = Harness(context_len=32)
        rid = harness.submit([1] * 20, 100)
        harness.run()
        harness.expect(rid, 12)

    def test_empty_prompt_and_foreign_ids_are_refused(self) -> None:
        harness = Harness()
        with pytest.raises(ValueError, match="the prompt is empty"):
            harness.submit([])
        with pytest.raises(ValueError, match=r"token id 61 at position 1 .* \[0, 61\)"):
            harness.submit([1, 61])
        with pytest.raises(ValueError, match="token id -1 at position 0"):
            harness.submit([-1])
        with pytest.raises(ValueError, match="stop_token_ids names token 99"):
            harness.submit([1], stop_token_ids=(99,))
        assert not harness.scheduler.has_work()

    def test_a_refused_request_disturbs_nobody(self) -> None:
        harness = Harness()
        rid = harness.submit(PROMPT, 6)
        harness.step()
        with pytest.raises(ValueError, match="in use"):
            harness.submit(PROMPT, rid=rid)
        harness.reqs = {rid: harness.reqs[rid]}
        harness.run()
        harness.expect(rid, 6)


class TestQueue:
    def test_a_full_queue_turns_the_newcomer_away(self) -> None:
        harness = Harness(max_running_requests=1, max_queued_requests=2)
        rids = [harness.submit([i + 1], 4) for i in range(2)]
        late = harness.submit([9], 4)
        harness.run()
        assert harness.ended[late].status == 503
        assert all(harness.ended[rid] == FinishLength(4) for rid in rids)

    def test_with_priorities_the_least_important_goes(self) -> None:
        harness = Harness(max_queued_requests=2, enable_priority_scheduling=True)
        low, high = harness.submit([1], 4, priority=1), harness.submit([2], 4, priority=5)
        newcomer = harness.submit([3], 4, priority=3)
        equal = harness.submit([4], 4, priority=3)
        harness.run()
        assert harness.ended[low].status == 503
        assert harness.ended[equal].status == 503
        assert harness.ended[high] == harness.ended[newcomer] == FinishLength(4)

    def test_waiting_timeout(self) -> None:
        harness = Harness(max_running_requests=1, waiting_timeout=10.0)
        first, second = harness.submit([1], 50), harness.submit([2], 5)
        harness.step()
        harness.clock.now = 10.5
        harness.step()
        assert harness.ended[second].status == 503
        harness.run()
        harness.expect(first, 50)

    def test_running_timeout(self) -> None:
        harness = Harness(running_timeout=10.0)
        rid = harness.submit([1], 50)
        harness.step()
        harness.clock.now = 10.5
        harness.run()
        assert harness.ended[rid].status == 503
        harness.expect_idle()


class TestPriority:
    def test_a_more_important_request_preempts(self) -> None:
        """The pool holds one of them."""
        harness = Harness(pool_tokens=40, enable_priority_scheduling=True)
        low = harness.submit([1, 2, 3], 30, priority=0)
        for _ in range(5):
            harness.step()
        high = harness.submit([4, 5, 6], 30, priority=20)
        harness.step()
        assert len(harness.tokens[high]) == 1
        assert harness.reqs[low].num_retractions == 1
        harness.run()
        harness.expect(low, 30)
        harness.expect(high, 30)
        harness.expect_idle()

    def test_not_by_a_small_difference(self) -> None:
        harness = Harness(pool_tokens=40, enable_priority_scheduling=True)
        low = harness.submit([1, 2, 3], 30, priority=0)
        harness.step()
        harness.submit([4, 5, 6], 30, priority=10)
        harness.run()
        assert harness.reqs[low].num_retractions == 0

    def test_a_row_is_preempted_too(self) -> None:
        harness = Harness(max_running_requests=1, enable_priority_scheduling=True)
        low = harness.submit([1], 10)
        harness.step()
        high = harness.submit([2], 10, priority=50)
        harness.run()
        assert harness.reqs[low].num_retractions == 1
        harness.expect(low, 10)
        harness.expect(high, 10)


class TestFailures:
    def test_a_nan_row_ends_its_own_request_only(self) -> None:
        """CASES D19."""
        tokens = expected_tokens(PROMPT, 5, VOCAB_SIZE)
        others = [[1, 2], [3, 4, 5]]
        for prompt in others:
            assert tokens[2] not in expected_tokens(prompt, 5, VOCAB_SIZE)
        harness = Harness(nan_token=tokens[2])
        rid = harness.submit(PROMPT, 5)
        rids = [harness.submit(prompt, 5) for prompt in others]
        harness.run()
        assert isinstance(harness.ended[rid], FinishError)
        assert harness.tokens[rid] == tokens[:3]
        for other in rids:
            harness.expect(other, 5)
        harness.expect_idle()

    def test_a_failing_forward_ends_its_batch_and_no_other_request(self) -> None:
        harness = Harness(fail_token=60, max_running_requests=2)
        harness.submit([1, 60], 5, rid="bad")
        mate = harness.submit([1, 2], 5)
        later = harness.submit([3, 4], 5)
        harness.run()
        assert isinstance(harness.ended["bad"], FinishError)
        assert "as it was told" in harness.ended["bad"].message
        assert isinstance(harness.ended[mate], FinishError)
        harness.expect(later, 5)
        harness.expect_idle()


def test_in_batch_prefix_caching_computes_a_shared_prefix_once() -> None:
    prefix = [(i * 3) % 50 + 1 for i in range(40)]
    harness = Harness(schedule_policy="lpm")
    rids = [harness.submit([*prefix, i], 3) for i in range(6)]
    harness.run()
    for rid in rids:
        harness.expect(rid, 3)
    assert harness.scheduler.stats().num_cached_tokens == 5 * len(prefix)


def test_new_token_ratio_falls_while_all_goes_well_and_rises_on_retraction() -> None:
    harness = Harness(pool_tokens=64, schedule_conservativeness=0.01)
    initial = harness.scheduler.stats().new_token_ratio
    rids = [harness.submit([i, i + 1, i + 2], 25) for i in range(8)]
    ratios, retractions = [], []
    while harness.scheduler.has_work():
        harness.step()
        ratios.append(harness.scheduler.stats().new_token_ratio)
        retractions.append(harness.scheduler.stats().num_retractions)
    first = next(i for i, n in enumerate(retractions) if n)
    assert all(a >= b for a, b in pairwise(ratios[:first]))
    assert initial * 0.14 <= min(ratios) <= max(ratios) <= 1.0
    assert ratios[first] > ratios[first - 1]
    assert set(harness.ended) == set(rids)
