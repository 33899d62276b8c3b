"""New weights for a model that serves: all are checked before the first one is copied.

Weights are copied in place, so CUDA graphs and whatever shares a tensor (a tied head, a draft model) stay
valid. An update that is refused changes nothing. Each rank calls the same methods with the same arguments,
gets whole tensors and keeps its part. A refusal of one rank is a refusal of all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diptych.shared.config import ModelConfig, read_config
from diptych.shared.interfaces import CausalLM, Collectives
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.loading.quantized_weights import quantize_while_reading
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import canonical_parts, expected_shapes, is_harmless
from diptych.shared.loading.weights import Weights, iterate_weights, named_targets, pieces
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.weight_group import WeightReceiver


class TensorSpec(NamedTuple):
    """A tensor that is to come, by its name in a checkpoint or its canonical one."""

    name: str
    dtype: str  # of torch: bfloat16
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises `ValueError` for no type of float."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{self.name} is of type {self.dtype!r}; it must be a type of float")
        return dtype


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


@dataclass
class LiveWeights:
    """The weights of one rank's model, and their version: the number of updates."""

    model: CausalLM
    config: ModelConfig  # of the whole model
    device: torch.device
    quantization: str | None  # the flag: weights that come are rounded as those of the start were
    ranks: Collectives  # that have a part of the model each
    ep: int = 1
    experts: ExpertManager | None = None
    version: int = field(default=0, init=False)
    group: WeightReceiver | None = field(default=None, init=False)  # through which a trainer sends

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raise `ValueError` for an engine that takes no tensors, and for unknown or repeated names and wrong
        shapes, with all of them. Weights that are not named stay as they are."""
        self._check_engine()
        storage = self.config.quantization.storage if self.config.quantization is not None else "online"
        if storage not in ("online", "gguf"):  # whose weights are rounded as they come
            raise ValueError(f"the checkpoint is quantized ({storage}): update it from a folder")
        expected, found, problems = expected_shapes(self.config), set(), []
        for spec in specs:
            assert spec.torch_dtype
            for part in canonical_parts(spec.name, spec.shape, self.config):
                if is_harmless(part.name, self.config):
                    continue
                if part.name not in expected:
                    problems.append(f"{part.name} is no weight of a {self.config.architecture}")
                elif part.name in found:
                    problems.append(f"{part.name} comes twice")
                elif tuple(part.shape) != expected[part.name]:
                    wanted = list(expected[part.name])
                    problems.append(f"{part.name} has shape {list(part.shape)}; it must be {wanted}")
                found.add(part.name)
        if problems:
            more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ValueError(f"no weight has changed: {'; '.join(problems[:3])}{more}")

    def update_from_folder(self, folder: str | Path) -> None:
        """Take the weights of a checkpoint of the same model. It is read twice: all of it is checked before
        the first tensor is copied. Raises `ValueError`; after an error of the second reading the weights are
        mixed, so it is a `RuntimeError`, which ends the engine."""
        folder = Path(folder)

        def read() -> Weights:
            return iterate_weights(folder, self.config, shards=self._shards(), device=self.device)

        with self._agreed():
            self._check_engine()
            found = with_quantization(read_config(folder), self.quantization)
            rope = replace(found.rope, is_long=self.config.rope.is_long)  # which the context has chosen
            if expected_shapes(found) != expected_shapes(self.config) or rope != self.config.rope:
                raise ValueError(f"{folder} is a {found.architecture} of other sizes than the model's")
            self._checked(read())
        try:
            self._copy(read())
        except Exception as error:
            raise RuntimeError(f"the weights are mixed, because {folder} has changed: {error}") from error

    def update(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Take whole tensors, on any device, which are held until all have come: they need their memory
        beside the model's. Raises `ValueError`."""
        with self._agreed():
            staged = self._checked(self._parts(self._whole(tensors)), hold=True)
        self._copy(staged.items())

    def get(self, name: str) -> torch.Tensor:
        """A copy of a weight, on the CPU, by its canonical name. Raises `ValueError` for an unknown name and
        for a part of a weight."""
        if self.ranks.size > 1:
            raise ValueError(f"{self.ranks.size} ranks have parts of the weights; read them on one rank")
        targets = named_targets(self.model)
        if name not in targets:
            raise ValueError(f"{name} is no weight of a {self.config.architecture} as it is in memory")
        return targets[name].detach().to("cpu", copy=True)

    # ---- steps of an update ----

    def _check_engine(self) -> None:
        runners = [getattr(module, "runner", None) for module in self.model.modules()]
        if any(getattr(runner, "changes_layout", False) for runner in runners):
            raise ValueError(
                "this engine takes no new weights: its MoE runner has changed the layout of the experts; use "
                "moe_runner_backend=auto"
            )

    def _shards(self) -> Shards | None:
        if self.ranks.size == 1:
            return None
        experts = self.experts.experts if self.experts is not None else None
        return Shards(self.config, self.ranks.rank, self.ranks.size, self.ep, experts)

    def _whole(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> Weights:
        """The canonical weights in tensors that are as their specs say."""
        for spec, tensor in tensors:
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.torch_dtype:
                raise ValueError(f"{spec.name} is not the announced {spec.dtype} {list(spec.shape)}")
            if tensor.numel() and not all(torch.isfinite(x) for x in tensor.aminmax()):
                raise ValueError(f"no weight has changed: {spec.name} has values that are NaN or infinite")
            for part in canonical_parts(spec.name, spec.shape, self.config):
                if not is_harmless(part.name, self.config):
                    yield part.name, part.of(tensor)

    def _parts(self, whole: Weights) -> Weights:
        """This rank's parts, quantized as the model is."""
        shards = self._shards()
        if self.config.quantization is not None:
            yield from quantize_while_reading(whole, self.config, self.device, shards)
            return
        for name, tensor in whole:
            for local_name in [name] if shards is None else shards.local_names(name):
                yield local_name, tensor if shards is None else shards.cut(name, tensor)

    def _checked(self, weights: Weights, hold: bool = False) -> dict[str, torch.Tensor]:
        """Check each weight against the model. With `hold`, returns them."""
        targets, held = named_targets(self.model), dict[str, torch.Tensor]()
        for name, tensor in weights:
            target = targets.get(name)
            if target is None or tensor.shape != target.shape:
                wanted = "no such weight" if target is None else f"{list(target.shape)}"
                raise ValueError(
                    f"no weight has changed: {name} has shape {list(tensor.shape)}, not {wanted}"
                )
            if hold:  # a part would keep the memory of its whole tensor
                held[name] = tensor if self.ranks.size == 1 else tensor.clone()
        return held

    @torch.inference_mode()
    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The one place that writes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a step in flight reads the old weights
        targets = named_targets(self.model)
        for name, tensor in weights:
            for to, source in zip(pieces(targets[name]), pieces(tensor)):
                to.copy_(source)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the sender may free or change its tensors
        self.version += 1

    def _agreed(self) -> _Agreed:
        return _Agreed(self.ranks)


class _Agreed:
    """A block that may refuse the update: then all ranks do, with a `ValueError`."""

    def __init__(self, ranks: Collectives) -> None:
        self.ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None and not issubclass(kind, Exception):
            return
        if self.ranks.size > 1:
            takes = self.ranks.all_gather(torch.tensor([kind is None]))
            if kind is None and not bool(takes.all()):
                refusing = [rank for rank, each in enumerate(takes.tolist()) if not each]
                raise ValueError(f"no weight has changed: rank {refusing[0]} refuses them")
        if error is not None:
            if self.ranks.size > 1:
                print(f"rank {self.ranks.rank} refuses new weights: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, ValueError):
                raise ValueError(f"no weight has changed: {error}") from error
