"""Values that follow from the model and the computer where the configuration leaves them open."""

from __future__ import annotations

from pathlib import Path

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.text.tokenizer import TOKENIZER_FILES, Tokenizer


def resolve_config(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace None in flags by values that follow from the model and the machine."""
    device = config.device or default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this torch ({torch.__version__}) sees no CUDA GPU")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device=mps: this torch ({torch.__version__}) sees no Apple GPU")
    if not device.startswith("cuda") and device not in ("cpu", "mps"):
        raise ValueError(f"device must be cpu, mps, cuda or cuda:N, got {device!r}")
    if device == "mps" and config.kv_cache_dtype == "fp8_e4m3":
        raise ValueError("kv_cache_dtype=fp8_e4m3: Apple GPUs have no FP8; use kv_cache_dtype=auto")
    context_len = config.context_len or model_config.context_len
    if context_len > model_config.context_len:
        raise ValueError(
            f"context_len={context_len} exceeds the model's {model_config.context_len} positions"
        )
    panel = config.panel or default_panel(device)
    if panel == "optimized" and not registry.runs_triton(device):
        raise ValueError(f"panel=optimized {registry.NO_TRITON}, and the device is {device}")
    return config.updated(device=device, panel=panel, context_len=context_len)


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_panel(device: str) -> str:
    return "optimized" if device.startswith("cuda") else "reference"


def dtype_of(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    """The dtype of activations."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.float32 if config.device == "cpu" else model_config.dtype


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer | None:
    """The model's tokenizer, or the one that the flag names; None for a model without one."""
    if config.tokenizer is not None:
        tokenizer_folder = Path(config.tokenizer).expanduser()
        if not tokenizer_folder.is_dir():
            tokenizer_folder = resolve_model_path(config.tokenizer, "dummy")
        return Tokenizer.from_pretrained(tokenizer_folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_pretrained(folder)
