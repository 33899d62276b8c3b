"""Definitions of FlashInfer Trace in our own words, and Solutions, right and wrong, for the tests."""

from __future__ import annotations

from typing import Any

from diptych.shared.tools.conformance.formats.trace_references import DEFINITIONS as KNOWN
from diptych.shared.tools.conformance.formats.trace_references import definition_of

GDN = """
import torch

def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    g = torch.exp(-A_log.exp() * torch.nn.functional.softplus(a.float()[:, 0] + dt_bias.float()))
    beta = torch.sigmoid(b.float()[:, 0])
    q, k, v = (torch.nn.functional.normalize(x.float()[:, 0], dim=-1) if i < 2 else x.float()[:, 0]
               for i, x in enumerate((q, k, v)))
    new = state * g[..., None, None]
    change = (v - torch.einsum("nhvk,nhk->nhv", new, k)) * beta[..., None]
    new = new + change[..., None] * k[..., None, :]
    out = torch.einsum("nhvk,nhk->nhv", new, q) * scale
    return out[:, None].bfloat16(), new
"""
INDEXER = """
import torch

def run(scores, seq_lens):
    hidden = torch.arange(scores.shape[1]) >= seq_lens[:, None]
    found = scores.masked_fill(hidden, -torch.inf).topk(4, -1)
    return torch.where(found.values == -torch.inf, -1, found.indices).int()
"""
MOE = """
import torch

def run(routing_logits, hidden_states, weights):
    chosen = routing_logits.sigmoid().topk(2, -1)
    out = torch.zeros(hidden_states.shape)
    for i, (scores, ids) in enumerate(zip(chosen.values, chosen.indices)):
        for score, e in zip(scores / scores.sum(), ids):
            out[i] += score * (weights[e].float() @ hidden_states[i].float())
    return out.bfloat16()
"""


_BF = "bfloat16"
DEFINITIONS: dict[str, dict[str, Any]] = {
    **KNOWN,
    "gdn": definition_of(
        "gdn_decode", "gdn", "batch_size one=1 num_heads=2 head_size=16",
        f"q:batch_size,one,num_heads,head_size:{_BF} k:batch_size,one,num_heads,head_size:{_BF} "
        f"v:batch_size,one,num_heads,head_size:{_BF} state:batch_size,num_heads,head_size,head_size:float32 "
        f"A_log:num_heads:float32 a:batch_size,one,num_heads:{_BF} dt_bias:num_heads:{_BF} "
        f"b:batch_size,one,num_heads:{_BF} scale::float32",
        f"output:batch_size,one,num_heads,head_size:{_BF} "
        "new_state:batch_size,num_heads,head_size,head_size:float32",
        GDN),
    "dsa_paged": definition_of("topk_indexer", "dsa_paged",
                             "batch_size num_tokens=24 topk=4 max_num_pages=6 page_size=4",
                             "scores:batch_size,num_tokens:float32 seq_lens:batch_size:int32",
                             "topk_indices:batch_size,topk:int32", INDEXER),
    "moe": definition_of("moe_e4", "moe", "seq_len num_experts=4 hidden_size=32",
                       f"routing_logits:seq_len,num_experts:float32 hidden_states:seq_len,hidden_size:{_BF} "
                       f"weights:num_experts,hidden_size,hidden_size:{_BF}",
                       f"output:seq_len,hidden_size:{_BF}", MOE),
}  # fmt: skip


def solution(name: str, change: tuple[str, str] = ("", ""), *, is_dps: bool = True) -> dict[str, Any]:
    """The reference as a Solution, with some words of it replaced."""
    definition = DEFINITIONS[name]
    assert not change[0] or change[0] in definition["reference"]
    source, entry = definition["reference"].replace(*change) if change[0] else definition["reference"], "run"
    if is_dps:
        inputs, outputs = ", ".join(definition["inputs"]), ", ".join(definition["outputs"])
        copies = "".join(f"    {each}.copy_(results[{i}])\n" for i, each in enumerate(definition["outputs"]))
        source += f"\n\ndef into({inputs}, {outputs}):\n    results = run({inputs})\n"
        source += "    results = results if isinstance(results, tuple) else (results,)\n" + copies
        entry = "into"
    return {
        "name": f"{name}_solution", "definition": definition["name"], "author": "tests",
        "sources": [{"path": "main.py", "content": source}],
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": f"main.py::{entry}",
                 "destination_passing_style": is_dps},
    }  # fmt: skip
