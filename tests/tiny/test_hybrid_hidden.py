"""The hybrid model's forward pass for training: against the recurrence, and against transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.reference.linear_attention import delta_rule
from diptych.shared.tools.training.hybrid_hidden import (
    chunked_delta_rule,
    hybrid_hidden,
    spread_decays,
    unit_lower_inverse,
)
from diptych.shared.tools.training.packing import Batch
from diptych.shared.tools.training.tiny_models import model_config
from diptych.shared.tools.training.train import document_mask

Inputs = tuple[torch.Tensor, ...]


def of_recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Token by token through the reference panel's `delta_rule`, and document by document."""
    g, beta, document_ids = rest
    rows = []
    for row, ids in enumerate(document_ids):
        outputs, state = [], torch.zeros(q.shape[1], k.shape[-1], v.shape[-1], dtype=q.dtype)
        for t in range(q.shape[2]):
            if t and ids[t] != ids[t - 1]:
                state = torch.zeros_like(state)
            decay = g[row, :, t, None]  # one for all channels
            q_t, k_t, v_t, beta_t = (part[row, :, t] for part in (q, k, v, beta))
            state, output = delta_rule(state, q_t, k_t, v_t, decay, beta_t)
            outputs.append(output)
        rows.append(torch.stack(outputs, 1))
    return torch.stack(rows)


def inputs(decay: float, equal_keys: bool = False) -> Inputs:
    """Two rows of 160 tokens in float64. Documents end in a chunk, at its end, after one token and after four
    chunks."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 160, dim, dtype=torch.float64) for dim in (8, 8, 12))
    if equal_keys:
        k = k[:, :, :1].expand_as(k)
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    g, beta = -decay * torch.rand(2, 3, 160, dtype=torch.float64), torch.rand(2, 3, 160, dtype=torch.float64)
    ids = torch.tensor([[0] * 10 + [1] * 54 + [2] * 1 + [3] * 95, [0] * 130 + [1] * 20 + [-1] * 10])
    return q, k, v, g, beta, ids


@pytest.mark.parametrize(
    ("decay", "equal_keys"), [(0.1, False), (30.0, False), (0.0, True)], ids=["slow", "fast", "equal keys"]
)
def test_chunks_are_the_recurrence(decay: float, equal_keys: bool) -> None:
    *floats, ids = inputs(decay, equal_keys)
    weights = torch.randn(2, 3, 160, 12, dtype=torch.float64)
    found: list[Inputs] = []
    rules: list[Callable[..., torch.Tensor]] = [of_recurrence, chunked_delta_rule]
    for rule in rules:
        leaves = [part.detach().clone().requires_grad_() for part in floats]
        output = rule(*leaves, ids)
        (output * weights).sum().backward()
        found.append((output.detach(), *(leaf.grad for leaf in leaves)))
    for name, wanted, given in zip(("output", *"qkvg", "beta"), *found):
        # float64 has 16 digits; the sums of 160 tokens lose three or four of them.
        torch.testing.assert_close(given, wanted, rtol=1e-9, atol=1e-11, msg=f"{name} differs")


def test_inverse_of_equal_keys_is_exact_in_float32() -> None:
    """A is one everywhere below the diagonal: the inverse has -1 beside its diagonal; powers reach 3e8."""
    strict = torch.ones(32, 32).tril(-1)
    expected = torch.eye(32) - torch.diag(torch.ones(31), -1)
    assert torch.equal(unit_lower_inverse(strict), expected)


def test_rows_that_are_no_chunks_are_refused() -> None:
    q, k, v, g, beta = (part[:, :, :90] for part in inputs(0.1)[:-1])
    with pytest.raises(ValueError, match="rows of 90 tokens; they must have a multiple of 32"):
        chunked_delta_rule(q, k, v, g, beta, torch.zeros(2, 90))


def test_hidden_states_are_those_of_transformers() -> None:
    """Each document of a packed row, against transformers on that document alone, in float64."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config("hybrid")).double()
    spread_decays(model)
    lens = [90, 61, 9]
    row_ids = torch.randint(1800, (1, 160))
    document_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))[None]
    positions = torch.cat([torch.arange(n) for n in lens])[None]
    batch = Batch(row_ids, row_ids, torch.ones(1, 160), positions, document_ids)
    with torch.no_grad():
        found = hybrid_hidden(model, batch, document_mask(document_ids))[0].split(lens)
        for ids, states in zip(row_ids[0].split(lens), found):
            wanted = model.model(ids[None]).last_hidden_state[0]
            # transformers computes the delta rule and the norms in float32, whatever the weights are.
            torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)
