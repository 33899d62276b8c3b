"""Weights of quantized models: read from a quantized checkpoint, or quantized while they are read.

Both give the tensors of `QuantScheme.tensors` under canonical names, or a rank's parts of them:
model.layers.0.self_attn.q_proj.weight, ...q_proj.weight_scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from diptych.shared.config import ModelConfig
from diptych.shared.loading.quantize import quantize_weight, scheme_of_weight
from diptych.shared.loading.quantized_formats import FLOATS, Axis, Stored, pack_units, stored_tensors
from diptych.shared.loading.safetensors_file import TensorInfo
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import canonical_parts, expected_shapes
from diptych.shared.modeling.dequantized_values import dequantize
from diptych.shared.types.quant_scheme import INT4_ZERO, INT8_ZERO, STORED, QuantScheme

Weights = Iterator[tuple[str, torch.Tensor]]


NO_BIAS = Stored("", FLOATS, None, None, lambda tensor: tensor, optional=True)
"""Zeros for a layer without a bias, as some exporters write them."""


class Layer(NamedTuple):
    """A quantized linear layer, by its canonical name."""

    name: str
    scheme: QuantScheme
    out: int
    size: int  # inputs

    def part(self, shards: Shards | None) -> tuple[list[slice], slice]:
        """The outputs and the inputs of a rank. Raises `ValueError` if a group of inputs with one scale would
        be cut."""
        outs, inputs = [slice(0, self.out)], slice(0, self.size)
        if shards is None:
            return outs, inputs
        indices = shards.indices(f"{self.name}.weight")
        if len(indices[0]) == 2:
            inputs = indices[0][1]
        elif indices[0]:
            outs = [index[0] for index in indices]
        group_size = self.scheme.group_size
        if self.scheme.any_order and (inputs.start, inputs.stop) != (0, self.size):
            raise ValueError(
                f"tp={shards.size}: {self.name} has groups of inputs in any order (desc_act), which cannot "
                f"be cut; use tp=1"
            )
        if group_size is not None and (inputs.start % group_size or inputs.stop % group_size):
            is_whole = (inputs.start, inputs.stop) == (0, self.size)
            if not is_whole:
                raise ValueError(
                    f"tp={shards.size}: {self.name} is cut into {shards.size} parts of "
                    f"{inputs.stop - inputs.start} inputs, which cuts a group of {group_size} inputs with "
                    f"one scale; use a tp for which the parts are multiples of {group_size}"
                )
        return outs, inputs


class Entry(NamedTuple):
    """A tensor of a quantized layer in a checkpoint."""

    name: str
    info: TensorInfo
    layer: Layer
    stored: Stored


def quantized_layers(config: ModelConfig) -> dict[str, Layer]:
    """The quantized linear layers of a model by canonical name."""
    found: dict[str, Layer] = {}
    for name, shape in expected_shapes(config).items():
        scheme = scheme_of_weight(config.quantization, name, shape)
        if scheme is not None:
            layer = Layer(name.removesuffix(".weight"), scheme, *shape)
            scheme.check(layer.name, layer.size)
            found[layer.name] = layer
    return found


def take_quantized(
    tensors: dict[str, TensorInfo], layers: dict[str, Layer], model: ModelConfig, where: str
) -> list[Entry]:
    """Remove the tensors of quantized layers from those of a checkpoint. Raises `ValueError` for missing or
    unknown tensors and wrong shapes or types."""
    assert model.quantization is not None
    storage = model.quantization.storage
    found: dict[str, dict[str, str]] = {name: {} for name in layers}
    biases = {name for name in expected_shapes(model) if name.endswith(".bias")}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        parts = canonical_parts(f"{module}.weight", (1, 1), model)
        module = parts[0].name.removesuffix(".weight")
        if len(parts) > 1 and module in found:
            raise ValueError(f"{where}: {name} holds {len(parts)} quantized layers; each must have its own")
        is_bias = suffix == "bias" and (f"{module}.bias" in biases or not storage.startswith("gptq"))
        if module in found and not is_bias:
            found[module][suffix] = name
    entries: list[Entry] = []
    problems: list[str] = []
    for layer in layers.values():
        wanted = {**stored_tensors(storage, layer.scheme), "bias": NO_BIAS}
        its_tensors = found[layer.name]
        for suffix, stored in wanted.items():
            if suffix not in its_tensors:
                if not stored.optional:
                    problems.append(f"{layer.name}.{suffix} is missing")
                continue
            name = its_tensors.pop(suffix)
            info = tensors.pop(name)
            shapes = stored.shapes(layer.out, layer.size)
            if info.dtype not in stored.dtypes:
                problems.append(f"{name} is of type {info.dtype}, not {' or '.join(stored.dtypes)}")
            elif shapes and info.shape not in shapes:
                problems.append(f"{name} has shape {list(info.shape)}, not {list(shapes[0])}")
            entries.append(Entry(name, info, layer, stored))
        problems += [f"{name} is unknown" for name in its_tensors.values()]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{where}: the weights do not fit its quantization_config ({storage}): "
            f"{'; '.join(problems[:3])}{more}"
        )
    return entries


def read_quantized(
    entries: list[Entry], shards: Shards | None, on_progress: Callable[[int, int], None] | None = None
) -> Weights:
    """The tensors of quantized layers, or a rank's parts of them, one at a time. `on_progress`: see
    `diptych.shared.loading.weights.iterate_weights`."""
    num_bytes, num_bytes_read = sum(entry.info.num_bytes for entry in entries), 0
    for layer in {entry.layer.name: entry.layer for entry in entries}.values():
        layer.part(shards)  # raises before any tensor is read
    for path in dict.fromkeys(entry.info.path for entry in entries):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for entry in entries:
                    names = [entry.layer.name] if shards is None else shards.local_names(entry.layer.name)
                    if entry.info.path != path:
                        continue
                    num_bytes_read += entry.info.num_bytes
                    if on_progress is not None:
                        on_progress(num_bytes_read, num_bytes)
                    if not names:
                        continue
                    outs, inputs = entry.layer.part(shards)
                    if not entry.stored.target:
                        _check(entry, file.get_tensor(entry.name))
                        continue
                    tensor = _read_parts(file, entry, outs, inputs)
                    _refuse_bad(entry, tensor)
                    if entry.stored.target in entry.layer.scheme.tensors(entry.layer.out, entry.layer.size):
                        for name in names:
                            yield f"{name}.{entry.stored.target}", _in_memory(entry, tensor)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None


def _read_parts(file: Any, entry: Entry, outs: list[slice], inputs: slice) -> torch.Tensor:
    first, *others = (_read_part(file, entry, part, inputs) for part in outs)
    of_all_outs = entry.stored.target in ("input_scale", "weight_group")
    return first if of_all_outs or not others else torch.cat((first, *others))


def _read_part(file: Any, entry: Entry, outs: slice, inputs: slice) -> torch.Tensor:
    """The part of a stored tensor, decoded: a row for each output."""
    stored, layer = entry.stored, entry.layer
    index = [slice(None)] * len(entry.info.shape)

    def cover(axis: Axis | None, part: slice) -> None:
        if axis is not None and axis.dim < len(index):
            index[axis.dim] = slice(part.start // axis.unit, axis.num_entries(part.stop))

    cover(stored.out, outs)
    cover(stored.inputs, inputs)
    stored_tensor = file.get_slice(entry.name)[tuple(index)] if index else file.get_tensor(entry.name)
    tensor = stored.decode(stored_tensor)
    if stored.target == "input_scale":
        return tensor.reshape(1)
    if stored.target == "weight_group":
        return tensor
    if stored.out is None:  # one scale for all outputs
        return tensor.expand(outs.stop - outs.start, -1)
    skipped = outs.start % stored.out.unit
    tensor = tensor[skipped : skipped + outs.stop - outs.start]
    if stored.target == "weight":
        assert inputs.start % (stored.inputs.unit if stored.inputs is not None else 1) == 0
        return tensor[:, : min(inputs.stop, layer.size) - inputs.start]
    return tensor


def _in_memory(entry: Entry, tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the form of QuantScheme.tensors."""
    if entry.layer.scheme.is_packed and entry.stored.target == "weight":
        return pack_units(tensor, entry.layer.scheme.unit(tensor.shape[1]))
    if entry.layer.scheme.weight_type == "nvfp4" and entry.stored.target == "weight_scale":
        return tensor.to(torch.float8_e4m3fn).contiguous()  # as stored
    return tensor.contiguous()


def _refuse_bad(entry: Entry, tensor: torch.Tensor) -> None:
    path, name = entry.info.path, entry.name
    if entry.stored.target in ("weight_scale", "input_scale", "weight_global"):
        if not bool((tensor.isfinite() & (tensor >= 0)).all()):
            raise ValueError(f"{path}: {name} has scales that are negative, NaN or infinite")
        if entry.stored.target != "weight_scale" and not bool((tensor > 0).all()):
            raise ValueError(f"{path}: {name} is 0; it must be positive")
    elif entry.stored.target == "weight_group":
        num_groups = entry.layer.scheme.num_groups(entry.layer.size)
        if not bool(((tensor >= 0) & (tensor < num_groups)).all()):
            raise ValueError(f"{path}: {name} names groups beyond the {num_groups} that there are")
    elif entry.stored.target == "weight_zero" and entry.layer.scheme.symmetric:
        zero = INT4_ZERO if entry.layer.scheme.weight_type == "int4" else INT8_ZERO
        if tensor.unique().tolist() not in ([zero - 1], [zero]):
            raise ValueError(
                f"{path}: {name} has zero points other than {zero} (stored as {zero - 1} or {zero}), but "
                f"quantization_config says that the weights are symmetric"
            )
    elif tensor.dtype == torch.float8_e4m3fn and bool(((tensor.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError(f"{path}: {name} has NaN values; the file is damaged")


def _check(entry: Entry, tensor: torch.Tensor) -> None:
    """Check the tensors that only describe others."""
    layer, scheme = entry.layer, entry.layer.scheme
    where = f"{entry.info.path}: {entry.name}"
    if entry.name.endswith("weight_shape"):
        if tensor.tolist() != [layer.out, layer.size]:
            raise ValueError(f"{where} is {tensor.tolist()}; the layer is {[layer.out, layer.size]}")
    elif entry.name.endswith(".bias"):
        if bool(tensor.any()):
            raise ValueError(f"{where} is not 0, and {layer.name} has no bias in this model")
    elif entry.name.endswith("zero_point"):
        if bool(tensor.float().any()):
            raise ValueError(f"{where} is not 0, but {scheme.weight_type} values are symmetric")
    elif entry.name.endswith(("input_global_scale", "input_scale")):
        if not bool((tensor > 0).all() and tensor.isfinite().all()):
            raise ValueError(f"{where} is {tensor.tolist()}; a scale is a finite number above 0")
    else:  # g_idx: the group of each input
        groups = torch.arange(layer.size, dtype=tensor.dtype) // scheme.unit(layer.size)
        if not torch.equal(tensor, groups):
            raise ValueError(
                f"{where}: the inputs are not in the order of their groups, but quantization_config has no "
                f"desc_act"
            )


def dequantize_some(weights: Weights, config: ModelConfig, shards: Shards | None) -> Weights:
    """Dequantize the layers that are dequantized when loaded; yields their weights in place of the quantized
    tensors."""
    assert config.quantization is not None
    schemes: dict[str, QuantScheme] = {}
    for name, layer in quantized_layers(config).items():
        if config.quantization.scheme_in_memory(name) is None:
            local = [name] if shards is None else shards.local_names(name)
            schemes |= dict.fromkeys(local, layer.scheme)
    return dequantized(weights, schemes.get)


def dequantized(weights: Weights, scheme_of: Callable[[str], QuantScheme | None]) -> Weights:
    """Plain weights, float32, in place of the quantized tensors of the layers that have a scheme."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        module, _, suffix = name.rpartition(".")
        is_plain = suffix == "weight" and tensor.dtype not in STORED.values()
        scheme = scheme_of(module)
        if scheme is None or is_plain:
            yield name, tensor
            continue
        tensors = found.setdefault(module, {})
        tensors[suffix] = tensor
        needed = {"weight", "weight_scale"}
        needed |= {"weight_global"} if scheme.weight_type == "nvfp4" else set()
        needed |= set() if scheme.symmetric else {"weight_zero"}
        needed |= {"weight_group"} if scheme.any_order else set()
        if needed <= tensors.keys():
            scale, zero = tensors.pop("weight_scale"), tensors.get("weight_zero")
            zero = tensors.pop("weight_global", zero)
            weight, groups = tensors.pop("weight"), tensors.get("weight_group")
            values = dequantize if groups is None else partial(_dequantize_in_any_order, groups.long())
            yield f"{module}.weight", values(weight, scale, zero, scheme)


def _dequantize_in_any_order(
    groups: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: QuantScheme,
) -> torch.Tensor:
    """As `dequantize`, with the group of each input."""
    no_zero = None if zero is None else torch.zeros_like(zero)
    values = dequantize(weight, torch.ones_like(scale), no_zero, scheme)
    if zero is not None:
        values -= zero[:, groups].float()
    return values * scale[:, groups]


def quantize_while_reading(
    weights: Weights, config: ModelConfig, device: torch.device | str, shards: Shards | None
) -> Weights:
    """Quantize the unsplit weights of linear layers. A rank gets its parts of the results, so that they are
    the same with any number of ranks."""
    layers = quantized_layers(config)
    for each in layers.values():
        each.part(shards)
    for name, tensor in weights:
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            local = [name] if shards is None else shards.local_names(name)
            part = tensor if shards is None else shards.cut(name, tensor)
            yield from ((local_name, part) for local_name in local)
            continue
        if shards is None or shards.local_names(layer.name):
            yield from parts_of_rank(layer, quantize_weight(tensor.to(device), layer.scheme), shards)


def parts_of_rank(layer: Layer, tensors: dict[str, torch.Tensor], shards: Shards | None) -> Weights:
    """The tensors of a whole layer by the ends of their names, or a rank's parts of them."""
    local = [layer.name] if shards is None else shards.local_names(layer.name)
    outs, inputs = layer.part(shards)
    for suffix, tensor in tensors.items():
        columns = slice(None)
        if suffix == "weight":
            per_byte = 2 if layer.scheme.is_packed else 1
            columns = slice(inputs.start // per_byte, inputs.stop // per_byte)
        elif layer.scheme.group_size is not None and suffix != "weight_global":
            size = layer.scheme.group_size
            columns = slice(inputs.start // size, -(-inputs.stop // size))
        own = [tensor[part, columns] for part in outs]
        for local_name in local:
            yield f"{local_name}.{suffix}", own[0] if len(own) == 1 else torch.cat(own)
