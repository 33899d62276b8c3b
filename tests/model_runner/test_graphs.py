"""On a GPU: engines with and without CUDA graphs, step by step, bit by bit."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.clauses.poison import poison_
from diptych.shared.tools.conformance.diff.lockstep import Lockstep
from diptych.shared.tools.conformance.diff.recorder import LOGITS, SAMPLED_IDS, Recorder
from diptych.shared.types import ForwardMode, SamplingParams

pytestmark = pytest.mark.gpu

MODELS = ("tiny-dense", "tiny-moe")
BACKENDS = ("default", "triton", "flashinfer")  # fa3 decodes by flashinfer's kernels
SIZES = (1, 2, 4, 8, 16, 24)


def engine(model: str, backend: str, **flags: Any) -> LLM:
    use = {} if backend == "default" else {"attention": backend}
    plain = {
        "max_total_tokens": 16384,
        "max_running_requests": 25,
        "cuda_graph_bs": SIZES,
        "cuda_graph_max_tokens": 256,
        "skip_warmup": True,  # kernels are compiled when a test needs them
        "num_continuous_decode_steps": 1,  # as without graphs
    }
    return LLM(model=model, panel="optimized", device="cuda", use=use, **{**plain, **flags})


class Pair:
    """Two engines in step. The one with graphs finds NaN in its dummy page before every step."""

    def __init__(self, model: str, backend: str, **flags: Any) -> None:
        self.replayed = engine(model, backend, check_invariants=True, **flags)
        self.launched = engine(model, backend, disable_cuda_graph=True, **flags)
        self.recorders = Recorder(self.replayed, graphs=True), Recorder(self.launched, graphs=True)
        self.decoded: list[int] = []  # batch sizes

    def submit(self, prompt: list[int], rid: str, **params: Any) -> None:
        for llm in (self.replayed, self.launched):
            llm.submit(prompt, SamplingParams(ignore_eos=True, **params), rid=rid)

    def step(self) -> bool:
        pool = self.replayed.assembly.kv_pool
        for layer_id in range(pool.num_layers):
            poison_(pool.k_buffer(layer_id)[: pool.page_size])
            poison_(pool.v_buffer(layer_id)[: pool.page_size])
        went_on = self.replayed.step(), self.launched.step()
        assert went_on[0] == went_on[1]
        for a, b in zip(*(recorder.take() for recorder in self.recorders), strict=True):
            assert a.schedule == b.schedule
            assert torch.equal(a.heads.tensors[LOGITS], b.heads.tensors[LOGITS]), a.schedule
            assert torch.equal(a.heads.tensors[SAMPLED_IDS], b.heads.tensors[SAMPLED_IDS]), a.schedule
            if a.forward_mode is ForwardMode.DECODE:
                self.decoded.append(len(a.rids))
        return went_on[0]

    def run(self) -> None:
        while self.step():
            pass
        runner = self.replayed.assembly.parts.model_runner
        num_replayable = sum(bs <= runner.steps.decode.max_bs for bs in self.decoded)
        assert runner.replays.steps == num_replayable > 0
        assert self.launched.assembly.parts.model_runner.replays.steps == 0


def prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_batch_size(model: str, backend: str) -> None:
    """From one more than the largest size down to one request, and all sizes again after a larger batch."""
    pair, dice = Pair(model, backend), random.Random(0)
    for i in range(25):
        params = {"temperature": 0.0} if i % 3 == 0 else {"temperature": 0.5 + i / 10, "seed": i}
        pair.submit(prompt(dice, 1 + 7 * i), f"r{i}", max_new_tokens=2 + i, **params)
    pair.run()
    assert set(pair.decoded) == set(range(1, 26))
    assert pair.replayed.assembly.parts.model_runner.replays.samplers > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(2))
def test_sizes_in_any_order(backend: str, seed: int) -> None:
    """Requests with every kind of sampling come and go, and some are retracted."""
    dice = random.Random(seed)
    pair = Pair("tiny-dense", backend, page_size=dice.choice([1, 16]), enable_mixed_chunk=bool(seed))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 9}, {"top_p": 0.7},
        {"frequency_penalty": 0.4}, {"temperature": 0.0, "return_logprob": True},
    ]  # fmt: skip
    waiting = [f"r{i}" for i in range(24)]
    while True:
        for _ in range(dice.choice([0, 0, 1, 3])):
            if waiting:
                only = kinds[:1] if len(waiting) > 18 else kinds[:4] if len(waiting) > 8 else kinds
                params = {**dice.choice(only), "max_new_tokens": dice.randint(1, 30), "seed": len(waiting)}
                pair.submit(prompt(dice, dice.randint(1, 90)), waiting.pop(), **params)
        running = [req.rid for req in pair.replayed.scheduler.state().running]
        if running and dice.random() < 0.1:
            rid = dice.choice(running)
            assert pair.replayed.scheduler.retract(rid) == pair.launched.scheduler.retract(rid)
        if not pair.step() and not waiting:
            break
    pair.run()
    assert len(set(pair.decoded)) > 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_sequences(backend: str) -> None:
    pair, dice = Pair("tiny-dense", backend), random.Random(1)
    context_len = pair.replayed.config.context_len
    for i, length in enumerate((context_len - 33, context_len // 2, 1)):
        pair.submit(prompt(dice, length), f"r{i}", max_new_tokens=32, temperature=0.0)
    pair.run()


def test_a_backend_without_graphs_is_said_once() -> None:
    with pytest.warns(RuntimeWarning, match="TorchAttention does not run in CUDA graphs"):
        llm = engine("tiny-dense", "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([1, 2, 3], SamplingParams(max_new_tokens=4, temperature=0.0), progress=False)
    assert llm.assembly.parts.model_runner.replays.steps == 0


def test_logits_that_are_still_held_are_not_overwritten() -> None:
    llm = engine("tiny-dense", "triton", check_invariants=True)
    runner = llm.assembly.parts.model_runner
    held = []
    forward_and_sample = runner.forward_and_sample

    def keep(*args: Any) -> Any:
        output = forward_and_sample(*args)
        held.append(output[0].next_token_logits[:, :2])
        return output

    runner.forward_and_sample = keep
    llm.submit([1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True), rid="r")
    collector = llm._live.collectors["r"]
    while llm.step():
        pass
    assert collector.finish_reason.kind == "error"
    assert "copy them" in collector.finish_reason.message
    # They are no longer referenced.
    held.clear()
    runner.forward_and_sample = forward_and_sample
    llm.generate([1, 2, 3], SamplingParams(max_new_tokens=8, temperature=0.0), progress=False)


def test_ops_are_seen_although_there_are_graphs() -> None:
    engines = [engine("tiny-dense", "triton", disable_cuda_graph=off) for off in (False, True)]
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [prompt(random.Random(2), n) for n in (5, 40, 12)]
    outcome = Lockstep(*engines).run(prompts, params)
    assert outcome.divergence is None
    assert outcome.finished
    assert {worst.ratio for worst in outcome.worst.values()} == {0.0}
    assert "attention" in outcome.worst
    assert outcome.num_one_sided == (0, 0)
    assert engines[0].assembly.parts.model_runner.replays.steps == 0
    # With graphs on, logits and ids of the steps that were replayed are compared.
    outcome = Lockstep(*engines, graphs=True).run(prompts, params)
    assert outcome.divergence is None
    assert engines[0].assembly.parts.model_runner.replays.steps > 0
