"""Configuration: of the engine (flags, validated) and of a model (from a Hugging Face config.json)."""

from shared.config.draft import DraftConfig, DraftFormat
from shared.config.engine import EngineConfig
from shared.config.model import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from shared.config.quantization import QuantConfig
from shared.config.speculation import draft_shape

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
]
