"""Typed access to the keys of a JSON object: what is missing or ill-typed raises one clear ValueError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

MAX_INTEGER = 2**31 - 1
MAXIMA = {
    "num_hidden_layers": 2**12,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**24,
    "original_max_position_embeddings": 2**24,
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "n_routed_experts": 2**14,
    "n_shared_experts": 2**10,
    "kv_lora_rank": 2**16,
    "q_lora_rank": 2**16,
    "qk_nope_head_dim": 2**14,
    "qk_rope_head_dim": 2**14,
    "v_head_dim": 2**14,
}
"""The largest values that a config.json may have: a hundred times what models have, and small enough that no
hostile file makes the engine build a billion layers before it refuses the weights."""


class _Required:
    """The default of a key that must be there."""


REQUIRED: Final = _Required()


class Fields:
    """The keys of one JSON object. `where` names it in errors.

    `default` stands in for a key that is missing or null; without one such a key is an error.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: expected an object with keys, found {values!r:.80}")
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def raw(self, key: str, wanted: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            found = "is null" if key in self.values else "is missing"
            raise ValueError(f"{self.where}: {key} {found}; it must be {wanted}")
        return default

    def error(self, key: str, wanted: str) -> ValueError:
        return ValueError(f"{self.where}: {key} is {self.values.get(key)!r:.80}; it must be {wanted}")

    def integer(self, key: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
        maximum = MAXIMA.get(key, MAX_INTEGER)
        wanted = f"an integer >= {minimum}"
        value = self.raw(key, wanted, default)
        if value is default:
            return value
        if not _is_integer(value) or value < minimum:
            raise self.error(key, wanted)
        if value > maximum:
            raise self.error(key, f"at most {maximum}")
        return value

    def number(self, key: str, default: Any = REQUIRED, above: float = 0.0) -> Any:
        wanted = f"a number > {above:g}"
        value = self.raw(key, wanted, default)
        if value is default:
            return value
        is_number = isinstance(value, float) or (_is_integer(value) and abs(value) < 2**1023)
        if not is_number or not math.isfinite(value) or not value > above:
            raise self.error(key, wanted)
        return float(value)

    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.raw(key, "true or false", default)
        if value is not default and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers >= 0; missing or null: an empty one."""
        value = self.raw(key, "a list of integers", [])
        if not isinstance(value, list) or not all(_is_integer(item) and item >= 0 for item in value):
            raise self.error(key, "a list of integers >= 0")
        return value

    def token_ids(self, key: str) -> frozenset[int]:
        """A token id, a list of them, or nothing."""
        if _is_integer(self.values.get(key)):
            return frozenset([self.integer(key, minimum=0)])
        return frozenset(self.integers(key))


def only_name(value: Any) -> str:
    """The text in a list of one text; "": `value` is anything else."""
    is_one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if is_one else ""


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
