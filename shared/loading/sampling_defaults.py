"""What a request gets for a sampling parameter that it leaves open: the value in generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diptych.shared.config.fields import Fields
from diptych.shared.config.hf_config import read_json
from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.types import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Those that SGLang and vLLM take. `do_sample` and lengths do not count, as there."""


def read_sampling_defaults(flags: EngineFlags) -> dict[str, Any]:
    """Fields of SamplingParams, by the flag `generation_config`: "auto" reads the model folder, "none"
    nothing, and anything else is a folder, which must have the file. Raises `ValueError` for a file that is
    damaged, or has a value that no request may have."""
    if flags.generation_config == "none":
        return {}
    if flags.generation_config == "auto":
        path = resolve_model_path(flags.model, flags.load_format) / FILE
        if not path.is_file():
            return {}
    else:
        path = Path(flags.generation_config).expanduser() / FILE
        if not path.is_file():
            raise ValueError(f"generation_config must be auto, none or a folder; there is no file {path}")
    fields = Fields(read_json(path), str(path))
    found = {name: fields.values[name] for name in NAMES if name in fields}
    if found.get("top_k") == 0:
        found["top_k"] = -1  # transformers' "keep all"
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; --generation-config none leaves the file out") from None
    return found


def text_of(defaults: Mapping[str, Any]) -> str:
    """For people: "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
