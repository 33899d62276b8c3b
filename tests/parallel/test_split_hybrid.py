"""Prefill and decode apart, with linear attention: the state at a prompt's end goes along with its KV."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.reference.parallel.disaggregation import PrefillSide
from diptych.reference.parallel.transport import Transport
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import StatePool
from diptych.shared.loading.sent_pool import SentPool
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import FinishAbort, FinishError, Req, SamplingParams
from tests.parallel.engine_pair import STATES, bring_to, expected_of, output_ids, pair_of
from tests.parallel.split_ranks import cluster_of
from tests.parallel.tiny_ranks import make_config
from tests.planted import Bug, Bugs

HOST_PARTS = ("scheduler", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
OVERLAP: dict[str, Any] = {"use": dict.fromkeys(HOST_PARTS, "optimized")}
SHARED = {"use": {"transport": "shared_memory"}}
NGRAM = {"speculative": "ngram", "speculative_topk": 1}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "pages of one token": ("qwen3.5", {"page_size": 1}),
    "chunks, shared memory": ("qwen3-next", {"chunked_prefill_size": 8} | SHARED),
    "KDA, overlap": ("kimi-linear", OVERLAP),
    "one state at a time": ("qwen3.5", {"max_kept_states": 1}),
    "drafts": ("qwen3.5", NGRAM),
    "drafts, overlap": ("qwen3.5", NGRAM | {"use": {**OVERLAP["use"], "drafter": "optimized"}}),
    "own layer of drafts": ("qwen3.5", {"speculative": "nextn"}),
    "deterministic": ("qwen3.5", {"deterministic": True}),
    "mixed": ("kimi-linear", {"enable_mixed_chunk": True, "chunked_prefill_size": 8} | SHARED),
}
SLOW = ("mixed", "drafts, overlap", "deterministic")


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "GRID", 8)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 16)


def config_of(folder: Path, name: str, **flags: Any) -> EngineConfig:
    config = HYBRID_CONFIGS[name] | {"mtp_num_hidden_layers": 1}
    if name == "kimi-linear":
        config = config | {"linear_attn_config": config["linear_attn_config"] | {"num_heads": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    if flags.get("speculative") == "nextn":
        flags["speculative_draft_model"] = str(folder)
    return make_config(str(folder), **{"page_size": 4} | flags)


def prompts(num_new: int = 10) -> list[Req]:
    """Three begin alike, and two are the same."""
    shared = [(7 * j) % 331 for j in range(17)]
    ids = [[(11 * j + 5) % 331 for j in range(9)], shared, [*shared, *range(8)], [*shared, 3, *range(14)]]
    params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
    return [Req(f"r{i}", each, params, seed=i) for i, each in enumerate([*ids, ids[2]])]


def alone(config: EngineConfig, asked: Sequence[Req] = ()) -> list[list[int]]:
    scheduler, reqs = assemble(config).scheduler, list(asked) or prompts()
    for req in reqs:
        scheduler.add_request(req)
    while scheduler.has_work():
        scheduler.step()
    return output_ids(reqs)


def states_of(assembly: Assembly) -> StateCheckpoints:
    found = [each for each in assembly.parts.features if isinstance(each, StateCheckpoints)]
    return found[0]


def check_states(engines: Sequence[Assembly]) -> None:
    """Every checkpoint has one owner, and none is a request's or a transport's."""
    for states in map(states_of, engines):
        states.check()
        assert not states.orders
        assert not states.being_sent
        assert not states.pool.loads


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.full] if way in SLOW else []) for way in WAYS]
)
def test_two_engines_answer_as_one(way: str, tmp_path: Path) -> None:
    name, flags = WAYS[way]
    config = config_of(tmp_path, name, **flags)
    expected = alone(config)
    with pair_of(config) as pair:
        for _ in range(2):  # the second time with hits at both engines
            reqs = prompts()
            for req in reqs:
                pair.add(req)
            pair.until(lambda: not pair.decode_side.has_work())
            assert output_ids(reqs) == expected
        num_hits = pair.prefill.scheduler.stats().num_cached_tokens
        assert bool(num_hits) == (config.max_kept_states is None)  # the one that there is is sent
        pair.until(lambda: not pair.prefill_side.in_flight)
        check_states((pair.prefill, pair.decode))
        pair.finish()


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
def test_optimized_engines_answer_as_one(tmp_path: Path) -> None:
    use = {"linear_attention": "optimized", **OVERLAP["use"]}
    config = config_of(tmp_path, "qwen3.5", use=use)
    expected = alone(config, prompts(3)[:2])
    with pair_of(config) as pair:
        reqs = prompts(3)[:2]
        for req in reqs:
            pair.add(req)
        pair.until(lambda: not pair.decode_side.has_work())
        assert output_ids(reqs) == expected
        pair.finish()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("kimi-linear", marks=pytest.mark.full)])
def test_ranks_answer_as_one_engine(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    config = config_of(tmp_path, name)
    expected = alone(config)
    with cluster_of(config.updated(use={"transport": "reference"}), sizes, tmp_path) as cluster:
        for _ in range(2):
            assert cluster.answer(prompts()) == expected
        cluster.until(lambda: not cluster.sides[0].in_flight, "prefill")
        for server in cluster.servers:
            server.on_each(lambda engine: check_states([engine]))
        cluster.finish()


ENDS = ["abort", "prefill", "decode"]


@pytest.mark.parametrize("transport", ["reference", pytest.param("shared_memory", marks=pytest.mark.full)])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("end", ENDS)
def test_an_end_at_every_state(transport: str, state: str, end: str, tmp_path: Path) -> None:
    """A request is aborted, or an engine is lost as if it were killed: pages, rows and states are whole."""
    config = config_of(tmp_path, "qwen3.5", chunked_prefill_size=8, use={"transport": transport})
    with pair_of(config) as pair:
        req = bring_to(pair, state)
        if end == "abort":
            assert pair.decode_side.abort(req.rid)
        else:
            lost = pair.sender if end == "prefill" else pair.receiver
            lost.connection.shutdown(socket.SHUT_RDWR)
        pair.gate.set()
        pair.until(lambda: not pair.decode_side.has_work())
        pair.until(lambda: not (pair.prefill_side.in_flight or pair.prefill_side.prefill), "prefill")
        check_states((pair.prefill, pair.decode))
        pair.finish()
        if end == "abort":
            assert isinstance(req.finished_reason, FinishAbort)
            again = bring_to(pair, "scheduled")
            pair.finish()
            assert again.output_ids == expected_of(config)[4].output_ids
        elif state != "scheduled":
            assert isinstance(req.finished_reason, FinishError)


def test_processes() -> None:
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 12, "n": 2, "progress": False}
    texts = ["Count from 3 to 9.", "What is 12 + 30?"]
    expected = [output.text for output in LLM("tiny-hybrid", **flags).generate(texts, **sampling)]
    llm = LLM("tiny-hybrid", disaggregation=True, **flags)
    assert [output.text for output in llm.generate(texts, **sampling)] == expected


@pytest.mark.parametrize("split", [{"disaggregation": True}, {"disaggregation_mode": "prefill"}])
def test_a_prefill_engine_needs_a_state_to_send(split: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3.5", max_kept_states=0)
    ((name, value),) = split.items()
    with pytest.raises(ValueError, match=f"max_kept_states=0 does not work with {name}={value}: states"):
        assemble(config.updated(check_invariants=False, **split))


def _leaves_states(self: Transport, room: str, layer: int, source: list[int], target: list[int]) -> None:
    """Layers of KV are sent, and the state stays behind."""
    if layer < self.kv_pool.num_kv_layers:
        COPY(self, room, layer, source, target)


def _sends_another(self: PrefillSide, start: Any, *more: Any) -> None:
    """The state of another request is sent."""
    last_page = self.last_pages._kept[more[0].rid]
    pool = states_of_side(self).pool
    for states in (pool.inputs, pool.recurrent):
        states[:, last_page.checkpoint] = states[:, (last_page.checkpoint - 1) or 1]
    SEND(self, start, *more)


def _sends_no_inputs(self: Any, layer_id: int) -> list[torch.Tensor]:
    """The recurrent state is sent, and the last inputs of the convolution are not."""
    return PARTS(self, layer_id)[3:]


def _sends_the_last_grid_point(self: StateCheckpoints, req: Req) -> int:
    """The state of the last grid point is sent, and not that at the end of the prompt."""
    checkpoint = BEGIN(self, req)
    states = [store.checkpoint for store in self.orders[req] if store.stored]
    for pool in (self.pool.inputs, self.pool.recurrent) if states else ():
        pool[:, checkpoint] = pool[:, states[-1]]
    return checkpoint


def _keeps_what_was_sent(self: StateCheckpoints, checkpoint: int) -> None:
    """A checkpoint that was sent has no owner."""
    self.being_sent.remove(checkpoint)


def _keeps_what_was_seen(self: StatePool, row: int, num_tokens: int) -> None:
    """Drafts of the row's last request are taken for accepted ones."""
    self.num_seen[row] = num_tokens - 3


def states_of_side(side: PrefillSide) -> StateCheckpoints:
    states = side.last_pages.states
    assert states is not None
    return states


_PARALLEL = "diptych.reference.parallel"
COPY, SEND, BEGIN = Transport._copy, PrefillSide._send, StateCheckpoints.begin_sending
PARTS = SentPool.parts_of_states
BUGS = Bugs("states of split servers", finder="one engine's answers, and owners")
for _bug, _where in {
    _leaves_states: f"{_PARALLEL}.transport.Transport._copy",
    _sends_another: f"{_PARALLEL}.disaggregation.PrefillSide._send",
    _sends_the_last_grid_point: "diptych.shared.scheduling.state_checkpoints.StateCheckpoints.begin_sending",
    _keeps_what_was_sent: "diptych.shared.scheduling.state_checkpoints.StateCheckpoints.end_sending",
    _keeps_what_was_seen: "diptych.shared.interfaces.linear_attention.StatePool.has_come",
    _sends_no_inputs: "diptych.shared.loading.sent_pool.SentPool.parts_of_states",
}.items():
    BUGS.add_all(_bug, where=_where)


@BUGS.found_by(AssertionError, honest=True)
def test_planted_bugs(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    config = config_of(tmp_path, "qwen3.5", **NGRAM)
    expected = alone(config)
    bug.plant_in(monkeypatch)
    with pair_of(config) as pair:
        reqs = prompts()
        for req in reqs:
            pair.add(req)
        pair.until(lambda: not pair.decode_side.has_work())
        pair.until(lambda: not pair.prefill_side.in_flight)
        check_states((pair.prefill, pair.decode))
        return output_ids(reqs) != expected
