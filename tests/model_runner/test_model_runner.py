"""The optimized runner around its graphs, with graphs played on a CPU."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import warnings
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from diptych.optimized.graphs import cuda_graph
from diptych.optimized.graphs.decode_graph import DecodeBuffers, SamplingKind, captured_batch_sizes
from diptych.optimized.graphs.verify_graph import verify_batch_sizes
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces.attention import AttentionBackend
from diptych.shared.parallel.alone import Alone
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.tools.conformance.clauses.suite import check_implementation
from diptych.shared.tools.conformance.contracts.model_runner import decode as clauses
from diptych.shared.tools.conformance.contracts.model_runner import verify as verify_clauses
from diptych.shared.tools.conformance.contracts.model_runner.decode import Decoding, PreparedSession
from diptych.shared.tools.conformance.contracts.model_runner.forward import model_for
from diptych.shared.types import Req, SamplingParams
from tests.conformance.fast_cut import fast_clauses

from .fake_graphs import FakeGraphs, FakeGraphsRunner

FEW = Decoding("few", batch_sizes=(3, 1, 2, 5, 4), sizes=(1, 2, 4))


# ---- which sizes ----


def test_sizes_are_fine_where_batches_are_small() -> None:
    sizes = captured_batch_sizes(EngineConfig())
    assert sizes[:8] == (1, 2, 4, 8, 12, 16, 24, 32)
    assert sizes[-2:] == (248, 256)
    assert len(sizes) == 36
    assert captured_batch_sizes(EngineConfig(max_running_requests=2000))[-3:] == (480, 496, 512)
    assert captured_batch_sizes(EngineConfig(max_running_requests=600, cuda_graph_max_bs=600))[-6:] == (
        480, 496, 512, 544, 576, 600,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ({"max_running_requests": 1}, (1,)),
        ({"max_running_requests": 3}, (1, 2, 3)),
        ({"max_running_requests": 20}, (1, 2, 4, 8, 12, 16, 20)),
        ({"cuda_graph_max_bs": 5}, (1, 2, 4, 5)),
        ({"cuda_graph_bs": (7, 1, 3)}, (1, 3, 7)),
        ({"cuda_graph_bs": (1, 4, 8, 16), "max_running_requests": 6}, (1, 4, 8)),
        ({"cuda_graph_bs": (1, 4, 8, 16), "max_running_requests": 4}, (1, 4)),
    ],
)
def test_sizes_follow_the_flags(flags: dict[str, object], sizes: tuple[int, ...]) -> None:
    assert captured_batch_sizes(EngineConfig(**flags)) == sizes


# ---- what a graph's buffers hold ----


def test_a_batch_is_followed_by_padding_whatever_was_there() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), FEW)
    batch = session.forward_batch({0: [5], 3: [6], 1: [7]})
    buffers = DecodeBuffers((4,), torch.device("cpu"))
    for vectors in (buffers.ints, buffers.floats, buffers.bools):
        vectors.values.fill_(77)
    reqs = [Req("r", [1], SamplingParams(temperature=2.0, top_k=9), seed) for seed in (11, 12, 13)]
    buffers.load(batch, 4, make_sampling_batch_info(reqs, 300, "cpu"))
    loaded = {name: buffers.ints.head(name, 4).tolist() for name in buffers.ints.rows}
    for name in ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc"):
        assert loaded[name][:3] == getattr(batch, name).tolist(), name
    assert loaded["seeds"] == [11, 12, 13, 0]
    assert loaded["top_ks"] == [9, 9, 9, 1]
    # A request of one token, in the dummy row and on the dummy page.
    assert [loaded[name][3] for name in list(loaded)[:5]] == [0, 0, 0, 1, 0]
    assert buffers.floats.head("temperatures", 4).tolist() == [2.0, 2.0, 2.0, 1.0]
    assert buffers.bools.head("is_greedy", 4).tolist() == [False, False, False, True]


def test_parameters_of_sampling_are_loaded_when_they_change() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), FEW)
    batch = session.forward_batch({0: [5], 3: [6], 1: [7]})
    buffers = DecodeBuffers((8,), torch.device("cpu"))
    infos = [
        make_sampling_batch_info(
            [Req("r", [1], SamplingParams(temperature=t, top_k=9), seed) for seed in (11, 12, 13)], 300, "cpu"
        )
        for t in (2.0, 3.0)
    ]

    def temperatures() -> list[float]:
        return buffers.floats.head("temperatures", 4).tolist()

    buffers.load(batch, 4, infos[0])
    buffers.floats.values.fill_(77)
    buffers.load(batch, 4, infos[0])
    assert temperatures() == [77, 77, 77, 77], "they were there"
    buffers.load(batch, 4)
    buffers.load(batch, 4, infos[1])
    assert temperatures() == [3.0, 3.0, 3.0, 1.0]
    buffers.floats.values.fill_(77)
    buffers.load(batch, 8, infos[1])
    assert temperatures() == [3.0, 3.0, 3.0, 1.0], "another size has other padding"
    buffers.padding_batch(4)
    assert buffers.ints.head("seeds", 4).tolist() == [0, 0, 0, 0]
    buffers.load(batch, 8, infos[1])
    assert buffers.ints.head("seeds", 4).tolist() == [11, 12, 13, 0], "padding was over them"


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        ([{"temperature": 0.0}], SamplingKind.GREEDY),
        ([{"temperature": 0.0, "top_k": 5}], SamplingKind.GREEDY),
        ([{"temperature": 0.5}, {"temperature": 0.0}], SamplingKind.PLAIN),
        ([{"temperature": 0.5}, {"top_p": 0.9}], SamplingKind.FILTERED),
        ([{"temperature": 0.0}, {"frequency_penalty": 0.1}], None),
        ([{"temperature": 0.0, "repetition_penalty": 1.1}], None),
        ([{"logit_bias": {1: 2.0}}], None),
        ([{"logit_bias": {1: -100.0}}, {}], None),
        ([{"min_new_tokens": 5, "stop_token_ids": (3,)}], None),
        ([{"return_logprob": True}], None),
        ([{"top_k": 5, "top_p": 0.9, "filter_order": "sequential"}], None),
    ],
)
def test_kinds_of_sampling(params: list[dict[str, object]], kind: SamplingKind | None) -> None:
    reqs = [Req("r", [1], SamplingParams(**p), 0, output_ids=[1]) for p in params]
    assert SamplingKind.of(make_sampling_batch_info(reqs, 300, "cpu")) is kind


ALONE = ("is_sequential", "logit_bias", "banned", "vocab_mask", "output_counts", "prompt_mask")
PENALTIES = ("frequency_penalties", "presence_penalties", "repetition_penalties")


@pytest.mark.parametrize("field", [*ALONE, *PENALTIES, "processors", "return_logprob"])
def test_one_adjustment_is_enough_to_leave_the_graph(field: str) -> None:
    info = make_sampling_batch_info([Req("r", [1], SamplingParams(temperature=0.5), 0)], 300, "cpu")
    assert SamplingKind.of(info) is SamplingKind.PLAIN
    value = {"processors": [(None, [0])], "return_logprob": True}.get(field, torch.ones(1))
    assert SamplingKind.of(replace(info, **{field: value})) is None


# ---- replaying ----


def test_the_contract_holds_with_graphs() -> None:
    clauses = [each.with_cases(each.cases[::2]) for each in fast_clauses("model_runner")]
    reference = registry.load("model_runner", "reference")
    verdicts = list(check_implementation(clauses, FakeGraphsRunner, reference))
    assert [v.failure for v in verdicts if not v.holds] == []
    assert len(verdicts) > 20


def test_what_is_replayed_and_what_is_not() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), FEW)
    session.prefill(FEW)
    runner = session.runner
    assert runner.steps.decode.batch_sizes == (1, 2, 4)
    assert runner.replays.steps == runner.replays.samplers == 0
    expected = []
    for number, (bs, kind) in enumerate([(1, "greedy"), (3, "filters"), (4, "penalties"), (5, "greedy")]):
        info = make_sampling_batch_info(
            clauses.requests(kind, bs, clauses.random.Random(number)), clauses.NUM_TOKEN_IDS, "cpu"
        )
        session.run_and_sample(session.forward_batch({i: [number] for i in range(bs)}), info)
        expected.append((runner.replays.steps, runner.replays.samplers))
    assert expected == [(1, 1), (2, 2), (3, 2), (3, 2)]
    # A sampler that the graphs were not made with is asked itself.
    info = make_sampling_batch_info(clauses.requests("greedy", 1, clauses.random.Random(9)), 300, "cpu")
    other = registry.load("sampler", "reference")()
    runner.forward_and_sample(session.forward_batch({0: [1]}), other, info, 300)
    runner.forward_and_sample(session.forward_batch({0: [1]}), session.sampler, info, 299)
    assert (runner.replays.steps, runner.replays.samplers) == (5, 2)


def test_logits_that_are_still_held_are_not_overwritten() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), FEW)
    session.prefill(FEW)
    results = session.runner.steps.decode.results
    results.check_borrowed = True
    session.run(session.forward_batch({0: [1]}))
    results.last.is_tracked = True
    held = session.run(session.forward_batch({0: [1]}))
    with pytest.raises(AssertionError, match="copy them"):
        session.run(session.forward_batch({0: [1]}))
    del held
    session.run(session.forward_batch({0: [1]}))


def test_a_backend_without_graphs_is_said_once_and_works() -> None:
    class NoGraphs(FakeGraphsRunner):
        def __init__(self, model, attention, kv_pool) -> None:
            super().__init__(model, attention, kv_pool)
            attention.supports_cuda_graph = False

    with pytest.warns(RuntimeWarning, match="ReplannedAttention does not run in CUDA graphs"):
        session = PreparedSession(NoGraphs, model_for(), FEW)
    plain = PreparedSession(registry.load("model_runner", "reference"), model_for(), FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.prefill(FEW)
        plain.prefill(FEW)
        for new_ids in FEW.steps():
            a, b = (s.run(s.forward_batch(new_ids)).next_token_logits for s in (session, plain))
            assert torch.allclose(a, b, atol=1e-4)
    assert session.runner.replays.steps == 0


def test_trees_of_the_configured_size_are_replayed() -> None:
    trees, chains, others = (verify_clauses.CASES[i] for i in (0, 1, 3))
    for case, num_replays in ((trees, 6), (chains, 6), (others, 1)):
        session = PreparedSession(FakeGraphsRunner, model_for(), case)
        session.prefill(case)
        assert [steps.batch_sizes for steps in session.runner.steps.verify] == [case.sizes]
        for (batch,) in case.batches(session):
            session.run(batch)
        # Not those of 5 requests, and no chunk of a prompt. Of the other size: the one that decodes.
        assert session.runner.replays.steps == num_replays, case.name


def test_trees_are_captured_as_far_as_their_nodes_are_few() -> None:
    assert verify_batch_sizes(EngineConfig(), 12) == (1, 2, 4, 8, 12, 16, 24, 32, 40)
    assert verify_batch_sizes(EngineConfig(cuda_graph_bs=(2, 100)), 12) == (2,)
    assert verify_batch_sizes(EngineConfig(cuda_graph_bs=(100,)), 12) == ()


def test_hidden_states_come_out_of_graphs_too() -> None:
    session = PreparedSession(FakeGraphsRunner, model_for(), FEW, capture_hidden=(1, 0))
    plain = PreparedSession(FakeGraphsRunner, model_for(), FEW, graphs=False, capture_hidden=(1, 0))
    session.prefill(FEW)
    plain.prefill(FEW)
    for number, new_ids in enumerate(FEW.steps()):
        found, expected = (s.run(s.forward_batch(new_ids)).hidden_states for s in (session, plain))
        assert torch.equal(found, expected), number
    assert session.runner.replays.steps == 4  # of 5 requests there is no graph
    # Other layers are requested than those captured.
    session.runner.capture_hidden = plain.runner.capture_hidden = ()
    found, expected = (s.run(s.forward_batch({0: [1]})).hidden_states for s in (session, plain))
    assert torch.equal(found, expected)
    assert session.runner.replays.steps == 4


def test_a_model_that_waits_for_the_gpu_is_said_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refuse(self, function, of_other_size):
        refused.append(function)
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(FakeGraphs, "capture", refuse)
    with pytest.warns(RuntimeWarning, match="the model makes the CPU wait"):
        session = PreparedSession(FakeGraphsRunner, model_for(), FEW)
    session.prefill(FEW)
    session.run(session.forward_batch({0: [1], 1: [2], 2: [3]}))
    assert session.runner.replays.steps == 0
    assert len(refused) == 1, "other sizes are not tried"


@pytest.mark.parametrize("runs_before", [False, True])
def test_plans_that_a_run_completes_run_before_each_capture(
    monkeypatch: pytest.MonkeyPatch, runs_before: bool
) -> None:
    asked = []
    capture = FakeGraphs.capture

    def remember(self, function, of_other_size):
        asked.append(of_other_size)
        return capture(self, function, of_other_size)

    monkeypatch.setattr(FakeGraphs, "capture", remember)
    monkeypatch.setattr(AttentionBackend, "runs_before_capture", runs_before)
    PreparedSession(FakeGraphsRunner, model_for(), FEW)
    of_models = asked[:: len(asked) // 3]  # of each size: the model, then kinds of sampling
    assert of_models == [False, not runs_before, not runs_before]


@pytest.mark.parametrize(("module", "name"), [("flashinfer", "FlashInferAttention"), ("fa3", "FA3Attention")])
def test_backends_that_refuse_an_unplanned_capture_run_before_it(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """The library need not be installed: its names are enough."""
    if importlib.util.find_spec("flashinfer") is None:
        parts = [each for each in sys.modules if each.startswith("diptych.optimized.attention.f")]
        for each in (*parts, "flashinfer"):
            monkeypatch.delitem(sys.modules, each, raising=False)
        for each in ("", ".decode"):
            monkeypatch.setitem(sys.modules, f"flashinfer{each}", MagicMock())
    backend = getattr(importlib.import_module(f"diptych.optimized.attention.{module}"), name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="run the plan once before it is captured"):
        backend._planned(backend.__new__(backend), MagicMock(), MagicMock())
    assert backend.runs_before_capture


def test_a_capture_begins_behind_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """With collectives inside, no rank captures while another sets up connections."""
    events: list[str] = []

    class Ranks(Alone):
        def barrier(self) -> None:
            events.append("barrier")

    class Graph:
        def capture_begin(self, **options: object) -> None:
            events.append("begin")

        def capture_end(self) -> None:
            events.append("end")

    monkeypatch.setattr(cuda_graph, "torch", MagicMock(cuda=MagicMock(CUDAGraph=Graph)))
    graphs = cuda_graph.CudaGraphs(torch.device("cuda"), Ranks())
    graphs.capture(lambda: events.append("run"))
    assert events == ["run", "run", "barrier", "begin", "run", "end"]


@pytest.mark.parametrize("is_cycle", [False, True])
def test_graphs_end_before_the_communicators_that_they_contain(
    monkeypatch: pytest.MonkeyPatch, is_cycle: bool
) -> None:
    """The end of an NCCL communicator waits for them forever, whatever Python frees first."""
    events: list[str] = []

    class Communicator:
        def __del__(self) -> None:
            events.append("communicator")

    class Ranks(Alone):
        size = 2

        def __init__(self) -> None:
            self.group = Communicator()

    class Graph(MagicMock):
        def reset(self) -> None:
            events.append("graph")

    monkeypatch.setattr(cuda_graph, "torch", MagicMock(cuda=MagicMock(CUDAGraph=Graph)))
    graphs = cuda_graph.CudaGraphs(torch.device("cuda"), Ranks())
    call = graphs.capture(lambda: torch.zeros(1))
    if is_cycle:
        graphs.ranks.users = [graphs, call]  # type: ignore[attr-defined]
    del graphs, call
    gc.collect()
    assert events == ["graph", "communicator"]


def test_without_graphs_nothing_is_captured_or_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = PreparedSession(FakeGraphsRunner, model_for(), FEW, graphs=False)
    session.prefill(FEW)
    session.run(session.forward_batch({i: [1] for i in range(3)}))
    assert session.runner.replays.steps == 0
    assert list(session.runner.steps.decode.by_size) == [4]


def test_the_optimized_panel_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ValueError, match=r"panel=optimized needs a CUDA GPU .*TRITON_INTERPRET=1\), and the device is cpu"
    ):
        LLM(model="tiny-dense", device="cpu", panel="optimized")
