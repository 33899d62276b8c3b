"""`diptych size`: what a model needs of a GPU, and how fast it could be there. Needs no GPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def size(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder, a built-in model, a known shape (Qwen3-8B ...) or an id."
        ),
    ],
    *,
    gpu: Annotated[
        str, typer.Option(help="H100, H200, B200, A100-80GB, RTX-4090; several by commas, or all.")
    ] = "H100",
    context: Annotated[int, typer.Option(min=1, help="Tokens of a request: prompt and answer.")] = 4096,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of a decode step. Default: all that fit.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    quantization: Annotated[
        str | None, typer.Option(help="Of the weights: fp8, int8 or int4. Default: as they are.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Of the KV pool: auto, fp8_e4m3 or fp8_e5m2.")] = "auto",
    mem_fraction_static: Annotated[float, typer.Option(help="Of the GPU, for weights and KV pool.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="JSON with all numbers.")] = False,
) -> None:
    """Weights, KV slots, requests that fit, and the roofline bound of a decode step, by card.

    Memory is a prediction: recorded pools are within 5 % of it. The step is a bound: the least that it takes
    at the card's bandwidth and GEMM rate. Measured steps take longer (docs/measurements/steps.md).
    """
    import torch

    from diptych.shared.config import EngineConfig
    from diptych.shared.config.hf_config import read_config
    from diptych.shared.loading.model_path import is_shape, resolve_model_path
    from diptych.shared.loading.quantize import with_quantization
    from diptych.shared.tools.bench.size import CARDS, formula_of, size_of

    names = list(CARDS) if gpu == "all" else gpu.split(",")
    unknown = [name for name in names if name not in CARDS]
    if unknown:
        raise ValueError(f"no card {unknown[0]!r}; there are {', '.join(CARDS)}")
    if kv_cache_dtype not in ("auto", "fp8_e4m3", "fp8_e5m2"):
        raise ValueError(f"--kv-cache-dtype is auto, fp8_e4m3 or fp8_e5m2, got {kv_cache_dtype!r}")
    last = model.rpartition("/")[2]
    name = last if is_shape(last) else model
    config = EngineConfig().updated(
        model=name, load_format="dummy", tp=tp, quantization=quantization,
        mem_fraction_static=mem_fraction_static,
    )  # fmt: skip
    model_config = read_config(resolve_model_path(name, "dummy"))
    if quantization is not None:
        model_config = with_quantization(model_config, quantization)
    if context > model_config.context_len:
        raise ValueError(f"--context {context} exceeds the {model_config.context_len} positions of {name}")
    kv_dtype = model_config.dtype if kv_cache_dtype == "auto" else torch.float8_e4m3fn
    formula = formula_of(model_config, config, model_config.dtype, kv_dtype)
    sizes = [size_of(formula, CARDS[each], context, batch, config) for each in names]
    if as_json:
        print(json.dumps([each.as_json() for each in sizes], indent=2))
        return
    _print(name, sizes, config.tp)


def _print(name: str, sizes: list, tp: int) -> None:  # type: ignore[type-arg]
    from rich.console import Console
    from rich.table import Table

    each = f" (each of {tp} GPUs)" if tp > 1 else ""
    table = Table("", *(size.card for size in sizes), title=f"{name}{each}", title_justify="left")
    rows = {
        "weights": lambda s: f"{s.weights / 2**30:.1f} GiB",
        "KV of a token": lambda s: f"{s.kv_bytes_per_token / 1024:.4g} KiB",
        "slots of the KV pool": lambda s: f"{s.num_slots:,}",
        f"requests of {sizes[0].context_len:,} tokens": lambda s: f"{s.max_requests:,}",
        "decode step, requests": lambda s: f"{s.batch_size:,}",
        "  at least": lambda s: f"{s.step_bound * 1e3:.2f} ms",
        "  so at most, tokens/s": lambda s: f"{s.tokens_per_second:,.0f}",
    }
    for label, text in rows.items():
        table.add_row(label, *map(text, sizes))
    Console().print(table)
    if any(size.batch_size > size.max_requests for size in sizes):
        print("note: the batch does not fit into the KV pool of every card at this context")
