"""The forward pass of the built-in hybrid model for training: packed rows, chunks, and large batched GEMMs.

transformers computes gated DeltaNet layers for one text a row, in a loop over its chunks. Here a row has
several chats, and chunks are computed side by side: the work within chunks in one batched GEMM for all of
them, the states between them in a scan by doubling. torch.compile takes it as one graph. The weights are in
transformers' modules.
"""

from typing import Any

import torch
import torch.nn.functional as F

from diptych.shared.tools.training.packing import Batch

CHUNK_LEN = 32
_EPS = 1e-6  # below the square root of a key's length, as in transformers


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """(I + A)**-1 for the part A below the diagonal of `strict`: [..., n, n], n a power of two.

    The inverse of [[L, 0], [B, R]] is [[L', 0], [-R' B L', R']], so blocks double from 1 to n. A sum of
    powers of A needs fewer GEMMs, but its terms reach 1e8 for 32 equal keys. The gradient of the inverse X by
    A is known, -X'GX': autograd only goes through the last line, which adds zero.
    """
    size = strict.shape[-1]
    index = torch.arange(size, device=strict.device)
    row, column = index[:, None], index[None, :]
    strict = strict.masked_fill(row <= column, 0.0)
    fixed = strict.detach()
    inverse = (row == column).to(strict.dtype).expand_as(strict)
    block = 1
    while block < size:
        # Below the diagonal, in one block of twice the size, and not in one block of this size.
        corner = (row // block != column // block) & (row // (2 * block) == column // (2 * block))
        inverse = inverse - inverse @ (fixed * corner) @ inverse
        block *= 2
    return inverse - inverse @ (strict - fixed) @ inverse


def states_before(transitions: torch.Tensor, additions: torch.Tensor) -> torch.Tensor:
    """The state before each chunk: S of chunk c + 1 is transitions[c] S + additions[c], and zero before all.

    Both have the shape [num_rows, num_heads, num_chunks, rows, columns]. Pairs of neighbours become one step,
    then pairs of those: as many rounds of two GEMMs as num_chunks has bits.
    """
    # Chunks first: a slice of them is then one block of memory, as batched GEMMs take it.
    steps, sums = transitions.movedim(2, 0).contiguous(), additions.movedim(2, 0).contiguous()
    reach = 1
    while reach < len(sums) - 1:
        later = steps[reach:]
        sums = torch.cat((sums[:reach], sums[reach:] + later @ sums[:-reach]))
        steps = torch.cat((steps[:reach], later @ steps[:-reach]))
        reach *= 2
    return torch.cat((torch.zeros_like(sums[:1]), sums[:-1])).movedim(0, 2)


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
    if row_len % CHUNK_LEN:
        raise ValueError(f"rows of {row_len} tokens; they must have a multiple of {CHUNK_LEN}")
    shape = (num_rows, num_heads, row_len // CHUNK_LEN, CHUNK_LEN)
    q, k, v, beta = q.view(*shape, -1), k.view(*shape, -1), v.view(*shape, -1), beta.view(*shape, 1)
    total = g.view(shape).cumsum(-1)
    ids = document_ids.view(num_rows, 1, -1, CHUNK_LEN)
    last = ids[..., -1:]
    before = F.pad(last[:, :, :-1], (0, 0, 1, 0), value=-2)  # an id that no document has
    # What is left of a write at token j when token i reads, of the state before the chunk, and at its end.
    is_back = torch.ones(CHUNK_LEN, CHUNK_LEN, dtype=torch.bool, device=q.device).tril()
    seen = (ids[..., :, None] == ids[..., None, :]) & is_back
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    of_state = (total.exp() * (ids == before))[..., None]
    to_end = ((total[..., -1:] - total).exp() * (ids == last))[..., None]

    inverse = unit_lower_inverse(beta * (k @ k.mT) * decay)
    writes = inverse @ (beta * v)  # what the tokens write if the state before the chunk is zero
    reads = inverse @ (beta * of_state * k)  # and how much less per row of that state
    kept_keys = (to_end * k).mT
    carried = (total[..., -1].exp() * (last == before)[..., 0])[..., None, None]
    identity = torch.eye(k_dim, dtype=k.dtype, device=k.device)
    state = states_before(carried * identity - kept_keys @ reads, kept_keys @ writes)
    corrections = writes - reads @ state
    return (of_state * (q @ state) + ((q @ k.mT) * decay) @ corrections).flatten(2, 3)


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
    heads = [part.transpose(1, 2).contiguous() for part in (q, k, v, g, beta)]
    out = chunked_delta_rule(*heads, batch.document_ids).transpose(1, 2)
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
    out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), attn_mask=mask)
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


def hybrid_hidden(model: Any, batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    """Hidden states behind the last norm, [num_rows, row_len, hidden_size], of a `Qwen3_5ForCausalLM`.

    `mask`: which tokens an attention layer reads, [num_rows, 1, row_len, row_len].
    """
    inner, eps = model.model, model.config.rms_norm_eps
    x = inner.embed_tokens(batch.input_ids)
    rotary = _rotary(model.config, batch.positions, x.dtype)
    for layer, kind in zip(inner.layers, model.config.layer_types):
        y = rms_norm(x, layer.input_layernorm.weight, eps)
        if kind == "linear_attention":
            x = x + gated_delta_net(layer.linear_attn, y, batch)
        else:
            x = x + gated_attention(layer.self_attn, y, rotary, mask, eps)
        x = x + layer.mlp(rms_norm(x, layer.post_attention_layernorm.weight, eps))
    return rms_norm(x, inner.norm.weight, eps)


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
