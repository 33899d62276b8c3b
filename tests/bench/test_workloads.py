"""What is asked in a measurement: the same each time, and of the lengths that it promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench.drive import Sampling, run_to_end
from diptych.shared.tools.bench.workloads import WORKLOADS, LongPrompts, Offline256, SharedPrefix, Uniform


def test_offline_256_is_the_published_one() -> None:
    [case] = Offline256().cases(151_936)
    assert len(case.requests) == 256
    assert sum(len(request.prompt) for request in case.requests) == 142_827
    assert sum(request.output_len for request in case.requests) == 133_966
    lens = [len(request.prompt) for request in case.requests] + [r.output_len for r in case.requests]
    assert (min(lens) >= 100, max(lens) <= 1024) == (True, True)


def test_lengths_do_not_depend_on_the_vocabulary() -> None:
    large, small = (Offline256().cases(vocab_size)[0].requests for vocab_size in (151_936, 50))
    assert [(len(r.prompt), r.output_len) for r in large] == [(len(r.prompt), r.output_len) for r in small]
    assert max(max(request.prompt) for request in small) == 49


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time_and_another_with_another_seed(name: str) -> None:
    kind = WORKLOADS[name]
    assert kind().cases(500) == kind().cases(500)
    assert kind().cases(500) != kind(seed=1).cases(500)


def test_uniform_prompts_part_at_their_first_token() -> None:
    small, large = Uniform((1, 16), (5, 5), (3, 3)).cases(100)
    assert [len(small.requests), len(large.requests)] == [1, 16]
    assert len({request.prompt[0] for request in large.requests}) == 16
    assert {(len(r.prompt), r.output_len) for r in large.requests} == {(5, 3)}
    with pytest.raises(ValueError, match="16 prompts"):
        Uniform((16,)).cases(15)


def test_groups_share_their_beginning_and_nothing_else() -> None:
    workload = SharedPrefix(groups=3, group_size=4, shared_len=10, input_len=(2, 5))
    [case] = workload.cases(100)
    groups = Counter(tuple(request.prompt[:10]) for request in case.requests)
    assert list(groups.values()) == [4, 4, 4]
    assert len({prefix[0] for prefix in groups}) == 3
    for prefix in groups:
        own = [r.prompt[10] for r in case.requests if tuple(r.prompt[:10]) == prefix]
        assert len(set(own)) == 4
    first = [tuple(request.prompt[:10]) for request in case.requests[:4]]
    assert len(set(first)) > 1, "groups come mixed"


@pytest.mark.parametrize(("page_size", "shared_len", "cached"), [(1, 20, 20), (16, 40, 32), (16, 15, 0)])
def test_the_ideal_hit_rate_is_what_a_patient_engine_reaches(
    page_size: int, shared_len: int, cached: int
) -> None:
    """One request at a time, so that everything that came before is in the cache."""
    workload = SharedPrefix(
        groups=2, group_size=3, shared_len=shared_len, input_len=(4, 4), output_len=(1, 1)
    )
    llm = LLM(
        model="tiny-dense", device="cpu", panel="reference", max_total_tokens=1024, page_size=page_size,
        max_running_requests=1,
    )  # fmt: skip
    requests = workload.cases(llm.model_config.vocab_size)[0].requests
    ideal = workload.ideal_hit_rate(requests, page_size)
    assert ideal == pytest.approx(2 * 2 * cached / (6 * (shared_len + 4)))
    assert run_to_end(llm, requests, Sampling(0.0, 0)).hit_rate == pytest.approx(ideal)


def test_the_published_shared_prefix_has_this_ideal() -> None:
    """15 of 16 requests find 2,048 of their 2,176 tokens."""
    workload = SharedPrefix()
    requests = workload.cases(5000)[0].requests
    assert len(requests) == 1024
    assert workload.ideal_hit_rate(requests, 1) == pytest.approx(15 * 2048 / (16 * 2176))


@pytest.mark.parametrize(("seconds", "interval", "number"), [(10, 1, 10), (10.5, 1, 11), (0.9, 1, 1)])
def test_long_prompts_arrive_as_long_as_is_measured(seconds: float, interval: float, number: int) -> None:
    running, long = LongPrompts(seconds=seconds, interval=interval, long_len=40).cases(100)
    assert (len(running.requests), len(long.requests)) == (32, number)
    assert {(len(request.prompt), request.output_len) for request in long.requests} == {(40, 16)}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("offline-256", {"num_requests": 0}),
        ("offline-256", {"input_len": (10, 9)}),
        ("uniform", {"output_len": (0, 5)}),
        ("uniform", {"concurrency": ()}),
        ("uniform", {"concurrency": (2, 0)}),
        ("shared-prefix", {"shared_len": 0}),
        ("long-prompts", {"interval": 0.0}),
        ("long-prompts", {"output_len": (2, 5)}),
    ],
)
def test_nonsense_is_refused_by_name(name: str, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        WORKLOADS[name](**bad)
