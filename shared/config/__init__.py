"""Configuration: of the engine (flags, validated) and of a model (from a Hugging Face config.json)."""

from diptych.shared.config.draft import DraftConfig, DraftFormat
from diptych.shared.config.engine import EngineConfig
from diptych.shared.config.hf_config import parse_config, read_config
from diptych.shared.config.hf_draft_config import parse_draft_config, read_draft_config
from diptych.shared.config.hf_quantization import parse_quantization
from diptych.shared.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from diptych.shared.config.quant_config import QuantConfig
from diptych.shared.config.speculation_flags import draft_shape

__all__ = [
    "DraftConfig",
    "DraftFormat",
    "EngineConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "QuantConfig",
    "RopeConfig",
    "draft_shape",
    "parse_config",
    "parse_draft_config",
    "parse_quantization",
    "read_config",
    "read_draft_config",
]
