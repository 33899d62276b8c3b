"""Tolerances of a server's log-probabilities against the float32 reference, by number format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_MEASURED = (
    "about three times what this project's engine loses on tiny-dense and tiny-moe (2,707 tokens each)"
)

_MEASURED_PEER = (
    "about three times what llama.cpp (Q8_0), or rounding of weights alone (Q4_0), loses on tiny-moe after "
    "random tokens"
)


@dataclass(frozen=True)
class Tolerance:
    """Limits of absolute errors of log-probabilities, in nats. A token may err by max_error * (1 + |logprob|
    / 3): for an unlikely token the error of its own logit adds. `outliers`: share of tokens that may exceed
    it.

    `self_error`: the limit between two answers of one server. Their weights are rounded alike, so what
    remains is the order of sums and the rounding of inputs: at most bfloat16's errors, except in the formats
    that round inputs to 8 bits with a scale for all of them."""

    max_error: float
    mean_error: float
    typical_error: float  # the median, over 1 + |logprob| / 3
    outliers: float
    self_error: float
    reason: str

    def allowed(self, logprob: float) -> float:
        return self.max_error * (1.0 + abs(logprob) / 3.0)

    def allowed_of_two(self, logprob: float) -> float:
        """Allowed difference between two answers of one server."""
        return self.self_error * (1.0 + abs(logprob) / 3.0)


_HALF = "weights, activations and K and V are rounded; with MoE a rounding may choose another expert"
_EIGHT = "weights and inputs are rounded to 8 bits"
_FOUR = "weights are rounded to 4 bits"
TABLE: dict[str, Tolerance] = {
    "float32": Tolerance(
        1e-3, 2e-4, 1e-4, 0.0, 1e-3, "sums in float32 in any order, K and V in float32; measured: 3e-5"
    ),
    "float16": Tolerance(0.06, 0.01, 0.003, 0.01, 0.06, f"{_HALF}; {_MEASURED}"),
    "bfloat16": Tolerance(0.3, 0.12, 0.02, 0.02, 0.3, f"{_HALF}; {_MEASURED}"),
    "fp8": Tolerance(0.8, 0.4, 0.06, 0.03, 0.8, f"{_EIGHT}; {_MEASURED}"),
    "int8": Tolerance(0.6, 0.25, 0.04, 0.03, 0.6, f"{_EIGHT}; {_MEASURED}"),
    "q8_0": Tolerance(
        1.0, 0.45, 0.25, 0.03, 0.3, f"{_EIGHT}, those of the LM head too, 32 to a scale; {_MEASURED_PEER}"
    ),
    "int4": Tolerance(1.5, 1.0, 0.15, 0.05, 0.3, f"{_FOUR}; {_MEASURED}"),
    "q4": Tolerance(
        5.0, 3.0, 2.0, 0.05, 0.3, f"{_FOUR}, those of the LM head too, 32 to a scale; {_MEASURED_PEER}"
    ),
}


def tolerance_of(dtype: str, folder: Path) -> tuple[str, Tolerance]:
    """The name and limits of a format. auto: float32 if the checkpoint's config.json says so, otherwise
    bfloat16. Raises `ValueError` for an unknown one."""
    if dtype == "auto":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        stored = config.get("dtype") or config.get("torch_dtype")
        dtype = stored if stored in ("float32", "float16") else "bfloat16"
    if dtype not in TABLE:
        raise ValueError(f"--dtype must be auto or one of {', '.join(TABLE)}, got {dtype!r}")
    return dtype, TABLE[dtype]
