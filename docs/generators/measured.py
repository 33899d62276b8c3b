"""Tables of measurements, from the files that benchmarks wrote into docs/measurements/data.

`RECORDINGS` of docs/generators/recordings.py has the command of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from docs.generators import profile_rows as profile
from docs.generators import run_rows as runs
from docs.generators import step_rows as steps
from docs.generators.recordings import DATA, FP8_SHAPES, RECORDINGS, SHAPES, TP_SHAPES
from docs.generators.tables import table

MAX_COLUMNS = 86
"""Of a command."""


class Measured(NamedTuple):
    """files: names without .json; none: counted when the page is made. rows: from the results of each file,
    in this order."""

    files: Sequence[str]
    head: Sequence[str]
    rows: Callable[..., steps.Rows]


WAITING = ("10 waiting", "1,000", "10,000", "first pass over 10,000")
PANELS = ("reference, 10", "reference, 10,000", "optimized, 10", "optimized, 10,000")
TAILS = ("TTFT p50, ms", "TTFT p99, ms", "ITL p50, ms", "ITL p99, ms", "TPOT p99, ms")
EVEN = ("TTFT p50, ms", "ITL p50, ms", "ITL p99, ms", "p99 / p50", "tokens/s at 64 clients")
STEPS = ("shape", "batch", "step, ms", "CPU launch, ms", "bound, ms", "bound / step")
BEST = ("best other engine", "Diptych", "roofline bound")
LAUNCHED = ("one by one, GPU", "one by one, CPU", "replayed, GPU", "replayed, CPU")
BOUNDS = ("1 request, ms", "its bound, ms", "64 requests, ms", "their bound, ms")
ROUND = ("batch", "decode step", "draft", "verify", "round", "round / decode step")
PAIR = ("in sequence, tokens/s", "idle", "overlapped, tokens/s", "idle, overlapped", "gain")
PREFIXES = (
    "shape",
    "without radix cache, tokens/s",
    "with radix cache",
    "gain",
    "hit rate",
    "ideal hit rate",
)
CALLS = (
    "cached tokens",
    "nodes per sequence",
    *(f"{operation}, {panel}" for operation in steps.OPERATIONS for panel in steps.PANELS),
)
PROFILED = {
    "Qwen3-8B": "bf16",
    "Qwen3-8B-fp8": "FP8 weights and KV",
    "Qwen3-14B-fp8": "FP8 weights and KV",
    "Qwen3-30B-A3B": "bf16",
    "Qwen3-30B-A3B-fp8": "FP8 weights and KV",
}
LOOPS = [
    f"serve-{loop}{size}" for size in ("", "-mixed-256", "-mixed-128") for loop in ("rates", "concurrency-64")
]

TABLES = {
    "offline": Measured([f"offline-{name}" for name in SHAPES], ["offline, tokens/s", *BEST], runs.offline),
    "latency": Measured(
        [f"latency-{name}" for name in SHAPES], ["single stream, ms/token", *BEST], runs.latency
    ),
    "steps": Measured(["steps"], STEPS, steps.steps),
    "eager-steps": Measured(["steps-eager", "steps"], ["batch", *LAUNCHED], steps.eager_steps),
    "formats": Measured(
        ["steps", "steps-fp8", "steps-fp8-kv", "steps-int4"], ["format", *BOUNDS], steps.formats
    ),
    "formats-offline": Measured(
        [f"offline-{name}{kind}" for name in FP8_SHAPES for kind in ("", "-fp8")],
        [
            "`offline-256`",
            "bf16, tokens/s",
            "FP8 weights and KV, tokens/s",
            "gain",
            "bound with FP8",
        ],
        runs.formats,
    ),
    "layers": Measured(
        ["layers-fp8"],
        ["tokens", "bf16, µs", "`fp8`, µs", "`int4`, µs", "gain of `fp8`", "gain of `int4`"],
        steps.layers,
    ),
    "profiles": Measured(
        [f"profile-{name}" for name in PROFILED],
        ["microseconds", *(f"{name.removesuffix('-fp8')}, {kind}" for name, kind in PROFILED.items())],
        profile.profiles,
    ),
    "kernels": Measured(
        ["decode-attention", "profile-Qwen3-8B", "profile-Qwen3-30B-A3B"],
        ["kernel", "work", "bound, µs", "time, µs", "of the bound"],
        profile.kernels,
    ),
    "other-steps": Measured(["steps-other"], STEPS, steps.steps),
    "prefill": Measured(
        ["prefill-eager", "prefill"], ["shape", "tokens", *LAUNCHED, "TFLOP/s"], steps.prefill
    ),
    "mixed": Measured(
        ["mixed"],
        ["decoding requests", "tokens in all", "step, ms", "CPU launch, ms", "bound, ms", "phases, ms"],
        steps.mixed,
    ),
    "decode-attention": Measured(
        ["decode-attention"],
        ["requests x context", "bound, µs", "Triton", "FlashInfer", "bound / Triton"],
        steps.decode_attention,
    ),
    "rounds": Measured(["round-tree", "round-chain"], ["steps, top-k, nodes", *ROUND], steps.rounds),
    "speculation": Measured(
        ["speculation"],
        [
            "concurrency",
            "decode, tokens/s",
            "with speculation",
            "speed-up",
            "tokens per verification",
            "same texts",
        ],
        runs.speculation,
    ),
    "itl": Measured(
        ["itl", "itl-512", "itl-256"],
        ["prompts", "ITL p50, ms", "p90", "p99", "max", "TTFT of a long prompt, ms"],
        runs.itl,
    ),
    "chunked-rates": Measured(
        ["offline-Qwen3-8B", "offline-mixed", "offline-Qwen3-0.6B", "offline-mixed-0.6B"],
        ["shape", "tokens per mixed step", "default flags, tokens/s", "mixed steps, tokens/s"],
        runs.chunked_rates,
    ),
    "overlap": Measured(
        ["sequential-0.6B", "overlap-0.6B", "sequential-8B", "overlap-8B"],
        ["model", "requests", *PAIR],
        runs.overlap,
    ),
    "shared-prefixes": Measured(
        ["shared-prefix-0.6B", "shared-prefix-8B"],
        PREFIXES,
        runs.shared_prefixes,
    ),
    "shared-prefixes-tiny": Measured(["shared-prefix-tiny"], PREFIXES, runs.shared_prefixes),
    "pools": Measured(
        ["pool-138016", "pool-27603", "pool-13801", "pool-6900"],
        ["pool", "slots", "tokens/s", "of the full pool's", "requests per step", "retractions"],
        runs.pools,
    ),
    "served": Measured(
        ["serve-engine", "serve-concurrency-64"], ["64 running requests", "output tokens/s"], runs.served
    ),
    "one-client": Measured(
        ["serve-engine-1", "serve-concurrency-1"],
        ["one request at a time", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms"],
        runs.one_client,
    ),
    "goodput": Measured(
        ["serve-rates"], ["arrivals/s", "goodput, requests/s", "output tokens/s", *TAILS], runs.goodput
    ),
    "even-times": Measured(LOOPS, ["prompt tokens of a step", "arrivals/s", *EVEN], runs.even_times),
    "sums": Measured(
        ["all-reduce"],
        ["KB", "one-shot kernel, µs", "NCCL, µs", "torch one-shot, µs", "bound, µs"],
        steps.sums,
    ),
    "tp-latency": Measured(
        [f"latency-{name}-tp2" for name in TP_SHAPES],
        ["single stream, two ranks", "ms/token", "bound, ms", "bound / time"],
        runs.tp_latency,
    ),
    "tp-offline": Measured(
        ["offline-Qwen3-14B", "offline-Qwen3-14B-tp2"],
        ["`offline-256`", "ranks", "tokens/s", "gain over one rank", "roofline bound", "of the bound"],
        runs.tp_offline,
    ),
    "deterministic": Measured(
        ["offline-Qwen3-8B", "offline-deterministic"],
        ["`offline-256`, Qwen3-8B", "tokens/s", "of the first"],
        runs.deterministic,
    ),
    "tp-steps": Measured(
        ["steps-tp2", "steps-tp2-ep2"],
        ["Qwen3-30B-A3B, requests", "parts of experts, ms", "whole experts, ms", "bound, ms"],
        steps.tp_steps,
    ),
    "scheduling": Measured(["scheduling"], ["policy", "panel", *WAITING], steps.scheduling),
    "scheduling-medians": Measured(["scheduling"], ["policy", *PANELS], steps.scheduling_medians),
    "cache-calls": Measured(["radix-cache"], CALLS, steps.cache_calls),
    "cache-calls-by-depth": Measured(["radix-cache-depth"], CALLS, steps.cache_calls),
    "pool-steps": Measured(
        [], ["conservativeness", "steps, pool of 10 %", "50 %", "100 %", "retractions"], steps.pool_steps
    ),
}
"""Name in a marker -> its table. A table whose files are not recorded yet is typed on its page."""


@cache
def measured(name: str) -> str:
    """A table of `TABLES`, and the files that it comes from."""
    if name not in TABLES:
        raise ValueError(f"no measured table {name!r}; there are {', '.join(TABLES)}")
    found = TABLES[name]
    files = [load(file) for file in found.files]
    cells = found.rows(*(file["results"] for file in files))
    is_number = [all(re.match(r"[\d*]|$", str(row[i])) for row in cells) for i in range(len(found.head))]
    align = "".join("r" if each else "l" for each in is_number)
    return f"{table(found.head, cells, align)}\n\n{source(found.files)}"


def source(names: Sequence[str]) -> str:
    if not names:
        return "*Source: counted when this page is built.*"
    places = dict.fromkeys(where(load(name)) for name in names)
    paths = ", ".join(f"`docs/measurements/data/{name}.json`" for name in names)
    return f"*Source: {paths} ({'; '.join(places)}).*"


def where(report: dict[str, Any]) -> str:
    """The hardware and the versions of a result file."""
    versions, machine = report["versions"], report["machine"]
    device = machine["gpus"][0] if machine["gpus"] else machine["cpu"]
    if len(machine["gpus"]) > 1:
        device = f"{len(machine['gpus'])} x {device}"
    return f"{device}, torch {versions['torch']}"


def load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return report


def recording(*names: str) -> str:
    """The commands that write these files, as a block of bash."""
    wrong = sorted(set(names) - set(RECORDINGS))
    if wrong:
        raise ValueError(f"no recording {', '.join(wrong)}; there are {', '.join(RECORDINGS)}")
    lines = []
    for name in names:
        line = ""
        # An option stays with its value.
        for part in re.split(r" (?=-)", f"{RECORDINGS[name].command} {name}.json"):
            if len(line) + len(part) > MAX_COLUMNS:
                lines.append(f"{line} \\")
                line = " "
            line += f" {part}" if line else part
        lines.append(line)
    return "\n".join(["```bash", *lines, "```"])
