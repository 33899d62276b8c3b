"""Measurements of other engines on one GPU with the workload offline-256, and the roofline bounds there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from diptych.shared import hardware
from diptych.shared.tools.bench.step_cost import Ceilings

GPU = "H200"
CEILINGS = Ceilings(bandwidth=4.3e12, matrix_rate=780e12)
"""Measured on that GPU; the bounds below follow from them (`diptych.shared.tools.bench.workload_bound`)."""

ENGINES = ("mini-sglang", "SGLang 0.5.14", "vLLM 0.24.0")
"""mini-sglang with FlashInfer in both phases, the others as they ship. bfloat16, random weights."""

STREAM_INPUT_LEN, STREAM_OUTPUT_LEN = 512, 128
"""The single stream: ms for each output token after such a prompt."""


class Comparison(NamedTuple):
    of_bound: float
    bound: float
    of_best_peer: float
    best_peer_value: float
    best_peer: str
    unit: str  # of the bound and of the best peer's value

    def __str__(self) -> str:
        return (
            f"{self.of_bound:.2f} of the roofline bound ({self.bound:,g} {self.unit} at 4.3 TB/s), "
            f"{self.of_best_peer:.2f} of the best peer ({self.best_peer}: {self.best_peer_value:,g})"
        )


class Row(NamedTuple):
    """The measurements of one shape, in the order of ENGINES; None: not measured."""

    offline: tuple[float | None, ...]  # tokens/s of offline-256
    offline_bound: float
    stream: tuple[float | None, ...]  # ms per output token of the single stream
    stream_bound: float

    def best_offline(self) -> tuple[str, float]:
        return max(_known(self.offline), key=lambda pair: pair[1])

    def best_stream(self) -> tuple[str, float]:
        return min(_known(self.stream), key=lambda pair: pair[1])

    def compare_offline(self, tokens_per_s: float) -> Comparison:
        engine, best = self.best_offline()
        return Comparison(
            tokens_per_s / self.offline_bound,
            self.offline_bound,
            tokens_per_s / best,
            best,
            engine,
            "tokens/s",
        )

    def compare_stream(self, milliseconds: float) -> Comparison:
        """Speed ratios; above 1: faster than the other engine."""
        engine, best = self.best_stream()
        return Comparison(
            self.stream_bound / milliseconds, self.stream_bound, best / milliseconds, best, engine, "ms"
        )


ROWS = {
    "Qwen3-0.6B": Row((21_770, 21_380, 23_780), 36_390, (1.75, 1.71, 1.66), 0.29),
    "Qwen3-8B": Row((9_155, 8_980, 9_390), 12_975, (5.30, 5.15, 5.17), 3.54),
    "Qwen3-14B": Row((6_030, 5_970, 6_120), 8_295, (8.47, 8.34, 8.45), 6.53),
    "Llama-3.1-8B": Row((9_820, 9_690, 9_857), 13_610, (4.88, 4.87, 4.93), 3.51),
    "Qwen3-30B-A3B": Row((None, 5_990, 5_900), 7_690, (None, 4.10, 4.34), 1.42),
}


def row_for(model: str, dtype: str, gpus: Sequence[str] | None = None) -> Row | None:
    """The row of this shape, for an engine in bfloat16 on the measured GPU. `gpus`: default, this
    computer's."""
    if gpus is None:
        gpus = cast("Sequence[str]", hardware.facts()["gpus"])
    if dtype != "bfloat16" or not gpus or GPU not in gpus[0]:
        return None
    return ROWS.get(Path(model).name)


def _known(figures: tuple[float | None, ...]) -> list[tuple[str, float]]:
    return [(engine, figure) for engine, figure in zip(ENGINES, figures) if figure is not None]
