"""`diptych tune`: measures kernels on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.shared import registry
from diptych.shared.tools.commands.option_values import integers


def tune(
    model: Annotated[
        str, typer.Option(help="Built-in shapes, folders or Hugging Face ids, separated by commas.")
    ],
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens, separated by commas. Default: all usual ones.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="Measure linear layers with quantized weights: schemes, separated by commas."),
    ] = None,
) -> None:
    """Measure which kernels and tiles are fastest for a model's linear layers and experts on this GPU, and
    write the GPU's table, which the optimized panel reads. Weights are random."""
    import torch

    from diptych.shared.config import read_config
    from diptych.shared.config.quant_config import ONLINE
    from diptych.shared.loading.model_path import resolve_model_path

    names = [name.strip() for name in (quantization or "").split(",") if name.strip()]
    unknown = sorted(set(names) - set(ONLINE))
    if unknown:
        raise ValueError(f"no scheme {', '.join(unknown)}; there are {', '.join(ONLINE)}")
    if not torch.cuda.is_available():
        raise ValueError("tune needs a CUDA GPU: it measures kernels there")
    all_tokens = None if tokens is None else integers("--tokens", tokens)
    models = [name.strip() for name in model.split(",")]
    configs = [read_config(resolve_model_path(name, "dummy")) for name in models]
    schemes = [ONLINE[name] for name in names]
    path = registry.load_part("tune").tune(configs, all_tokens, schemes)
    typer.echo(f"written: {path}")
