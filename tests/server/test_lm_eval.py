"""lm-eval's local-completions, unmodified, on a small task of ours; where lm_eval[api] is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.types import SamplingParams
from tests.server.running import RunningServer

NEEDED = ("lm_eval", "datasets", "aiohttp", "tenacity")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)

TASK = """
task: diptych_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
metadata: {{version: 1}}
"""
CHOICES = """doc_to_choice: ["42", "43", "Lima"]
target_delimiter: " "
metric_list: [{metric: acc}]"""
GENERATION = """generation_kwargs: {until: ["<|im_end|>"], max_gen_toks: 16}
metric_list: [{metric: exact_match, ignore_punctuation: false}]"""


def question(a: int, b: int) -> str:
    return f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n"


def evaluate(server: RunningServer, folder: Path, task: str, tokenizer: dict[str, str]) -> dict[str, float]:
    arguments = {
        "model": "tiny-dense", "base_url": f"{server.url}/v1/completions", "num_concurrent": 4,
        "max_retries": 1, **tokenizer,
    }  # fmt: skip
    command = [
        sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", task,
        "--include_path", str(folder), "--output_path", str(folder / "out"),
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (folder / "out").rglob("results_*.json")
    found: dict[str, float] = json.loads(file.read_text())["results"][task]
    return found


@pytest.mark.full
@pytest.mark.parametrize("backend", ["remote", "huggingface"])
@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_scores_are_those_of_the_offline_engine(
    server: RunningServer, tmp_path: Path, kind: str, backend: str
) -> None:
    sums = [(12, 30), (20, 22), (40, 2), (21, 21), (13, 29), (11, 31), (12, 31), (40, 3)]
    llm = LLM(model="tiny-dense")
    rows, num_right = [], 0
    for a, b in sums:
        text = f"{a} + {b} = {a + b}"
        offline = llm.generate(question(a, b), SamplingParams(temperature=0, max_new_tokens=16))
        num_right += offline.text == text
        start = f"{a} + {b} =" if kind == "multiple_choice" else ""
        answer = str(a + b - 42) if kind == "multiple_choice" else text  # the index of a choice
        rows.append({"question": question(a, b) + start, "answer": answer})
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = CHOICES if kind == "multiple_choice" else GENERATION
    task = TASK.format(kind=kind, file=tmp_path / "test.jsonl", more=more)
    (tmp_path / "task.yaml").write_text(task)
    tokenizer = {"tokenizer_backend": backend}
    if backend == "huggingface":
        tokenizer["tokenizer"] = str(resolve_model_path("tiny-dense"))
    found = evaluate(server, tmp_path, f"diptych_{kind}", tokenizer)
    score = found["acc,none" if kind == "multiple_choice" else "exact_match,none"]
    assert score == pytest.approx(num_right / len(sums))
