"""How much is drafted follows what is accepted, and changes no answer."""

from __future__ import annotations

from diptych.shared.config.speculation_flags import shapes_up_to
from diptych.shared.speculation.adaptive_shape import WINDOW, AdaptiveShape
from diptych.shared.tools.conformance.oracles.ledger_drafter import Guess, perfect, useless
from diptych.shared.tools.conformance.oracles.scheduler_harness import SchedulerHarness, shape_flags
from diptych.shared.types import DraftShape

LARGEST = DraftShape(5, 2, 11)


def verify(shape: AdaptiveShape, rate: float, num: int = WINDOW) -> DraftShape:
    for _ in range(num):
        shape.record(10, int(10 * rate))
    return shape.current


def test_shapes_double_their_steps() -> None:
    assert shapes_up_to(LARGEST) == [(1, 2, 3), (2, 2, 5), (4, 2, 9), LARGEST]
    assert shapes_up_to(DraftShape(3, 1, 4)) == [(1, 1, 2), (2, 1, 3), (3, 1, 4)]
    assert shapes_up_to(DraftShape(1, 4, 5)) == [(1, 4, 5)]
    for shape in shapes_up_to(DraftShape(8, 4, 64)):
        assert 2 <= shape.num_draft_tokens <= shape.max_nodes


def test_it_goes_down_up_and_stays() -> None:
    shape = AdaptiveShape(LARGEST)
    assert verify(shape, 0.0, WINDOW - 1) == LARGEST
    assert verify(shape, 0.0, 1) == (4, 2, 9)
    assert verify(shape, 0.5) == (4, 2, 9)
    assert verify(shape, 0.0, 10 * WINDOW) == (1, 2, 3)
    assert verify(shape, 1.0) == (2, 2, 5)
    assert verify(shape, 1.0, 10 * WINDOW) == LARGEST


def test_no_draft_says_nothing() -> None:
    shape = AdaptiveShape(LARGEST)
    for _ in range(10 * WINDOW):
        shape.record(0, 0)
    assert shape.current == LARGEST


def run(guess: Guess, num_tokens: int = 400) -> SchedulerHarness:
    harness = SchedulerHarness(
        guess=guess,
        speculative_auto=True,
        page_size=4,
        pool_tokens=1024,
        context_len=512,
        **shape_flags(LARGEST),
    )
    rid = harness.submit([5, 7, 11], num_tokens)
    harness.run()
    harness.expect(rid, num_tokens)
    harness.expect_idle()
    return harness


def test_the_scheduler_follows_and_answers_stay() -> None:
    assert run(useless, num_tokens=150).scheduler.decoding.acceptance.shape == (1, 2, 3)
    assert run(perfect).scheduler.decoding.acceptance.shape == LARGEST


def test_it_recovers() -> None:
    """Wrong for the first hundred tokens, then right."""

    def guess(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
        return (useless if len(tokens) < 100 else perfect)(tokens, shape, vocab_size)

    acceptance = run(guess).scheduler.decoding.acceptance
    assert acceptance.shape != (1, 2, 3)
