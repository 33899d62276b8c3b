"""Definitions of FlashInfer Trace in our own words, and Solutions, right and wrong, for the tests."""

from __future__ import annotations

from typing import Any

from diptych.shared.tools.conformance.formats.trace_references import DEFINITIONS as KNOWN
from diptych.shared.tools.conformance.formats.trace_references import definition_of
from tests.kernel_check.trace_published import PUBLISHED, WITHOUT_EXACT_RESULT

CHOICE = """
import torch

def run(scores, seq_lens):
    hidden = torch.arange(scores.shape[1], device=scores.device) >= seq_lens[:, None]
    found = scores.masked_fill(hidden, -torch.inf).topk(4, -1)
    return torch.where(found.values == -torch.inf, -1, found.indices).int()
"""
DEFINITIONS: dict[str, dict[str, Any]] = {
    **KNOWN,
    **PUBLISHED,
    "gdn that normalises": KNOWN["gdn"] | {"reference": KNOWN["gdn"]["reference"].replace(
        "(x.float()[:, 0]", "(F.normalize(x.float()[:, 0], dim=-1)")},
    "choice of scores": definition_of("topk_indexer", "dsa_paged",
                             "batch_size num_tokens=24 topk=4 max_num_pages=6 page_size=4",
                             "scores:batch_size,num_tokens:float32 seq_lens:batch_size:int32",
                             "topk_indices:batch_size,topk:int32", CHOICE),
}  # fmt: skip
UNKNOWN = ("choice of scores", *WITHOUT_EXACT_RESULT)


def inputs_of(definition: dict[str, Any]) -> list[str]:
    """The parameters of the reference, whose order may be another one than the Definition's."""
    parameters = definition["reference"].split("def run(")[1].split(")")[0].split(",")
    return [each.strip().partition("=")[0] for each in parameters]


def solution(name: str, change: tuple[str, str] = ("", ""), *, is_dps: bool = True) -> dict[str, Any]:
    """The reference as a Solution, with some words of it replaced."""
    definition = DEFINITIONS[name]
    assert not change[0] or change[0] in definition["reference"]
    source, entry = definition["reference"].replace(*change) if change[0] else definition["reference"], "run"
    if is_dps:
        inputs, outputs = ", ".join(definition["inputs"]), ", ".join(definition["outputs"])
        copies = "".join(f"    {each}.copy_(results[{i}])\n" for i, each in enumerate(definition["outputs"]))
        taken = ", ".join(inputs_of(definition))
        source += f"\n\ndef into({inputs}, {outputs}):\n    results = run({taken})\n"
        source += "    results = tuple(results.values()) if isinstance(results, dict) else results\n"
        source += "    results = results if isinstance(results, tuple) else (results,)\n" + copies
        entry = "into"
    return {
        "name": f"{name}_solution", "definition": definition["name"], "author": "tests",
        "sources": [{"path": "main.py", "content": source}],
        "spec": {"language": "python", "target_hardware": ["cpu"], "entry_point": f"main.py::{entry}"}
        | ({} if "type" in definition else {"destination_passing_style": is_dps}),
    }  # fmt: skip
