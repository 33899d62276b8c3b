"""Data-parallel attention: uneven, idle and mixed steps, and the answers of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from diptych.optimized.parallel.dp_attention import PassDispatch as PaddedDispatch
from diptych.reference.parallel.dp_attention import PassDispatch, pads_to_longest
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.engine.processes import replicas_in_step
from diptych.shared.engine.processes.child import Child, EngineProcessEnded, Inbox
from diptych.shared.engine.processes.replicas import controlled, serve_calls
from diptych.shared.engine.processes.replicas_in_step import (
    ControllerInStep,
    assemble_in_step,
    assemble_replica,
)
from diptych.shared.interfaces import Collectives, FusedExperts, TopKOutput
from diptych.shared.parallel import channel
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.in_step import PassTokens
from diptych.shared.tools.conformance.clauses.clause import Clause
from diptych.shared.tools.conformance.clauses.suite import check_implementation, clauses_of
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req
from tests.parallel.tiny_ranks import answers_of_one, make_config, requests
from tests.planted import Bug, Bugs

MIXES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 8, "page_size": 4},
    "mixed chunks": {"chunked_prefill_size": 8, "enable_mixed_chunk": True},
    "small pool": {"max_total_tokens": 48, "schedule_conservativeness": 0.1},
    "whole experts": {"ep": 2},
    "one at a time": {"max_running_requests": 1},
}
HOST_PARTS = ("scheduler", "model_runner", "memory_pool", "radix_cache", "schedule_policy", "prefill_adder")
PANELS: dict[str, dict[str, Any]] = {
    "reference": {},
    "optimized": {
        "use": dict.fromkeys((*HOST_PARTS, "collectives"), "optimized")
    },  # without Triton's kernels
}


class Begun(PassDispatch):
    """A dispatch of one pass."""

    is_extend = False

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        self.begin(x.shape[0], self.is_extend, x.device)
        return super().run(x, topk, experts)


class BegunWithPrompts(Begun):
    """Without padding."""

    is_extend = True


class BegunAhead(PaddedDispatch):
    """A dispatch of a pass of the optimized panel, without padding."""

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        self.begin(x.shape[0], True, x.device)
        return super().run(x, topk, experts)


class BegunPadded(PaddedDispatch):
    """A padded pass, with NaN in the padding rows, which have chosen experts as other rows have."""

    def run(self, x: torch.Tensor, topk: TopKOutput, experts: FusedExperts) -> torch.Tensor:
        self.captured = {1: {4096}}
        num_tokens = x.shape[0]
        num_more = max(self.begin(num_tokens, False, x.device).num_tokens) + 1 - num_tokens
        weights, ids = topk
        padded = TopKOutput(
            torch.cat([weights, weights.new_ones(num_more, weights.shape[1])]),
            torch.cat([ids, ids.new_zeros(num_more, ids.shape[1])]),
        )
        nan = x.new_full((num_more, x.shape[1]), torch.nan)
        return super().run(torch.cat([x, nan]), padded, experts)[:num_tokens]


@pytest.mark.parametrize("impl", [Begun, BegunWithPrompts, BegunAhead, BegunPadded])
@pytest.mark.parametrize("clause", clauses_of("expert_dispatch"), ids=lambda clause: clause.name)
def test_it_is_an_expert_dispatch(clause: Clause, impl: Any) -> None:
    for case in clause.cases:
        clause.run(impl, case, impl)


class FromTheStart(BegunWithPrompts):
    """A rank's tokens stand at the beginning."""

    _start = 0  # type: ignore[assignment]


class PaddingIsCounted(Begun):
    """A rank takes back the rows of padding too."""

    def _scatter(self, summands: torch.Tensor) -> torch.Tensor:
        found = self.ranks.all_reduce(summands)
        return found[: self._end - self._start]


class NoSum(BegunWithPrompts):
    """A rank takes back what its own experts give."""

    def _scatter(self, summands: torch.Tensor) -> torch.Tensor:
        return summands[self._start : self._end]


class LocalNumbers(Begun):
    """Numbers of experts are taken for local ones."""

    def __init__(self, ranks: Collectives, ep: int) -> None:
        super().__init__(ranks, ep)
        self.part = 0


BUGS = Bugs("dispatch of passes", "PassDispatch", "a clause of expert_dispatch")
BUGS.add_all(FromTheStart, PaddingIsCounted, NoSum, LocalNumbers)


@BUGS.found_by()
def test_a_planted_bug_breaks_the_contract(bug: Bug) -> bool:
    clauses = clauses_of("expert_dispatch")
    verdicts = check_implementation(clauses, bug.plant, bug.plant, shrink_failures=False)
    return any(not verdict.holds for verdict in verdicts)


@pytest.mark.parametrize(
    ("num_tokens", "is_extend", "pads"),
    [
        ((4, 4), False, True),
        ((4, 0), False, True),
        ((4, 0, 0), False, False),  # 8 of 12 rows would be padding
        ((3, 3, 3), True, False),
        ((0, 0), False, True),
    ],
)
def test_which_padding(num_tokens: tuple[int, ...], is_extend: bool, pads: bool) -> None:
    assert pads_to_longest(PassTokens(num_tokens, is_extend)) == pads


def in_threads(config: EngineConfig, size: int) -> ControllerInStep:
    """A controller whose other replicas are threads."""
    store, others, ready = HashStore(), [], []

    def run(rank: int, inbox: Inbox) -> None:
        assembly = assemble_replica(config, store, rank, 20.0)
        inbox.start(assembly.parts.allocator.size)
        serve_calls(assembly.scheduler, assembly.grammars, inbox, steps_when_called=True)

    for rank in range(1, size):
        mine, theirs = channel.pair()
        others.append(Child(f"replica {rank}", mine))
        inbox = Inbox(theirs, list, leave=lambda code: None)
        threading.Thread(target=run, args=(rank, inbox), daemon=True).start()
    assembly = assemble_replica(config, store, 0, 20.0)
    ready = [other.next_message(20.0) for other in others]
    return controlled(ControllerInStep, assembly.config, assembly, others, ready)


def run_all(controller: ControllerInStep, reqs: list[Req]) -> dict[str, list[int]]:
    """Output ids, of requests that come one per step."""
    waiting, found = list(reqs), {req.rid: list[int]() for req in reqs}
    while waiting or controller.has_work():
        if waiting:
            controller.add_request(waiting.pop(0))
        for output in controller.step():
            found[output.rid] += output.new_token_ids
    return found


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("panel", PANELS)
def test_replicas_in_step_answer_as_one(folders: dict[str, str], mix: str, size: int, panel: str) -> None:
    """Prompts, decoding and no work at the same time, in all combinations."""
    flags = MIXES[mix] | PANELS[panel]
    ep = flags.pop("ep", 1)
    config = make_config(folders["qwen3-moe"], **flags)
    expected = {req.rid: req.output_ids for req in answers_of_one(config)}
    controller = in_threads(config.updated(dp=size, ep=ep, dp_attention=True), size)
    assert run_all(controller, requests()) == expected
    assert run_all(controller, requests()[:1]) == {"r0": expected["r0"]}  # the others are idle


def test_a_rank_has_a_part_of_the_experts_and_all_of_the_rest(folders: dict[str, str]) -> None:
    config = make_config(folders["qwen3-moe"], dp=2, dp_attention=True)
    whole = assemble(config.updated(dp=1, dp_attention=False)).model.state_dict()
    for part in on_ranks(2, lambda dp: assemble(config, tp=dp).model.state_dict()):
        for name, weight in whole.items():
            assert (part[name].shape == weight.shape) == (".experts." not in name), name
            assert part[name].numel() * (2 if ".experts." in name else 1) == weight.numel()


def test_a_pass_gathers_once(folders: dict[str, str]) -> None:
    """One small tensor, before the collectives of the layers."""
    config = make_config(folders["qwen3-moe"])
    controller = in_threads(config.updated(dp=2, dp_attention=True), 2)
    run_all(controller, requests()[:2])
    entries = list(controller.dp.log.entries)
    gathers = [entry for entry in entries if (entry.dtype, entry.shape) == ("int64", (1, 4))]
    assert len(gathers) == controller.scheduler.runner.num_passes  # type: ignore[attr-defined]
    num_others = len(entries) - len(gathers) - 2  # two are of the start
    assert num_others == 2 * 4 * len(gathers)  # two layers: tokens, weights, ids, and the sum


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dp": 2, "pp": 2}, "all layers on each rank: pp is 2"),
        ({"dp": 2, "ep": 4}, "ep=4 needs dp . tp to be a multiple of it: dp is 2, tp is 1"),
        (
            {"dp": 2, "speculative": "standalone", "speculative_draft_model": "qwen3-moe"},
            "speculative_draft_model=.*: it has experts",
        ),
        ({"dp": 2, "ep": 2, "ep_num_redundant_experts": 1}, "must be a multiple of ep"),
        ({"dp": 2, "model": "llama"}, "LlamaForCausalLM has none"),
        ({"dp": 2, "use": {"scheduler": "optimized"}}, "scheduler=optimized, model_runner=reference; choose"),
        ({"dp": 2, "panel": "optimized", "use": {"model_runner": "reference"}}, "model_runner=reference;"),
        (
            {"dp": 2, "use": {"expert_dispatch": "all_to_all"}},
            "expert_dispatch=all_to_all: it has a dispatch",
        ),
    ],
)
def test_what_cannot_step_together(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = {"model": "qwen3-moe", "dp_attention": True, **flags}
    given |= {name: folders[given[name]] for name in ("model", "speculative_draft_model") if name in given}
    with pytest.raises(ValueError, match=message):
        assemble(make_config(**given), tp=ALONE)


def test_the_replicas_that_are_started_together(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `assemble_in_step`, with threads in place of the processes."""

    def spawn(name: str, main: Callable[..., None], *args: Any) -> Child:
        mine, theirs = channel.pair()
        threading.Thread(target=main, args=(*args, theirs), daemon=True).start()
        return Child(name, mine)

    monkeypatch.setattr(replicas_in_step.Child, "spawn", spawn)
    monkeypatch.setattr(replicas_in_step, "Inbox", partial(Inbox, leave=lambda code: None))
    monkeypatch.setattr(replicas_in_step, "reported_end", lambda inbox: suppress(Exception))
    monkeypatch.setattr(replicas_in_step, "REPORT_SECONDS", 0.01)
    config = make_config(folders["qwen3-moe"])
    expected = {req.rid: req.output_ids for req in answers_of_one(config)}
    controller: Any = assemble_in_step(config.updated(dp=2, dp_attention=True), 20.0).scheduler
    assert [replica.name for replica in controller.replicas] == ["replica 0", "replica 1"]
    assert run_all(controller, requests()) == expected
    for req in requests()[:2]:
        controller.add_request(req)
    controller.step()
    assert controller.retract("r0")
    assert controller.retract("r1")
    assert controller.abort("r0")
    assert controller.abort("r1")
    while controller.has_work():
        controller.step()
    assert controller.flush_cache()

    def late() -> None:
        raise EngineProcessEnded("the first is late")

    controller.scheduler.step = late  # and no other has ended
    for _ in range(2):
        with pytest.raises(EngineProcessEnded, match="replica 0 has ended: the first is late"):
            controller.step()


@pytest.mark.parametrize(("panel", "tp"), [("reference", 1), ("reference", 2), ("optimized", 2)])
@pytest.mark.full
def test_processes_in_step(panel: str, tp: int) -> None:
    config = EngineConfig(
        model="tiny-moe",
        dp=2,
        tp=tp,
        dp_attention=True,
        panel="reference",
        device="cpu",
        max_total_tokens=1024,
        **PANELS[panel],
    )
    assembly = assemble_in_step(config)
    controller: Any = assembly.scheduler
    assert assembly.tokenizer is not None
    prompt = assembly.tokenizer.chat([{"role": "user", "content": "What is 12 + 30?"}])
    for i in range(3):
        req = requests()[0]
        req.rid, req.origin_input_ids = f"q{i}", list(prompt)
        controller.add_request(req)
    found: dict[str, list[int]] = {}
    while controller.has_work():
        for output in controller.step():
            found.setdefault(output.rid, []).extend(output.new_token_ids)
    assert len({tuple(ids) for ids in found.values()}) == 1
    assert "42" in assembly.tokenizer.decode(found["q0"])
