# mypy: ignore-errors
# ruff: noqa: F821
class MyLinearAttention:
    def before(self, tokens: Tokens, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, states = self.pool.inputs[layer.layer_id], self.pool.recurrent[layer.layer_id]
        if tokens.is_first:
            return torch.zeros_like(inputs[tokens.row]), torch.zeros_like(states[tokens.row])
        return inputs[tokens.row], states[tokens.row]

    def after(self, tokens: Tokens, seen: torch.Tensor, state: torch.Tensor, layer: LinearLayer) -> None:
        self.pool.inputs[layer.layer_id, tokens.row] = seen[tokens.end - tokens.start :]
        self.pool.recurrent[layer.layer_id, tokens.row] = state

    def keep(
        self, checkpoint: int, n: int, seen: torch.Tensor, state: torch.Tensor, layer: LinearLayer
    ) -> None:
        self.pool.inputs[layer.layer_id, checkpoint] = seen[n : n + layer.config.conv_kernel - 1]
        self.pool.recurrent[layer.layer_id, checkpoint] = state


def convolve(seen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    windows = seen.to(torch.float32).unfold(0, weight.shape[1], 1)  # [n, num_channels, conv_kernel]
    sums = (windows * weight.to(torch.float32)).sum(-1)
    return sums * torch.sigmoid(sums)


def split_heads(c: torch.Tensor, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    config = layer.config
    q, k, v = c.split((config.k_size, config.k_size, config.v_size), dim=-1)
    q, k = (x.unflatten(-1, (-1, config.k_head_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    repeats = config.num_v_heads // config.num_k_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q, k))
    return q * config.k_head_dim**-0.5, k, v.unflatten(-1, (-1, config.v_head_dim))


def delta_rule(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = g.exp()[:, None, None] * state
    remembered = (state * k[:, :, None]).sum(1)
    correction = beta[:, None] * (v - remembered)
    state = state + k[:, :, None] * correction[:, None, :]
    return state, (state * q[:, :, None]).sum(1)
