"""`gdn` of FlashInfer Trace: the gated delta rule, one token for each sequence, several drafted ones, or
sequences of any length."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import Read, TraceOp, constant, tensor
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, bytes_of

LENGTHS = {
    "ragged": ((5,), (1, 2, 17), (64, 1, 65)), "pooled": ((2,), (4,) * 3, (3,) * 17),
    "single": ((1,), (1,) * 3, (1,) * 17),
}  # fmt: skip
SIZES = ("num_q_heads", "num_k_heads", "num_v_heads", "head_size")
OF_TOKENS = ("q", "k", "v", "a", "b")


def delta_rule_op(definition: Definition, normalises: float | None) -> TraceOp | None:
    """`normalises`: whether the reference divides q and k by their lengths."""
    inputs, const = definition.inputs, definition.const
    is_ragged, is_pooled = "cu_seqlens" in inputs, "initial_state_indices" in inputs
    state = "initial_state" if is_pooled else "state"
    is_known = set(SIZES) <= set(const) and {*OF_TOKENS, state, "A_log", "dt_bias"} <= set(inputs)
    if not is_known or not (is_ragged or is_pooled or const.get("seq_len") == 1):
        return None
    lengths = LENGTHS["ragged" if is_ragged else "pooled" if is_pooled else "single"]
    left_out = [(), (state,)] if inputs[state].is_optional and not is_pooled else [()]
    cases = tuple(
        Case(f"{len(each)} x {min(each)} to {max(each)} tokens" + ", no state" * bool(absent), lengths=each,
             seed=i, absent=absent)
        for absent in left_out for i, each in enumerate(lengths) if not absent or i == 1
    )  # fmt: skip
    like = Like(
        "gdn", "A state decays, is corrected under each key and read under each query.", "tokens",
        cases, lambda _: cases[-1:], partial(_make, definition, bool(normalises)), SUSPECTS,
        sparse="v", rows=() if is_ragged or is_pooled else (*OF_TOKENS, "state"),
    )  # fmt: skip
    names: dict[str, Read] = {name: tensor(name) for name in ("A_log", "dt_bias", "cu_seqlens")}
    names |= {state: tensor("state"), "initial_state_indices": tensor("indices")}
    names |= {name: tensor(name) if is_ragged else partial(_of_sequences, name) for name in OF_TOKENS}
    names |= {"scale": constant("scale"), "intermediate_states_buffer": lambda p: None}
    return TraceOp(like, names, {"output": "out", "new_state": "state", "final_state": "pool"})


def _of_sequences(name: str, problem: Problem) -> torch.Tensor:
    """[num_seqs, tokens of a sequence, ...]"""
    return problem[name].unflatten(0, (-1, problem.constants["seq_len"]))


def _make(definition: Definition, normalises: bool, case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """q, k [num_tokens, heads, size] of length 1, v; a, b [num_tokens, heads]; state [num_seqs, heads, size,
    size], keys in its last dimension unless the Definition's name has v_last. With `indices` of the
    sequences, state is a pool, in which the others hold NaN."""
    inputs, specs = Inputs(case.seed + 1000 * seed), definition.inputs
    *heads, size = (definition.const[name] for name in SIZES)
    num_tokens, num_seqs = sum(case.lengths), len(case.lengths)
    shapes = {
        "a": (num_tokens, heads[2]), "b": (num_tokens, heads[2]), "A_log": heads[2:], "dt_bias": heads[2:],
        "v": (num_tokens, heads[2], size), "state": (num_seqs, heads[2], size, size),
    }  # fmt: skip
    tensors = {
        name: inputs.normal(*shape, dtype=specs[name].dtype if name in specs else torch.float32)
        for name, shape in shapes.items()
    }
    for name, num in zip("qk", heads):
        rows = F.normalize(inputs.normal(num_tokens, num, size), dim=-1)
        tensors[name] = rows.to(specs[name].dtype)
    offsets = torch.tensor([0, *case.lengths]).cumsum(0)
    dtype = specs["cu_seqlens"].dtype if "cu_seqlens" in specs else torch.int64
    tensors["cu_seqlens"] = offsets.to(tensors["q"].device, dtype)
    if case.absent:
        tensors["state"].zero_()
    if "initial_state_indices" in specs:
        indices = inputs.permutation(num_seqs + 2)[:num_seqs]
        pool = torch.full((num_seqs + 2, *shapes["state"][1:]), torch.nan, device=indices.device)
        pool[indices] = tensors["state"].to(pool)
        dtype = specs["initial_state_indices"].dtype
        tensors |= {"state": pool.to(specs["initial_state"].dtype), "indices": indices.to(dtype)}
    constants = {
        "scale": size**-0.5, "normalises": normalises, "is_ragged": "cu_seqlens" in specs,
        "is_v_last": "v_last" in definition.name, "absent": case.absent,
        "seq_len": num_tokens // num_seqs,
    }  # fmt: skip
    return Problem(
        case.name, tensors, constants, _recurrence, "linear attention", specs["v"].dtype, num_tokens,
        bytes_of(*tensors.values(), tensors["state"], tensors["v"]),
        6.0 * num_tokens * heads[2] * size * size,
        dtypes={"state": torch.float32, "pool": tensors["state"].dtype},
    )  # fmt: skip


def _recurrence(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    """Token by token in float64, with the state [heads, values, keys]."""
    q, k, v, a, b, pool = (problem[name].cpu().double() for name in (*OF_TOKENS, "state"))
    state = pool[problem["indices"].cpu().long()] if "indices" in problem.tensors else pool
    decay = problem["A_log"].cpu().double().exp() * F.softplus(a + problem["dt_bias"].cpu().double())
    g, beta = torch.exp(-decay), b.sigmoid()
    if mistake == "beta":
        beta = torch.ones_like(beta)
    if mistake == "decay":
        g = torch.ones_like(g)
    if problem.constants["normalises"]:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    repeats = v.shape[1] // q.shape[1]
    q, k = (
        x.repeat(1, repeats, 1) if mistake == "heads" else x.repeat_interleave(repeats, 1) for x in (q, k)
    )
    is_transposed = problem.constants["is_v_last"] != (mistake == "layout")
    states, out = [], torch.zeros_like(v)
    for i, (start, end) in enumerate(pairwise(problem["cu_seqlens"].tolist())):
        s = state[i].mT if is_transposed else state[i]
        for t in range(start, end):
            s = s * g[t, :, None, None]
            before = s
            change = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
            s = s + change[:, :, None] * k[t, :, None, :]
            read = before if mistake == "read" else s
            out[t] = problem.constants["scale"] * torch.einsum("hvk,hk->hv", read, q[t])
        states.append(s.mT if is_transposed else s)
    if not problem.constants["is_ragged"]:
        out = out.unflatten(0, (-1, problem.constants["seq_len"]))
    return {"out": out, "state": torch.stack(states), "pool": pool}


SUSPECTS = {
    "beta is forgotten": partial(_recurrence, mistake="beta"),
    "the state does not decay": partial(_recurrence, mistake="decay"),
    "value head h has query head h % num_q_heads, not h // group": partial(_recurrence, mistake="heads"),
    "the output is read before the state is corrected": partial(_recurrence, mistake="read"),
    "keys and values of the state are swapped": partial(_recurrence, mistake="layout"),
}
