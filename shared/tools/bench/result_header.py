"""The common part of result files: hardware, versions and engine of a measurement."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.shared import hardware
from diptych.shared.tools.bench.step_cost import Ceilings

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM


def header(benchmark: str) -> dict[str, Any]:
    return {"benchmark": benchmark, "versions": hardware.versions(), "machine": hardware.facts()}


def engine_facts(llm: LLM) -> dict[str, Any]:
    """The facts about an engine that a result must include."""
    return {
        "flags": asdict(llm.config) | {"use": dict(llm.config.use)},
        "components": llm.describe(),
        "num_pool_tokens": llm.assembly.kv_pool.size,
        "kv_bytes_per_token": llm.assembly.kv_pool.num_bytes_per_token,
        "dtype": str(llm.assembly.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(llm.assembly.kv_pool.dtype).removeprefix("torch."),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Repeated measurements, summed up."""
    middle, count = statistics.median(seconds), len(seconds)
    return {"median": middle, "min": min(seconds), "max": max(seconds), "num_repeats": count}


def ceilings_as_json(ceilings: Ceilings) -> dict[str, float]:
    return {"bytes_per_s": ceilings.bandwidth, "flops_per_s": ceilings.matrix_rate}


def write_json(file: Path, report: dict[str, Any]) -> None:
    file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
