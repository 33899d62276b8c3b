"""`diptych quantize`: writes a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diptych.shared.tools.commands import bench_run


def quantize(
    model: Annotated[str, typer.Argument(help="Built-in model, local folder or Hugging Face id.")],
    method: Annotated[str, typer.Option("--format", help="fp8, int8 or int4.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="A folder that is new or empty.")],
    device: Annotated[
        str | None, typer.Option(help="Where weights are rounded. Default: the engine's.", show_default=False)
    ] = None,
) -> None:
    """Round the linear layers of MODEL as `--quantization` does, and write the checkpoint in the format of
    compressed-tensors."""
    bench_run.check_folder(output)

    from diptych.shared.engine.build.settings import default_device
    from diptych.shared.loading.load_model import LoadingBar
    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.loading.save_quantized import save_quantized

    source = resolve_model_path(model)
    save_quantized(source, output, method, device or default_device(), LoadingBar().update)
    before, after = _weight_bytes(source), _weight_bytes(output)
    print(f"{output}: {after / 1e6:,.1f} MB of weights, {after / before:.0%} of {before / 1e6:,.1f} MB")


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
