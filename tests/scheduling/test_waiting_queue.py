"""The queue of waiting requests, beside a list."""

from __future__ import annotations

import random

import pytest

from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.types import Req, SamplingParams


def req(rid: str) -> Req:
    return Req(rid, [1], SamplingParams(), seed=0)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_list_and_a_follower_misses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    everyone = [req(str(i)) for i in range(12)]
    queue, listed = WaitingQueue(everyone[:3]), everyone[:3]
    follower, followed = queue.follow(), dict[Req, int]()
    for _ in range(300):
        one = rng.choice(everyone)
        if one in listed:
            queue.remove(one)
            listed.remove(one)
        else:
            queue.append(one)
            listed.append(one)
        assert list(queue) == listed
        assert list(reversed(queue)) == listed[::-1]
        assert len(queue) == len(listed)
        assert [one in queue for one in everyone] == [one in listed for one in everyone]
        assert queue[1:3] == listed[1:3]
        if listed:
            assert (queue[0], queue[-1]) == (listed[0], listed[-1])
        if rng.random() < 0.2:
            joined, left = follower.take()
            for gone, ticket in left.items():
                assert followed.pop(gone) == ticket
            assert not followed.keys() & joined.keys()
            followed |= joined
            assert sorted(followed, key=followed.__getitem__) == listed
            assert len(set(followed.values())) == len(followed)


def test_only_waiting_requests_leave_and_none_waits_twice() -> None:
    one = req("one")
    queue = WaitingQueue([one])
    with pytest.raises(AssertionError, match="one waits already"):
        queue.append(one)
    queue.remove(one)
    with pytest.raises(KeyError):
        queue.remove(one)
    with pytest.raises(IndexError):
        queue[-1]


def test_a_follower_gets_nothing_after_unfollow() -> None:
    queue = WaitingQueue()
    follower = queue.follow()
    queue.unfollow(follower)
    queue.append(req("one"))
    assert follower.take() == ({}, {})
