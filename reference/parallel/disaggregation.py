"""Prefill and decode in two engines, with a transport between their pools.

A request at the decode engine, and what it owns there:

    waiting    nothing; it comes when the pool has room for its prompt and its longest answer
    transfer   pages of its prompt, and a row; both open for the transport; a lock on its cached prefix
    scheduled  in the ordinary scheduler, where it decodes from the first token, which comes with the KV

and at the prefill engine:

    prefill    in the ordinary scheduler, for one token
    in flight  a lock on its prompt, its last page, a copy of its state, until the transport ends the room

Pages change owner only after `poll` gave a final status. A request without its engine moves once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from diptych.reference.parallel.prompt_messages import Computed, Failed, Message, Start, decode, encode
from diptych.shared.config import EngineConfig
from diptych.shared.engine.processes.input_log import req_of, request_of
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import (
    RadixKey,
    Scheduler,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
    Transport,
)
from diptych.shared.loading.kv_sizing import num_speculative_slots
from diptych.shared.scheduling.admission import admit
from diptych.shared.scheduling.last_pages import LastPage, LastPages
from diptych.shared.scheduling.pages import evict_for, num_pages_of, round_down_to_page, round_up_to_page
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.types import FinishAbort, FinishError, FinishReason, Req, StepOutput

TIME_LIMIT = 300.0
"""Time limit of a transfer in seconds, after which the connection to the other engine is closed."""
POLL_SECONDS = 0.001
"""Seconds that a turn waits if there is nothing to compute."""


@dataclass
class Sent:
    """What a room owns at the prefill engine while it is read."""

    node: Any  # that it locks; None: nothing is sent
    last_page: LastPage = field(default_factory=LastPage)


class PrefillSide:
    """The prefill engine: computes prompts for the decode engine. Call `turn` until `is_done`."""

    def __init__(self, scheduler: Scheduler, parts: SchedulerParts, grammars: GrammarCompiler,
                 transport: Transport, name: str = "") -> None:  # fmt: skip
        """name: of the decode engine, if several share the scheduler."""
        self.scheduler = scheduler
        self.tree = parts.tree_cache
        self.allocator = parts.allocator
        (self.last_pages,) = (each for each in parts.features if isinstance(each, LastPages))
        self.grammars = grammars
        self.transport = transport
        self.name = name
        self.prefill: dict[str, Start] = {}  # by the id in the scheduler
        self.in_flight: dict[str, Sent] = {}  # by room

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
            self._start(decode(message))
        for rid, start in list(self.prefill.items()):
            if self.transport.poll(start.room) != "open":  # aborted
                del self.prefill[rid]
                self.scheduler.abort(rid)
                self.last_pages.free(self.last_pages.take(rid))

    def send(self, outputs: Sequence[StepOutput]) -> None:
        """After a step: send what is computed, and unlock what has arrived."""
        for output in outputs:
            if output.finished_reason is not None and output.rid in self.prefill:
                self._send(self.prefill.pop(output.rid), output, output.finished_reason)
        for room in [room for room in self.in_flight if self.transport.poll(room) != "open"]:
            sent = self.in_flight.pop(room)
            if sent.node is not None:
                self.tree.dec_lock_ref(sent.node)
            self.last_pages.free(sent.last_page)

    # --8<-- [end:prefill-turn]

    def _start(self, start: Message) -> None:
        assert isinstance(start, Start)
        rid = self.name + start.room
        self.transport.open_sender(start.room)
        try:
            req = req_of(start.request, self.grammars)
            params = req.sampling_params
            lengths = {name: min(getattr(params, name), 1) for name in ("min_new_tokens", "max_new_tokens")}
            # The engine that decodes looks for the end; a time limit may end a regex on one rank only.
            req.rid, req.sampling_params = rid, params.updated(**lengths, stop_regex=())
            self.scheduler.add_request(req)
        except ValueError as error:
            self._fail(start.room, FinishError(str(error)))
            return
        self.prefill[rid] = start
        self.last_pages.wanted.add(rid)

    def _send(self, start: Start, output: StepOutput, reason: FinishReason) -> None:
        page_size, request = self.allocator.page_size, start.request
        ids, extra_key = request.input_ids, request.extra_key
        last_page = self.last_pages.take(output.rid)
        match = self.tree.match_kv(RadixKey(ids, extra_key, self.tree.is_bigram))
        slots = torch.cat([match.device_indices, last_page.slots])
        pages = (slots[::page_size] // page_size).tolist()[start.first_page :]
        found = len(slots), len(pages), last_page.checkpoint is not None
        if found != (len(ids), len(start.target_pages), start.target_row is not None):
            self.last_pages.free(last_page)  # it failed, or the cache did not keep it
            self._fail(start.room, reason)
            return
        self.tree.inc_lock_ref(match.last_node)
        self.in_flight[start.room] = Sent(match.last_node, last_page)
        output.finished_reason = None  # whether it ends the request is known where all its limits are
        self.transport.post(encode(Computed(start.room, output, last_page.draft_state)))
        self.transport.send(start.room, pages, start.target_pages, last_page.checkpoint, start.target_row)

    def _fail(self, room: str, reason: FinishReason) -> None:
        message = f"the prefill engine has no KV: {getattr(reason, 'message', reason)}"
        self.transport.post(encode(Failed(room, message, getattr(reason, "status", 503))))
        self.transport.abort(room)
        self.in_flight[room] = Sent(None)


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
    row: int
    since: float
    first: StepOutput | None = None
    draft_state: bytes = b""
    reason: str = "the prefill engine has ended"
    status: int = 503
    is_wanted: bool = True  # False: its request was aborted


class DecodeSide(Scheduler):
    """The scheduler of the decode engine, whose prompts the prefill engine computes."""

    def __init__(self, scheduler: Scheduler, parts: SchedulerParts, grammars: GrammarCompiler,
                 vocab_size: int, config: EngineConfig, prefill_engines: PrefillEngines) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.parts = parts
        self.grammars = grammars
        self.vocab_size = vocab_size
        assert config.context_len is not None  # chosen with the model
        self.context_len = config.context_len
        self.prefill_engines = prefill_engines
        self.waiting: list[Req] = []
        self.moved: set[str] = set()  # ids of requests whose first prefill engine has ended
        self.transfers: dict[str, Transfer] = {}  # by room
        self.scheduled: dict[str, str] = {}  # rid -> room
        self.reserved: dict[str, int] = {}  # room -> pages of prompt and longest answer
        self.outputs: list[StepOutput] = []
        self.child: Any = None  # the process of the other engine
        self.num_draft_slots = 2 * num_speculative_slots(config, parts.drafter)  # a round and the next
        self.has_states = any(isinstance(each, StateCheckpoints) for each in parts.features)
        self._num_rooms = 0
        self._new: list[tuple[Transport, Start]] = []  # not posted yet

    def add_request(self, req: Req) -> None:
        rids = [req.rid for req in self.waiting] + [output.rid for output in self.outputs]
        rids += [transfer.req.rid for transfer in self.transfers.values() if transfer.is_wanted]
        if req.rid in rids or req.rid in self.scheduled:
            raise ValueError(f"request id {req.rid!r} is in use")
        if req.logit_processor is not None:
            raise ValueError("custom logit processors do not work here: the prefill engine samples, too")
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
        # A batch in flight may write to what is free; behind the next step it has ended.
        is_in_flight = self.scheduler.overlaps and self.scheduler.has_work()
        found = {room: transfer.transport.poll(room) for room, transfer in self.transfers.items()}
        for transport in self.prefill_engines.transports():
            for message in transport.messages():  # read after the polls: they come ahead of the pages
                self._hear(transport, decode(message))
        for room, status in found.items():
            if status != "open":
                self._take(room, self.transfers.pop(room), status == "done")
        while self.waiting and self._allocate(self.waiting[0]):
            self.waiting.pop(0)
        if not is_in_flight:
            self._post()
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
        self._post()  # not if the step raises: then a batch may still be in flight
        outputs, self.outputs = self.outputs, []
        return outputs

    def _post(self) -> None:
        """Ask for the prompts of new rooms: from now on their memory may be written to."""
        for transport, start in self._new:
            transport.post(encode(start))
        self._new.clear()

    def _hear(self, transport: Transport, message: Message) -> None:
        transfer = self.transfers.get(message.room)
        if transfer is None or transfer.transport is not transport:
            return
        if isinstance(message, Failed):
            transfer.reason, transfer.status = message.reason, message.status
        elif isinstance(message, Computed):
            transfer.first, transfer.draft_state = message.first, message.draft_state

    def _allocate(self, req: Req) -> bool:
        """Open a room for the prompt, or schedule it if it is cached. False: there is no memory, or an engine
        is just being connected."""
        allocator, tree = self.parts.allocator, self.parts.tree_cache
        page_size, prompt = allocator.page_size, req.origin_input_ids
        needed = num_pages_of(len(prompt) + req.max_new_tokens + self.num_draft_slots, page_size)
        needed = min(needed, allocator.size // page_size)  # KV of the last token is never needed
        is_full = sum(self.reserved.values()) + needed > allocator.size // page_size
        if is_full or len(self.reserved) == self.parts.req_to_token_pool.size:
            return False
        self._num_rooms += 1
        room = f"{self._num_rooms} {req.rid}"
        num_tokens = round_down_to_page(len(prompt) - 1, page_size)
        key = RadixKey(prompt[: num_tokens + tree.is_bigram], req.extra_key, tree.is_bigram)
        prefix, node = tree.match_prefix(key)
        if len(prefix) == num_tokens:  # all but the last page, which is computed here
            self.reserved[room] = needed
            self._schedule(req, room)
            return True
        prefix, node = tree.match_kv(key)
        busy = Counter(transfer.transport for transfer in self.transfers.values())
        transport = self.prefill_engines.choose(req, busy)
        if self.prefill_engines.is_connecting(req):
            return False
        if transport is None:
            self._end(req, FinishError("the prefill engine has ended", 503))
            return True
        self.reserved[room] = needed
        tree.inc_lock_ref(node)
        num_missing = round_up_to_page(len(prompt), page_size) - len(prefix)
        has_room = evict_for(num_missing, tree, allocator)
        assert has_room, "less memory than is reserved"
        slots = allocator.alloc(num_missing)
        rows = self.parts.req_to_token_pool.alloc(1)
        assert slots is not None
        assert rows is not None
        pages, row = (slots[::page_size] // page_size).tolist(), rows[0]
        first_page, target_row = len(prefix) // page_size, row if self.has_states else None
        start = Start(room, request_of(req, self.grammars), first_page, pages, target_row)
        transport.open_receiver(room, pages, target_row)
        self._new.append((transport, start))
        self.transfers[room] = Transfer(req, transport, prefix, node, slots, row, self.parts.clock())
        return True

    def _take(self, room: str, transfer: Transfer, is_done: bool) -> None:
        """Take the pages of a room that the transport has ended; this engine alone owns them."""
        req, first = transfer.req, transfer.first
        if is_done and transfer.is_wanted and first is not None:
            slots = torch.cat([transfer.prefix, transfer.slots])
            req.prefix_indices = slots[: len(req.origin_input_ids)]
            req.last_node, req.cache_protected_len = transfer.locked, len(transfer.prefix)
            req.req_pool_idx = transfer.row
            self.moved.discard(req.rid)
            self.scheduled[req.rid] = room
            self.scheduler.add_computed(req, first, transfer.draft_state)
            return
        self.parts.tree_cache.dec_lock_ref(transfer.locked)
        self.parts.allocator.free(transfer.slots)
        self.parts.req_to_token_pool.free([transfer.row])
        del self.reserved[room]
        if not transfer.is_wanted:
            return
        can_move = transfer.transport.is_lost and self.prefill_engines.choose(req, Counter()) is not None
        if can_move and req.rid not in self.moved:
            self.moved.add(req.rid)
            self.waiting.insert(0, req)
        else:
            self._end(req, FinishError(transfer.reason, transfer.status))

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
