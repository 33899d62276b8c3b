"""The vocabulary of the engine: plain data that both panels exchange."""

from diptych.shared.types.batch import (
    BatchResult,
    ForwardBatch,
    ForwardMode,
    SamplingBatchInfo,
    ScheduleBatch,
)
from diptych.shared.types.diffusion import DiffusionParams
from diptych.shared.types.draft_tree import Accepted, Beams, DraftTree, TopTokens
from diptych.shared.types.finish import (
    FinishAbort,
    FinishError,
    FinishLength,
    FinishReason,
    FinishRegex,
    FinishString,
    FinishToken,
)
from diptych.shared.types.lora import LoraAdapter, LoraWeights
from diptych.shared.types.outputs import (
    GenerateOutput,
    InputLogprobs,
    LogitsOutput,
    LogprobsOutput,
    SampleOutput,
    SpeculationStats,
    StepOutput,
    TokenLogprob,
)
from diptych.shared.types.prompt_embeds import PromptEmbeds
from diptych.shared.types.req import Req
from diptych.shared.types.sampling_params import MIN_TEMPERATURE, SamplingParams
from diptych.shared.types.speculation import DraftBatch, DraftShape

__all__ = [
    "MIN_TEMPERATURE",
    "Accepted",
    "BatchResult",
    "Beams",
    "DiffusionParams",
    "DraftBatch",
    "DraftShape",
    "DraftTree",
    "FinishAbort",
    "FinishError",
    "FinishLength",
    "FinishReason",
    "FinishRegex",
    "FinishString",
    "FinishToken",
    "ForwardBatch",
    "ForwardMode",
    "GenerateOutput",
    "InputLogprobs",
    "LogitsOutput",
    "LogprobsOutput",
    "LoraAdapter",
    "LoraWeights",
    "PromptEmbeds",
    "Req",
    "SampleOutput",
    "SamplingBatchInfo",
    "SamplingParams",
    "ScheduleBatch",
    "SpeculationStats",
    "StepOutput",
    "TokenLogprob",
    "TopTokens",
]
