"""The actions of `Control` that change the model's weights. Their arguments are those of the HTTP bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.shared.engine.weight_updates import WeightUpdates, as_specs
from diptych.shared.parallel.tensor_frames import bytes_of


class WeightActions:
    """Each returns what the answer has. A refusal is a `ValueError`, and changes nothing."""

    def __init__(self, updates: WeightUpdates) -> None:
        self.updates = updates

    def on_update_weights_from_disk(self, path: str) -> dict[str, Any]:
        """From a checkpoint of the same model."""
        return {"weight_version": self.updates.from_folder(path)}

    def on_update_weights_from_tensor(
        self, specs: Sequence[Any], data: Sequence[bytes], handles: Sequence[Any]
    ) -> dict[str, Any]:
        """From bytes, or from memory of a GPU of this computer."""
        found = as_specs(specs)
        if handles:
            return {"weight_version": self.updates.from_handles(found, handles)}
        return {"weight_version": self.updates.from_bytes(found, data)}

    def on_init_weights_update_group(self) -> dict[str, Any]:
        """Invite a trainer of this computer."""
        return self.updates.invite()

    def on_update_weights_from_distributed(self, specs: Sequence[Any]) -> dict[str, Any]:
        """From the trainer that has been invited, which sends these tensors now."""
        return {"weight_version": self.updates.from_group(as_specs(specs))}

    def on_get_weights_by_name(self, name: str) -> dict[str, Any]:
        """A weight as it is in memory."""
        tensor = self.updates.weights.get(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(tensor.shape), "data": bytes_of(tensor)}
