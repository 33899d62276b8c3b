# --8<-- [start:toy-noise]
import math
import random

import torch


def gumbel(seed, position, token_ids):
    """Noise that belongs to (seed, position, token): no generator, no state."""
    draws = [random.Random(f"{seed}/{position}/{token_id}").random() for token_id in token_ids.tolist()]
    return torch.tensor([-math.log(-math.log(draw)) for draw in draws])
    # --8<-- [end:toy-noise]


# --8<-- [start:toy-sample]
def filtered(logits, temperature, top_k, top_p):
    """(ids of the tokens that stay, their log-probabilities), the likeliest first."""
    logprobs = ((logits - logits.max()) / temperature).log_softmax(-1)
    logprobs, token_ids = logprobs.sort(descending=True, stable=True)
    probs = logprobs.exp()
    keep = torch.arange(len(probs)) < top_k
    keep &= probs.cumsum(-1) - probs < top_p  # the token that crosses top_p stays
    return token_ids[keep], logprobs[keep]


def sample(logits, temperature=1.0, top_k=1 << 30, top_p=1.0, seed=0, position=0):
    """One row of logits [vocab_size] -> a token id."""
    if temperature == 0:
        return int(logits.argmax())
    token_ids, logprobs = filtered(logits, temperature, top_k, top_p)
    return int(token_ids[(logprobs + gumbel(seed, position, token_ids)).argmax()])
    # --8<-- [end:toy-sample]
