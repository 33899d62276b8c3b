"""The steps that no graph contains, as examples from which their kernels are compiled.

Which kernel and which tiles a launcher chooses depends on the numbers of tokens and of requests. The examples
have numbers on both sides of each choice. `tests/model_runner/test_compile_ahead.py` checks that random
requests launch no other variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from itertools import accumulate, chain
from operator import mul
from types import FunctionType
from typing import Any

import torch
from torch import nn

from diptych.optimized.decoder import DecoderForCausalLM
from diptych.optimized.graphs.decode_graph import DecodeBuffers, captured_batch_sizes
from diptych.optimized.graphs.verify_graph import MAX_TOKENS, VerifyBuffers, has_windows
from diptych.optimized.kernels.attention.qk_norm_rope_store import MANY_TOKENS
from diptych.optimized.kernels.linear.cublas_linear import HALF_TYPES
from diptych.optimized.kernels.linear.fixed_order_gemm import sizes_of_all_tiles
from diptych.optimized.kernels.portable import gpu_of
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.interfaces.model_runner import ModelRunner
from diptych.shared.modeling.forward import attention_output
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.to_device import vectors_to_device
from diptych.shared.types import ForwardBatch, ForwardMode, Req, SamplingBatchInfo, SamplingParams
from diptych.shared.types.attention import AttentionLayer

NUM_REQUESTS = (1, 2, 3, 4, 5, 17, 33, 65, 257, 1025)
"""Kernels for few rows have other tiles from each of these numbers on."""
BATCH_SIZES = (1, 65, 1025)
"""of prompts: attention looks for a request among so many (`portable.prompts_block`)."""
TILE_ROWS = (16, 32, 64, 128)
"""Query heads of a KV head and of a prompt's tokens, together: attention has tiles of so many."""
LONG_PROMPT = 256
NUM_KEYS = 8192
"""Cached tokens and new ones, which attention divides into parts."""
NUM_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Prefill steps beyond the captured ones: a layer of experts chooses its tiles by them."""
SAMPLING: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "return_logprob": True},
    {"temperature": 0.0, "return_logprob": True, "top_logprobs_num": 5},
    {"temperature": 0.8, "return_logprob": True},
    {"temperature": 0.8, "return_logprob": True, "top_logprobs_num": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "return_logprob": True},
    {"temperature": 0.8, "top_p": 0.9, "return_logprob": True, "top_logprobs_num": 5},
    {"temperature": 0.8, "frequency_penalty": 0.5, "min_new_tokens": 1},
)
"""One batch with each: kernels of sampling differ."""


def prefill_batches(
    config: EngineConfig, model: ModelConfig, num_captured: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """Prefill steps that run without a graph, or whose attention does. num_captured: the most tokens of a
    step in a graph."""
    assert config.context_len is not None
    most = _most_tokens(config)
    group = model.num_qo_heads // model.num_kv_heads
    cases = [(min(num_captured + n, most), n) for n in NUM_REQUESTS]
    # Less than a whole tile each: from 64 tokens on, the default backend asks FlashInfer.
    cases += [(n * max(rows // group * 3 // 4, 1), n) for n in BATCH_SIZES for rows in TILE_ROWS]
    if model.linear_attention is not None:
        cases += _of_linear_attention(model, num_captured, device)
        if config.max_running_requests > 1 and most > 2:
            yield prompts([2, 1], device)  # a single token beside a prompt
    if model.moe is not None:
        cases += [(n, 1) for n in (*NUM_TOKENS, most) if num_captured < n]
    for num_tokens, num_requests in cases:
        num_tokens = min(num_tokens, num_requests * config.context_len)
        if num_requests <= min(config.max_running_requests, num_tokens) and num_tokens <= most:
            each, rest = divmod(num_tokens, num_requests)
            yield prompts([each + (i < rest) for i in range(num_requests)], device)
    long = prompts([1], device)  # of many keys
    length = min(config.context_len, NUM_KEYS)
    yield replace(long, seq_lens=torch.full_like(long.seq_lens, length), seq_lens_cpu=(length,))
    if model.rope.mrope_section:
        for num_tokens in {min(n, most, config.context_len) for n in (1, MANY_TOKENS)}:
            batch = prompts([num_tokens], device)
            axes, row = batch.positions.expand(3, -1).contiguous(), batch.positions[:1]
            embeds = torch.zeros(1, 2 * model.hidden_size, device=device)
            yield replace(batch, rope_positions=axes, embed_rows=row, embeds=embeds)


def deterministic_batches(
    config: EngineConfig, model: nn.Module, num_captured: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """Prefill steps beyond the captured ones with each tile of the GEMMs in a fixed order."""
    assert config.context_len is not None
    tensors = [*model.parameters(), *model.buffers()]
    outs = {len(each) for each in tensors if each.dim() == 2}
    is_half = tensors[0].dtype in HALF_TYPES
    most, gpu = _most_tokens(config), gpu_of(device)
    for num_tokens in sizes_of_all_tiles(outs, num_captured, most, is_half, gpu):
        num_requests = -(-num_tokens // config.context_len)
        if num_requests <= config.max_running_requests:
            each, rest = divmod(num_tokens, num_requests)
            yield prompts([each + (i < rest) for i in range(num_requests)], device)


def _of_linear_attention(
    model: ModelConfig, num_captured: int, device: torch.device
) -> list[tuple[int, int]]:
    """Gates of heads have larger tiles from 2,048 heads on, and scans of many prompts fewer warps."""
    linear = model.linear_attention
    assert linear is not None
    programs = linear.num_v_heads * -(-linear.v_head_dim // 32)
    many = 2 * gpu_of(device).num_multiprocessors // programs + 1
    return [(max(2048 // model.num_qo_heads, num_captured) + 1, 1), (2 * many, many)]


def decode_batches(config: EngineConfig, num_captured: int, device: torch.device) -> Iterator[ForwardBatch]:
    """Decode steps of more requests than are captured."""
    for size in sizes_beyond(config, num_captured):
        yield replace(prompts([1] * size, device), forward_mode=ForwardMode.DECODE)


def verify_batches(
    config: EngineConfig, num_captured: int, like: DecodeBuffers | VerifyBuffers, device: torch.device
) -> Iterator[ForwardBatch]:
    """Verify steps of more requests than are captured, with trees as in these buffers."""
    assert isinstance(like, VerifyBuffers)
    num_nodes = like.num_nodes
    for size in sizes_beyond(config, num_captured):
        mask = None
        if like.tree_mask is not None:
            mask = torch.ones(size, num_nodes, num_nodes, dtype=torch.bool, device=device)
        trees = prompts([num_nodes] * size, device)
        yield replace(trees, forward_mode=ForwardMode.TARGET_VERIFY, tree_mask=mask)


def block_batches(
    config: EngineConfig, model: ModelConfig, num_captured: int, device: torch.device
) -> Iterator[ForwardBatch]:
    """Block diffusion: prompts, whose masks no graph takes, and passes of more blocks than are captured."""
    block_len = config.cuda_graph_block_len
    assert block_len is not None
    assert config.context_len is not None
    # A prompt for the default backend's FlashInfer, then small ones, as no graph pads them.
    long = prompts([min(LONG_PROMPT, _most_tokens(config), config.context_len)], device)
    for batch in chain([long], prefill_batches(config, model, 0, device)):
        yield replace(batch, custom_mask=_flat_mask(batch, device))
    most = min(config.max_running_requests, MAX_TOKENS // block_len)
    for size in sizes_beyond(config.updated(max_running_requests=most), num_captured):
        blocks = replace(prompts([block_len] * size, device), forward_mode=ForwardMode.TARGET_VERIFY)
        if has_windows(model):
            yield replace(blocks, custom_mask=_flat_mask(blocks, device))
        else:
            mask = torch.ones(size, block_len, block_len, dtype=torch.bool, device=device)
            yield replace(blocks, tree_mask=mask)


def _most_tokens(config: EngineConfig) -> int:
    """The most tokens of a prefill step."""
    return min(config.max_prefill_tokens, config.chunked_prefill_size or config.max_prefill_tokens)


def _flat_mask(batch: ForwardBatch, device: torch.device) -> torch.Tensor:
    return torch.ones(
        sum(map(mul, batch.extend_seq_lens_cpu, batch.seq_lens_cpu)), dtype=torch.bool, device=device
    )


def sizes_beyond(config: EngineConfig, num_captured: int) -> list[int]:
    """Numbers of requests of decode steps that are not captured."""
    sizes = captured_batch_sizes(config.updated(cuda_graph_bs=None, cuda_graph_max_bs=None))
    most = config.max_running_requests
    return sorted(size for size in {*sizes, *NUM_REQUESTS, most} if num_captured < size <= most)


@contextmanager
def attention_of_rehearsal(*owners: Any) -> Iterator[None]:
    """Within the block, `attention` of the owners, or its half for prompts, computes nothing if it does not
    consist of kernels that `compile_ahead` or FlashInfer compiles: reference and flex_attention, which do not
    run in graphs either, would compute long prompts with much memory."""
    attention: Any = owners[0].attention
    replaced = [(owner, "attention") for owner in owners]
    if attention.supports_cuda_graph:
        replaced = [(attention, "prefill_backend")] if hasattr(attention, "prefill_backend") else []
        if replaced and attention.prefill_backend.supports_cuda_graph:
            replaced = []
    before = [getattr(owner, name) for owner, name in replaced]
    for owner, name in replaced:
        setattr(owner, name, NoAttention())
    try:
        yield
    finally:
        for (owner, name), value in zip(replaced, before):
            setattr(owner, name, value)


@contextmanager
def layers_of_rehearsal(runner: ModelRunner) -> Iterator[None]:
    """Within the block the model has fewer layers: of each kind of layer one behind each other kind. The
    others launch the same variants. All, if a drafter reads the inputs of some, or if the model is of another
    kind than this panel's, which may count on them."""
    if not isinstance(runner.model, DecoderForCausalLM) or runner.capture_hidden:
        yield
        return
    body: Any = runner.model.model
    layers = body.layers
    kinds = [_kind_of(layer) for layer in layers]
    pairs = [*zip([None, *kinds], kinds)]
    body.layers = nn.ModuleList(layers[pairs.index(pair)] for pair in dict.fromkeys(pairs))
    try:
        yield
    finally:
        body.layers = layers


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What decides which kernels a layer launches: classes, shapes, types and numbers, but its position."""
    return tuple((name, type(each), *map(_fact, vars(each).items())) for name, each in layer.named_modules())


def _fact(named: tuple[Any, Any]) -> Any:
    name, value = named
    if name == "layer_id":
        return name
    if isinstance(value, float):
        return name, bool(value)  # kernels have no variants by the value of a float
    if isinstance(value, torch.Tensor):
        return name, value.shape, value.stride(), value.dtype
    if isinstance(value, dict):  # parameters and buffers
        return name, *map(_fact, value.items())
    if isinstance(value, (tuple, list)):
        return name, *map(_fact, enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return name, type(value), *[_fact((each.name, getattr(value, each.name))) for each in fields(value)]
    is_fact = isinstance(value, (int, str, torch.dtype, type(None), type, Enum, FunctionType))
    return name, value if is_fact else type(value)


class NoAttention(AttentionBackend):
    """Leaves its output as it is."""

    def __init__(self) -> None:
        """It needs no pools."""

    def plan(self, forward_batch: ForwardBatch) -> None:
        """No plan."""

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attention_output(q, layer, out)


def prompts(lens: list[int], device: torch.device) -> ForwardBatch:
    """Prompts of these lengths, all in the dummy page."""
    zeros = [0] * sum(lens)
    positions = [position for n in lens for position in range(n)]
    starts = [0, *accumulate(lens)][:-1]
    ids, places, rows, seq_lens, slots, extend_lens, start_locs = vectors_to_device(
        [zeros, positions, [0] * len(lens), lens, zeros, lens, starts], device
    )
    on_cpu = tuple(lens)
    return ForwardBatch(
        ForwardMode.EXTEND, ids, places, rows, seq_lens, slots, extend_lens, start_locs, on_cpu, on_cpu
    )  # fmt: skip


def sampling_infos(max_rows: int, num_token_ids: int, device: torch.device) -> Iterator[SamplingBatchInfo]:
    """Each kind of sampling, of numbers of requests up to `max_rows`."""
    for values in SAMPLING:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True, **values)  # type: ignore[arg-type]
        req = Req("example", [0], params, seed=0)
        for num_rows in (1, 17, 65, 257, 1025):
            if num_rows <= max_rows:
                yield make_sampling_batch_info([req] * num_rows, num_token_ids, device)
