"""The contracts: one abstract class per component, its docstring says what must hold."""

from shared.interfaces.attention import AttentionBackend, BatchAttention
from shared.interfaces.collectives import Collectives
from shared.interfaces.detokenizer import Detokenizer
from shared.interfaces.draft_model import DraftModel, DraftOutput
from shared.interfaces.draft_tree import DraftTreeOps
from shared.interfaces.drafter import Drafter, DrafterParts
from shared.interfaces.expert_balancer import ExpertBalancer, ExpertMap
from shared.interfaces.expert_dispatch import ExpertDispatch
from shared.interfaces.grammar import Grammar
from shared.interfaces.host_pool import HostPool
from shared.interfaces.layers import (
    GeluTanhAndMul,
    GemmaRMSNorm,
    Layers,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)
from shared.interfaces.lora import LoraPool
from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from shared.interfaces.mla_attention import MLAAttentionBackend
from shared.interfaces.mla_memory_pool import MLATokenToKVPool
from shared.interfaces.model import CausalLM
from shared.interfaces.model_runner import ModelRunner
from shared.interfaces.moe import FusedExperts, MoE, TopK, TopKOutput
from shared.interfaces.prefill_adder import (
    CLIP_MAX_NEW_TOKENS,
    MAX_WAITS,
    AddReqResult,
    PrefillAdder,
    PrefillBudget,
)
from shared.interfaces.prefix_cache import (
    CacheNode,
    CacheWatcher,
    InsertResult,
    MatchResult,
    PrefixCache,
    RadixKey,
    WatchablePrefixCache,
)
from shared.interfaces.quantization import Quantization, QuantizedLinear
from shared.interfaces.quantized_experts import QuantizedExperts
from shared.interfaces.sampler import Sampler
from shared.interfaces.schedule_policy import PolicyResult, SchedulePolicy
from shared.interfaces.scheduler import Scheduler, SchedulerParts, SchedulerState, SchedulerStats
from shared.interfaces.transport import TransferStatus, Transport

__all__ = [
    "CLIP_MAX_NEW_TOKENS",
    "MAX_WAITS",
    "AddReqResult",
    "AttentionBackend",
    "BatchAttention",
    "CacheNode",
    "CacheWatcher",
    "CausalLM",
    "Collectives",
    "Detokenizer",
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
    "Layers",
    "LoraPool",
    "MLAAttentionBackend",
    "MLATokenToKVPool",
    "MatchResult",
    "MergedLinear",
    "MoE",
    "ModelRunner",
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
    "Sampler",
    "SchedulePolicy",
    "Scheduler",
    "SchedulerParts",
    "SchedulerState",
    "SchedulerStats",
    "SiluAndMul",
    "TokenToKVPool",
    "TokenToKVPoolAllocator",
    "TopK",
    "TopKOutput",
    "TransferStatus",
    "Transport",
    "WatchablePrefixCache",
]
