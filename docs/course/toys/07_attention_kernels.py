# --8<-- [start:toy-merge]
import torch


def partial(q, k, v):
    """q [dim], k [n, dim] -> (weighted sum, largest score, sum of weights)."""
    scores = k @ q / q.shape[-1] ** 0.5
    largest = scores.max()
    weights = (scores - largest).exp()
    return weights @ v, largest, weights.sum()


def merge(a, b):
    """Two partial results of the same query over different keys, as one."""
    largest = torch.maximum(a[1], b[1])
    scale_a, scale_b = (a[1] - largest).exp(), (b[1] - largest).exp()
    return a[0] * scale_a + b[0] * scale_b, largest, a[2] * scale_a + b[2] * scale_b
    # --8<-- [end:toy-merge]


# --8<-- [start:toy-flash]
def flash(q, k, v, block):
    """Attention of one query, one block of keys after another."""
    result = partial(q, k[:block], v[:block])
    for start in range(block, len(k), block):
        result = merge(result, partial(q, k[start : start + block], v[start : start + block]))
    return result[0] / result[2]


def split_kv(seq_lens, num_ctas, block):
    """Equal runs of tiles: for each CTA its [(request, tile)]."""
    tiles = [(request, tile) for request, n in enumerate(seq_lens) for tile in range(-(-n // block))]
    run_len = -(-len(tiles) // num_ctas)
    return [tiles[start : start + run_len] for start in range(0, len(tiles), run_len)]
    # --8<-- [end:toy-flash]
