"""`diptych bench quantization`: quantized linear layers against unquantized ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, run
from diptych.shared.tools.commands.option_values import integers

if TYPE_CHECKING:
    from diptych.shared.tools.bench.quantized_linear_cost import LinearResult


def quantization(
    model: Annotated[str, typer.Option(help="Built-in shapes, a folder or a Hugging Face id.")] = "Qwen3-8B",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, separated by commas.")
    ] = "1,16,64,256,2048,8192",
    schemes: Annotated[
        str, typer.Option(help="Schemes of --quantization, separated by commas.")
    ] = "fp8,fp8-block,int8,int4",
    panel: Annotated[str | None, typer.Option(help="reference or optimized.")] = None,
    output: Output = None,
) -> None:
    """Time the linear layers of a model with quantized and with 16-bit weights, input quantization included.
    Each layer runs alone, with random weights that come from memory."""
    import torch

    from diptych.shared.config import read_config
    from diptych.shared.engine.build.settings import default_device, default_panel
    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.tools.bench.quantized_linear_cost import PLAIN, LinearTimes, cases_of

    device = default_device()
    chosen = panel or default_panel(device)
    names = [name.strip() for name in schemes.split(",") if name.strip()]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    times = LinearTimes(chosen, names, torch.device(device), dtype)
    config = read_config(resolve_model_path(model, "dummy"))
    benchmark = QuantizationBenchmark(cases_of(config, integers("--tokens", tokens)), times.measure)
    benchmark.columns = (
        Column("layer", lambda r: r.case.layer, is_text=True),
        Column("out x in", lambda r: f"{r.case.out_features} x {r.case.in_features}"),
        Column("tokens", lambda r: str(r.case.num_tokens)),
        Column(f"{PLAIN} us", lambda r: f"{r.microseconds[PLAIN]:.1f}"),
        *(Column(f"{name} us", partial(_time, name)) for name in names),
    )
    benchmark.title = f"{model}, panel {chosen} on {device}: microseconds, and the speed-up"
    benchmark.facts |= {"model": model, "panel": chosen}
    run(benchmark, output=output)


def _time(name: str, result: LinearResult) -> str:
    from diptych.shared.tools.bench.quantized_linear_cost import PLAIN

    time = result.microseconds[name]
    return f"{time:.1f} ({result.microseconds[PLAIN] / time:.2f}x)"


class QuantizationBenchmark(Benchmark):
    name = "quantization"
