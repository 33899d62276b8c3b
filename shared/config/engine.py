"""EngineConfig: every flag of the engine, validated once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from diptych.shared.config.deterministic_flags import check_deterministic
from diptych.shared.config.parallel import check_parallel_flags
from diptych.shared.config.speculation_flags import check_speculation

Panel = Literal["reference", "optimized"]
SchedulePolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]
DataParallelPolicyName = Literal["round-robin", "least-requests", "least-tokens"]
EvictionPolicyName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
MoeRunnerName = Literal[
    "auto", "triton", "triton_kernel", "deep_gemm", "cutlass", "flashinfer_cutlass", "flashinfer_mxfp4",
    "flashinfer_trtllm", "flashinfer_cutedsl",
]  # fmt: skip
KvCacheDtypeName = Literal["auto", "fp8_e4m3"]
QuantizationMethod = Literal["fp8", "fp8-block", "int8", "int4"]
SpeculativeAlgorithm = Literal["eagle", "eagle3", "nextn", "standalone", "ngram"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Flags. `None` means that the engine chooses by model and hardware; `diptych.shared.engine.llm`
    resolves it, and the resolved value can be read from the engine. A bad value raises `ValueError` with
    flag, value and range.
    """

    # What to run
    model: str = "tiny-dense"  # a built-in model's name, a local folder, or a Hugging Face id
    tokenizer: str | None = None  # default: beside the model
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: seeded random weights, only config.json needed
    panel: Panel | None = None  # default: optimized on a CUDA GPU, else reference
    use: Mapping[str, str] = field(
        default_factory=dict
    )  # component -> panel, backend or package.module:Class
    device: str | None = None  # "cpu", "mps", "cuda", "cuda:1"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: float32 on cpu, else the model's
    )
    quantization: QuantizationMethod | None = None  # of linear layers whose weights are not quantized
    moe_runner_backend: MoeRunnerName = "auto"  # what computes the experts in the optimized panel
    random_seed: int = 0  # for requests without a seed, and for dummy weights
    deterministic: bool = False  # the bits of an answer depend on its request alone; slower

    # Several ranks
    tp: int = 1  # tensor parallelism: so many ranks have a part of the model each
    pp: int = 1  # pipeline parallelism: so many ranks have some of the layers each
    dp: int = 1  # data parallelism: so many replicas of the whole model
    dp_policy: DataParallelPolicyName = "least-tokens"  # the replica that gets a request
    dp_attention: bool = False  # the replicas of an MoE model share the experts, and step together
    ep: int = 1  # expert parallelism: the ranks are in so many parts, and each has some of the experts
    ep_num_redundant_experts: int = 0  # places for replicas of experts in each layer, over all parts
    eplb_rebalance_num_iterations: int | None = None  # rebalance experts each so many steps; None: never
    disaggregation: bool = False  # prefill and decode in two engines, with a process each

    # Memory
    kv_cache_dtype: KvCacheDtypeName = "auto"  # auto: that of the model; fp8_e4m3: 8 bits a value
    page_size: int = 1
    context_len: int | None = None  # default: the model's
    max_total_tokens: int | None = None  # size of the KV pool in tokens; default: from free memory
    mem_fraction_static: float = 0.9  # largest share of GPU memory for weights and KV pool
    max_running_requests: int = 256
    disable_radix_cache: bool = False
    eviction_policy: EvictionPolicyName = "lru"

    # Tiers of the prefix cache
    hicache_tokens: int | None = None  # tokens whose KV is kept in the computer's memory; None: no such tier
    hicache_dir: str | None = None  # folder of a tier on disk, below the one in memory
    hicache_dir_tokens: int = 1_000_000  # tokens whose KV is kept there

    # Scheduling
    schedule_policy: SchedulePolicyName = "fcfs"
    schedule_conservativeness: float = 1.0  # larger: fewer concurrent requests, fewer retractions
    max_prefill_tokens: int = 16384  # prompt tokens in one step, over all requests
    chunked_prefill_size: int | None = 8192  # a longer prompt is computed in chunks; None: no chunks
    enable_mixed_chunk: bool = False  # decode in the same step as a prefill
    enable_priority_scheduling: bool = False  # with fcfs and lof; requests of higher priority preempt
    priority_preemption_threshold: int = 10  # preempt only if the priorities differ by more than this
    max_queued_requests: int | None = None
    in_batch_prefix_check_threshold: int = (
        32  # search the queue for shared prefixes if at most this much is cached
    )
    in_batch_prefix_deprioritize_threshold: int = 32  # ... and defer requests that share at least this much
    waiting_timeout: float | None = None  # seconds in the queue
    running_timeout: float | None = None  # seconds since first scheduled

    # Speculative decoding (not together with mixed chunks)
    speculative: SpeculativeAlgorithm | None = None  # the drafter; None: no speculation
    speculative_draft_model: str | None = None  # a folder or id; ngram has none
    speculative_num_steps: int | None = None  # deepest draft; default: by algorithm
    speculative_topk: int | None = None  # beams kept while drafting; 1: a chain
    speculative_num_draft_tokens: int | None = None  # nodes of a verified tree; 1 + num_steps for a chain
    speculative_auto: bool = False  # adapt the depth to the acceptance rate, up to num_steps

    # LoRA adapters
    lora_paths: Mapping[str, str] = field(default_factory=dict)  # name -> folder, loaded at start
    max_loras_per_batch: int | None = None  # adapters in one batch; default: 8 with lora_paths, else none
    max_lora_rank: int | None = None  # of adapters loaded later; default: of lora_paths, at least 16

    # CUDA graphs
    disable_cuda_graph: bool = False  # launch each kernel of a decode step
    cuda_graph_max_bs: int | None = None  # largest captured batch; default: max_running_requests, at most 512
    cuda_graph_bs: tuple[int, ...] | None = None  # captured batch sizes; default: 1, 2, 4, 8, 12, 16, 24 ...
    cuda_graph_max_tokens: int | None = None  # largest captured prefill step, 0: none; default: by model

    # Server
    skip_warmup: bool = False  # on a GPU a server runs some requests of its own before the first one

    # Debugging
    check_invariants: bool = False  # after every step: slow, for tests and debugging
    check_idle: bool = False  # the same whenever no request is left

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and _DEFAULTS[name] is None):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        for name in (
            "tp", "pp", "dp", "ep", "page_size", "max_running_requests", "max_prefill_tokens",
            "context_len", "max_total_tokens", "eplb_rebalance_num_iterations",
            "chunked_prefill_size", "max_queued_requests", "cuda_graph_max_bs",
            "max_loras_per_batch", "max_lora_rank", "hicache_tokens", "hicache_dir_tokens",
            "speculative_num_steps", "speculative_topk", "speculative_num_draft_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            optional = _DEFAULTS[name] is None or name == "chunked_prefill_size"
            if not (value is None and optional) and not (
                isinstance(value, int) and not isinstance(value, bool) and value >= 1
            ):
                raise ValueError(f"{name} must be an integer >= 1{' or None' * optional}, got {value!r}")
        self._check_cuda_graph_bs()
        if self.cuda_graph_max_tokens is not None and self.cuda_graph_max_tokens < 0:
            raise ValueError(f"cuda_graph_max_tokens must be >= 0 or None, got {self.cuda_graph_max_tokens}")
        self._check_types()
        check_speculation(self)
        check_parallel_flags(self)
        check_deterministic(self)
        if not 0.0 < self.mem_fraction_static < 1.0:
            raise ValueError(f"mem_fraction_static must be in (0, 1), got {self.mem_fraction_static!r}")
        if not self.schedule_conservativeness > 0.0:
            raise ValueError(f"schedule_conservativeness must be > 0, got {self.schedule_conservativeness!r}")
        for name in ("waiting_timeout", "running_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0 seconds or None, got {value!r}")
        if self.priority_preemption_threshold < 0:
            raise ValueError(
                f"priority_preemption_threshold must be >= 0, got {self.priority_preemption_threshold}"
            )
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked_prefill_size ({self.chunked_prefill_size}) must be at least page_size "
                f"({self.page_size}): a chunk ends on a page boundary"
            )
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(
                f"enable_priority_scheduling works with the policies fcfs and lof, not {self.schedule_policy}"
            )

    def _check_types(self) -> None:
        """Check the types of flags that no other check covers: the text "false" is not False."""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if isinstance(default, bool) and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if isinstance(default, float) and not (is_number and math.isfinite(value)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        for name in ("waiting_timeout", "running_timeout"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"{name} must be a number of seconds or None, got {value!r}")
        for name in ("random_seed", "priority_preemption_threshold"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        for name in ("model", "tokenizer", "device", "speculative_draft_model", "hicache_dir"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and _DEFAULTS[name] is None):
                raise ValueError(f"{name} must be a text, got {value!r}")
        if not isinstance(self.use, Mapping):
            raise ValueError(f"use must map components to implementations, got {self.use!r}")
        if not isinstance(self.lora_paths, Mapping):
            raise ValueError(f"lora_paths must map names to folders, got {self.lora_paths!r}")

    def _check_cuda_graph_bs(self) -> None:
        sizes = self.cuda_graph_bs
        if sizes is None:
            return
        if not isinstance(sizes, (tuple, list)) or not sizes or not all(type(n) is int for n in sizes):
            raise ValueError(f"cuda_graph_bs must be a tuple of integers or None, got {sizes!r}")
        if min(sizes) < 1 or len(set(sizes)) != len(sizes):
            raise ValueError(f"cuda_graph_bs must be distinct integers >= 1, got {sizes!r}")
        if self.cuda_graph_max_bs is not None:
            raise ValueError(
                f"give cuda_graph_bs ({sizes!r}) or cuda_graph_max_bs ({self.cuda_graph_max_bs}), not both"
            )

    @property
    def num_lora_slots(self) -> int:
        """Adapters that a batch may have; 0: the engine takes none."""
        return self.max_loras_per_batch or (8 if self.lora_paths else 0)

    @property
    def num_ranks(self) -> int:
        """Processes, or threads in tests, that run the engine together."""
        return self.tp * self.pp

    def updated(self, **changes: Any) -> EngineConfig:
        """A copy with some flags changed; an unknown flag raises `ValueError` with the list of flags."""
        unknown = sorted(set(changes) - set(_DEFAULTS))
        if unknown:
            raise ValueError(
                f"unknown flag {', '.join(unknown)}; the flags are {', '.join(sorted(_DEFAULTS))}"
            )
        return replace(self, **changes)


_DEFAULTS = {f.name: f.default for f in fields(EngineConfig)}
_CHOICES = {
    "panel": get_args(Panel),
    "schedule_policy": get_args(SchedulePolicyName),
    "eviction_policy": get_args(EvictionPolicyName),
    "dp_policy": get_args(DataParallelPolicyName),
    "speculative": get_args(SpeculativeAlgorithm),
    "load_format": ("auto", "dummy"),
    "quantization": get_args(QuantizationMethod),
    "kv_cache_dtype": get_args(KvCacheDtypeName),
    "moe_runner_backend": get_args(MoeRunnerName),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
}
