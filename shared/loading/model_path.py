"""Where a model's files are (a built-in name, folder, GGUF file or Hugging Face id), and its tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.loading.safetensors_file import CHECKPOINT_FILES
from diptych.shared.text.tokenizer import TOKENIZER_FILES, Tokenizer

ASSETS = Path(__file__).parents[1] / "assets"
QUANTIZED = re.compile(r"(.+)-(fp8|int8|int4)")
"""A built-in model with quantized weights: tiny-dense-int4."""


def builtin_models() -> list[str]:
    """Names of the models that come with the project. (A draft model has no tokenizer of its own.)"""
    return sorted(p.parent.name for p in ASSETS.glob("*/tokenizer.json"))


def builtin_draft_models() -> list[str]:
    """Names of the speculation heads that come with the project."""
    return sorted({p.parent.name for p in ASSETS.glob("*/config.json")} - set(builtin_models()))


def is_shape(model: str) -> bool:
    """Whether the name is a shape of assets/configs, which can only have random weights."""
    return (ASSETS / "configs" / model / "config.json").is_file()


def resolve_model_path(model: str, load_format: str = "auto") -> Path:
    """The folder that holds `model`'s config.json. Raises `ValueError` with the searched names and places.

    With load_format="dummy" the names of the shapes in assets/configs, which have no weights, are accepted
    too.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a model folder: it has no config.json")
        return folder
    if (ASSETS / model / "config.json").is_file():
        return ASSETS / model
    if (match := QUANTIZED.fullmatch(model)) and match[1] in builtin_models():
        from diptych.shared.loading.builtin_quantized import quantized_folder

        return quantized_folder(ASSETS / match[1], match[2])
    if is_shape(model):
        if load_format != "dummy":
            raise ValueError(
                f"{model} is a shape without weights: use load_format='dummy', or name a checkpoint"
            )
        return ASSETS / "configs" / model
    if folder.is_file() and folder.suffix == ".gguf":
        from diptych.shared.loading.gguf_folder import gguf_folder

        return gguf_folder(folder)
    if folder.exists():
        raise ValueError(
            f"{folder} is a file; a model is a folder with config.json and *.safetensors, or a *.gguf file"
        )
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _download(model)
    raise ValueError(
        f"no model {model!r}: neither a folder, nor a built-in model ({', '.join(builtin_models())}; "
        "quantized: tiny-dense-int4, -int8, -fp8), nor a Hugging Face id (owner/name)"
    )


def _download(model_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=CHECKPOINT_FILES))
    except Exception as error:  # the hub's errors have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"no folder {model_id!r} here, and Hugging Face did not give it: {reason}") from None


def load_tokenizer(config: EngineFlags, folder: Path) -> Tokenizer | None:
    """The model's tokenizer, or the one that the flag names; None for a model without one."""
    if config.tokenizer is not None:
        tokenizer_folder = Path(config.tokenizer).expanduser()
        if not tokenizer_folder.is_dir():
            tokenizer_folder = resolve_model_path(config.tokenizer, "dummy")
        return Tokenizer.from_pretrained(tokenizer_folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_pretrained(folder)
