"""Which adapter is in which slot of the LoRA pool, and which requests may run together."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import SchedulerFeature
from diptych.shared.interfaces.lora import NO_ADAPTER, LoraPool
from diptych.shared.types import Req
from diptych.shared.types.lora import LoraAdapter


class LoraSlots(SchedulerFeature):
    """A batch has at most as many adapters as the pool has slots. An adapter stays in its slot until another
    one needs it and no running request uses it."""

    def __init__(self, pool: LoraPool) -> None:
        self.pool = pool
        self.adapters: list[LoraAdapter | None] = [None] * pool.num_slots
        self._last_used = [0] * pool.num_slots  # time of the last admission
        self._time = 0

    # --8<-- [start:lora-admission]
    def may_join(self, req: Req, running: Sequence[Req], new: Sequence[Req]) -> bool:
        """Whether the request's adapter has a slot beside those of the others."""
        if all(other.lora is None or other.lora in self.adapters for other in (req, *new)):
            return True  # all have slots, as have the adapters of running requests
        adapters = {other.lora for other in (*running, *new) if other.lora is not None}
        return req.lora is None or req.lora in adapters or len(adapters) < self.pool.num_slots

    def have_joined(self, new: Sequence[Req], running: Sequence[Req]) -> None:
        """Give the adapters of new requests a slot each."""
        for req in new:
            if req.lora is not None:
                self._time += 1
                if req.lora not in self.adapters:
                    slot = self._free_slot({other.lora for other in (*running, *new)})
                    self.adapters[slot] = req.lora
                    self.pool.load(slot, req.lora)
                self._last_used[self.adapters.index(req.lora)] = self._time
        slots = [NO_ADAPTER if req.lora is None else self.adapters.index(req.lora) for req in new]
        self.pool.assign([req.req_pool_idx for req in new if req.req_pool_idx is not None], slots)

    # --8<-- [end:lora-admission]

    def _free_slot(self, used: set[LoraAdapter | None]) -> int:
        """The slot that was not needed for the longest time."""
        free = [slot for slot, adapter in enumerate(self.adapters) if adapter is None or adapter not in used]
        assert free, "no slot for an adapter: admission checks this"
        return min(free, key=lambda slot: self._last_used[slot])
