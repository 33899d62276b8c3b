"""States of linear attention in CPU memory: a tier below the checkpoints on the device.

KV comes back to the device only up to a token at which there is a state, on the device or here.
"""

from __future__ import annotations

import torch

from diptych.shared.interfaces import (
    HostPool,
    PrefixCache,
    RadixKey,
    StatePool,
    TokenToKVPoolAllocator,
)
from diptych.shared.scheduling.host_cache import HostCache
from diptych.shared.scheduling.host_pages import HostPages
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.types import Req


class StateRows:
    """The states of all rows, as a host pool copies KV: a row is a slot, and a state is a page."""

    page_size = 1

    def __init__(self, states: StatePool) -> None:
        self.states = states
        self.num_layers = len(states.recurrent)
        self.device = states.recurrent.device

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        return self.states.inputs[layer_id]

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        return self.states.recurrent[layer_id]


class HostStates(HostPages):
    """The states of CPU memory by digest, each in a page of one."""

    def store(self, digest: str, checkpoint: int) -> None:
        """Copy a state that has entered the prefix cache, if it is new."""
        if digest not in self.pages:
            (page,) = self.take(1, keep=())
            self.pages[digest] = page
            self.pool.store([page], torch.tensor([checkpoint]))
        self.use([digest])

    def load(self, digest: str, checkpoint: int) -> None:
        self.use([digest])
        self.pool.load([self.pages[digest]], torch.tensor([checkpoint]))


class StatefulHostCache(HostCache):
    """Pages of KV, and states at some of their tokens."""

    def __init__(self, pool: HostPool, seed: str, states: StateCheckpoints, state_pool: HostPool) -> None:
        self.states, self.state_pool = states, state_pool
        self.kept = states.below = HostStates(state_pool, seed)
        super().__init__(pool, seed)

    def clear(self) -> None:
        super().clear()
        self.kept.clear()

    # --8<-- [start:load-state-and-kv]
    def load(self, req: Req, tree: PrefixCache, allocator: TokenToKVPoolAllocator) -> None:
        """Bring KV up to the last state of the request's prefix, and then that state."""
        key, size = self.key_of(req), self.pool.page_len
        start = len(tree.match_kv(key).device_indices)
        pages = self._find(self.digests(key.token_ids, key.extra_key), start // size)
        end = max(start, (start // size + len(pages)) * size)
        num_tokens = self.states.longest(key, end, goes_below=True)
        loaded = key.token_ids[: min(end, round_up_to_page(num_tokens, size))]
        self.load_kv(RadixKey(loaded, key.extra_key), req, tree, allocator, least=1)
        self.states.bring(key, len(tree.match_kv(key).device_indices))
        # --8<-- [end:load-state-and-kv]

    def check(self) -> None:
        super().check()
        owned = sorted([*self.kept.free, *self.kept.pages.values()])
        assert owned == list(range(self.kept.pool.num_pages)), f"owners of states in CPU memory: {owned}"
