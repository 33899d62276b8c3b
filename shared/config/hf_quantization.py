"""Reads the quantization_config of a config.json: FP8 of DeepSeek and Qwen3, compressed-tensors, torchao,
GPTQ, AWQ, MXFP4 of GPT-OSS, NVFP4 of ModelOpt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from diptych.shared.config.fields import Fields
from diptych.shared.config.hf_multimodal import language_name
from diptych.shared.config.quant_config import ALL_LINEAR, REGEX, QuantConfig
from diptych.shared.types.quant_scheme import MXFP4_GROUP, NVFP4_GROUP, QuantScheme

NVFP4_PACKED = "nvfp4-pack-quantized"
COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", NVFP4_PACKED)


def parse_quantization(values: Mapping[str, Any], where: str = "config.json") -> QuantConfig:
    """Read the quantization_config of a config.json. Whatever is not supported raises `ValueError`: what was
    found, and what is supported."""
    fields = Fields(values, f"{where}: quantization_config")
    wanted = f"one of {', '.join(_METHODS)}"
    method = fields.raw("quant_method", wanted)
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(
            f"{where}: the checkpoint is quantized (quant_method {method!r:.40}); supported is {wanted}"
        )
    return _METHODS[method](fields)


def _parse_fp8(fields: Fields) -> QuantConfig:
    """Block scales of DeepSeek and Qwen3, or one scale for each layer."""
    _refuse(fields, fmt="e4m3", scale_fmt="float")
    is_static = _choice(fields, "activation_scheme", ("dynamic", "static"), default="dynamic") == "static"
    if "weight_block_size" in fields:
        rows, size = _block(fields, "weight_block_size")
        if is_static:
            raise ValueError(
                f"{fields.where}: activation_scheme is static with a weight_block_size; supported is dynamic"
            )
        scheme = QuantScheme("fp8", rows, size, "group")
    else:
        scheme = QuantScheme("fp8", None, None, "static" if is_static else "token")
    ignored = [*_names(fields, "modules_to_not_convert"), *_names(fields, "ignored_layers")]
    return QuantConfig("fp8", ((ALL_LINEAR, scheme),), tuple(ignored))


def _parse_compressed_tensors(fields: Fields) -> QuantConfig:
    for key in ("sparsity_config", "transform_config"):
        value = fields.values.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise ValueError(f"{fields.where}: {key} is not supported, found {value!r:.80}")
    groups = fields.raw("config_groups", "an object with at least one group")
    targets: list[tuple[str, QuantScheme]] = []
    for name, group in Fields(groups, f"{fields.where}: config_groups").values.items():
        of_group = Fields(group, f"{fields.where}: config_groups.{name}")
        _choice(of_group, "format", COMPRESSED_FORMATS, default=COMPRESSED_FORMATS[0])
        scheme = _compressed_scheme(of_group)
        targets += [(target, scheme) for target in _names(of_group, "targets")]
    # An exact name of compressed-tensors is a name from the first part on.
    ignored = tuple(_from_start(entry) for entry in _names(fields, "ignore"))
    heads = ("lm_head", "language_model.lm_head")
    has_head = any(re.match(entry.removeprefix(REGEX), head) for entry in ignored for head in heads)
    if not has_head and any(target == ALL_LINEAR for target, _ in targets):
        raise ValueError(f"{fields.where}: ignore does not name lm_head; a quantized head is not supported")
    return QuantConfig(
        "compressed-tensors",
        tuple((t if t == ALL_LINEAR else _from_start(t), scheme) for t, scheme in targets),
        ignored,
    )


def _compressed_scheme(group: Fields) -> QuantScheme:
    if group.values.get("output_activations") is not None:
        raise ValueError(f"{group.where}: output_activations are not supported")
    weights = Fields(group.raw("weights", "an object"), f"{group.where}.weights")
    num_bits, kind = weights.integer("num_bits", default=8), weights.raw("type", "a name", default="int")
    weight_type = {"8 float": "fp8", "8 int": "int8", "4 int": "int4"}.get(f"{num_bits} {kind}")
    strategy = weights.raw("strategy", "a name", default="tensor")
    symmetric = weights.boolean("symmetric", default=True)
    if (num_bits, kind, strategy) == (4, "float", "tensor_group"):
        return _nvfp4_scheme(group, weights)
    actorder = weights.values.get("actorder")
    strategies = ("channel", "group") if weight_type == "int4" else ("tensor", "channel", "block")
    if weight_type is None or strategy not in strategies:
        raise ValueError(
            f"{weights.where}: {num_bits} bits of type {kind!r:.40} with strategy {strategy!r:.40}; "
            f"supported are 8 bits float or int by tensor, channel or block, 4 bits int by channel or "
            f"group, and 4 bits float by tensor_group (NVFP4)"
        )
    if actorder not in (None, "weight", "static") or weights.values.get("dynamic"):
        raise ValueError(f"{weights.where}: actorder is {actorder!r:.80}; supported: null, weight and static")
    rows: int | None = 1
    size = None
    if strategy == "tensor":
        rows = None
    elif strategy == "block":
        rows, size = _block(weights, "block_structure")
    elif strategy == "group":
        size = weights.integer("group_size")
    scheme = QuantScheme(weight_type, rows, size, symmetric=symmetric)  # type: ignore[arg-type]
    if group.values.get("input_activations") is None:
        return scheme
    return _with_inputs(scheme, Fields(group.values["input_activations"], f"{group.where}.input_activations"))


def _nvfp4_scheme(group: Fields, weights: Fields) -> QuantScheme:
    """Weights in NVFP4. Inputs that the checkpoint quantizes to 4 bits too stay as they are."""
    _choice(group, "format", (NVFP4_PACKED,), default=NVFP4_PACKED)
    _refuse(weights, group_size=NVFP4_GROUP, symmetric=True, dynamic=False)
    inputs = group.values.get("input_activations")
    if inputs is not None:
        _refuse(Fields(inputs, f"{group.where}.input_activations"), num_bits=4, type="float")
    return QuantScheme("nvfp4", group_size=NVFP4_GROUP)


def _with_inputs(scheme: QuantScheme, inputs: Fields) -> QuantScheme:
    num_bits, kind = inputs.integer("num_bits", default=8), inputs.raw("type", "a name", default="int")
    strategy = inputs.raw("strategy", "a name", default="tensor")
    is_dynamic = inputs.boolean("dynamic", default=False)
    is_same = (num_bits, kind) == (8, {"fp8": "float", "int8": "int"}.get(scheme.weight_type))
    is_supported = strategy == "tensor" or (is_dynamic and strategy in ("token", "group"))
    if not is_same or not is_supported or not inputs.boolean("symmetric", default=True):
        raise ValueError(
            f"{inputs.where}: {num_bits} bits of type {kind!r:.40} with strategy {strategy!r:.40}, "
            f"dynamic {is_dynamic}, for {scheme.weight_type} weights; supported are symmetric values "
            f"of the weight's type, dynamic by token or group, or static by tensor"
        )
    if strategy == "group" and inputs.integer("group_size") != scheme.group_size:
        raise ValueError(
            f"{inputs.where}: group_size is {inputs.integer('group_size')}; supported is that of the "
            f"weights, {scheme.group_size}"
        )
    # One dynamic scale for a whole batch would make a token depend on the others.
    return replace(scheme, inputs="static" if not is_dynamic else "group" if strategy == "group" else "token")


def _parse_torchao(fields: Fields) -> QuantConfig:
    types = Fields(fields.raw("quant_type", "an object"), f"{fields.where}.quant_type")
    config = Fields(types.raw("default", "an object"), f"{types.where}.default")
    kinds = {"Float8DynamicActivationFloat8WeightConfig": "token", "Float8WeightOnlyConfig": "none"}
    inputs = kinds[_choice(config, "_type", tuple(kinds))]
    data = config.values.get("_data") or {}
    if "torch.dtype" in repr(data) and "float8_e4m3fn" not in repr(data):
        raise ValueError(f"{config.where}: _data is {data!r:.80}; supported is float8_e4m3fn")
    granularity = repr(data.get("granularity", "PerTensor")) if isinstance(data, Mapping) else ""
    rows = 1 if "PerRow" in granularity or inputs == "none" else None
    scheme = QuantScheme("fp8", rows, None, inputs)  # type: ignore[arg-type]
    return QuantConfig("torchao", ((ALL_LINEAR, scheme),), tuple(_names(fields, "modules_to_not_convert")))


def _parse_gptq(fields: Fields) -> QuantConfig:
    _refuse(fields, lm_head=False, pack_dtype="int32")
    num_bits = fields.integer("bits")
    if num_bits not in (4, 8):
        raise ValueError(f"{fields.where}: bits is {num_bits}; supported are 4 and 8")
    for key in ("dynamic", "is_marlin_format"):
        if fields.values.get(key):
            raise ValueError(f"{fields.where}: {key} is {fields.values[key]!r:.80}; it is not supported")
    key = "checkpoint_format"
    version = _choice(fields, key, ("gptq", "gptq_v2"), default="gptq")
    symmetric = fields.boolean("sym", default=True)
    group_size, weight_type = _group_size(fields), "int4" if num_bits == 4 else "int8"
    if num_bits == 8 and not symmetric:
        raise ValueError(f"{fields.where}: sym is false with 8 bits; supported is true")
    any_order = fields.boolean("desc_act", default=False) and group_size is not None
    scheme = QuantScheme(weight_type, group_size=group_size, symmetric=symmetric, any_order=any_order)  # type: ignore[arg-type]
    return QuantConfig(version, ((ALL_LINEAR, scheme),), tuple(_names(fields, "modules_to_not_convert")))


def _parse_awq(fields: Fields) -> QuantConfig:
    _refuse(fields, bits=4, version="gemm", zero_point=True)
    scheme = QuantScheme("int4", group_size=_group_size(fields), symmetric=False)
    return QuantConfig("awq", ((ALL_LINEAR, scheme),), tuple(_names(fields, "modules_to_not_convert")))


def _parse_mxfp4(fields: Fields) -> QuantConfig:
    """The experts of GPT-OSS."""
    scheme = QuantScheme("mxfp4", group_size=MXFP4_GROUP)
    return QuantConfig("mxfp4", (("mlp.experts", scheme),), tuple(_names(fields, "modules_to_not_convert")))


def _parse_modelopt(fields: Fields) -> QuantConfig:
    """NVFP4 as NVIDIA's ModelOpt exports it. Names of modules that are not quantized have `*` for any
    text."""
    quant_algo = fields.raw("quant_algo", "NVFP4")
    if quant_algo != "NVFP4":
        raise ValueError(f"{fields.where}: quant_algo is {quant_algo!r:.40}; supported is NVFP4")
    _refuse(fields, group_size=NVFP4_GROUP)
    ignored = [*_names(fields, "ignore"), *_names(fields, "exclude_modules")]
    scheme = QuantScheme("nvfp4", group_size=NVFP4_GROUP)
    return QuantConfig("modelopt", ((ALL_LINEAR, scheme),), tuple(_without_stars(name) for name in ignored))


def _without_stars(name: str) -> str:
    if "*" not in name:
        return name
    return f"{REGEX}{'.*'.join(map(re.escape, name.split('*')))}$"


_METHODS: dict[str, Callable[[Fields], QuantConfig]] = {
    "fp8": _parse_fp8,
    "compressed-tensors": _parse_compressed_tensors,
    "torchao": _parse_torchao,
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "mxfp4": _parse_mxfp4,
    "modelopt": _parse_modelopt,
    "modelopt_fp4": _parse_modelopt,  # as vLLM names it
}


def _refuse(fields: Fields, **supported: Any) -> None:
    """Raise `ValueError` for a key that is there with another value."""
    for key, value in supported.items():
        found = fields.values.get(key, value)
        is_same = (
            found.lower() == value if isinstance(found, str) and isinstance(value, str) else found == value
        )
        if found is not None and not is_same:
            raise ValueError(f"{fields.where}: {key} is {found!r:.80}; supported is {value!r}")


def _choice(fields: Fields, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    wanted = f"one of {', '.join(allowed)}"
    value = fields.raw(key, wanted) if default is None else fields.raw(key, wanted, default)
    if value not in allowed:
        raise fields.error(key, wanted)
    return str(value)


def _names(fields: Fields, key: str) -> list[str]:
    value = fields.raw(key, "a list of names", default=[])
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise fields.error(key, "a list of names")
    value = [item if item.startswith(REGEX) else language_name(item) for item in value]
    for item in value:
        try:
            re.compile(item.removeprefix(REGEX))
        except re.error as error:
            if item.startswith(REGEX):
                raise ValueError(f"{fields.where}: {key} has {item!r:.80}: {error}") from None
    return value


def _from_start(entry: str) -> str:
    """An entry that is a whole name or a regular expression, as the latter."""
    return entry if entry.startswith(REGEX) else f"{REGEX}{re.escape(entry)}$"


def _block(fields: Fields, key: str) -> tuple[int, int]:
    value = fields.raw(key, "two integers")
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else 0 for part in value.split("x")]
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(item) is int and 1 <= item <= 2**16 for item in value):
        raise fields.error(key, "two integers >= 1: outputs, inputs")
    return value[0], value[1]


def _group_size(fields: Fields) -> int | None:
    """-1: one group."""
    return None if fields.values.get("group_size") == -1 else fields.integer("group_size")
