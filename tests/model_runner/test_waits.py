"""A step is launched without waiting for the device. On a CPU: nothing is called that makes a host wait.

What a CPU cannot show, copies between host and device, is in tests/gpu/test_waits.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.types import ForwardBatch, SamplingParams

from .waits import Waited, refusing_to_wait

SMALL: dict[str, Any] = {
    "device": "cpu",
    "load_format": "dummy",
    "max_total_tokens": 512,
    "max_running_requests": 4,
    "chunked_prefill_size": 8,
    "enable_mixed_chunk": True,
    "page_size": 4,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 12], [3]]
PARAMS = [
    SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True),
    SamplingParams(
        max_new_tokens=3, top_k=20, top_p=0.9, min_p=0.05, return_logprob=True, top_logprobs_num=2,
        logprob_start_len=0, ignore_eos=True,
    ),
    SamplingParams(
        max_new_tokens=2, frequency_penalty=0.4, presence_penalty=0.1, repetition_penalty=1.2,
        logit_bias={5: 1.0, 6: -float("inf")}, min_new_tokens=2,
    ),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled: tests/gpu/test_waits.py")
@pytest.mark.parametrize("model", [pytest.param("tiny-dense", marks=pytest.mark.full), "tiny-moe"])
def test_forward_and_sampling_wait_for_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model of one layer: all layers are alike."""
    config = json.loads((ASSETS / model / "config.json").read_text()) | {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    use = {"attention": "triton"}
    llm = LLM(model=str(tmp_path), panel="optimized", use=use, cuda_graph_bs=(4,), **SMALL)
    runner, modes = llm.assembly.parts.model_runner, set()
    forward_and_sample = runner.forward_and_sample

    def watched(forward_batch: ForwardBatch, *args: Any) -> Any:
        is_first = not modes
        modes.add(forward_batch.forward_mode.name)
        if is_first:  # it makes the table of rotations
            return forward_and_sample(forward_batch, *args)
        with refusing_to_wait(monkeypatch):
            return forward_and_sample(forward_batch, *args)

    monkeypatch.setattr(runner, "forward_and_sample", watched)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False)
    assert [output.finish_reason.kind for output in outputs] == ["length"] * 3
    assert modes == {"EXTEND", "MIXED", "DECODE"}


X = torch.arange(6.0)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: X.max().item(), "_local_scalar_dense"),
        (lambda: int(X[2]), "_local_scalar_dense"),
        (lambda: bool((X > 7).any()), "_local_scalar_dense"),
        (lambda: X.tolist(), "tolist"),
        (lambda: X[X > 3], "index"),
        (lambda: X.clone().index_put_((X > 3,), torch.ones(())), "index_put_"),
        (lambda: X.nonzero(), "nonzero"),
        (lambda: X.unique(), "_unique2"),
        (lambda: X.repeat_interleave(X.long()), "repeat_interleave"),
        (lambda: torch.equal(X, X), "equal"),
    ],
)
def test_what_waits_is_refused(call: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_to_wait(monkeypatch), pytest.raises(Waited, match=what):
        call()
    call()


def test_what_does_not_wait_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_to_wait(monkeypatch):
        rows = X[torch.tensor([2, 4])].masked_fill(X[:2] > 0, 1.0)
        rows = torch.where(rows > 0, rows, 0.0).repeat_interleave(torch.tensor([1, 2]), output_size=3)
    assert rows.tolist() == [2.0, 1.0, 1.0]
