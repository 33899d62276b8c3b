# --8<-- [start:toy-delta-rule]
import torch


def step(S, q, k, v, keep, beta):
    """One token: S [keys, values] fades, is corrected under k, is read under q."""
    S = keep * S
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return S, S.T @ q
    # --8<-- [end:toy-delta-rule]


# --8<-- [start:toy-states]
class StateCache:
    """Copies of states at multiples of `grid` tokens: a state cannot be cut back."""

    def __init__(self, grid):
        self.grid, self.states = grid, {}

    def answer(self, prompt, tokens_of, num_keys=8, num_values=8):
        """-> (output of the last token, number of tokens that were computed)"""
        start = max((n for n in range(len(prompt)) if tuple(prompt[:n]) in self.states), default=0)
        S = self.states.get(tuple(prompt[:start]), torch.zeros(num_keys, num_values))
        for n, token in enumerate(prompt[start:], start + 1):
            S, output = step(S, *tokens_of(token))
            if n % self.grid == 0:
                self.states[tuple(prompt[:n])] = S.clone()
        return output, len(prompt) - start

    # --8<-- [end:toy-states]
