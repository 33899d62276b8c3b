"""Measures the CPU time of scheduling one step, by number of waiting requests: policy, prefill adder and
queue. No model runs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import AddReqResult, PrefillBudget, RadixKey
from diptych.shared.scheduling.lora_slots import LoraSlots
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.scheduling.waiting_queue import WaitingQueue
from diptych.shared.tools.bench.workloads import check_least
from diptych.shared.types import Req, SamplingParams
from diptych.shared.types.lora import LoraAdapter

POLICIES = ("fcfs", "fcfs by priority", "lof", "random", "routing-key", "lpm", "dfs-weight")
CLOCK = time.thread_time
"""CPU time of this thread: other work on the machine counts only through cache misses."""

STEPS_PER_BLOCK = 20
MIN_STEPS = 5
"""Steps of a case whose steps are too slow for a block within the time."""

PREFIX_LEN, OWN_LEN, MAX_NEW_TOKENS, NUM_GROUPS = 64, 64, 256, 64
"""A request's prompt: the prefix of its group, and tokens of its own."""
NODE_LEN, NODES_OF_SEQUENCE = 10, 10
"""Tokens of a node, and nodes of a branch, of what was in the tree before."""


@dataclass(frozen=True)
class SchedulingCase:
    """One running request ends and one arrives in every step, so that the numbers stay constant."""

    panel: str
    policy: str
    num_waiting: int
    num_running: int = 256
    page_size: int = 1
    num_adapters: int = 0
    num_cached: int = 0  # tokens in the tree at the start, of other prompts
    has_grammars: bool = False  # every second request

    def __str__(self) -> str:
        return f"{self.panel}, {self.policy}, {self.num_waiting} waiting"

    def __post_init__(self) -> None:
        check_least(self, num_waiting=0, num_running=1, page_size=1, num_adapters=0, num_cached=0)


@dataclass(frozen=True)
class SchedulingResult:
    case: SchedulingCase
    first_pass: float  # seconds of the first step, in which all waiting requests are new
    blocks: tuple[float, ...]  # seconds per step, each the mean of a block of successive steps

    @property
    def least(self) -> float:
        """Cost of a step on an idle processor."""
        return min(self.blocks)

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)


class NoWeights:
    """A pool of LoRA adapters without their weights."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def load(self, slot: int, adapter: LoraAdapter) -> None: ...

    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None: ...


class Rehearsal:
    """The admission of a scheduler, and a simulation of arriving and ending requests around it."""

    def __init__(self, case: SchedulingCase, seed: int = 0) -> None:
        by_priority = case.policy == "fcfs by priority"
        policy_name = "fcfs" if by_priority else case.policy
        self.case = case
        self.config = EngineConfig(
            schedule_policy=policy_name,  # type: ignore[arg-type]
            enable_priority_scheduling=by_priority,
            page_size=case.page_size,
        )
        pools = registry.load("memory_pool", "reference")
        request_len = PREFIX_LEN + OWN_LEN + MAX_NEW_TOKENS
        num_tokens = round_up_to_page((case.num_running + 64) * request_len + case.num_cached, case.page_size)
        self.rows = pools.ReqToTokenPool(case.num_running + 1, request_len, "cpu")
        self.allocator = pools.TokenToKVPoolAllocator(num_tokens, case.page_size, "cpu")
        self.tree = registry.load("radix_cache", case.panel)(case.page_size, self.allocator, self.rows)
        self.policy = registry.load("schedule_policy", case.panel)(self.config, self.tree)
        self.adder_class = registry.load("prefill_adder", case.panel)
        self.rng = random.Random(seed)
        self.running: list[Req] = []
        self.num_made = 0
        self.adapters = [LoraAdapter(f"adapter {i}", str(i), {}) for i in range(case.num_adapters)]
        weights: Any = NoWeights(case.num_adapters)
        self.features = [LoraSlots(weights)] if self.adapters else []
        self.fill_tree()
        self.waiting_queue = WaitingQueue(self.new_req() for _ in range(case.num_waiting + case.num_running))

    def new_req(self) -> Req:
        self.num_made += 1
        group = self.rng.randrange(NUM_GROUPS)
        grammar: Any = object() if self.case.has_grammars and self.num_made % 2 else None
        prompt = [group] * PREFIX_LEN + [self.rng.randrange(1000) for _ in range(OWN_LEN)]
        return Req(
            str(self.num_made),
            prompt,
            SamplingParams(
                max_new_tokens=self.rng.randint(1, MAX_NEW_TOKENS), regex="[a-z]*" if grammar else None
            ),
            seed=0,
            priority=self.rng.randrange(5),
            queue_start_time=float(self.num_made),
            routing_key=str(group % 16),
            grammar=grammar,  # a request waits for a step only when its grammar is compiled
            lora=self.rng.choice(self.adapters) if self.adapters else None,
        )

    def fill_tree(self) -> None:
        """Insert branches of nodes that no request shares."""
        node_len = round_up_to_page(NODE_LEN, self.case.page_size)
        length = node_len * NODES_OF_SEQUENCE
        for number in range(self.case.num_cached // length):
            token_ids, slots = [1_000_000 + number] * length, self.allocator.alloc(length)
            for end in range(node_len, length + 1, node_len):
                self.tree.insert(RadixKey(token_ids[:end]), slots[:end])

    def fill(self) -> None:
        """Admit requests until the running set is full."""
        while len(self.running) < self.case.num_running:
            self.begin(self.admit())

    def step(self) -> float:
        """Run one step; returns the seconds of the measured part: an arrival, the pass, admission."""
        self.end_one()
        req = self.new_req()
        start = CLOCK()
        self.waiting_queue.append(req)
        admitted = self.admit()
        seconds = CLOCK() - start
        assert admitted, "a request ended: there is room for another one"
        self.begin(admitted)
        return seconds

    def admit(self) -> Sequence[Req]:
        """Admit requests as a scheduler does in each step."""
        adder = self.adder_class(
            PrefillBudget(
                page_size=self.case.page_size,
                max_prefill_tokens=self.config.max_prefill_tokens,
                chunked_prefill_size=None,
                new_token_ratio=0.1,
                in_batch_prefix_threshold=self.config.in_batch_prefix_deprioritize_threshold,
            ),
            self.tree,
            self.allocator,
            self.running,
        )
        order, deprioritized = self.policy.order(self.waiting_queue, self.running)
        for req in order:
            if req.rid in deprioritized and adder.can_run_list:
                break
            if not all(each.may_join(req, self.running, adder.can_run_list) for each in self.features):
                break
            if len(self.running) + len(adder.can_run_list) >= self.case.num_running:
                break
            result = adder.add_one_req(req)
            if result is AddReqResult.WAIT:
                continue
            if result is not AddReqResult.CONTINUE:
                break
            self.waiting_queue.remove(req)
        admitted: Sequence[Req] = adder.can_run_list
        for each in self.features:
            each.have_joined(admitted, self.running)
        return admitted

    def begin(self, reqs: Sequence[Req]) -> None:
        """Allocate memory for admitted requests and insert their prompts into the tree, as if computed."""
        for req in reqs:
            self.tree.evict(len(req.fill_ids) + self.case.page_size - self.allocator.available_size())
            prefix_len, seq_len = len(req.prefix_indices), len(req.fill_ids)
            last_loc = int(req.prefix_indices[-1]) if prefix_len else -1
            slots = self.allocator.alloc_extend([prefix_len], [seq_len], [last_loc])
            (req.req_pool_idx,) = self.rows.alloc(1)
            self.rows.write(req.req_pool_idx, 0, req.prefix_indices)
            self.rows.write(req.req_pool_idx, prefix_len, slots)
            req.kv_committed_len = req.kv_allocated_len = seq_len
            self.tree.cache_unfinished_req(req)
            self.running.append(req)

    def end_one(self) -> None:
        self.tree.cache_finished_req(self.running.pop(self.rng.randrange(len(self.running))))


def measure(case: SchedulingCase, seconds: float) -> SchedulingResult:
    """Measure blocks of steps for `seconds`, at least one block."""
    rehearsal = Rehearsal(case)
    start = CLOCK()
    admitted = rehearsal.admit()
    first_pass = CLOCK() - start
    rehearsal.begin(admitted)
    rehearsal.fill()
    for _ in range(MIN_STEPS):
        rehearsal.step()
    end = CLOCK() + seconds
    blocks: list[float] = []
    while not blocks or CLOCK() < end:
        times: list[float] = []
        while len(times) < STEPS_PER_BLOCK and (len(times) < MIN_STEPS or CLOCK() < end):
            times.append(rehearsal.step())
        if len(times) == STEPS_PER_BLOCK or not blocks:
            blocks.append(statistics.mean(times))
    return SchedulingResult(case, first_pass, tuple(blocks))
