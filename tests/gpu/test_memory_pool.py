"""The optimized pools on a GPU: no call of a step synchronizes, and device and CPU hold the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diptych.optimized import memory_pool
from diptych.optimized.radix_cache import RadixCache
from diptych.optimized.schedule_batch import prepare_for_decode, prepare_for_extend
from diptych.shared.interfaces import RadixKey, SchedulerParts
from diptych.shared.types import Req, SamplingParams

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]


@pytest.fixture
def no_synchronization(device: str) -> Iterator[None]:
    if device == "cpu":
        yield
        return
    torch.cuda.init()
    torch.ones(1, device="cuda").item()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("no_synchronization")
def test_lives_of_requests_wait_for_nothing(page_size: int, device: str) -> None:
    """Admission with a cached prefix, prefill, decode, finish, eviction."""
    rows = memory_pool.ReqToTokenPool(8, 512, device)
    allocator = memory_pool.TokenToKVPoolAllocator(64 * 16, page_size, device)
    tree = RadixCache(page_size, allocator, rows)
    used = SimpleNamespace(req_to_token_pool=rows, allocator=allocator, tree_cache=tree)
    parts = cast(SchedulerParts, used)
    for turn in range(6):
        reqs = []
        for i in range(4):
            tokens = [*range(64), turn * 10 + i, *range(20)]
            req = Req(f"{turn}-{i}", tokens, SamplingParams(), seed=0)
            match = tree.match_prefix(RadixKey(tokens[:-1]))
            tree.inc_lock_ref(match.last_node)
            req.last_node, req.prefix_indices = match.last_node, match.device_indices
            req.cache_protected_len = len(match.device_indices)
            req.fill_ids, req.extend_input_len = tokens, len(tokens) - len(match.device_indices)
            reqs.append(req)
        prepare_for_extend(reqs, parts)
        for req in reqs:
            tree.cache_unfinished_req(req)
            req.output_ids.append(1)
        for _ in range(20):
            assert prepare_for_decode(reqs, parts) is not None
            for req in reqs:
                req.output_ids.append(1)
        for req in reqs[1:]:
            tree.cache_finished_req(req)
        with allowed(device):
            row = rows.req_to_token[reqs[0].req_pool_idx, : reqs[0].kv_committed_len]
            assert row.tolist() == rows.read(reqs[0].req_pool_idx, 0, len(row)).tolist()
        tree.cache_finished_req(reqs[0], is_insert=False)
    tree.evict(tree.evictable_size())
    assert allocator.available_size() == allocator.size


class allowed:
    """Synchronizes on purpose."""

    def __init__(self, device: str) -> None:
        self.set_mode = torch.cuda.set_sync_debug_mode if device == "cuda" else len

    def __enter__(self) -> None:
        self.set_mode("default")

    def __exit__(self, *error: object) -> None:
        self.set_mode("error")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("no_synchronization")
def test_move_waits_for_nothing_and_takes_slots_of_the_host(device: str) -> None:
    pool = memory_pool.TokenToKVPool(64, 4, 3, 2, 64, torch.bfloat16, device)
    pool.k_buffer(1).copy_(torch.arange(68, device=device, dtype=torch.bfloat16)[:, None, None])
    pool.move(torch.tensor([5, 6, 7]), torch.tensor([4, 5, 6]))
    with allowed(device):
        assert pool.k_buffer(1)[4:9, 0, 0].tolist() == [4, 4, 5, 6, 8]
        assert not pool.k_buffer(0).any()


@pytest.mark.gpu
def test_the_same_answers_as_on_the_references_pools() -> None:
    from diptych.shared.tools.conformance.whole_engine.switches import prompts

    from .harness import optimized

    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    answers = []
    for choice in ("reference", "optimized"):
        use = {"memory_pool": choice}
        llm = optimized("tiny-dense", use=use, page_size=16, check_invariants=True, dtype="float32")
        assert llm.describe()["memory_pool"] == choice
        outputs = llm.generate(prompts(llm), params, progress=False)
        answers.append([output.output_ids for output in outputs])
    assert answers[0] == answers[1]
