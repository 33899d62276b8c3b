"""The RoPE part of a config.json: transformers 4's `rope_theta` + `rope_scaling`, 5's `rope_parameters`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from diptych.shared.config.fields import MAXIMA, Fields
from diptych.shared.config.model import RopeConfig, RopeType


def parse_rope(
    fields: Fields,
    head_dim: int,
    default_theta: float,
    has_local: bool = False,
    default_share: float = 1.0,
    default_type: RopeType = "default",
) -> RopeConfig:
    """`has_local`: layers with a sliding window have their own (`parse_local_rope`). `default_share` stands
    for a missing partial_rotary_factor, `default_type` for a missing rope_type."""
    # With both present transformers takes rope_scaling, and rope_theta from wherever it is.
    key = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    rope = Fields(fields.raw(key, "an object", default={}), f"{fields.where}, {key}")
    if has_local and key == "rope_parameters" and "full_attention" in rope:
        rope = Fields(rope.values["full_attention"], f"{rope.where}, full_attention")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise ValueError(f"{rope.where}: has parameters per layer type; supported is one set for all layers")
    rope_type = _rope_type(rope, default_type)
    max_position_embeddings = fields.integer("max_position_embeddings")
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=default_theta))
    if rope_type == "proportional":
        return _proportional(rope, RopeConfig(rope_type, theta, head_dim), default_share)
    rotary_dim = _rotary_dim(fields, rope, head_dim, default_share)
    if rope_type == "dynamic" and rotary_dim <= 2:
        raise ValueError(f"{rope.where}: dynamic scaling needs more than {rotary_dim} rotated dimensions")
    if rope_type == "longrope":
        return _longrope(fields, rope, RopeConfig(rope_type, theta, rotary_dim))
    scaling = _scaling(rope, rope_type, max_position_embeddings)
    sections = _mrope_section(rope, rotary_dim)
    return RopeConfig(rope_type, theta, rotary_dim, **scaling, mrope_section=sections)


def _mrope_section(rope: Fields, rotary_dim: int) -> tuple[int, ...]:
    """(): only prompts with images need it, and they refuse a model without it."""
    found: Any = rope.values.get("mrope_section")
    is_valid = isinstance(found, list) and [type(each) for each in found] == [int] * 3 and min(found) > 0
    return tuple(found) if is_valid and sum(found) == rotary_dim // 2 else ()


def _proportional(rope: Fields, base: RopeConfig, default_share: float) -> RopeConfig:
    share = rope.number("partial_rotary_factor", default=default_share)
    turning_dim = 2 * int(min(share, 2.0) * base.rotary_dim // 2)
    if not 0 < turning_dim <= base.rotary_dim:
        raise ValueError(
            f"{rope.where}: of head_dim {base.rotary_dim}, partial_rotary_factor {share:g} leaves "
            f"{turning_dim} dimensions to rotate; it must be from 2 to head_dim"
        )
    return replace(base, turning_dim=turning_dim, factor=rope.number("factor", default=1.0))


def _longrope(fields: Fields, rope: Fields, base: RopeConfig) -> RopeConfig:
    """For the longest context; `for_context` chooses for another."""
    longest = fields.integer("max_position_embeddings")
    key = "original_max_position_embeddings"
    original = rope.integer(key, default=fields.integer(key, default=longest))
    divisors: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        wanted = f"a list of {base.rotary_dim // 2} numbers above 0"
        found = rope.raw(name, wanted)
        if not isinstance(found, list) or len(found) != base.rotary_dim // 2:
            raise rope.error(name, wanted)
        each = [Fields({name: value}, rope.where).number(name) for value in found]
        divisors[name] = tuple(each)
    return replace(
        base,
        factor=rope.number("factor", default=longest / original),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", default=None),
        is_long=longest > original,
        **divisors,
    )


def for_context(rope: RopeConfig, context_len: int) -> RopeConfig:
    """longrope has two sets of frequencies. The engine uses one for all requests, by the longest that it may
    have: a change on the way would leave cached keys with angles of the other set."""
    if rope.rope_type != "longrope":
        return rope
    return replace(rope, is_long=context_len > rope.original_max_position_embeddings)


def parse_local_rope(fields: Fields, head_dim: int, default_theta: float) -> RopeConfig:
    """Read the RoPE of layers with a sliding window, which is not scaled. transformers 5 has parameters per
    layer type, 4 has rope_local_base_freq."""
    rope = Fields(_by_layer_type(fields, "sliding_attention"), f"{fields.where}, sliding_attention")
    if _rope_type(rope) != "default":
        raise ValueError(f"{rope.where}: rope_type is {_rope_type(rope)!r:.80}; supported is default")
    default = fields.number("rope_local_base_freq", default=default_theta)
    return RopeConfig(
        "default", rope.number("rope_theta", default=default), _rotary_dim(fields, rope, head_dim)
    )


def _by_layer_type(fields: Fields, layer_type: str) -> Any:
    return Fields(fields.values.get("rope_parameters") or {}, fields.where).raw(layer_type, "an object", {})


def context_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """linear, dynamic and yarn stretch a model that was trained on shorter texts by `factor`, and
    max_position_embeddings may give the length before or after. llama3 always gives the one after."""
    stretched = float(max_position_embeddings)
    if rope.rope_type == "linear":
        stretched = max_position_embeddings * rope.factor
    elif rope.rope_type in ("dynamic", "yarn"):
        stretched = max(max_position_embeddings, rope.original_max_position_embeddings * rope.factor)
    longest = MAXIMA["max_position_embeddings"]
    if not 1 <= stretched <= longest:
        raise ValueError(
            f"RoPE factor {rope.factor:g} makes a context of {stretched:g} tokens; it must be 1 to {longest}"
        )
    return int(stretched)


def _scaling(rope: Fields, rope_type: RopeType, max_position_embeddings: int) -> dict[str, Any]:
    """The fields of RopeConfig that belong to `rope_type`."""
    if rope_type == "default":
        return {}
    if rope_type == "linear":
        return {"factor": rope.number("factor")}
    if rope_type == "dynamic":
        # The length that the frequencies were trained with is max_position_embeddings, as in transformers.
        return {"factor": rope.number("factor"), "original_max_position_embeddings": max_position_embeddings}
    original = rope.integer("original_max_position_embeddings", default=max_position_embeddings)
    if rope_type == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:
            raise ValueError(
                f"{rope.where}: high_freq_factor ({high:g}) must not be below low_freq_factor ({low:g})"
            )
        return {
            "factor": rope.number("factor"),
            "original_max_position_embeddings": original,
            "low_freq_factor": low,
            "high_freq_factor": high,
        }
    return {
        "factor": rope.number("factor", default=max_position_embeddings / original),
        "original_max_position_embeddings": original,
        "beta_fast": rope.number("beta_fast", default=32.0),
        "beta_slow": rope.number("beta_slow", default=1.0),
        "attention_factor": rope.number("attention_factor", default=None),
        "mscale": rope.number("mscale", default=None),
        "mscale_all_dim": rope.number("mscale_all_dim", default=None),
        "truncate": rope.boolean("truncate", default=True),
    }


def _rope_type(rope: Fields, default: RopeType = "default") -> RopeType:
    rope_type = rope.raw("rope_type", "a name", default=rope.raw("type", "a name", default=default))
    if rope_type == "su":  # its name in the first releases of Phi-3
        return "longrope"
    supported = get_args(RopeType)
    if rope_type in supported:
        return rope_type
    raise ValueError(f"{rope.where}: rope_type is {rope_type!r:.80}; supported are {', '.join(supported)}")


def _rotary_dim(fields: Fields, rope: Fields, head_dim: int, default_share: float = 1.0) -> int:
    key = "partial_rotary_factor"
    where = rope if key in rope else fields
    fraction = where.number(key, default=default_share)
    rotary_dim = int(head_dim * min(fraction, 2.0))  # an integer, whatever the number
    if fraction > 1.0 or rotary_dim < 2 or rotary_dim % 2 != 0:
        raise ValueError(
            f"{where.where}: of head_dim {head_dim}, {key} {fraction:g} leaves {rotary_dim} dimensions to "
            f"rotate; it must be an even number from 2 to head_dim"
        )
    return rotary_dim
