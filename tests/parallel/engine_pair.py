"""A prefill engine and a decode engine in one process, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diptych.reference.parallel.disaggregation import DecodeSide, OnePrefillEngine, PrefillSide
from diptych.shared.config import EngineConfig
from diptych.shared.config.engine import for_prompts
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes.disaggregated import sent_pool_of, transport_of
from diptych.shared.scheduling.invariants import check_idle
from diptych.shared.types import Req
from tests.parallel.tiny_ranks import answers_of_one, make_config, requests

SECONDS = 20.0


class Pair:
    """Both engines in this process. `hold()` keeps the transport from reading the pages of the sender."""

    def __init__(self, config: EngineConfig, **flags_of_prefill: Any) -> None:
        config = config.updated(check_invariants=False, disaggregation=True)
        transport_class = transport_of(config)
        of_prefill = for_prompts(config).updated(**flags_of_prefill)
        self.prefill, self.decode = assemble(of_prefill), assemble(config)
        self.gate, self.is_copying = threading.Event(), threading.Event()
        self.gate.set()
        pool = self.prefill.kv_pool
        k_buffer = pool.k_buffer

        def gated(layer_id: int) -> Any:
            if threading.current_thread() is self.sender._writer:
                self.is_copying.set()
                self.gate.wait(SECONDS)
            return k_buffer(layer_id)

        with ThreadPoolExecutor(2) as threads:
            pools = sent_pool_of(self.prefill), sent_pool_of(self.decode)
            sender, receiver = threads.map(transport_class, socket.socketpair(), pools)
        self.sender: Any = sender
        self.receiver: Any = receiver
        pool.k_buffer = gated  # type: ignore[method-assign]
        self.prefill_side = PrefillSide(
            self.prefill.scheduler, self.prefill.parts, self.prefill.grammars, sender
        )
        decode = self.decode
        self.decode_side = DecodeSide(
            decode.scheduler,
            decode.parts,
            decode.grammars,
            decode.model_config.vocab_size,
            decode.config,
            OnePrefillEngine(receiver),
        )

    def add(self, req: Req) -> None:
        self.decode_side.add_request(req)

    def step(self) -> None:
        self.prefill_side.turn()
        self.decode_side.step()

    def until(self, holds: Callable[[], bool], turns: str = "both") -> None:
        """Steps of both engines, or of one."""
        limit = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < limit
            {"both": self.step, "prefill": self.prefill_side.turn, "decode": self.decode_side.step}[turns]()

    def finish(self) -> None:
        """Run both until nothing is left. Then their pools are whole."""
        self.gate.set()
        self.until(lambda: not self.decode_side.has_work())
        self.until(
            lambda: (
                not (
                    self.prefill_side.prefill
                    or self.prefill_side.in_flight
                    or self.prefill.scheduler.has_work()
                )
            ),
            "prefill",
        )
        assert not self.decode_side.reserved
        assert not self.decode_side.scheduled
        for engine in (self.prefill, self.decode):
            check_idle(engine.parts.allocator, engine.parts.req_to_token_pool, engine.parts.tree_cache)
            assert engine.scheduler.flush_cache()
            assert engine.parts.allocator.available_size() == engine.parts.allocator.size

    def close(self) -> None:
        self.gate.set()
        self.sender.close()
        self.receiver.close()


@contextlib.contextmanager
def pair_of(config: EngineConfig, **flags_of_prefill: Any) -> Iterator[Pair]:
    pair = Pair(config, **flags_of_prefill)
    try:
        yield pair
    finally:
        pair.close()


def config_of(folders: dict[str, str], transport: str, **flags: Any) -> EngineConfig:
    model = folders[flags.pop("model", "llama")]
    return make_config(model, use={"transport": transport}, **{"page_size": 4} | flags)


def output_ids(reqs: list[Req]) -> list[list[int]]:
    return [req.output_ids for req in reqs]


def expected_of(config: EngineConfig) -> list[Req]:
    return answers_of_one(config)


STATES = ["waiting", "allocated", "prefill", "copying", "scheduled"]


def bring_to(pair: Any, state: str) -> Req:
    """A request in a state, and one before it that is running."""
    first, req = requests()[1], requests()[4]
    pair.add(first)
    pair.until(lambda: first.rid in pair.decode_side.scheduled)
    pair.until(lambda: bool(first.output_ids))
    pair.add(req)
    if state == "allocated":
        pair.until(lambda: bool(pair.decode_side.transfers), "decode")
    elif state == "prefill":  # one chunk of several
        pair.until(lambda: bool(pair.decode_side.transfers), "decode")
        pair.until(lambda: bool(pair.prefill_side.prefill), "prefill")
    elif state == "copying":
        pair.is_copying.clear()
        pair.gate.clear()
        pair.until(pair.is_copying.is_set)
    elif state == "scheduled":
        pair.until(lambda: bool(req.output_ids))
    return req
