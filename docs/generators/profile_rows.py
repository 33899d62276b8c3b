"""Rows of the tables of docs/generators/measured.py that are about the kernels of a step (`--profile`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from docs.generators.cells import cell
from docs.generators.result_rows import Results

if TYPE_CHECKING:
    from diptych.shared.config import ModelConfig

PARTS = {
    "attention": ("_decode_kernel", "_fp8_decode_kernel"),
    "GEMMs of the layers": ("cuBLAS", "_tiled_gemm_kernel", "_quantized_gemm_kernel"),
    "experts": ("_up_kernel", "_down_kernel", "_quantized_experts_kernel"),
    "choice of experts, sum of their outputs": ("_route_kernel", "_place_kernel", "_combine_kernel"),
    "quantization of inputs": ("_quantize_input_kernel",),
    "residual sums": ("vectorized_elementwise_kernel: CUDAFunctor_add",),
    "norms and activation": ("_rms_norm_kernel", "_act_and_mul_kernel"),
    "RoPE and KV store": ("_qk_norm_rope_store_kernel",),
    "head (`lm_head`)": (),
    "sampling": ("_bound_kernel", "_draw_kernel"),
    "idle between kernels": ("idle",),
}
"""Part of a step -> how the names of its kernels begin. The head is the GEMM that runs once."""


def profiles(*files: Results) -> list[list[object]]:
    """Microseconds of each part of the step with the most requests; the first row is the step without the
    profiler."""
    steps = [fewest_and_most(results)[1] for results in files]
    found = [parts_of(step) for step in steps]
    rows: list[list[object]] = [["step", *(_microseconds(step["step_s"]["median"]) for step in steps)]]
    rows += [[part, *(_microseconds(parts.get(part, 0.0)) for parts in found)] for part in (*PARTS, "others")]
    return rows


def fewest_and_most(results: Results) -> tuple[dict[str, Any], dict[str, Any]]:
    """The steps of these numbers of requests."""
    ordered = sorted(results, key=lambda r: r["batch_size"])
    return ordered[0], ordered[-1]


def parts_of(step: dict[str, Any]) -> dict[str, float]:
    """Seconds of each part."""
    parts: dict[str, float] = {}
    for kernel in step["kernels"]:
        part = next((part for part, names in PARTS.items() if kernel["name"].startswith(names)), "others")
        if part == "GEMMs of the layers" and kernel["num_calls"] == 1:
            part = "head (`lm_head`)"
        parts[part] = parts.get(part, 0.0) + kernel["seconds"]
    return parts


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds else ""


def kernels(attention: Results, dense: Results, experts: Results) -> list[list[object]]:
    """The share of its roofline bound that each kind of kernel reaches. dense, experts: steps of Qwen3-8B and
    of Qwen3-30B-A3B."""
    widest = max((r for r in attention if r["backend"] == "triton"), key=lambda r: r["batch_size"])
    (step, largest), (of_experts, _) = map(fewest_and_most, (dense, experts))
    num_tokens, parts = step["batch_size"], parts_of(step)
    config, moe_config = config_of(step), config_of(of_experts)
    moe = moe_config.moe
    assert moe is not None
    heads = 2 * (config.num_qo_heads + config.num_kv_heads) * config.head_dim
    of_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    of_expert = 3 * moe_config.hidden_size * moe.intermediate_size
    experts_read = 2 * of_experts["num_experts_hit"] * of_expert / bandwidth(of_experts)
    head_read = 2 * config.vocab_size * config.hidden_size / bandwidth(step)
    logits_read = 4 * largest["batch_size"] * config.vocab_size / bandwidth(step)
    bounds = (widest["bound_us"] / 1e6, experts_read, 2 * of_layer / bandwidth(step), head_read, logits_read)
    times = (
        widest["us"] / 1e6,
        parts_of(of_experts)["experts"] / of_experts["num_layers"],
        parts["GEMMs of the layers"] / step["num_layers"],
        parts["head (`lm_head`)"],
        parts_of(largest)["sampling"],
    )
    works = {
        "[decode attention](decode-attention.md)": f"{widest['batch_size']} requests x 1,024 tokens",
        "[experts](moe.md)": f"a layer of Qwen3-30B-A3B, {of_experts['batch_size']} tokens",
        "[GEMMs](linear-layers.md)": f"a layer of Qwen3-8B, {num_tokens} tokens",
        "head": f"Qwen3-8B, {num_tokens} tokens",
        "[sampling](sampling.md), no filter": f"{largest['batch_size']} rows of {config.vocab_size:,} logits",
    }
    return [
        [*work, f"{bound * 1e6:,.1f}", f"{time * 1e6:,.1f}", cell("{0:%0}", [bound / time])]
        for work, bound, time in zip(works.items(), bounds, times, strict=True)
    ]


def config_of(step: dict[str, Any]) -> ModelConfig:
    from diptych.shared.config import read_config
    from diptych.shared.loading.model_path import resolve_model_path

    return read_config(resolve_model_path(step["model"], "dummy"))


def bandwidth(step: dict[str, Any]) -> float:
    """Bytes per second that were measured beside a step that its bytes bound."""
    return float((step["weight_bytes"] + step["kv_bytes"]) / step["bound_s"])
