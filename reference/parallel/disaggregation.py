"""Prefill and decode in two engines, with a transport between their pools.

A request at the decode engine, and what it owns there:

    waiting    nothing; it comes when the pool has room for its prompt and its longest answer
    transfer   pages of its prompt, open for the transport, and a lock on the prefix that is cached already
    scheduled  in the ordinary scheduler, which finds the prompt in the prefix cache and computes the rest

and at the prefill engine:

    prefill    in the ordinary scheduler, for one token
    in flight  a lock on its prompt in the prefix cache, until the transport has ended the room

Pages change owner only after `poll` has returned a final status, also after an abort, an error, or the end of
the other engine. A decode engine may have several prefill engines: a request whose prefill engine ends moves
to another one, once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import msgspec
import torch

from diptych.shared.interfaces import (
    RadixKey,
    Scheduler,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
    Transport,
)
from diptych.shared.parallel.channel import decoder
from diptych.shared.scheduling.admission import admit
from diptych.shared.scheduling.pages import evict_for, num_pages_of, round_down_to_page
from diptych.shared.types import FinishAbort, FinishError, FinishReason, Req, SamplingParams, StepOutput

TIME_LIMIT = 300.0
"""Time limit of a transfer in seconds, after which the connection to the other engine is closed."""
POLL_SECONDS = 0.001
"""Seconds that a turn waits if there is nothing to compute."""


Page = Annotated[int, msgspec.Meta(ge=0)]


class Start(msgspec.Struct, tag=True):
    """A message: compute a prompt, and send its KV from page `first_page` on to these pages."""

    room: str
    input_ids: list[int]
    extra_key: str | None
    first_page: Page
    target_pages: list[Page]


class Failed(msgspec.Struct, tag=True):
    """A message: why the prefill engine has aborted a room."""

    room: str
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_decode = decoder(Start | Failed)


class PrefillSide:
    """The prefill engine: computes prompts for the decode engine. Call `turn` until `is_done`."""

    def __init__(
        self, scheduler: Scheduler, parts: SchedulerParts, transport: Transport, name: str = ""
    ) -> None:
        """name: of the decode engine, if several share the scheduler."""
        self.scheduler = scheduler
        self.tree = parts.tree_cache
        self.page_size = parts.allocator.page_size
        self.transport = transport
        self.name = name
        self.prefill: dict[str, Start] = {}  # by the id in the scheduler
        self.in_flight: dict[str, Any] = {}  # room -> the node that it locks; None: nothing to send

    @property
    def is_done(self) -> bool:
        return self.has_ended and not self.scheduler.has_work()

    @property
    def has_ended(self) -> bool:
        """The connection is lost, and nothing waits for it."""
        return self.transport.is_lost and not (self.prefill or self.in_flight)

    def turn(self) -> bool:
        """Run one step. False: there was nothing to compute."""
        self.receive()
        has_work = self.scheduler.has_work()
        self.send(self.scheduler.step() if has_work else [])
        return has_work

    # --8<-- [start:prefill-turn]
    def receive(self) -> None:
        """Before a step: take new prompts, and drop those that were aborted."""
        for message in self.transport.messages():
            self._start(_decode(message))
        for rid, start in list(self.prefill.items()):
            if self.transport.poll(start.room) != "open":  # aborted
                del self.prefill[rid]
                self.scheduler.abort(rid)

    def send(self, outputs: Sequence[StepOutput]) -> None:
        """After a step: send what is computed, and unlock what has arrived."""
        for output in outputs:
            if output.finished_reason is not None and output.rid in self.prefill:
                self._send(self.prefill.pop(output.rid), output.finished_reason)
        for room in [room for room in self.in_flight if self.transport.poll(room) != "open"]:
            node = self.in_flight.pop(room)
            if node is not None:
                self.tree.dec_lock_ref(node)

    # --8<-- [end:prefill-turn]

    def _start(self, start: Start | Failed) -> None:
        assert isinstance(start, Start)
        rid = self.name + start.room
        self.transport.open_sender(start.room)
        self.prefill[rid] = start
        params = SamplingParams(temperature=0.0, max_new_tokens=1)
        req = Req(rid, start.input_ids, params, seed=0, extra_key=start.extra_key)
        try:
            self.scheduler.add_request(req)
        except ValueError as error:
            self._send(self.prefill.pop(rid), FinishError(str(error)))

    def _send(self, start: Start, reason: FinishReason) -> None:
        num_tokens = (start.first_page + len(start.target_pages)) * self.page_size
        match = self.tree.match_prefix(RadixKey(start.input_ids[:num_tokens], start.extra_key))
        if len(match.device_indices) < num_tokens:  # it failed, or the cache did not keep it
            self.transport.post(_encode(Failed(start.room, f"the prefill engine has no KV: {reason}")))
            self.transport.abort(start.room)
            self.in_flight[start.room] = None
            return
        self.tree.inc_lock_ref(match.last_node)
        self.in_flight[start.room] = match.last_node
        slots = match.device_indices[start.first_page * self.page_size :: self.page_size]
        self.transport.send(start.room, (slots // self.page_size).tolist(), start.target_pages)


class PrefillEngines(Protocol):
    """The prefill engines of a decode engine."""

    def transports(self) -> Sequence[Transport]:
        """To all that were connected, the lost ones included."""

    def choose(self, req: Req, busy: Counter[Transport]) -> Transport | None:
        """The transport for a prompt; None: no engine is connected. busy: open rooms."""

    def is_connecting(self, req: Req) -> bool:
        """Whether the request should wait because the engine that it names may be connected soon."""


class OnePrefillEngine(PrefillEngines):
    """The other engine of a pair."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def transports(self) -> Sequence[Transport]:
        return [self.transport]

    def choose(self, req: Req, busy: Counter[Transport]) -> Transport | None:
        return None if self.transport.is_lost else self.transport

    def is_connecting(self, req: Req) -> bool:
        return False


@dataclass
class Transfer:
    """A room at the decode engine. `locked`: the node of the already cached `prefix`."""

    req: Req
    transport: Transport
    prefix: torch.Tensor
    locked: Any
    slots: torch.Tensor
    since: float
    reason: str = "the prefill engine has ended"
    is_wanted: bool = True  # False: its request was aborted


class DecodeSide(Scheduler):
    """The scheduler of the decode engine, whose prompts the prefill engine computes."""

    def __init__(self, scheduler: Scheduler, parts: SchedulerParts, vocab_size: int, context_len: int,
                 prefill_engines: PrefillEngines) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.parts = parts
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.prefill_engines = prefill_engines
        self.waiting: list[Req] = []
        self.moved: set[str] = set()  # ids of requests whose first prefill engine has ended
        self.transfers: dict[str, Transfer] = {}  # by room
        self.scheduled: dict[str, str] = {}  # rid -> room
        self.reserved: dict[str, int] = {}  # room -> pages of prompt and longest answer
        self.outputs: list[StepOutput] = []
        self.child: Any = None  # the process of the other engine
        self._num_rooms = 0

    def add_request(self, req: Req) -> None:
        rids = [req.rid for req in self.waiting] + [output.rid for output in self.outputs]
        rids += [transfer.req.rid for transfer in self.transfers.values() if transfer.is_wanted]
        if req.rid in rids or req.rid in self.scheduled:
            raise ValueError(f"request id {req.rid!r} is in use")
        admit(req, self.vocab_size, self.context_len, self.parts.allocator.size)
        self.waiting.append(req)

    def abort(self, rid: str) -> bool:
        for req in self.waiting:
            if req.rid == rid:
                self.waiting.remove(req)
                self._end(req, FinishAbort("aborted"))
                return True
        for room, transfer in self.transfers.items():
            if transfer.req.rid == rid and transfer.is_wanted:
                transfer.is_wanted = False  # its pages stay allocated: they may still be written to
                transfer.transport.abort(room)
                self._end(transfer.req, FinishAbort("aborted"))
                return True
        return self.scheduler.abort(rid)

    def retract(self, rid: str) -> bool:
        return self.scheduler.retract(rid)

    # --8<-- [start:decode-step]
    def step(self) -> list[StepOutput]:
        for transport in self.prefill_engines.transports():
            for message in transport.messages():
                self._has_failed(transport, _decode(message))
        while self.waiting and self._allocate(self.waiting[0]):
            self.waiting.pop(0)
        for room in list(self.transfers):
            status = self.transfers[room].transport.poll(room)
            if status != "open":
                self._take(room, self.transfers.pop(room), status == "done")
        # --8<-- [end:decode-step]
        for transfer in self.transfers.values():
            if self.parts.clock() - transfer.since > TIME_LIMIT and not transfer.transport.is_lost:
                transfer.transport.close()
        if self.scheduler.has_work():
            for output in self.scheduler.step():
                if output.finished_reason is not None:
                    del self.reserved[self.scheduled.pop(output.rid)]
                self.outputs.append(output)
        elif not self.outputs:
            time.sleep(POLL_SECONDS)
        outputs, self.outputs = self.outputs, []
        return outputs

    def _has_failed(self, transport: Transport, failed: Start | Failed) -> None:
        transfer = self.transfers.get(failed.room)
        if isinstance(failed, Failed) and transfer is not None and transfer.transport is transport:
            transfer.reason = failed.reason

    def _allocate(self, req: Req) -> bool:
        """Open a room for the prompt, or schedule it if it is cached. False: there is no memory, or an engine
        is just being connected."""
        allocator, tree = self.parts.allocator, self.parts.tree_cache
        page_size, prompt = allocator.page_size, req.origin_input_ids
        needed = num_pages_of(len(prompt) + req.max_new_tokens, page_size)
        needed = min(needed, allocator.size // page_size)  # KV of the last token is never needed
        if sum(self.reserved.values()) + needed > allocator.size // page_size:
            return False
        self._num_rooms += 1
        room = f"{self._num_rooms} {req.rid}"
        num_tokens = round_down_to_page(len(prompt) - 1, page_size)  # the last token is computed here
        prefix, node = tree.match_prefix(RadixKey(prompt[:num_tokens], req.extra_key))
        num_missing = num_tokens - len(prefix)
        if num_missing == 0:
            self.reserved[room] = needed
            self._schedule(req, room)
            return True
        busy = Counter(transfer.transport for transfer in self.transfers.values())
        transport = self.prefill_engines.choose(req, busy)
        if self.prefill_engines.is_connecting(req):
            return False
        if transport is None:
            self._end(req, FinishError("the prefill engine has ended", 503))
            return True
        self.reserved[room] = needed
        tree.inc_lock_ref(node)
        has_room = evict_for(num_missing, tree, allocator)
        assert has_room, "less memory than is reserved"
        slots = allocator.alloc(num_missing)
        assert slots is not None
        pages = (slots[::page_size] // page_size).tolist()
        transport.open_receiver(room, pages)
        start = Start(room, prompt, req.extra_key, len(prefix) // page_size, pages)
        transport.post(_encode(start))
        self.transfers[room] = Transfer(req, transport, prefix, node, slots, self.parts.clock())
        return True

    def _take(self, room: str, transfer: Transfer, is_done: bool) -> None:
        """Take the pages of a room that the transport has ended; this engine alone owns them."""
        tree, req, slots = self.parts.tree_cache, transfer.req, transfer.slots
        num_unused = len(slots)
        if is_done:
            all_slots = torch.cat([transfer.prefix, slots])
            key = RadixKey(req.origin_input_ids[: len(all_slots)], req.extra_key)
            num_unused = tree.insert(key, all_slots).prefix_len - len(transfer.prefix)  # cached meanwhile
        tree.dec_lock_ref(transfer.locked)
        if num_unused > 0:
            self.parts.allocator.free(slots[:num_unused])
        if is_done and transfer.is_wanted:
            self._schedule(req, room)
            return
        del self.reserved[room]
        if not transfer.is_wanted:
            return
        can_move = transfer.transport.is_lost and self.prefill_engines.choose(req, Counter()) is not None
        if can_move and req.rid not in self.moved:
            self.moved.add(req.rid)
            self.waiting.insert(0, req)
        else:
            self._end(req, FinishError(transfer.reason, 503))

    def _schedule(self, req: Req, room: str) -> None:
        self.moved.discard(req.rid)
        self.scheduled[req.rid] = room
        self.scheduler.add_request(req)

    def _end(self, req: Req, reason: FinishReason) -> None:
        self.moved.discard(req.rid)
        req.finished_reason = reason
        self.outputs.append(req.step_output())

    @property
    def problem(self) -> str | None:  # type: ignore[override]
        is_lost = all(transport.is_lost for transport in self.prefill_engines.transports())
        return "the prefill engine has ended" if is_lost else None

    def has_work(self) -> bool:
        return bool(self.waiting or self.transfers or self.outputs) or self.scheduler.has_work()

    def flush_cache(self) -> bool:
        return not self.waiting and not self.transfers and self.scheduler.flush_cache()

    def state(self) -> SchedulerState:
        state = self.scheduler.state()
        return replace(state, waiting_queue=[*self._pending(), *state.waiting_queue])

    def stats(self) -> SchedulerStats:
        stats = self.scheduler.stats()
        return stats._replace(num_waiting=stats.num_waiting + len(self._pending()))

    def _pending(self) -> Sequence[Req]:
        return [*self.waiting, *(each.req for each in self.transfers.values() if each.is_wanted)]
