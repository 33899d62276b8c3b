"""Prefill steps in pieces of graphs: on a CPU with simulated graphs, on a GPU bit by bit."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from diptych.optimized.graphs import mixed_graph
from diptych.optimized.graphs.token_buffers import (
    MAX_LAYER_FLOPS,
    MAX_MIXED_TOKENS,
    captured_token_counts,
    flops_per_token,
)
from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.modeling.forward import run_model
from diptych.shared.tools.bench.step import step_of
from diptych.shared.tools.bench.step_inputs import StepCase, fill_pool
from diptych.shared.tools.conformance.contracts.model_runner.decode import PreparedSession
from diptych.shared.tools.conformance.contracts.model_runner.extend import CASES
from diptych.shared.tools.conformance.contracts.model_runner.forward import model_for
from diptych.shared.types import ForwardMode, SamplingParams

from .fake_graphs import FakeGraphs, FakeGraphsRunner

# ---- which numbers of tokens


def shape(name: str) -> ModelConfig:
    return read_config(ASSETS / "configs" / name)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"cuda_graph_max_tokens": 0}, ()),
        ({"cuda_graph_max_tokens": 64}, (16, 32, 64)),
        ({"cuda_graph_max_tokens": 100}, (16, 32, 64)),
        ({"chunked_prefill_size": 100}, (16, 32, 64, 100)),
        ({"chunked_prefill_size": 7}, (7,)),
        ({"chunked_prefill_size": 100, "enable_mixed_chunk": True}, (16, 32, 64, 100)),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 9, "context_len": 70}, (16, 32, 64, 70)),
        (
            {
                "chunked_prefill_size": None, "max_prefill_tokens": 9, "context_len": 70,
                "enable_mixed_chunk": True, "max_running_requests": 40,
            },
            (16, 32, 64, 110),
        ),
    ],
)  # fmt: skip
def test_sizes_follow_the_flags(flags: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert captured_token_counts(EngineConfig(**flags), shape("Qwen3-0.6B")) == sizes


def test_flops_of_a_token_are_those_of_its_gemms() -> None:
    dense = 1024 * (16 + 8 + 8 + 16) * 128 + 3 * 1024 * 3072
    experts = 2048 * (32 + 4 + 4 + 32) * 128 + 3 * 2048 * 8 * 768
    assert flops_per_token(shape("Qwen3-0.6B")) == 2 * dense
    assert flops_per_token(shape("Qwen3-30B-A3B")) == 2 * experts


def test_sizes_ascend() -> None:
    flags = EngineConfig(cuda_graph_max_tokens=20_000, chunked_prefill_size=20_000)
    sizes = captured_token_counts(flags, shape("Qwen3-0.6B"))
    steps = [base + i * base // 4 for base in (1024, 2048, 4096, 8192) for i in range(4)]
    assert sizes == (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, *steps, 20_000)


def test_larger_models_are_captured_for_fewer_tokens() -> None:
    largest = {}
    for name in ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B"):
        sizes = captured_token_counts(EngineConfig(chunked_prefill_size=16384), shape(name))
        assert sizes[-1] * flops_per_token(shape(name)) <= MAX_LAYER_FLOPS
        largest[name] = sizes[-1]
    assert largest["Qwen3-8B"] < largest["Qwen3-30B-A3B"] < largest["Qwen3-0.6B"] < 16384
    assert largest["Qwen3-8B"] == 1024  # the next turn of a conversation does not wait for its launches
    mixed = EngineConfig(chunked_prefill_size=4096, enable_mixed_chunk=True)
    assert captured_token_counts(mixed, shape("Qwen3-14B"))[-1] == MAX_MIXED_TOKENS
    assert captured_token_counts(mixed, shape("Qwen3-30B-A3B"))[-1] == largest["Qwen3-30B-A3B"]
    # A whole step of the default size: launched eagerly it leaves the GPU waiting for the CPU.
    assert captured_token_counts(EngineConfig(), shape("Qwen3-0.6B"))[-1] == 8192


# ---- graphs played on a CPU


def test_what_is_replayed_and_what_is_not() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), CASES[1])
    [steps] = session.runner.steps.prefill
    assert steps.tokens.sizes == (16, 32, 64)
    num_layers = session.model.config.num_hidden_layers
    assert {len(pieces.up_to_attention) for pieces in steps.captured.values()} == {num_layers}
    ids = iter(range(1000))

    def num_replays(lens: dict[int, int], mode: ForwardMode) -> int:
        before = steps.num_replays
        session.run(
            session.forward_batch(
                {i: [next(ids) % 331 for _ in range(n)] for i, n in lens.items()}, forward_mode=mode
            )
        )
        return steps.num_replays - before

    assert num_replays({0: 40, 1: 24}, ForwardMode.EXTEND) == 1
    assert num_replays({0: 1}, ForwardMode.EXTEND) == 1
    assert num_replays({0: 1, 2: 5}, ForwardMode.MIXED) == 1
    assert num_replays({3: 65}, ForwardMode.EXTEND) == 0
    assert num_replays({0: 1, 3: 1}, ForwardMode.DECODE) == 0
    session.runner.is_watched = True
    assert num_replays({0: 4}, ForwardMode.EXTEND) == 0
    session.runner.is_watched, session.runner.capture_hidden = False, ()
    assert num_replays({0: 4}, ForwardMode.EXTEND) == 0
    session.runner.capture_hidden = None
    assert num_replays({0: 4}, ForwardMode.EXTEND) == 1


def test_a_step_launched_as_it_is_asks_for_its_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all tokens if the others are read too, or if hooks record every op."""
    session, seen = PreparedSession(FakeGraphsRunner, model_for(), CASES[1]), []
    ids = list(range(70))

    def noted(*args: Any) -> Any:
        hidden_states, captured = run_model(*args)
        seen.append(len(hidden_states))
        return hidden_states, captured

    monkeypatch.setattr("diptych.optimized.model_runner.ModelRunner.run_model", staticmethod(noted))

    def num_tokens(row: int = 0, **fields: Any) -> int:
        batch = session.forward_batch({row: ids, 3: ids[:2]}, forward_mode=ForwardMode.EXTEND, **fields)
        logits = session.run(batch).next_token_logits
        assert logits.shape[0] == 2
        return seen[-1]

    assert num_tokens() == 2
    session.runner.is_watched = True
    assert num_tokens(row=1) == 72
    session.runner.is_watched = False
    row, token_id = torch.tensor([5]), torch.tensor([7])
    assert num_tokens(input_logprob_rows=row, input_logprob_ids=token_id) == 72
    session.runner.capture_hidden = ()
    assert num_tokens() == 72


def test_padding_is_the_same_token_everywhere() -> None:
    """So that an MoE sends it to few experts, and a NaN of an earlier step spreads nowhere."""
    session = PreparedSession(FakeGraphsRunner, model_for("mixtral"), CASES[4])
    steps, seen = session.runner.steps.prefill[0], []
    layer = session.model.model.layers[-1]
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    for heads in steps.tokens.heads.values():
        heads.fill_(torch.nan)
    steps.tokens.inputs.fill_(7)
    session.run(session.forward_batch({0: [1, 2, 3], 1: [4, 5]}, forward_mode=ForwardMode.EXTEND))
    assert seen[-1].shape[0] == 16
    assert bool(seen[-1].isfinite().all())
    assert torch.equal(seen[-1][5:], seen[-1][5:6].expand(11, -1))


def test_mixed_steps_are_replayed_whole() -> None:
    """But not those of many prompts, or of a long one."""
    case = next(case for case in CASES if case.is_mixed)
    session = PreparedSession(FakeGraphsRunner, model_for(), case.replace(batch_sizes=(20,)))
    runner, planned = session.runner, []
    plan = runner.attention.plan

    def noted(batch: Any) -> Any:
        planned.append(batch.num_tokens)
        return plan(batch)

    session.run(session.forward_batch({0: [1] * 9, 1: [2] * 60, 2: [3]}, forward_mode=ForwardMode.EXTEND))
    runner.attention.plan = noted

    def is_whole(lens: dict[int, int]) -> bool:
        before = runner.replays.prompts, len(planned)
        ids = {i: [n % 331] * n for i, n in lens.items()}
        session.run(session.forward_batch(ids, forward_mode=ForwardMode.MIXED))
        assert runner.replays.prompts == before[0] + 1
        return len(planned) == before[1]

    assert is_whole({3: 40, 4: 2, 0: 1, 1: 1})
    assert is_whole({4: 7, 2: 1})
    assert is_whole({1: 1, 0: 1})
    assert is_whole(dict.fromkeys(range(3, 19), 2) | {0: 1})
    assert not is_whole(dict.fromkeys(range(3, 20), 2) | {0: 1})


def test_beside_a_long_prompt_steps_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.is_mixed)
    session = PreparedSession(FakeGraphsRunner, model_for(), case)
    _, mixed = session.runner.steps.prefill
    session.run(session.forward_batch({0: [1] * 60, 1: [2] * 5}, forward_mode=ForwardMode.EXTEND))
    batch = session.forward_batch({1: [3] * 5, 0: [1]}, forward_mode=ForwardMode.MIXED)
    for longest, takes in ((10, True), (9, False)):
        monkeypatch.setattr(mixed_graph, "MAX_PROMPT_LEN", longest)
        assert mixed.takes(batch) == takes


@pytest.mark.parametrize("watched", [False, True], ids=["replayed", "launched"])
def test_attention_writes_where_the_next_piece_reads(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session, outs = PreparedSession(FakeGraphsRunner, model_for(), CASES[1]), []
    steps, run = session.runner.steps.prefill[0], session.runner.attention.run
    session.runner.is_watched = watched
    batch = session.forward_batch({0: [1, 2, 3], 1: [4, 5]}, forward_mode=ForwardMode.EXTEND)

    def noted(*args: Any, out: torch.Tensor, **kv: Any) -> torch.Tensor:
        outs.append(out)
        return run(*args, out=out, **kv)

    monkeypatch.setattr(steps.attention, "run", noted)
    session.run(batch)
    assert steps.num_replays == (not watched)
    assert len(outs) == session.model.config.num_hidden_layers
    [heads] = steps.tokens.heads.values()
    assert {(out.data_ptr(), len(out)) for out in outs} == {(heads.data_ptr(), 5)}

    monkeypatch.setattr(steps.attention, "run", lambda *args, out, **kv: run(*args, **kv))
    with pytest.raises(AssertionError, match="did not write to out"):
        session.run(batch)


def test_a_model_that_waits_for_the_gpu_is_said_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, function, of_other_size):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(FakeGraphs, "capture_pieces", refuse)
    with pytest.warns(RuntimeWarning, match="prefill launches kernel by kernel: the model makes"):
        session = PreparedSession(FakeGraphsRunner, model_for(), CASES[0])
    session.run(session.forward_batch({0: [1, 2, 3]}, forward_mode=ForwardMode.EXTEND))
    assert session.runner.replays.prompts == 0


def test_attention_without_graphs_does_for_prompts() -> None:
    class NoGraphs(FakeGraphsRunner):
        def __init__(self, model, attention, kv_pool) -> None:
            super().__init__(model, attention, kv_pool)
            attention.supports_cuda_graph = False

    with pytest.warns(RuntimeWarning, match="ReplannedAttention does not run in CUDA graphs"):
        session = PreparedSession(NoGraphs, model_for(), CASES[0])
    session.run(session.forward_batch({0: [1, 2, 3]}, forward_mode=ForwardMode.EXTEND))
    assert session.runner.replays.prompts == 1


# ---- on a GPU


def gpu_engine(model: str, backend: str | None, **flags: Any) -> LLM:
    use = {} if backend is None else {"attention": backend}
    plain = {
        "max_total_tokens": 8192,
        "max_running_requests": 16,
        "cuda_graph_bs": (1,),
        "cuda_graph_max_tokens": 512,
        "skip_warmup": True,
    }
    return LLM(model=model, panel="optimized", device="cuda", use=use, **{**plain, **flags})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton", "flashinfer", "reference"])
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_replaying_changes_no_bit(model: str, backend: str | None) -> None:
    """At the edges of every size, largest first and in any order, over poisoned padding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reference's attention decodes without graphs
        replayed, launched = (gpu_engine(model, backend, disable_cuda_graph=off) for off in (False, True))
    [steps] = replayed.assembly.parts.model_runner.steps.prefill
    sizes = steps.tokens.sizes
    counts = [n for size in sizes[::-1] for n in (size, size - 1, size // 2 + 1)]
    random.Random(0).shuffle(counts)
    for llm in (replayed, launched):
        fill_pool(llm.assembly.kv_pool)
    for number, num_tokens in enumerate([sizes[-1], *counts]):
        case = StepCase("prefill", min(num_tokens, 1 + number % 5), 50 * (number % 3), num_tokens)
        for heads in steps.tokens.heads.values():
            heads.fill_(torch.nan)
        results = []
        for llm in (replayed, launched):
            with step_of(llm.assembly.parts, case, 0.0, number) as step:
                results.append(step())  # type: ignore[arg-type]
        (a, ids), (b, expected) = results
        assert torch.equal(a.next_token_logits, b.next_token_logits), case
        assert torch.equal(ids.next_token_ids, expected.next_token_ids), case
    assert steps.num_replays == 1 + len(counts)
    assert launched.assembly.parts.model_runner.replays.prompts == 0
    pools = [llm.assembly.kv_pool for llm in (replayed, launched)]
    for layer_id in range(pools[0].num_layers):
        for a, b in ((p.k_buffer(layer_id) for p in pools), (p.v_buffer(layer_id) for p in pools)):
            assert torch.equal(a[pools[0].page_size :], b[pools[0].page_size :])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "flags",
    [{"chunked_prefill_size": 400}, {"enable_mixed_chunk": True, "chunked_prefill_size": 96}],
    ids=str,
)
def test_answers_are_the_same(flags: dict[str, Any]) -> None:
    dice = random.Random(3)
    prompts = [[dice.randrange(256) for _ in range(dice.randint(1, 150))] for _ in range(30)]
    params = SamplingParams(
        max_new_tokens=12, temperature=0.0, ignore_eos=True, return_logprob=True, logprob_start_len=0
    )
    answers = []
    for off in (False, True):
        llm = gpu_engine("tiny-dense", None, disable_cuda_graph=off, check_invariants=True, **flags)
        answers.append(llm.generate(prompts, params, progress=False))
        assert (llm.assembly.parts.model_runner.replays.prompts > 0) != off
    for a, b in zip(*answers, strict=True):
        assert (a.output_ids, a.output_logprobs, a.input_logprobs) == (
            b.output_ids,
            b.output_logprobs,
            b.input_logprobs,
        )
