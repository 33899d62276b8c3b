"""The contracts: one abstract class per component, its docstring says what must hold."""

from diptych.shared.interfaces.attention import AttentionBackend, BatchAttention
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.interfaces.detokenizer import Detokenizer
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.interfaces.disk_tier import DiskTier, PageMemory
from diptych.shared.interfaces.draft_model import (
    BlockDraftModel,
    DraftModel,
    DraftOutput,
    StepDraftModel,
)
from diptych.shared.interfaces.draft_tree import DraftTreeOps
from diptych.shared.interfaces.drafter import Drafter, DrafterParts
from diptych.shared.interfaces.expert_balancer import ExpertBalancer, ExpertMap
from diptych.shared.interfaces.expert_dispatch import ExpertDispatch
from diptych.shared.interfaces.grammar import Grammar
from diptych.shared.interfaces.host_pool import HostPool
from diptych.shared.interfaces.kv_cache import KVCache
from diptych.shared.interfaces.layers import (
    GeluTanhAndMul,
    GemmaRMSNorm,
    Layers,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)
from diptych.shared.interfaces.linear_attention import (
    BatchLinearAttention,
    LinearAttention,
    LinearLayer,
    StatePool,
)
from diptych.shared.interfaces.lora import LoraPool
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from diptych.shared.interfaces.mla_attention import MLAAttentionBackend
from diptych.shared.interfaces.mla_memory_pool import MLATokenToKVPool
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.model_runner import ModelRunner, RunModel, RunnerFeatures
from diptych.shared.interfaces.moe import FusedExperts, MoE, TopK, TopKOutput
from diptych.shared.interfaces.prefill_adder import (
    CLIP_MAX_NEW_TOKENS,
    MAX_WAITS,
    AddReqResult,
    PrefillAdder,
    PrefillBudget,
)
from diptych.shared.interfaces.prefix_cache import (
    CacheNode,
    CacheWatcher,
    InsertResult,
    MatchResult,
    PrefixCache,
    RadixKey,
    WatchablePrefixCache,
)
from diptych.shared.interfaces.quantization import Quantization, QuantizedLinear
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.interfaces.sampler import Sampler
from diptych.shared.interfaces.schedule_policy import PolicyResult, SchedulePolicy
from diptych.shared.interfaces.scheduler import (
    Scheduler,
    SchedulerFeature,
    SchedulerParts,
    SchedulerState,
    SchedulerStats,
)
from diptych.shared.interfaces.transport import TransferStatus, Transport
from diptych.shared.interfaces.vision import VisionTower

__all__ = [
    "CLIP_MAX_NEW_TOKENS",
    "MAX_WAITS",
    "AddReqResult",
    "AttentionBackend",
    "BatchAttention",
    "BatchLinearAttention",
    "BlockDraftModel",
    "CacheNode",
    "CacheWatcher",
    "CausalLM",
    "Collectives",
    "Detokenizer",
    "Dialect",
    "DiskTier",
    "DraftModel",
    "DraftOutput",
    "DraftTreeOps",
    "Drafter",
    "DrafterParts",
    "ExpertBalancer",
    "ExpertDispatch",
    "ExpertMap",
    "FusedExperts",
    "GeluTanhAndMul",
    "GemmaRMSNorm",
    "Grammar",
    "HostPool",
    "InsertResult",
    "KVCache",
    "Layers",
    "LinearAttention",
    "LinearLayer",
    "LoraPool",
    "MLAAttentionBackend",
    "MLATokenToKVPool",
    "MatchResult",
    "MergedLinear",
    "MoE",
    "ModelRunner",
    "PageMemory",
    "PolicyResult",
    "PrefillAdder",
    "PrefillBudget",
    "PrefixCache",
    "Quantization",
    "QuantizedExperts",
    "QuantizedLinear",
    "RMSNorm",
    "RadixKey",
    "ReqToTokenPool",
    "RotaryEmbedding",
    "RunModel",
    "RunnerFeatures",
    "Sampler",
    "SchedulePolicy",
    "Scheduler",
    "SchedulerFeature",
    "SchedulerParts",
    "SchedulerState",
    "SchedulerStats",
    "SiluAndMul",
    "StatePool",
    "StepDraftModel",
    "TokenToKVPool",
    "TokenToKVPoolAllocator",
    "TopK",
    "TopKOutput",
    "TransferStatus",
    "Transport",
    "VisionTower",
    "WatchablePrefixCache",
]
