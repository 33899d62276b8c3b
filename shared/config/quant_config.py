"""QuantConfig: which linear layers of a model are quantized, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from diptych.shared.config.hf_multimodal import LANGUAGE_PREFIXES
from diptych.shared.types.quant_scheme import QuantScheme

ALL_LINEAR = "Linear"
"""As a target: every linear layer of the decoder."""
REGEX = "re:"

ONLINE: dict[str, QuantScheme] = {
    "fp8": QuantScheme("fp8", inputs="token"),
    "fp8-block": QuantScheme("fp8", block_rows=128, group_size=128, inputs="group"),
    "int8": QuantScheme("int8", inputs="token"),
    "int4": QuantScheme("int4", group_size=128),
    "nvfp4": QuantScheme("nvfp4", group_size=16),
}
"""What the flag `quantization` may say: weights are rounded to the nearest value when they are loaded."""

DEQUANTIZED = ".kv_b_proj"
"""The end of the name of a layer whose weight latent attention takes apart: it is dequantized when loaded."""

_NEVER = re.compile(r"(.*\.)?(lm_head|embed_tokens|mlp\.gate|mlp\.shared_expert_gate|eh_proj|fc)")
"""The head, the embedding, routers, and what a draft model has before its decoder layer: no supported
checkpoint quantizes them."""


@dataclass(frozen=True)
class QuantConfig:
    """Layers have canonical names, before any of them are merged: model.layers.0.self_attn.q_proj. Entries
    have these names or the checkpoint's.

    A target or an ignored entry is a name, "re:" and a regular expression that matches a name from its start,
    or some successive parts of a name: "mlp.gate" is in model.layers.0.mlp.gate and not in
    model.layers.0.mlp.gate_up_proj. A regular expression may be of the names that a multimodal checkpoint
    has for a layer."""

    storage: (
        str  # how the checkpoint stores it: a key of diptych.shared.loading.quantized_formats, or "online"
    )
    targets: tuple[tuple[str, QuantScheme], ...]
    ignore: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = field(default=(), compare=False)  # theirs, ours

    def scheme_of(self, name: str) -> QuantScheme | None:
        """The scheme of a layer; None: it is not quantized. A name is a better target than a regular
        expression, and that a better one than "Linear"."""
        if self.storage == "online" and name.endswith(DEQUANTIZED):
            return None
        if _NEVER.fullmatch(name) or any(self._is_in(entry, name) for entry in self.ignore):
            return None
        found = [(target, scheme) for target, scheme in self.targets if self._is_in(target, name)]
        ranked = sorted(found, key=lambda item: (item[0] == ALL_LINEAR, item[0].startswith(REGEX)))
        return ranked[0][1] if ranked else None

    def scheme_in_memory(self, name: str) -> QuantScheme | None:
        """The scheme of a layer behind loading; None: it is a plain one."""
        scheme = None if name.endswith(DEQUANTIZED) else self.scheme_of(name)
        return None if scheme is None or scheme.is_dequantized else scheme

    def _is_in(self, entry: str, name: str) -> bool:
        """Whether an entry has a layer, by its canonical name or another of the checkpoint."""
        names = [f".{name}."]
        for theirs, ours in reversed(self.renamed):
            names += [each.replace(ours, theirs) for each in names if ours in each]
        return any(_matches(entry, each[1:-1]) for each in names)

    @classmethod
    def online(cls, method: str, sizes: Iterable[int]) -> QuantConfig:
        """What the flag `quantization` says, for layers with these numbers of inputs: groups of int4 are as
        large as divides all of them, and at most 128."""
        scheme = ONLINE[method]
        if method == "int4":
            scheme = replace(scheme, group_size=math.gcd(128, *sizes))
        return cls("online", ((ALL_LINEAR, scheme),))


def _matches(entry: str, name: str) -> bool:
    if entry == ALL_LINEAR:
        return True
    if entry.startswith(REGEX):
        expression, rest = entry.removeprefix(REGEX), name.removeprefix("model.")
        names = [name] if rest == name else [name, *(prefix + rest for prefix in LANGUAGE_PREFIXES)]
        return any(re.match(expression, each) for each in names)
    return f".{entry}." in f".{name}."
