"""Tables of measurements, from the files that benchmarks wrote into docs/measurements/data.

`RECORDINGS` of docs/generators/recordings.py has the command of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from docs.generators import profile_rows as profile
from docs.generators import result_rows as rows
from docs.generators.cells import cell
from docs.generators.recordings import DATA, FP8_SHAPES, RECORDINGS, SHAPES, TP_SHAPES
from docs.generators.tables import table

MAX_COLUMNS = 86
"""Of a command."""


class Measured(NamedTuple):
    """files: names without .json; none: counted when the page is made. head: the headings, " | " between.
    row: alike, the templates of cells (docs/generators/cells.py) for each row that `rows` makes of the
    results of the files; without it these rows are cells. names: the first cells, where their template is
    empty."""

    files: Sequence[str]
    head: str
    row: str = ""
    rows: Callable[..., Iterable[Any]] = rows.each
    names: Sequence[str] = ()

    @property
    def headings(self) -> list[str]:
        return self.head.split(" | ")

    def cells(self) -> list[list[object]]:
        found = list(self.rows(*(load(file)["results"] for file in self.files)))
        if self.row:
            found = [[cell(template, row) for template in self.row.split(" | ")] for row in found]
        for name, row in zip(self.names, found):
            row[0] = name
        return found


STEPS = (
    "shape | batch | step, ms | CPU launch, ms | bound, ms | bound / step",
    "{model} | {batch_size} | {step_s.median:ms3} | {host_s:ms} | {bound_s:ms3} | {share_of_bound:%}",
)
PREFIXES = (
    "shape | without radix cache, tokens/s | with radix cache | gain | hit rate | ideal hit rate",
    "{0.flags.model} | {0.tokens_per_s.median:n} | {1.tokens_per_s.median:n} | "
    "{1.tokens_per_s.median/0.tokens_per_s.median:.2f} | {1.hit_rate:%2} | {1.ideal_hit_rate:%2}",
    rows.files,
)
CALLS = " | ".join(
    ["cached tokens", "nodes per sequence"]
    + [f"{operation}, {panel}" for operation in rows.OPERATIONS for panel in rows.PANELS]
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
    "offline": Measured(
        [f"offline-{name}" for name in SHAPES],
        "offline, tokens/s | best other engine | Diptych | roofline bound",
        "{shape} | {best} | **{own.tokens_per_s.median:n}** | {own.bound.tokens_per_s:n}",
        rows.beside_peers("best_offline"),
    ),
    "latency": Measured(
        [f"latency-{name}" for name in SHAPES],
        "single stream, ms/token | best other engine | Diptych | roofline bound",
        "{shape} | {best} | **{own.time_per_token_s:ms}** | {own.bound_s:ms}",
        rows.beside_peers("best_stream"),
    ),
    "steps": Measured(["steps"], *STEPS),
    "other-steps": Measured(["steps-other"], *STEPS),
    "eager-steps": Measured(
        ["steps-eager", "steps"],
        "batch | one by one, GPU | one by one, CPU | replayed, GPU | replayed, CPU",
        "{0.batch_size} | {0.step_s.median:us} | {0.host_s:us} | {1.step_s.median:us} | {1.host_s:us}",
        rows.by("model", "batch_size"),
    ),
    "prefill": Measured(
        ["prefill-eager", "prefill"],
        "shape | tokens | one by one, GPU | one by one, CPU | replayed, GPU | replayed, CPU | TFLOP/s",
        "{0.model} | {0.num_new_tokens:n} | {0.step_s.median:ms} | {0.host_s:ms} | "
        "{1.step_s.median:ms} | {1.host_s:ms} | {1.flops_per_s:T}",
        rows.by("model", "num_new_tokens"),
    ),
    "formats": Measured(
        ["steps", "steps-fp8", "steps-fp8-kv", "steps-int4"],
        "format | 1 request, ms | its bound, ms | 64 requests, ms | their bound, ms",
        " | {0.step_s.median:ms} | {0.bound_s:ms} | {1.step_s.median:ms} | {1.bound_s:ms}",
        rows.of_one_and_64_requests,
        names=("bf16", "`fp8`", "`fp8`, FP8 KV", "`int4`"),
    ),
    "formats-offline": Measured(
        [f"offline-{name}{kind}" for name in FP8_SHAPES for kind in ("", "-fp8")],
        "`offline-256` | bf16, tokens/s | FP8 weights and KV, tokens/s | gain | bound with FP8",
        "{0.flags.model} | {0.tokens_per_s.median:n} | {1.tokens_per_s.median:n} | "
        "{1.tokens_per_s.median/0.tokens_per_s.median:.2f} | {1.bound.tokens_per_s:n}",
        rows.pairs,
    ),
    "layers": Measured(
        ["layers-fp8"],
        "tokens | bf16, µs | `fp8`, µs | `int4`, µs | gain of `fp8` | gain of `int4`",
        "{tokens:n} | {16 bits:.1f} | {fp8:.1f} | {int4:.1f} | {16 bits/fp8:.2f} | {16 bits/int4:.2f}",
        rows.layers,
    ),
    "profiles": Measured(
        [f"profile-{name}" for name in PROFILED],
        " | ".join(
            ["microseconds", *(f"{name.removesuffix('-fp8')}, {kind}" for name, kind in PROFILED.items())]
        ),
        rows=profile.profiles,
    ),
    "kernels": Measured(
        ["decode-attention", "profile-Qwen3-8B", "profile-Qwen3-30B-A3B"],
        "kernel | work | bound, µs | time, µs | of the bound",
        rows=profile.kernels,
    ),
    "mixed": Measured(
        ["mixed"],
        "decoding requests | tokens in all | step, ms | CPU launch, ms | bound, ms | phases, ms",
        "{batch_size} | {num_new_tokens} | {step_s.median:ms} | {host_s:ms} | {bound_s:ms} | {roofline_s:ms}",
    ),
    "decode-attention": Measured(
        ["decode-attention"],
        "requests x context | bound, µs | Triton | FlashInfer | bound / Triton",
        "{triton.batch_size} x 1,024 | {triton.bound_us:.1f} | {triton.us:.1f} | "
        "{flashinfer.us:.1f} | {triton.bound_us/triton.us:%0}",
        rows.by_backend,
    ),
    "rounds": Measured(
        ["round-tree", "round-chain"],
        "steps, top-k, nodes | batch | decode step | draft | verify | round | round / decode step",
        "{shape} | {batch_size} | {decode:ms3} | {pieces.draft:ms3} | {pieces.verify:ms3} | "
        "{round:ms3} | {ratio:.2f}",
    ),
    "speculation": Measured(
        ["speculation"],
        "concurrency | decode, tokens/s | with speculation | speed-up | tokens per verification | same texts",
        "{batch_size} | {plain_tokens_per_s:n} | {speculative_tokens_per_s:n} | {speedup:.2f} | "
        "{tokens_per_verification:.2f} | {num_equal} of {num_requests}",
        rows.with_equal_texts,
    ),
    "itl": Measured(
        ["itl", "itl-512", "itl-256"],
        "prompts | ITL p50, ms | p90 | p99 | max | TTFT of a long prompt, ms",
        " | {p50:ms} | {p90:ms} | {p99:ms} | {max:ms} | {wait:ms0}",
        rows.itl,
        names=("none arrive", "whole (default)", "chunks of 512, mixed", "chunks of 256, mixed"),
    ),
    "chunked-rates": Measured(
        ["offline-Qwen3-8B", "offline-mixed", "offline-Qwen3-0.6B", "offline-mixed-0.6B"],
        "shape | tokens per mixed step | default flags, tokens/s | mixed steps, tokens/s",
        "{0.flags.model} | {1.flags.chunked_prefill_size} | {0.tokens_per_s.median:n} | "
        "{1.tokens_per_s.median:n}",
        rows.pairs,
    ),
    "overlap": Measured(
        ["sequential-0.6B", "overlap-0.6B", "sequential-8B", "overlap-8B"],
        "model | requests | in sequence, tokens/s | idle | overlapped, tokens/s | idle, overlapped | gain",
        "{0.flags.model} | {0.num_requests} | {0.tokens_per_s.median:n} | {0.idle.share:%} | "
        "{1.tokens_per_s.median:n} | {1.idle.share:%} | "
        "{1.tokens_per_s.median/0.tokens_per_s.median:.2f}",
        rows.pairs,
    ),
    "shared-prefixes": Measured(["shared-prefix-0.6B", "shared-prefix-8B"], *PREFIXES),
    "shared-prefixes-tiny": Measured(["shared-prefix-tiny"], *PREFIXES),
    "pools": Measured(
        ["pool-138016", "pool-27603", "pool-13801", "pool-6900"],
        "pool | slots | tokens/s | of the full pool's | requests per step | retractions",
        "{1.num_pool_tokens/0.num_pool_tokens:%0} | {1.num_pool_tokens:n} | "
        "{1.tokens_per_s.median:n} | {1.tokens_per_s.median/0.tokens_per_s.median:%0} | "
        "{1.runs.0.num_output_tokens/1.runs.0.num_steps:.1f} | {1.runs.0.num_retractions}",
        rows.over_first,
    ),
    "served": Measured(
        ["serve-engine", "serve-concurrency-64"],
        "64 running requests | output tokens/s",
        " | {0:n}",
        rows.served,
        names=(
            "the engine alone (`bench offline`)",
            "through HTTP, a closed loop of 64 clients (`bench serve`)",
        ),
    ),
    "one-client": Measured(
        ["serve-engine-1", "serve-concurrency-1"],
        "one request at a time | TTFT p50, ms | ITL p50, ms | ITL p99, ms",
        " | {ttft:ms1} | {p50:ms} | {p99:ms}",
        rows.one_client,
        names=("the engine alone (`bench latency`)", "through HTTP"),
    ),
    "goodput": Measured(
        ["serve-rates"],
        "arrivals/s | goodput, requests/s | output tokens/s | TTFT p50, ms | TTFT p99, ms | "
        "ITL p50, ms | ITL p99, ms | TPOT p99, ms",
        "{rate:g} | {goodput:.2f} | {output_tokens_per_s:n} | {ttft_ms.p50:.1f} | "
        "{ttft_ms.p99:.1f} | {itl_ms.p50:.1f} | {itl_ms.p99:.1f} | {tpot_ms.p99:.1f}",
    ),
    "even-times": Measured(
        LOOPS,
        "prompt tokens of a step | arrivals/s | TTFT p50, ms | ITL p50, ms | ITL p99, ms | "
        "p99 / p50 | tokens/s at 64 clients",
        "{size} | {open.rate:g} | {open.ttft_ms.p50:.1f} | {open.itl_ms.p50:.1f} | "
        "{open.itl_ms.p99:.1f} | {open.itl_ms.p99/open.itl_ms.p50:.2f} | "
        "{closed.output_tokens_per_s:n}",
        rows.even_times,
    ),
    "sums": Measured(
        ["all-reduce"],
        "KB | one-shot kernel, µs | NCCL, µs | torch one-shot, µs | bound, µs",
        "{num_bytes:KiB} | {seconds.Triton one-shot:us1} | {seconds.NCCL:us1} | "
        "{seconds.torch one-shot:us1} | {bound_s:us1}",
    ),
    "tp-latency": Measured(
        [f"latency-{name}-tp2" for name in TP_SHAPES],
        "single stream, two ranks | ms/token | bound, ms | bound / time",
        " | {time_per_token_s:ms3} | {bound_s:ms3} | {bound_s/time_per_token_s:%}",
        names=TP_SHAPES,
    ),
    "tp-offline": Measured(
        ["offline-Qwen3-14B", "offline-Qwen3-14B-tp2"],
        "`offline-256` | ranks | tokens/s | gain over one rank | roofline bound | of the bound",
        "{1.flags.model} | {1.flags.tp} | {1.tokens_per_s.median:n} | "
        "{1.tokens_per_s.median/0.tokens_per_s.median:.2f} | {1.bound.tokens_per_s:n} | "
        "{1.bound.share:%}",
        rows.over_first,
    ),
    "deterministic": Measured(
        ["offline-Qwen3-8B", "offline-deterministic"],
        "`offline-256`, Qwen3-8B | tokens/s | of the first",
        " | {1.tokens_per_s.median:n} | {1.tokens_per_s.median/0.tokens_per_s.median:%}",
        rows.over_first,
        names=("default flags", "`--deterministic`"),
    ),
    "tp-steps": Measured(
        ["steps-tp2", "steps-tp2-ep2"],
        "Qwen3-30B-A3B, requests | parts of experts, ms | whole experts, ms | bound, ms",
        "{0.batch_size} | {0.step_s.median:ms3} | {1.step_s.median:ms3} | {0.bound_s:ms3}",
        rows.beside,
    ),
    "scheduling": Measured(
        ["scheduling"],
        "policy | panel | 10 waiting | 1,000 | 10,000 | first pass over 10,000",
        rows=rows.scheduling,
    ),
    "scheduling-medians": Measured(
        ["scheduling"],
        "policy | reference, 10 | reference, 10,000 | optimized, 10 | optimized, 10,000",
        rows=rows.scheduling_medians,
    ),
    "cache-calls": Measured(["radix-cache"], CALLS, rows=rows.cache_calls),
    "cache-calls-by-depth": Measured(["radix-cache-depth"], CALLS, rows=rows.cache_calls),
    "pool-steps": Measured(
        [], "conservativeness | steps, pool of 10 % | 50 % | 100 % | retractions", rows=rows.pool_steps
    ),
}
"""Name in a marker -> its table. A table whose files are not recorded yet is typed on its page."""


@cache
def measured(name: str) -> str:
    """A table of `TABLES`, and the files that it comes from."""
    if name not in TABLES:
        raise ValueError(f"no measured table {name!r}; there are {', '.join(TABLES)}")
    found = TABLES[name]
    cells = found.cells()
    is_number = [all(re.match(r"[\d*]|$", str(row[i])) for row in cells) for i in range(len(found.headings))]
    align = "".join("r" if each else "l" for each in is_number)
    return f"{table(found.headings, cells, align)}\n\n{source(found.files)}"


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
