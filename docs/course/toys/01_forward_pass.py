# --8<-- [start:toy-model]
import torch


class ToyModel:
    """Embedding, one attention head, output head. Random weights, no positions."""

    def __init__(self, vocab_size=50, dim=32):
        random = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(vocab_size, dim, generator=random)
        self.wq, self.wk, self.wv = torch.randn(3, dim, dim, generator=random) / dim**0.5

    def forward(self, token_ids, k, v):
        """k, v [num_cached, dim] -> (logits [vocab_size], k, v of all tokens)"""
        x = self.embedding[token_ids]  # [num_new, dim]
        k, v = torch.cat([k, x @ self.wk]), torch.cat([v, x @ self.wv])
        scores = x @ self.wq @ k.T / x.shape[-1] ** 0.5  # [num_new, num_cached + num_new]
        visible = torch.ones_like(scores, dtype=torch.bool).tril(len(k) - len(x))
        x = x + scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
        return x[-1] @ self.embedding.T, k, v
        # --8<-- [end:toy-model]


# --8<-- [start:toy-generate]
def generate(model, prompt, num_tokens, use_cache):
    """(token ids of the answer, number of tokens that the model computed)"""
    ids, num_computed = list(prompt), 0
    empty = torch.empty(0, model.wk.shape[0])
    k, v = empty, empty
    for _ in range(num_tokens):
        if not use_cache:
            k, v = empty, empty
        new = ids[len(k) :]
        logits, k, v = model.forward(new, k, v)
        num_computed += len(new)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], num_computed
    # --8<-- [end:toy-generate]
