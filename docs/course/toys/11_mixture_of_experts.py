# --8<-- [start:toy-experts]
import torch
import torch.nn.functional as F


def route(router_logits, k):
    """[num_tokens, num_experts] -> (weights, expert ids), both [num_tokens, k]."""
    weights, expert_ids = router_logits.softmax(-1).sort(descending=True, stable=True)
    weights, expert_ids = weights[:, :k], expert_ids[:, :k]
    return weights / weights.sum(-1, keepdim=True), expert_ids


def loop_over_experts(x, w_up, w_down, weights, expert_ids):
    """Each expert computes the tokens that chose it."""
    y = torch.zeros_like(x)
    for expert in expert_ids.unique().tolist():
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        hidden = F.silu(x[tokens] @ w_up[expert]) @ w_down[expert]
        y.index_add_(0, tokens, hidden * weights[tokens, places, None])
    return y
    # --8<-- [end:toy-experts]


# --8<-- [start:toy-blocks]
def sort_into_blocks(expert_ids, block):
    """(pairs sorted by expert, padded with -1 to blocks; the expert of each block)"""
    order = expert_ids.flatten().argsort(stable=True)
    pairs, experts = [], []
    for expert in range(int(expert_ids.max()) + 1):
        mine = order[expert_ids.flatten()[order] == expert].tolist()
        mine += [-1] * (-len(mine) % block)
        pairs += mine
        experts += [expert] * (len(mine) // block)
    return pairs, experts
    # --8<-- [end:toy-blocks]
