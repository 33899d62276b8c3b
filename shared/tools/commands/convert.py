"""`diptych convert`: writes a checkpoint as a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    model: Annotated[str, typer.Argument(help="Built-in model, local folder or Hugging Face id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new file, named *.gguf.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Of matrices: f32, f16, bf16 or q8_0.")] = "f32",
) -> None:
    """Write MODEL as a GGUF file, with its tokenizer and chat template, for llama.cpp."""
    from diptych.shared.loading.gguf_file import write_gguf
    from diptych.shared.loading.load_model import LoadingBar
    from diptych.shared.loading.model_path import resolve_model_path

    write_gguf(resolve_model_path(model), output, dtype, LoadingBar().update)
    print(f"{output}: {output.stat().st_size / 1e6:,.1f} MB")
