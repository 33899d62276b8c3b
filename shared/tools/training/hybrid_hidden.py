"""The forward pass of the built-in hybrid model for training: packed rows, chunks, and large batched GEMMs.

transformers computes gated DeltaNet layers for one text a row, in a loop over its chunks. Here a row has
several chats, and chunks are computed side by side: the work within chunks in one batched GEMM for all of
them, the states between them in a scan by doubling. torch.compile takes it as one graph. The weights are in
transformers' modules.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from diptych.shared.tools.training.packing import Batch

CHUNK_LEN = 32
_EPS = 1e-6  # below the square root of a key's length, as in transformers


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)**-1 for A that is zero on and above the diagonal: [..., n, n], n a power of two.

    The inverse of [[L, 0], [B, R]] is [[L', 0], [-R' B L', R']], so blocks double from 1 to n. A sum of
    powers of A needs fewer GEMMs, but its terms reach 1e8 for 32 equal keys.
    """
    size = strict.shape[-1]
    index = torch.arange(size, device=strict.device)
    row, column = index[:, None], index[None, :]
    inverse = (row == column).to(strict.dtype) - strict * (row // 2 == column // 2)
    block = 2
    while block < size:
        # Below the diagonal, in one block of twice the size, and not in one block of this size.
        corner = (row // block != column // block) & (row // (2 * block) == column // (2 * block))
        inverse = inverse - inverse @ (strict * corner) @ inverse
        block *= 2
    return inverse


class UnitLowerSolve(torch.autograd.Function):
    """Y with (I + A) Y = `rhs`. The gradient of A is the gradient of `rhs` times -Y'."""

    @staticmethod
    def forward(ctx: Any, strict: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
        inverse = unit_lower_inverse(strict)
        solution = inverse @ rhs
        ctx.save_for_backward(inverse, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inverse, solution = ctx.saved_tensors
        of_rhs = inverse.mT @ grads[0]
        return -(of_rhs @ solution.mT), of_rhs


def scan(transitions: torch.Tensor, additions: torch.Tensor) -> torch.Tensor:
    """The state S before each chunk: zero at first, and transitions[c] S + additions[c] after chunk c.

    Shapes [num_chunks, ..., k_dim, k_dim] and [num_chunks, ..., k_dim, v_dim]. Two neighbors become one,
    then pairs of those: as many rounds of one GEMM as num_chunks has bits.
    """
    k_dim, reach = transitions.shape[-1], 1
    steps = torch.cat((transitions, additions), -1)
    while reach < len(steps) - 1:
        later = steps[reach:]
        both = later[..., :k_dim] @ steps[:-reach]
        both = torch.cat((both[..., :k_dim], both[..., k_dim:] + later[..., k_dim:]), -1)
        steps = torch.cat((steps[:reach], both))
        reach *= 2
    return torch.cat((torch.zeros_like(additions[:1]), steps[:-1, ..., k_dim:]))


class Scan(torch.autograd.Function):
    """`scan`, whose gradient is a scan from the last chunk to the first."""

    @staticmethod
    def forward(ctx: Any, transitions: torch.Tensor, additions: torch.Tensor) -> torch.Tensor:
        states = scan(transitions, additions)
        ctx.save_for_backward(transitions, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transitions, states = ctx.saved_tensors
        of_next = scan(transitions.flip(0).mT, grads[0].flip(0)).flip(0)  # of the state behind each chunk
        return of_next @ states.mT, of_next


def chunked_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    document_ids: torch.Tensor,
) -> torch.Tensor:
    """Outputs [num_rows, num_heads, row_len, v_dim] of the gated delta rule; each document starts from zero.

    q, k: [num_rows, num_heads, row_len, k_dim], v likewise, g and beta: [num_rows, num_heads, row_len],
    document_ids: [num_rows, row_len], equal ids side by side. row_len is a multiple of CHUNK_LEN.
    """
    num_rows, num_heads, row_len, k_dim = k.shape
    v_dim = v.shape[-1]
    if row_len % CHUNK_LEN:
        raise ValueError(f"rows of {row_len} tokens; they must have a multiple of {CHUNK_LEN}")
    # Chunks first: for `scan` a slice of them is one block of memory.
    q, k, v, beta, g = (
        part.view(num_rows, num_heads, -1, CHUNK_LEN, part.shape[-1]).permute(2, 0, 1, 3, 4)
        for part in (q, k, v, beta[..., None], g[..., None])
    )
    total = g[..., 0].cumsum(-1)
    ids = document_ids.view(num_rows, 1, -1, CHUNK_LEN).permute(2, 0, 1, 3)
    last = ids[..., -1:]
    before = F.pad(last[:-1], (0, 0, 0, 0, 0, 0, 1, 0), value=-2)  # an id that no document has
    # What is left of a write at token j when token i reads, of the state before the chunk, and at its end.
    index = torch.arange(CHUNK_LEN, device=q.device)
    seen = (ids[..., :, None] == ids[..., None, :]) & (index[:, None] >= index)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    of_state = (total.exp() * (ids == before))[..., None]
    to_end = ((total[..., -1:] - total).exp() * (ids == last))[..., None]
    carried = (total[..., -1].exp() * (last == before)[..., 0])[..., None, None]

    # GEMMs with a factor in common are one GEMM.
    of_keys, of_queries = (torch.cat((k, q), -2) @ k.mT).split(CHUNK_LEN, -2)
    strict = (beta * of_keys * decay).masked_fill(index[:, None] <= index, 0.0)
    # What the tokens write if the state before the chunk is zero, and how much less for each of its rows.
    solution = UnitLowerSolve.apply(strict, torch.cat((beta * v, beta * of_state * k), -1))
    writes, reads = solution.split((v_dim, k_dim), -1)
    additions, removals = ((to_end * k).mT @ solution).split((v_dim, k_dim), -1)
    identity = torch.eye(k_dim, dtype=k.dtype, device=k.device)
    states = Scan.apply(carried * identity - removals, additions)
    read, output = (torch.cat((reads, of_state * q), -2) @ states).split(CHUNK_LEN, -2)
    output = output + (of_queries * decay) @ (writes - read)
    return output.permute(1, 2, 0, 3, 4).flatten(2, 3)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """SiLU of a weighted sum of each channel of a token and of the tokens before it in its document.

    x: [num_rows, row_len, num_channels], weight: [num_channels, num_taps].
    """
    taps = weight.unbind(1)
    total = x * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), start=1):
        earlier = F.pad(x[:, :-back], (0, 0, back, 0))
        total = total + torch.where((positions >= back)[..., None], earlier, 0.0) * tap
    return F.silu(total)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Qwen3.5's: the weight is the factor's distance from 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1 + weight)).to(x.dtype)


def gated_delta_net(net: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A linear layer: convolution, delta rule, and a norm with a gate for each head."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mixed = causal_convolution(net.in_proj_qkv(x), net.conv1d.weight.squeeze(1), batch.positions).to(wide)
    sizes = [net.key_dim, net.key_dim, net.value_dim]
    q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(mixed.split(sizes, -1), _head_dims(net)))
    q, k = (part * torch.rsqrt(part.pow(2).sum(-1, keepdim=True) + _EPS) for part in (q, k))
    q, k = (
        part.repeat_interleave(net.num_v_heads // net.num_k_heads, 2)
        for part in (q * net.head_k_dim**-0.5, k)
    )
    beta = net.in_proj_b(x).to(wide).sigmoid()
    g = -net.A_log.to(wide).exp() * F.softplus(net.in_proj_a(x).to(wide) + net.dt_bias)
    q, k, v, g, beta = (part.transpose(1, 2).contiguous() for part in (q, k, v, g, beta))
    out = chunked_delta_rule(q, k, v, g, beta, batch.document_ids).transpose(1, 2)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + net.layer_norm_epsilon) * net.norm.weight
    out = out.flatten(2) * F.silu(net.in_proj_z(x).to(wide))
    return net.out_proj(out.to(x.dtype))


def _head_dims(net: Any) -> tuple[int, int, int]:
    return net.head_k_dim, net.head_k_dim, net.head_v_dim


def gated_attention(
    attn: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor, eps: float
) -> torch.Tensor:
    """An attention layer: each head's query has a gate beside it."""
    q, gate = attn.q_proj(x).unflatten(-1, (-1, 2 * attn.head_dim)).chunk(2, -1)
    k, v = (proj(x).unflatten(-1, (-1, attn.head_dim)) for proj in (attn.k_proj, attn.v_proj))
    q = _rotate(rms_norm(q, attn.q_norm.weight, eps), *rotary)
    k = _rotate(rms_norm(k, attn.k_norm.weight, eps), *rotary)
    k, v = (part.repeat_interleave(attn.num_key_value_groups, 2) for part in (k, v))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attn.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first 2 * cos.shape[-1] numbers of each head turn, the others stay."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _rotary(config: Any, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rope = config.rope_parameters
    rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
    powers = torch.arange(0, rotary_dim, 2, device=positions.device) / rotary_dim
    angles = (positions[..., None] * rope["rope_theta"] ** -powers)[:, :, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def hybrid_layer(
    layer: Any, x: torch.Tensor, batch: Batch, rotary: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """A decoder layer of either kind."""
    eps = layer.input_layernorm.eps
    y = rms_norm(x, layer.input_layernorm.weight, eps)
    if hasattr(layer, "linear_attn"):
        x = x + gated_delta_net(layer.linear_attn, y, batch)
    else:
        x = x + gated_attention(layer.self_attn, y, rotary, mask, eps)
    return x + layer.mlp(rms_norm(x, layer.post_attention_layernorm.weight, eps))


def hybrid_hidden(
    model: Any, batch: Batch, mask: torch.Tensor, layer_fn: Callable[..., torch.Tensor] = hybrid_layer
) -> torch.Tensor:
    """Hidden states behind the last norm, [num_rows, row_len, hidden_size], of a `Qwen3_5ForCausalLM`.

    `mask`: which tokens an attention layer reads, [num_rows, 1, row_len, row_len]. `layer_fn` may be
    `hybrid_layer` compiled: one compilation for each kind of layers takes less time than one of the model.
    """
    x = model.model.embed_tokens(batch.input_ids)
    rotary = _rotary(model.config, batch.positions, x.dtype)
    for layer in model.model.layers:
        x = layer_fn(layer, x, batch, rotary, mask)
    return rms_norm(x, model.model.norm.weight, model.config.rms_norm_eps)


@torch.no_grad()
def spread_decays(model: Any) -> None:
    """Start linear layers with half-lives from below one token to hundreds of tokens, by head.

    transformers' own start forgets nearly all within a token.
    """
    for layer in model.model.layers:
        if not hasattr(layer, "linear_attn"):
            continue
        net = layer.linear_attn
        # Decay rates a token, softplus(dt_bias) * exp(A_log), with the second factor 1.
        rates = torch.logspace(-3, 0, net.num_v_heads, device=net.A_log.device)
        net.A_log.zero_()
        net.dt_bias.copy_(rates.expm1().log())
