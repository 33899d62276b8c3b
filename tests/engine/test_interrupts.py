"""Ctrl-C: it takes effect between two steps, and the engine goes on afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.python_runtime import deferred_interrupts
from diptych.shared.scheduling.invariants import check_invariants

PROMPTS = ["Count from 3 to 9.", "What is 12 + 30?", "Spell the word river."]
HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
NUM_INTERRUPTS = 25


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs in this thread before the next line


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    reached = []

    @deferred_interrupts()
    def work() -> None:
        with deferred_interrupts():
            interrupt()
        reached.append("the outer block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["the outer block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_raised_where_it_arrives() -> None:
    reached = []

    @deferred_interrupts()
    def work() -> None:
        interrupt()
        reached.append("after the first")
        interrupt()
        reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_stays_visible() -> None:
    @deferred_interrupts()
    def work() -> None:
        interrupt()
        raise RuntimeError("of the block")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert str(caught.value.__context__) == "of the block"


def test_a_handler_of_the_program_stays_installed() -> None:
    signals: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    with deferred_interrupts():
        interrupt()
        assert signals == [signal.SIGINT]


def test_other_threads_are_left_alone() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with deferred_interrupts():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


@pytest.mark.parametrize(
    "use",
    [
        pytest.param({}, id="reference", marks=pytest.mark.full),
        pytest.param(dict.fromkeys(HOST_PARTS, "optimized"), id="optimized"),
    ],
)
def test_interrupts_at_random_moments_lose_no_memory(use: dict[str, str]) -> None:
    llm = LLM(
        "tiny-dense",
        panel="reference",
        use=use,
        device="cpu",
        dtype="float32",
        max_total_tokens=512,
        chunked_prefill_size=16,
        check_invariants=True,
    )
    sampling = {"temperature": 0, "max_tokens": 24, "progress": False}
    expected = [output.text for output in llm.generate(PROMPTS, **sampling)]
    start = time.perf_counter()
    llm.generate(PROMPTS, **sampling)
    duration = time.perf_counter() - start
    rng = random.Random(0)
    num_raised = 0
    for _ in range(NUM_INTERRUPTS):
        timer = threading.Timer(rng.uniform(0, duration), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            llm.generate(PROMPTS, **sampling)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            num_raised += 1
        timer.join()
        while llm.step():
            pass
        parts = llm.assembly.parts
        assert not llm.scheduler.requests.live
        check_invariants(llm.scheduler.state(), parts.allocator, parts.req_to_token_pool, parts.tree_cache)
    assert num_raised > NUM_INTERRUPTS // 2
    assert [output.text for output in llm.generate(PROMPTS, **sampling)] == expected
    assert llm.flush_cache()
    assert llm.assembly.parts.allocator.available_size() == llm.assembly.parts.allocator.size
