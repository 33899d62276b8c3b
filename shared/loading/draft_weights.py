"""Weights of draft models: streamed from a checkpoint, or random."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

from diptych.shared.config import DraftConfig
from diptych.shared.config.draft import DraftFormat
from diptych.shared.config.families import FAMILIES
from diptych.shared.config.hf_config import config_path, read_json
from diptych.shared.loading.quantize import scheme_of_weight
from diptych.shared.loading.quantized_weights import Layer, dequantized, read_quantized, take_quantized
from diptych.shared.loading.safetensors_file import (
    INDEX_DTYPES,
    QUANTIZED_DTYPES,
    SUPPORTED_DTYPES,
    TensorInfo,
    read_checkpoint,
)
from diptych.shared.loading.weight_names import canonical_parts, expected_shapes
from diptych.shared.loading.weights import Weights, dummy_tensors, stream

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# The name of a layer that no language model has, and the draft model that has it.
_MARKS: dict[DraftFormat, tuple[str, str]] = {
    "eagle": ("fc", "an EAGLE head"),
    "eagle3": ("hidden_norm", "an EAGLE-3 head"),
    "nextn": ("eh_proj", "a NEXTN layer"),
    "dflash": ("hidden_norm", "a DFlash head"),
}

_MTP = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
"""The names of Qwen's layer for drafting -> those of a NEXTN layer."""


def refuse_language_model(folder: Path, draft_format: DraftFormat, name: str) -> None:
    """Raise `ValueError` if the folder of a draft model holds a language model. Many heads have the name of a
    plain family under "architectures", so the names of the weights decide."""
    config = read_json(config_path(folder))
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if architectures not in [[family] for family in FAMILIES]:
        return
    layer, what = _MARKS[draft_format]
    tensors = read_checkpoint(folder, SUPPORTED_DTYPES + INDEX_DTYPES + QUANTIZED_DTYPES)
    is_marked = any(tensor.split(".")[-2:-1] == [layer] for tensor in tensors)
    if not is_marked and not (draft_format == "nextn" and "mtp.fc.weight" in tensors):
        raise ValueError(
            f"{name} is a language model ({architectures[0]}), not {what}: it has no {layer}.weight; "
            "speculative=standalone drafts with language models"
        )


def iterate_draft_weights(folder: str | Path, config: DraftConfig | None = None) -> Weights:
    """The tensors of a draft model's folder, on the CPU, one at a time: weights, and tables of indices. For a
    language model's checkpoint with a NEXTN layer, the tensors of that layer only. Weights that are quantized
    according to `config` are dequantized. `DraftModel.load_weights` checks the names. Errors are
    `ValueError`s."""
    is_quantized = config is not None and config.model.quantization is not None
    tensors = read_checkpoint(
        Path(folder), SUPPORTED_DTYPES + INDEX_DTYPES + (QUANTIZED_DTYPES if is_quantized else ())
    )
    if mtp := {name: info for name, info in tensors.items() if name.startswith("mtp.")}:
        return _nextn_weights(mtp, config, str(folder))
    layers = {match[0]: int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    nextn = [layer for layer in layers if f"{layer}eh_proj.weight" in tensors]
    if nextn and len(layers) > len(nextn):
        first = min(nextn, key=layers.__getitem__)
        tensors = {name: info for name, info in tensors.items() if name.startswith(first)}
    if config is None or not is_quantized:
        return stream(tensors, None)
    linear = _quantized_layers(config, tensors)
    entries = take_quantized(tensors, linear, config.model, str(folder))
    quantized = dequantized(read_quantized(entries, None), lambda name: linear[name].scheme)
    return chain(stream(tensors, None), quantized)


def _nextn_weights(tensors: dict[str, TensorInfo], config: DraftConfig | None, where: str) -> Weights:
    """Qwen's layer for drafting under the names of a NEXTN layer, its experts one by one."""
    if any(info.dtype in QUANTIZED_DTYPES for info in tensors.values()):
        raise ValueError(f"{where}: the layer for drafting (mtp.*) is quantized; supported is a plain one")
    target = None if config is None else config.target
    for name, tensor in stream(tensors, None):
        prefix = next((prefix for prefix in _MTP if name.startswith(prefix)), "")
        name = f"model.layers.0.{_MTP[prefix]}{name.removeprefix(prefix)}" if prefix else name
        for part in canonical_parts(name, tuple(tensor.shape), target):
            yield part.name, part.of(tensor)


def _quantized_layers(config: DraftConfig, names: Iterable[str]) -> dict[str, Layer]:
    """The quantized linear layers of a draft model's checkpoint, by canonical name."""
    shapes, layers = draft_shapes(config), {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in names):
        canonical = canonical_parts(f"{module}.weight", (1, 1), config.model)[0].name
        shape = shapes.get(_LAYER.sub("layers.0.", canonical).removeprefix("model."), ())
        scheme = scheme_of_weight(config.model.quantization, f"{module}.weight", shape)
        if scheme is not None:
            name = canonical.removesuffix(".weight")
            layers[name] = Layer(name, scheme, *shape)
    return layers


def dummy_draft_weights(config: DraftConfig, seed: int = 0, device: torch.device | str = "cpu") -> Weights:
    """Seeded random weights, as `diptych.shared.loading.weights.dummy_weights`, under the names of public
    checkpoints. A draft vocabulary smaller than the target's is spread evenly over it."""
    yield from dummy_tensors(draft_shapes(config), config.model.dtype, seed, device)
    vocab_size, target_vocab_size = config.model.vocab_size, config.target.vocab_size
    if vocab_size != target_vocab_size:
        draft_ids = torch.arange(vocab_size, device=device)
        yield "d2t", draft_ids * target_vocab_size // vocab_size - draft_ids


def draft_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that a checkpoint of the format must have, and the embedding and head that cannot be
    shared."""
    hidden_size, target_hidden_size = config.model.hidden_size, config.target_hidden_size
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in expected_shapes(config.model).items()
        if name.startswith("model.layers.")
    }
    if config.draft_format == "eagle":
        del shapes["layers.0.input_layernorm.weight"]
        shapes["fc.weight"] = (hidden_size, hidden_size + target_hidden_size)
    elif config.draft_format == "eagle3":
        shapes = {name.replace("layers.0", "midlayer"): shape for name, shape in shapes.items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            num_out, _ = shapes[f"midlayer.self_attn.{name}.weight"]
            shapes[f"midlayer.self_attn.{name}.weight"] = (num_out, 2 * hidden_size)
        shapes["midlayer.hidden_norm.weight"] = shapes["norm.weight"] = (hidden_size,)
        if config.target_layers:
            shapes["fc.weight"] = (hidden_size, target_hidden_size)
        if config.norms.fusion == "joint":
            shapes["input_norm.weight"] = (target_hidden_size,)
        elif config.norms.fusion == "per layer":
            for i in range(len(config.target_layers)):
                shapes[f"fc_norm.{i}.weight"] = (config.target.hidden_size,)
    elif config.draft_format == "dflash":
        shapes["fc.weight"] = (hidden_size, target_hidden_size)
        shapes["hidden_norm.weight"] = shapes["norm.weight"] = (hidden_size,)
    else:
        shapes["layers.0.eh_proj.weight"] = (hidden_size, hidden_size + target_hidden_size)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"layers.0.{name}.weight"] = (hidden_size,)
    is_of_other_width = hidden_size != config.target.hidden_size
    if is_of_other_width:
        shapes["embed_tokens.weight"] = (config.target.vocab_size, hidden_size)
    if is_of_other_width or config.model.vocab_size != config.target.vocab_size:
        shapes["lm_head.weight"] = (config.model.vocab_size, hidden_size)
    return shapes
