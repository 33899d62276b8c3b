"""New weights for a running engine, from a folder or from another process: between two steps, on every rank.

Requests that run go back to the queue. They keep their tokens and compute their KV again with the new
weights, and the prefix cache starts empty. A refused update changes nothing, and no request notices it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from diptych.shared.config import EngineConfig
from diptych.shared.config.parallel import ONE_ENGINE
from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.processes.start import on_every_rank
from diptych.shared.loading.live_weights import LiveWeights, TensorSpec, specs_of
from diptych.shared.parallel.cuda_memory import Handle, open_shared
from diptych.shared.parallel.tensor_frames import bytes_of, tensor_of
from diptych.shared.parallel.weight_group import WeightReceiver, invite
from diptych.shared.types import StepOutput

Deliver = Callable[[list[StepOutput], int], None]
"""Gets the outputs of batches that were in flight, and the version of their weights."""


def problem_with(config: EngineConfig) -> str | None:
    """Why an engine with these flags takes no new weights; None: it does."""
    for name, only in (("pp", 1), ("dp", 1), *ONE_ENGINE, ("hicache_dir", None)):
        if getattr(config, name) != only:
            return f"updates do not work with {name}={getattr(config, name)}"
    return None


class WeightUpdates:
    """The updates of one engine. Each method raises `ValueError` for an update that is refused."""

    def __init__(self, assembly: Assembly, deliver: Deliver) -> None:
        self.assembly = assembly
        self.weights = assembly.weights  # of the first rank
        self.deliver = deliver
        self._store: Any = None  # of a trainer: its files live as long

    # --8<-- [start:update-weights]
    def _update(self, update: str, *arguments: Any) -> int:
        """Run an update on every rank. Returns the version of the weights."""
        self._check_engine()
        before = self.weights.version
        on_every_rank(self.assembly, on_weights, update, *arguments)  # refused: nothing has changed
        outputs = self.assembly.scheduler.forget_kv()  # of the old weights
        self.deliver(outputs, before)
        return self.weights.version

    # --8<-- [end:update-weights]

    def _check_engine(self) -> None:
        problem = problem_with(self.assembly.config)
        if problem is not None:
            raise ValueError(f"this engine takes no new weights: {problem}")

    def from_folder(self, path: str) -> int:
        """A checkpoint of the same model."""
        return self._update("folder", path)

    def from_tensors(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Whole tensors, on any device of this process, by name."""
        specs = specs_of(tensors)
        self.weights.check(specs)
        if self.assembly.config.num_ranks == 1:
            return self._update("tensors", tensors)
        return self.from_bytes(specs, [bytes_of(tensor) for tensor in tensors.values()])

    def from_bytes(self, specs: Sequence[TensorSpec], data: Sequence[bytes]) -> int:
        """Tensors as their bytes."""
        self.weights.check(specs)
        return self._update("bytes", list(specs), list(data))

    def from_handles(self, specs: Sequence[TensorSpec], handles: Sequence[Mapping[str, Any]]) -> int:
        """CUDA memory of another process, as `cuda_memory.share` gives it."""
        self.weights.check(specs)
        return self._update("handles", list(specs), list(handles))

    def invite(self) -> dict[str, Any]:
        """Let a trainer of this computer and user send weights, with a `WeightSender`. Returns what it needs.
        An earlier invitation ends."""
        self._check_engine()
        self._store, invitation = invite(self.assembly.config.num_ranks)
        on_every_rank(self.assembly, on_weights, "join", invitation["store"], invitation["world_size"])
        return invitation

    def from_group(self, specs: Sequence[TensorSpec]) -> int:
        """What the trainer sends, which gets a refusal too."""
        if self.weights.group is None:
            raise ValueError("no trainer is invited: call init_weights_update_group first")
        return self._update("group", list(specs))


# ---- on every rank: arguments are what msgpack has ----


def on_weights(assembly: Assembly, update: str, *arguments: Any) -> None:
    """Run one of `UPDATES` on this rank's weights."""
    UPDATES[update](assembly.weights, *arguments)


def _from_folder(weights: LiveWeights, path: str) -> None:
    weights.update_from_folder(path)


def _from_tensors(weights: LiveWeights, tensors: Mapping[str, torch.Tensor]) -> None:
    weights.update(zip(specs_of(tensors), tensors.values()))


def _from_bytes(weights: LiveWeights, specs: Sequence[Any], data: Sequence[bytes]) -> None:
    announced = as_specs(specs)
    tensors = (tensor_of(spec.dtype, spec.shape, each) for spec, each in zip(announced, data, strict=True))
    weights.update(zip(announced, tensors))


def _from_handles(weights: LiveWeights, specs: Sequence[Any], handles: Sequence[Any]) -> None:
    announced = as_specs(specs)
    tensors = (open_shared(msgspec.convert(each, Handle)) for each in handles)
    weights.update(zip(announced, tensors, strict=True))


def _join(weights: LiveWeights, path: str, size: int) -> None:
    weights.group = WeightReceiver(path, weights.ranks.rank, size, weights.device)


def _from_group(weights: LiveWeights, specs: Sequence[Any]) -> None:
    announced = as_specs(specs)
    assert weights.group is not None
    try:
        weights.check(announced)
        weights.update(weights.group.receive(announced))
    except ValueError as error:
        weights.group.end(str(error))
        raise
    weights.group.end()


UPDATES: dict[str, Callable[..., None]] = {
    "folder": _from_folder,
    "tensors": _from_tensors,
    "bytes": _from_bytes,
    "handles": _from_handles,
    "join": _join,
    "group": _from_group,
}


def as_specs(specs: Sequence[Any]) -> list[TensorSpec]:
    """Specs as messages have them: name, dtype, shape."""
    try:
        return [TensorSpec(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in specs]
    except (TypeError, ValueError):
        raise ValueError("tensors are announced by name, dtype and shape") from None
