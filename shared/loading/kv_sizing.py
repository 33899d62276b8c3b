"""Sizes the KV pool: the memory that is free after loading, minus the memory of steps."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil
import torch

from diptych.shared.config import EngineConfig, ModelConfig, draft_shape
from diptych.shared.config.engine import MAX_BLOCK_LEN
from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import Drafter, StatePool
from diptych.shared.loading.quantize import MERGED
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.sampling.logprobs import LOGPROB_ROWS

MAX_CPU_TOKENS = 65_536
"""Enough for the requests of a laptop; set max_total_tokens for more."""

CPU_MEMORY_FRACTION = 0.25
GIB = 2**30
STAGING_BYTES = 128 * 2**20
"""On the GPU, for copies to a tier in CPU memory: of KV, and as many of states."""

LIBRARIES = 1 * GIB
"""Workspaces of cuBLAS and of attention backends, compiled kernels, space between tensors."""
BYTES_PER_LOGIT = 24
"""Per row and token id: the head's output, its float32 copy, and the sampler's buffers (float64 sums)."""
BYTES_PER_GRAPH = 16 * 2**20
"""The memory that CUDA keeps for the kernels of a captured step, in addition to the tensors that all graphs
share."""
CHUNK = 64
"""Tokens of a chunk of linear attention."""
NUM_GRAPHS = 36
EXTEND_GRAPHS = 512 * 2**20
"""Prefill graphs, for the numbers of tokens that are captured by default: the larger a model, the fewer."""


@dataclass(frozen=True)
class MemoryPlan:
    """A memory plan in bytes. On a CPU it has only the pool."""

    num_tokens: int
    bytes_per_token: int
    total: int = 0  # of the GPU
    free_before: int = 0  # before the weights
    free: int = 0  # with the weights in place
    weights: int = 0
    reserved: dict[str, int] = field(default_factory=dict)  # for what comes while running
    reason: str = ""  # why not more tokens

    def rows(self) -> dict[str, str]:
        """The plan as (label, text) rows."""
        pool = self.num_tokens * self.bytes_per_token
        rows = {}
        if self.total:
            free = f"{_gib(self.free_before)} free before the weights, {_gib(self.free)} after"
            rows["GPU memory"] = f"{_gib(self.total)}: {free}"
            rows["weights"] = _gib(self.weights)
            parts = ", ".join(f"{what} {_gib(size)}" for what, size in self.reserved.items())
            rows["kept for steps"] = f"{_gib(sum(self.reserved.values()))} ({parts})"
        rows["KV pool"] = (
            f"{self.num_tokens:,} tokens of {self.bytes_per_token / 1024:g} KiB: {_gib(pool)} ({self.reason})"
        )
        return rows


def num_rows(config: EngineConfig) -> int:
    """The number of rows of req_to_token: one for each running request and the chunked prompt, twice. They
    are allocated first in, first out, so a freed row is not reused until the batch in flight has ended."""
    return 2 * (config.max_running_requests + 1)


def check_row_memory(config: EngineConfig, device: torch.device) -> None:
    """Raise `ValueError` if the rows of req_to_token are larger than the free memory. Other tables have a row
    for each running request too, and shorter ones."""
    num_bytes = (num_rows(config) + 1) * (config.context_len or 0) * torch.int32.itemsize
    check_memory(f"a table for max_running_requests={config.max_running_requests}", num_bytes, device)


def num_speculative_slots(config: EngineConfig, drafter: Drafter | None) -> int:
    """The slots that a request takes behind its committed ones while it speculates: for drafting, then for
    the tree. A row of req_to_token is longer than the context by this number."""
    if drafter is None:
        return 0
    shape = draft_shape(config)
    return max(drafter.num_slots(shape), shape.num_draft_tokens)


def kv_bytes_per_token(model_config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(model_config.of_layer(i).kv_size for i in model_config.kv_layers) * dtype.itemsize


def free_gpu_memory(device: torch.device) -> int:
    """Free bytes of a GPU, after emptying torch's cache; 0 for other devices."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise `ValueError`, before any allocation, if `what` needs more memory than is free."""
    is_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else psutil.virtual_memory().available
    if num_bytes > free:
        raise ValueError(
            f"{what} needs {num_bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on this "
            f"{'GPU' if is_gpu else 'computer'}"
        )


@contextlib.contextmanager
def must_fit(what: str) -> Iterator[None]:
    """In this block a failed allocation, of a size that no check has counted, raises `ValueError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0]
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate" not in text:
            raise
        raise ValueError(f"{what} does not fit into memory: {text}") from error


def plan_memory(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    free_before: int = 0,
    weights: int = 0,
    draft_bytes_per_token: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> MemoryPlan:
    """The size of the KV pool in whole pages: the flag if given, otherwise what fits *after* the weights are
    loaded, at most what all running requests can fill. `free_before`: free memory of the GPU before the
    weights; `weights`: their bytes; `draft_bytes_per_token`: bytes of a slot in a drafter's own pool;
    `kv_dtype`: of the KV pool, if it is not `dtype`."""
    bytes_per_token = kv_bytes_per_token(model_config, kv_dtype or dtype) + draft_bytes_per_token
    free, total, reserved = 0, 0, {}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = reserve_for_steps(config, model_config, dtype)
    if config.max_total_tokens is not None:
        num_tokens = config.max_total_tokens
        reason = f"max_total_tokens is {num_tokens}"
        check_memory(f"the KV pool (max_total_tokens={num_tokens})", num_tokens * bytes_per_token, device)
    else:
        budget, reason = _budget(config, free, total, sum(reserved.values()))
        num_tokens = max(budget, 0) // bytes_per_token
        most = config.max_running_requests * (config.context_len or model_config.context_len)
        if num_tokens > most:
            num_tokens, reason = most, "all that running requests can fill"
        if device.type != "cuda" and num_tokens > MAX_CPU_TOKENS:
            num_tokens, reason = MAX_CPU_TOKENS, "enough for a CPU"
    num_tokens -= num_tokens % config.page_size
    if num_tokens < config.page_size:
        raise ValueError(
            f"no room for a KV pool: a page of {config.page_size} tokens takes "
            f"{config.page_size * bytes_per_token} bytes, and {reason}"
        )
    return MemoryPlan(
        num_tokens, bytes_per_token, total, free_before or free, free, weights, reserved, reason
    )


def _budget(config: EngineConfig, free: int, total: int, reserved: int) -> tuple[int, str]:
    """Bytes for the pool, and the reason for that number."""
    if not total:
        available = psutil.virtual_memory().available
        budget = int(available * CPU_MEMORY_FRACTION)
        return budget, f"{CPU_MEMORY_FRACTION:.0%} of the {available / GIB:.1f} GiB available are for it"
    budget = pool_budget(config.mem_fraction_static, free, total, reserved)
    found = f"of {total / GIB:.1f} GiB on the GPU {free / GIB:.1f} are free, and "
    if budget < free - reserved:
        leaves = f"mem_fraction_static ({config.mem_fraction_static}) leaves {max(budget, 0) / GIB:.1f}"
    else:
        leaves = f"steps need {reserved / GIB:.1f}, which leaves {max(budget, 0) / GIB:.1f}"
    return budget, f"{found}{leaves} for it"


def pool_budget(mem_fraction_static: float, free: int, total: int, reserved: int) -> int:
    """Bytes for the pool on a GPU of `total` bytes: what the fraction leaves, or steps, if they need more."""
    return min(int(free - total * (1.0 - mem_fraction_static)), free - reserved)


def reserve_for_steps(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> dict[str, int]:
    """The bytes that the largest step takes in addition to weights and KV, by purpose."""
    context_len = config.context_len or model.context_len
    num_tokens = _most_prompt_tokens(config, context_len) + config.max_running_requests  # if mixed
    layers = [model.of_layer(layer_id) for layer_id in range(model.num_hidden_layers)]
    q = model.num_qo_heads * max(layer.head_dim for layer in layers)
    kv = max(layer.num_kv_heads * layer.head_dim for layer in layers)
    attention = (q + 2 * kv) + q + q  # merged QKV, rotated q, output
    mlp = 3 * max(layer.intermediate_size for layer in layers)  # gate and up, their product
    if model.moe is not None:
        expert = 3 * model.moe.intermediate_size + model.hidden_size
        routed = model.moe.num_experts_per_tok * expert
        if config.dp_attention:  # of the tokens of all ranks, which are gathered, as their outputs are
            routed = config.dp * (routed + 2 * model.hidden_size)
        routed += 3 * model.moe.shared_intermediate_size
        has_mlp = model.moe.beside_mlp or len(model.moe_layers) < model.num_hidden_layers
        mlp = max(routed, mlp if has_mlp else 0)
    # Residual, norm, result, and a norm's float32; the larger of attention and MLP, which are never live
    # together.
    linear, chunks = linear_bytes(model.linear_attention, dtype)
    largest = max(max(attention, mlp) * dtype.itemsize, linear)
    per_token = 3 * model.hidden_size * dtype.itemsize + largest + 8 * model.hidden_size
    per_token += 4 * len(layers) * model.layer_input_size * dtype.itemsize  # two terms, their sum, a copy
    num_nodes = draft_shape(config).num_draft_tokens if config.speculative is not None else 1
    num_logit_rows = max(config.max_running_requests * num_nodes, LOGPROB_ROWS)
    graphs = 0
    if not config.disable_cuda_graph:
        graphs = len(config.cuda_graph_bs or range(NUM_GRAPHS)) * BYTES_PER_GRAPH
        if config.speculative is not None:
            # Decoding; and for each shape verifying, drafting, extending the drafter.
            graphs *= 1 + 3 * len(possible_shapes(config))
        if config.cuda_graph_block_len is not None:
            graphs *= 2
        if config.cuda_graph_max_tokens != 0 and not config.dp_attention and model.linear_attention is None:
            graphs += max(min(config.cuda_graph_max_tokens or 0, num_tokens) * per_token, EXTEND_GRAPHS)
    masks = {} if config.cuda_graph_block_len is None else {"masks": mask_bytes(config, model)}
    copies = {} if config.hicache_tokens is None else {"copies": staging_bytes(config, model, dtype)}
    besides = masks | copies
    return besides | {
        "activations": num_tokens * per_token
        + 2 * config.max_running_requests * chunks
        + dequantized_bytes(model, dtype),
        "logits": num_logit_rows * model.vocab_size * BYTES_PER_LOGIT,
        "req_to_token": (num_rows(config) + 1) * context_len * torch.int32.itemsize,
        "graphs": graphs,
        "libraries": LIBRARIES,
    }


def staging_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes on the GPU for copies to a tier in CPU memory: at least a page, and at least a state."""
    linear, sizes = model.linear_attention, [config.page_size * kv_bytes_per_token(model, dtype)]
    if linear is not None:
        sizes.append(StatePool.bytes_per_row(len(model.linear_layers), linear, dtype))
    return sum(max(size, STAGING_BYTES) for size in sizes)


def dequantized_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """The bytes of the largest merged layer whose inputs are not quantized: a prefill step of many tokens
    dequantizes one such layer at a time."""
    if model.quantization is None:
        return 0
    merged: dict[str, int] = {}
    for name, shape in expected_shapes(model).items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(shape) != 2 or ".experts." in name:
            continue
        scheme = model.quantization.scheme_in_memory(module)
        if scheme is not None and scheme.inputs == "none":
            whole = MERGED.sub("merged", module)
            merged[whole] = merged.get(whole, 0) + math.prod(shape) * dtype.itemsize
    return max(merged.values(), default=0)


def linear_bytes(linear: LinearAttentionConfig | None, dtype: torch.dtype) -> tuple[int, int]:
    """The bytes that a layer of linear attention takes for a token of a prompt (`delta_chunks`), and for a
    chunk. A prompt may begin and end in a chunk that it does not fill."""
    if linear is None:
        return 0, 0
    k_size = linear.num_v_heads * linear.k_head_dim
    num_gates = linear.num_v_heads * (linear.num_decays + 1)  # g and beta
    wide = num_gates + linear.num_channels + linear.v_size + k_size + linear.num_v_heads * linear.num_decays
    narrow = sum(linear.projections.values()) + linear.v_size
    if linear.channel_decay:
        narrow += k_size + linear.k_head_dim  # a, and its factor
    chunk = (2 if linear.channel_decay else 1) * linear.num_v_heads * CHUNK**2 * 4
    return wide * 4 + narrow * dtype.itemsize + chunk // CHUNK, chunk


def mask_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """The bytes of the largest masks of block diffusion: each token of a step sees the whole context. A mask
    has a byte for each pair, and up to two copies of a bit each, one for each kind of layer. While a prompt
    runs, the next one is launched ahead, so there are two masks."""
    context_len = config.context_len or model.context_len
    num_tokens = max(_most_prompt_tokens(config, context_len), MAX_BLOCK_LEN)
    return num_tokens * context_len * 2 * 5 // 4


def check_mask_memory(memory: MemoryPlan, config: EngineConfig, model: ModelConfig) -> None:
    """Raise `ValueError` if the memory plan of a GPU has no room for the masks of block diffusion."""
    others = sum(size for what, size in memory.reserved.items() if what != "masks")
    left = memory.free - memory.num_tokens * memory.bytes_per_token - others
    if memory.total and mask_bytes(config, model) > left:
        raise ValueError(
            f"masks of block diffusion need up to {_gib(mask_bytes(config, model))}; the KV pool and other "
            f"memory of steps leave {_gib(max(left, 0))}: start with cuda_graph_block_len, which keeps "
            f"memory for masks, or a smaller chunked_prefill_size ({config.chunked_prefill_size}), "
            "context_len or max_total_tokens"
        )


def _most_prompt_tokens(config: EngineConfig, context_len: int) -> int:
    """The most prompt tokens of a step."""
    return config.chunked_prefill_size or max(config.max_prefill_tokens, context_len)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
