"""Every flag of the engine, once: default, help, range, and below it what it costs.

`EngineConfig` checks the values, the commands take a flag as an option of its name, and
docs/reference/engine-flags.md has them as tables: all from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diptych.shared.flags.flag import flag

Panel = Literal["reference", "optimized"]
SchedulePolicyName = Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"]
DataParallelPolicyName = Literal["round-robin", "least-requests", "least-tokens"]
EvictionPolicyName = Literal["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]
MoeRunnerName = Literal[
    "auto", "triton", "triton_kernel", "deep_gemm", "cutlass", "flashinfer_cutlass", "flashinfer_mxfp4",
    "flashinfer_trtllm", "flashinfer_cutedsl",
]  # fmt: skip
KvCacheDtypeName = Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
QuantizationMethod = Literal["fp8", "fp8-block", "int8", "int4", "nvfp4"]
SpeculativeAlgorithm = Literal["eagle", "eagle3", "nextn", "dflash", "standalone", "ngram"]

MODEL, RANKS, MEMORY, TIERS = "What to run", "Several ranks", "Memory", "Tiers of the prefix cache"
SCHEDULING, SPECULATION, LORA = "Scheduling", "Speculative decoding", "LoRA adapters"
GRAPHS, SERVER, DEBUGGING = "CUDA graphs", "Server", "Debugging"


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """`None` means that the engine chooses by model and hardware; `diptych.shared.engine.llm` resolves it,
    and the resolved value can be read from the engine."""

    model: str = flag(
        MODEL, "tiny-dense", "Built-in model, local folder, GGUF file or Hugging Face id.", short="-m"
    )
    """Weights are read from safetensors files or a GGUF file, one tensor at a time."""
    tokenizer: str | None = flag(MODEL, None, "Folder or id of the tokenizer. Default: the model's.")
    """Needed only where the model folder has none."""
    tool_call_parser: str = flag(
        MODEL,
        "auto",
        "How the model writes tool calls: a dialect's name, or file.py:Class. Default: by its template.",
    )
    """A wrong one shows calls as text. `none`: the model calls no tools, and a request cannot demand it."""
    reasoning_parser: str = flag(
        MODEL,
        "auto",
        "Markers of the model's reasoning: a name of SGLang's, or none. Default: the dialect's.",
    )
    """A wrong one shows the reasoning as the answer."""
    generation_config: str = flag(
        MODEL,
        "auto",
        "Folder of the generation_config.json with defaults of sampling; none. Default: the model's.",
        metavar="FOLDER",
    )
    """none: temperature 1, and no other change of the distribution."""
    load_format: Literal["auto", "dummy"] = flag(
        MODEL, "auto", "dummy: seeded random weights, only config.json is needed."
    )
    """dummy starts without a checkpoint: for benchmarks and tests of memory, never for answers."""
    panel: Panel | None = flag(MODEL, None, "Version of the components. Default: optimized on a CUDA GPU.")
    """The reference panel is slower and runs on any device. Both give the same answers."""
    use: Mapping[str, str] = flag(
        MODEL,
        {},
        "Take a component from elsewhere: a panel, a backend or package.module:Class. "
        "Repeat it, or separate by commas.",
        metavar="COMPONENT=IMPLEMENTATION",
    )
    """One component from elsewhere costs the fusions that its panel makes with it: optimized models over
    reference layers run one kernel after the other."""
    device: str | None = flag(MODEL, None, "cpu, mps, cuda or cuda:1. Default: a GPU if there is one.")
    """A panel or backend that cannot run on the device is refused at start."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        MODEL, "auto", "Number format of weights and activations; auto: float32 on a CPU, else the model's."
    )
    """float32 takes twice the memory and bandwidth of 16 bits. Comparisons of texts are exact in float32
    only."""
    quantization: QuantizationMethod | None = flag(
        MODEL, None, "Quantize linear layers whose weights are not quantized. Default: no."
    )
    """Rounds the weights while they are loaded. A checkpoint that is quantized already needs no flag."""
    moe_runner_backend: MoeRunnerName = flag(MODEL, "auto", "What computes experts in the optimized panel.")
    """One that cannot be used is refused when the engine starts."""
    random_seed: int = flag(MODEL, 0, "Seed of dummy weights and of requests without a seed.")
    """Two engines with the same seed and the same requests in the same order give the same answers."""
    deterministic: bool = flag(MODEL, False, "The bits of an answer depend on its request alone; slower.")
    """Tokens and log-probabilities are equal bit for bit whatever runs beside a request."""

    tp: int = flag(RANKS, 1, "Tensor parallelism: ranks that have a part of the model each.", at_least=1)
    """Each rank has a part of the weights and of the KV heads. Two sums over ranks per layer. See the limits
    below."""
    pp: int = flag(RANKS, 1, "Pipeline parallelism: ranks that have some of the layers each.", at_least=1)
    """Each rank has the weights and the KV of its layers. A step passes the ranks in turn, and several
    batches are under way to keep them all working. With --tp each stage has so many ranks."""
    two_batch_tokens: int | None = flag(
        RANKS, None, "With several ranks: prefill passes of so many tokens run as two halves.",
        at_least=2,
    )  # fmt: skip
    """Default: none. One half computes while sums over ranks, or tokens for experts, of the other are under
    way. Pays where these take long; such a pass launches twice as many kernels, without CUDA graphs."""
    dp: int = flag(RANKS, 1, "Data parallelism: replicas of the whole model.", at_least=1)
    """Each replica has the whole model and a KV pool of its own, so a cached prefix is in one of them."""
    dp_policy: DataParallelPolicyName = flag(RANKS, "least-tokens", "The replica that gets a request.")
    """least-tokens counts prompt and output tokens of the requests that a replica has; round-robin looks at
    nothing."""
    dp_attention: bool = flag(RANKS, False, "With --dp: the replicas of an MoE model share the experts.")
    """Attention and its KV are per replica; experts are divided among all ranks. Replicas without work step
    along."""
    ep: int = flag(
        RANKS, 1, "Expert parallelism: parts of the ranks, with some of the experts each.", at_least=1
    )
    """Each rank has fewer experts, whole, instead of a part of each. A step waits for the rank with the most
    tokens."""
    ep_num_redundant_experts: int = flag(
        RANKS, 0, "With --ep: places for replicas of experts in each layer, over all parts.", at_least=0
    )
    """Replicas divide the load of busy experts. Each takes the memory of an expert in every layer."""
    eplb_rebalance_num_iterations: int | None = flag(
        RANKS, None, "With --ep: steps between two rebalances of experts. Default: never.", at_least=1
    )
    """A rebalance moves weights between ranks; no step runs meanwhile."""
    elastic_ep: bool = flag(RANKS, False, "With --dp-attention: go on when a replica ends.")
    """The others take over its experts, for which they need redundant ones as room. Its requests end with an
    error. Without it, and for the first replica, all end."""
    disaggregation: bool = flag(RANKS, False, "Prefill and decode in two engines, a process each.")
    """Prompts do not delay running requests. Twice the weights and pools, and the KV of each prompt is
    copied."""
    disaggregation_mode: Literal["prefill", "decode"] | None = flag(
        RANKS, None, "Of a server: compute prompts for other servers, or let others compute them."
    )
    """Any number of both on any computers, which `diptych route` pairs. Each has the whole model and a pool.
    They prove the cluster's secret to each other."""
    disaggregation_host: str = flag(
        RANKS, "127.0.0.1", "With --disaggregation-mode prefill: address that decode servers connect to."
    )
    """Prompts and KV on the way have a code of the secret and are not encrypted."""
    disaggregation_port: int = flag(
        RANKS, 0, "With --disaggregation-mode prefill: its port; 0: any free one.", at_least=0
    )
    """The router learns it from the server; without a router decode servers need it."""
    prefill_servers: str | None = flag(
        RANKS, None, "With --disaggregation-mode decode: HOST:PORT,... Default: those that the router names."
    )
    """Without a router a prompt goes to the one of these with the fewest prompts."""
    dist_timeout: int = flag(
        RANKS, 120, "Seconds that a rank waits for the others: at the start and in a collective.", at_least=1
    )
    """A rank that is later ends the engine. Longer for slow disks, where one rank reads its weights last."""
    cluster_secret_file: str | None = flag(
        RANKS, None, "Secret of a launcher's ranks and of split servers. Default: DIPTYCH_CLUSTER_SECRET."
    )
    """They prove to each other that they know it. The file is yours alone (mode 0600), the same on every
    computer, and has at least 16 bytes."""

    kv_cache_dtype: KvCacheDtypeName = flag(
        MEMORY, "auto", "auto: the model's number format; bfloat16; fp8_e4m3 or fp8_e5m2: 8 bits a value."
    )
    """bfloat16 halves the pool of a float32 model. fp8_e4m3 doubles the tokens of a bfloat16 pool and halves
    what decoding reads. K and V keep 4 significant bits, so answers change. Scales come from the checkpoint,
    else they are 1. The draft model of speculative decoding keeps its own dtype."""
    page_size: int = flag(MEMORY, 1, "Tokens of a KV page.", at_least=1)
    """Larger pages make page tables shorter. A shared prefix ends at a page boundary, so up to `page_size` -
    1 tokens of each hit are computed again, and each request wastes half a page on average."""
    context_len: int | None = flag(MEMORY, None, "Longest sequence. Default: the model's.", at_least=1)
    """Longer prompts are refused with the limit in the message. `req_to_token` takes 4 bytes per request and
    position."""
    max_total_tokens: int | None = flag(
        MEMORY, None, "Tokens of the KV pool. Default: from free memory.", at_least=1
    )
    """A small pool runs fewer requests together. Use it to fix the size in tests, or to leave memory for
    another process."""
    mem_fraction_static: float = flag(
        MEMORY, 0.9, "Largest share of the GPU's memory for weights and KV pool.", above=0, below=1
    )
    """Larger gives more KV, up to what a step of the configured size needs, which is always kept free.
    Smaller leaves memory to other processes."""
    max_running_requests: int = flag(MEMORY, 256, "Most concurrent requests.", at_least=1)
    """A larger batch has more throughput and a longer inter-token latency. It also sets the largest captured
    graph."""
    disable_radix_cache: bool = flag(MEMORY, False, "Never reuse the KV of an earlier prompt.")
    """Saves the CPU time of match and insert. Prompts with a common beginning are computed each time."""
    eviction_policy: EvictionPolicyName = flag(MEMORY, "lru", "Which cached prefix is evicted first.")
    """Costs nothing until the pool is full. lru suits chats; priority keeps the KV of important requests."""

    max_kept_states: int | None = flag(
        MEMORY, None, "States of linear attention in the prefix cache. Default: max_running_requests.",
        at_least=0,
    )  # fmt: skip
    """Prompts of models with linear attention continue from these. Each takes as much memory as a running
    request's state. Taken before the KV pool is sized."""

    hicache_tokens: int | None = flag(
        TIERS, None, "Tokens whose KV is kept in the computer's memory. Default: none.", at_least=1
    )
    """Takes as much of the computer's memory as so many tokens take of the KV pool. Loading pays where a
    token takes longer to compute than to copy."""
    hicache_dir: str | None = flag(TIERS, None, "Folder of a tier on disk, below the one in memory.")
    """Pages of other models, types and adapters in the same folder are never mistaken."""
    hicache_dir_tokens: int = flag(TIERS, 1_000_000, "Tokens whose KV each engine keeps there.", at_least=1)
    """Replicas of dp divide them. The pages that were not used for the longest time are removed."""

    disable_overlap_schedule: bool = flag(
        SCHEDULING, False, "Process the results of a step before the next step is launched."
    )
    """The optimized panel only: the reference never overlaps. The GPU waits for the CPU between steps; tokens
    come one step earlier."""
    disable_prefill_overlap: bool = flag(
        SCHEDULING, False, "Process a prefill's results before another prefill is launched."
    )
    """The optimized panel only. While prompts queue, first tokens do not wait until the next prefill is
    formed and launched; the GPU waits for the CPU meanwhile."""
    num_continuous_decode_steps: int | None = flag(
        SCHEDULING, None, "Decode steps that are launched together, without a decision between them. "
        "Default: with CUDA graphs of a small model up to 4, else 1.", at_least=1
    )  # fmt: skip
    """With more the GPU waits less for the CPU, where steps are short. Tokens come in groups, a new request
    waits for all steps of a group, and one that stops computes tokens of up to two groups in vain: so by
    default a group has at most 64 tokens, and is of a model without linear attention whose weights take at
    most 2.5 GB. While one request of a batch has a grammar, a penalty, tokens left of min_new_tokens or
    log-probabilities, all its steps are launched alone; so are mixed steps, the first step behind a prompt,
    and those of a full pool."""
    schedule_policy: SchedulePolicyName = flag(SCHEDULING, "fcfs", "The order of waiting requests.")
    """fcfs is fair. lpm and dfs-weight raise the hit rate of the radix cache and may delay requests without a
    hit. lof ends offline work earlier, because long answers start first."""
    schedule_conservativeness: float = flag(
        SCHEDULING, 1.0, "Larger: fewer concurrent requests, fewer retractions.", above=0
    )
    """Admission reserves 0.7 times this of the tokens that running requests may still produce. Lower it for
    more concurrency if few answers reach their limit."""
    max_prefill_tokens: int = flag(
        SCHEDULING, 16384, "Most prompt tokens of one step, over all requests.", at_least=1
    )
    """Larger steps use the GPU better and delay decoding requests longer."""
    chunked_prefill_size: int | None = flag(
        SCHEDULING, 8192, "Prompt tokens of one step before a prompt is cut; -1: never cut.", at_least=1
    )
    """The activations of a chunk are kept free of KV. Smaller chunks bound the time that decoding requests
    wait for a long prompt. They lengthen its TTFT, because each chunk reads the KV of the earlier ones."""
    enable_mixed_chunk: bool = flag(SCHEDULING, False, "Decode in the same step as a prefill.")
    """Decoding requests do not wait for prefill steps. Raises offline throughput of large shapes with small
    chunks, lowers it for small models. Not with speculation."""
    enable_priority_scheduling: bool = flag(
        SCHEDULING, False, "With fcfs and lof: requests of higher priority go first and preempt others."
    )
    """A preempted request computes its tokens again, except those still in the radix cache."""
    priority_preemption_threshold: int = flag(
        SCHEDULING, 10, "Preempt only if the priorities differ by more than this.", at_least=0
    )
    """Lower values preempt more often."""
    max_queued_requests: int | None = flag(
        SCHEDULING, None, "Most requests waiting. Default: any number.", at_least=1
    )
    """More requests end with status 503."""
    in_batch_prefix_check_threshold: int = flag(
        SCHEDULING, 32, "Search the queue for shared prefixes if at most this much is cached; -1: never.",
        at_least=-1,
    )  # fmt: skip
    """Applies to lpm and dfs-weight. Costs one more match per waiting request and step."""
    in_batch_prefix_deprioritize_threshold: int = flag(
        SCHEDULING, 32, "... and defer requests that share at least so many tokens.", at_least=0
    )
    """Deferred requests wait one step and then find the prefix in the cache."""
    waiting_timeout: float | None = flag(SCHEDULING, None, "Seconds in the queue. Default: any.", above=0)
    """The request ends with `FinishAbort` and status 503. Checked once per step."""
    running_timeout: float | None = flag(
        SCHEDULING, None, "Seconds since first scheduled. Default: any.", above=0
    )
    """The request ends with `FinishAbort` and status 503; the tokens so far were already streamed. Checked
    once per step."""

    speculative: SpeculativeAlgorithm | None = flag(SPECULATION, None, "Draft and verify. Default: no.")
    """Faster at small batches, where a step is bound by reading the weights. At large batches it verifies
    tokens that are rejected, and may lose. ngram needs no model and suits answers that repeat the prompt."""
    speculative_draft_model: str | None = flag(SPECULATION, None, "Folder or id of the draft model.")
    """Its weights and its KV pool take memory. Required except for ngram."""
    speculative_num_steps: int | None = flag(
        SPECULATION, None, "Deepest draft. Default: by algorithm.", at_least=1
    )
    """Deeper drafts pay while most of them are accepted. Each step is one pass of the draft model."""
    speculative_topk: int | None = flag(
        SPECULATION, None, "Beams kept while drafting; 1: a chain. Default: by algorithm.", at_least=1
    )
    """More beams find the accepted path more often, and draft and verify more nodes."""
    speculative_num_draft_tokens: int | None = flag(
        SPECULATION, None, "Nodes of a verified tree, the newest token included. Default: by algorithm.",
        at_least=1,
    )  # fmt: skip
    """Each node needs a slot, a row of logits and its share of the verify step."""
    speculative_auto: bool = flag(
        SPECULATION, False, "Draft less while little is accepted, up to the numbers above."
    )
    """Captures graphs of every depth that it may choose, so the engine starts later. Answers stay the
    same."""

    speculative_ngram_private: bool = flag(
        SPECULATION, False, "n-gram drafts from the request's own tokens only."
    )
    """By default drafts also come from other requests with the same adapter and cache salt. One is accepted
    only if the model itself gives that token, but how many are accepted shows in the time of an answer."""

    lora_paths: Mapping[str, str] = flag(
        LORA, {}, "An adapter to load at start. Repeat it, or separate by commas.", metavar="NAME=FOLDER"
    )
    """Adapters in PEFT's format. Each is read at start and checked against the model."""
    max_loras_per_batch: int | None = flag(
        LORA, None, "Adapters in one batch. Default: 8 with --lora-paths, else none.", at_least=1
    )
    """Each slot takes GPU memory for an adapter of the largest rank in every layer. Requests of one adapter
    too many wait."""
    max_lora_rank: int | None = flag(
        LORA,
        None,
        "Largest rank of an adapter. Default: by --lora-paths, at least 16.",
        at_least=1,
    )
    """Memory and work grow with it, also for adapters of a lower rank."""

    disable_cuda_graph: bool = flag(GRAPHS, False, "Launch each kernel of a decode step.")
    """Starts in seconds less and frees the graphs' memory. A decode step takes as long as launching its
    kernels."""
    cuda_graph_max_bs: int | None = flag(
        GRAPHS, None, "Largest captured batch. Default: --max-running-requests, at most 512.", at_least=1
    )
    """Larger batches run without a graph."""
    cuda_graph_bs: tuple[int, ...] | None = flag(
        GRAPHS, None, "Captured batch sizes. Default: 1, 2, 4, 8, 12, 16, then every eighth.",
        at_least=1, metavar="N,N,...",
    )  # fmt: skip
    """Fewer sizes start faster and pad more. A batch is padded to the next size."""
    cuda_graph_max_tokens: int | None = flag(
        GRAPHS, None, "Largest captured prefill step, in tokens; 0: none. Default: by the model's size.",
        at_least=0,
    )  # fmt: skip
    """Without it short prompts wait for the CPU. Long prompts wait for the GPU, so graphs gain nothing
    there."""
    cuda_graph_block_len: int | None = flag(
        GRAPHS, None, "Capture passes of block diffusion too, for blocks of this length.", at_least=1
    )
    """A divisor of the page size. Blocks of other lengths run without graphs."""

    kernel_cache: str | None = flag(
        SERVER, None, "File of compiled kernels, which `diptych warm` wrote on a GPU of this kind."
    )
    """It contains programs. A file for another GPU, torch, Triton, FlashInfer or source is ignored, with one
    line that names the difference."""
    decode_log_interval: int | None = flag(
        SERVER, None, "Batches between two lines about the load on stderr. Default: none.", at_least=1
    )
    """A line has the requests that run and wait, tokens per second, hit rate of the prefix cache, and use of
    the KV pool."""
    skip_warmup: bool = flag(
        SERVER, False, "Compile kernels when they are first used, and serve without warm-up requests."
    )
    """The engine is ready earlier, and requests wait for kernels to be compiled. Warm-up requests, which only
    a server on a GPU gets, count in the totals of `/metrics`."""

    check_invariants: bool = flag(DEBUGGING, False, "Check every pool after every step; slow.")
    """Every step reads all pools and the whole tree."""
    check_idle: bool = flag(DEBUGGING, False, "Check every pool whenever no request is left.")
    """Finds a leak of memory when the last request ends, before it stops new ones. Costs one check of all
    pools each time. A violation ends the engine with the message of the check."""

    @property
    def num_lora_slots(self) -> int:
        """Adapters that a batch may have; 0: the engine takes none."""
        return self.max_loras_per_batch or (8 if self.lora_paths else 0)

    @property
    def num_ranks(self) -> int:
        """Processes, or threads in tests, that run the engine together."""
        return self.tp * self.pp
