"""What one engine sends to another: KV of the target, of the drafter where it has some, and states of linear
attention."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Drafter, StatePool
from diptych.shared.interfaces.host_pool import byte_rows
from diptych.shared.loading.model_path import resolve_model_path

BLOCK_BYTES = 64 * 2**10
NUM_BLOCKS = 18
"""Of a file of weights: the start, sixteen places between, and the end."""
WEIGHT_FILES = (".safetensors", ".bin", ".gguf")


class SentPool:
    """Several pools as one: the layers of the target, then those of the drafter, which have the same slots,
    then those of linear attention, with a state for each row."""

    def __init__(
        self, kv_pool: Any, draft_pool: Any = None, drafter: str = "", states: StatePool | None = None
    ) -> None:
        """drafter: a name that is the same in engines with the same drafter and the same dtypes of it."""
        self.kv_pool, self.draft_pool, self.drafter, self.states = kv_pool, draft_pool, drafter, states
        self.page_size, self.dtype, self.device = kv_pool.page_size, kv_pool.dtype, kv_pool.device
        self.num_kv_layers = kv_pool.num_layers + (0 if draft_pool is None else draft_pool.num_layers)
        self.num_layers = self.num_kv_layers + (0 if states is None else len(states.recurrent))

    def is_of_drafter(self, layer_id: int) -> bool:
        return bool(self.kv_pool.num_layers <= layer_id < self.num_kv_layers)

    def k_buffer(self, layer_id: int) -> torch.Tensor:
        pool, layer_id = self._layer(layer_id)
        buffer: torch.Tensor = pool.k_buffer(layer_id)
        return buffer

    def v_buffer(self, layer_id: int) -> torch.Tensor:
        pool, layer_id = self._layer(layer_id)
        buffer: torch.Tensor = pool.v_buffer(layer_id)
        return buffer

    def _layer(self, layer_id: int) -> tuple[Any, int]:
        if self.is_of_drafter(layer_id):
            return self.draft_pool, layer_id - self.kv_pool.num_layers
        return self.kv_pool, layer_id

    def parts_of_states(self, layer_id: int) -> list[torch.Tensor]:
        """The states of a layer as bytes [num_rows, n, width]: q, k and v of the last inputs, and the
        recurrent state. In each, the heads of several ranks are neighbours in the last dimension."""
        assert self.states is not None
        config, layer_id = self.states.config, layer_id - self.num_kv_layers
        inputs, recurrent = self.states.inputs[layer_id], self.states.recurrent[layer_id]
        sizes = [size * inputs.itemsize for size in (config.k_size, config.k_size, config.v_size)]
        parts = inputs.view(torch.uint8).split(sizes, dim=-1)
        return [*parts, recurrent.flatten(1).view(torch.uint8)[:, None]]


def is_of_states(pool: Any, layer_id: int) -> bool:
    return isinstance(pool, SentPool) and layer_id >= pool.num_kv_layers


def parts_of(pool: Any, layer_id: int) -> list[torch.Tensor]:
    """What travels of a layer, as bytes in the memory of the pool: pages of K and of V, or of the one buffer
    that holds both, [num_pages, page_size, width]; or states."""
    if is_of_states(pool, layer_id):
        states: list[torch.Tensor] = pool.parts_of_states(layer_id)
        return states
    return [rows.unflatten(0, (-1, pool.page_size)) for rows in byte_rows(pool, layer_id)]


def names_of(pool: Any) -> str:
    """What must be equal in two engines, beside the shapes of pages."""
    if not isinstance(pool, SentPool):
        return "no KV of a drafter"
    drafter = f"drafter {pool.drafter}" if pool.draft_pool is not None else "no KV of a drafter"
    return drafter + (f", states of {pool.states.inputs.dtype}" if pool.states is not None else "")


def sent_pool(
    config: EngineConfig,
    kv_pool: Any,
    drafter: Drafter | None,
    dtype: torch.dtype,
    states: StatePool | None = None,
) -> Any:
    """The pool that a transport reads and writes. dtype: of activations, and so of a drafter's states. Raises
    `ValueError` for a drafter that reads hidden states of the target and has no KV of its own, which could be
    sent."""
    if drafter is not None and drafter.kv_pool is not None:
        name = f"{drafter_name(config)} with KV in {drafter.kv_pool.dtype} and states in {dtype}"
        return SentPool(kv_pool, drafter.kv_pool, name, states)
    if drafter is not None and drafter.hidden_layers is not None:
        raise ValueError(
            f"prefill and decode in two engines do not work with the drafter {type(drafter).__name__}: it "
            "reads hidden states of the prompt, and has no kv_pool that could be sent in their place"
        )
    return kv_pool if states is None else SentPool(kv_pool, states=states)


def drafter_name(config: EngineConfig) -> str:
    """The algorithm, and a hash of the draft model: of its config.json, and of the size and `NUM_BLOCKS`
    blocks of each file with weights."""
    found = hashlib.sha256()
    if config.speculative_draft_model is not None:
        folder = resolve_model_path(config.speculative_draft_model, config.load_format)
        for file in sorted(Path(folder).iterdir()):
            if file.name == "config.json":
                found.update(file.read_bytes())
            elif file.suffix in WEIGHT_FILES:
                size = file.stat().st_size
                with file.open("rb") as opened:
                    found.update(f"{file.name} {size} ".encode())
                    for start in block_starts(size):
                        opened.seek(start)
                        found.update(opened.read(BLOCK_BYTES))
    return f"{config.speculative} {found.hexdigest()[:16]}"


def block_starts(size: int) -> list[int]:
    """Where the blocks of a file begin; those of a file of at most `NUM_BLOCKS` blocks have all of it."""
    last = max(size - BLOCK_BYTES, 0)
    return [last * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
