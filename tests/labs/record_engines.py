"""Grades three engines of the project for `diptych course leaderboard`: shared/tools/course/engines.json.

    python -m tests.labs.record_engines [NAME...]

Each engine is a learner's folder below build/engines. Its files are the solutions that the tests have, except
for the part that makes the engine what it is. Grades of files that are equal in two engines are made once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from diptych.shared.tools.conformance.clauses.stages import STAGES, Stage
from diptych.shared.tools.course.folder import FILE
from tests.docs.solutions import solution

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "engines"
OUTPUT = ROOT / "shared" / "tools" / "course" / "engines.json"

FAST: dict[str, str | tuple[str, str]] = {  # parts of the optimized panel that need no GPU
    "02": "diptych.optimized.memory_pool",
    "04": "diptych.optimized.prefill_adder:PrefillAdder",
    "05": "diptych.optimized.radix_cache:RadixCache",
}

SLOW_ATTENTION = '''\
"""Attention query by query and head by head: right, and slow."""

import torch

from diptych.reference.attention import RequestPlan, TorchAttention, in_window
from diptych.shared.types.attention import AttentionLayer


class MyAttention(TorchAttention):
    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        k, v = (x.to(dtype) for x in self._keys_and_values(layer, request.slots))
        output = torch.zeros(len(q), layer.num_qo_heads, v.shape[-1], dtype=dtype, device=q.device)
        visible = request.visible
        if layer.sliding_window >= 0:
            visible = in_window(request, layer.sliding_window)
        for i in range(len(q)):
            keys = visible[i].nonzero()[:, 0]
            for head in range(layer.num_qo_heads if len(keys) else 0):
                kv_head = head // (layer.num_qo_heads // layer.num_kv_heads)
                scores = k[keys, kv_head] @ (q[i, head].to(dtype) * layer.scale)
                if layer.logit_cap > 0:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                if layer.sinks is not None:
                    scores = torch.cat([scores, layer.sinks[head : head + 1].to(dtype)])
                output[i, head] = torch.softmax(scores, dim=-1)[: len(keys)] @ v[keys, kv_head]
        return output
'''

LOST_TOKEN = ("(before < top_ps * total)", "(before + weights <= top_ps * total) | (ranks == 0)")
"""Words of the sampler and others: top-p without the token with which the sum crosses p."""

ENGINES: dict[str, dict[str, str | tuple[str, str]]] = {
    "swift": FAST,
    "plodder": {"07": SLOW_ATTENTION},
    "almost": {**FAST, "06": LOST_TOKEN},
}
"""name -> stage -> a target of the registry, the text of the file, or words of the solution and others"""


def text_of(stage: Stage, choice: str | tuple[str, str] = "") -> str:
    """The text of the stage's file: a choice of `ENGINES`, by default the solution that the tests have."""
    if isinstance(choice, tuple) or not choice:
        source, class_name = solution(stage)
        if class_name:
            source = source.replace(f"class {class_name}(", f"class {stage.class_name}(")
        assert not choice or choice[0] in source
        return source.replace(*choice) if choice else source
    if "\n" in choice:
        return choice
    module, _, name = choice.partition(":")
    names = f"{name} as {stage.class_name}" if stage.class_name else "*"
    return f'"""A part of the optimized panel."""\n\nfrom {module} import {names}\n'


def build(name: str) -> None:
    """Write the folder of an engine, with the grades of another one, which hold for files that are equal."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        text = text_of(stage, ENGINES[name].get(stage.number, ""))
        (folder / stage.skeleton).write_text(text, encoding="utf-8")
    if not (folder / FILE).is_file():
        others = sorted(BUILD.glob(f"*/{FILE}"))
        kept = others[0].read_text("utf-8") if others else json.dumps({"stages": {}, "labs": []})
        (folder / FILE).write_text(kept, encoding="utf-8")


def main(names: list[str]) -> None:
    known = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.is_file() else []
    reports = {entry["name"]: entry for entry in known}
    for name in names or ENGINES:
        build(name)
        command = ["diptych", "course", "engine", "--folder", str(BUILD / name), "--seconds", "30"]
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
        report = json.loads((BUILD / name / "engine.json").read_text(encoding="utf-8"))
        reports[name] = {**report, "author": "Diptych"}
    ordered = [reports[name] for name in ENGINES if name in reports]
    OUTPUT.write_text(json.dumps(ordered, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
