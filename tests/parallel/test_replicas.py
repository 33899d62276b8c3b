"""Replicas behind a controller: which one gets a request, and that answers are those of one engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.processes.child import Child, EngineProcessEnded, Inbox
from diptych.shared.engine.processes.devices import config_of_replica
from diptych.shared.engine.processes.replicas import Controller, Load, choose_replica, controlled, serve_calls
from diptych.shared.parallel import channel
from diptych.shared.types import FinishAbort, FinishError, FinishLength, Req, SamplingParams, StepOutput
from tests.parallel.tiny_ranks import answers_of_one, make_config, requests
from tests.planted import Bug, Bugs

STALL = 8.0
"""Seconds for which the first replica is held in a step, if nothing lets it go on."""
SECONDS = 6.0
"""Time limit of a wait for ends, which come within some tenths of a second."""
POLICIES = ("round-robin", "least-requests", "least-tokens")


def loads(*num_tokens: Sequence[int]) -> list[Load]:
    return [Load({str(i): num for i, num in enumerate(each)}) for each in num_tokens]


CHOICES: list[tuple[str, list[Load], int, int]] = [
    ("round-robin", loads([], [9, 9], []), 0, 1),
    ("round-robin", loads([], [], []), 2, 0),
    ("least-requests", loads([100], [1, 1], [1, 1]), 0, 0),
    ("least-requests", loads([1], [100], [1]), 0, 1),  # a tie goes round robin
    ("least-requests", loads([], [], []), 1, 2),
    ("least-tokens", loads([100], [1, 1], [50]), 0, 1),
    ("least-tokens", loads([10], [5, 5], [20]), 0, 0),  # a tie goes to fewer requests
    ("least-tokens", loads([7], [7], [7]), 1, 2),
]


@pytest.mark.parametrize(("policy", "given", "last", "expected"), CHOICES)
def test_which_replica_gets_a_request(policy: str, given: list[Load], last: int, expected: int) -> None:
    assert choose_replica(policy, given, last) == expected


def _ties_to_the_first(policy: str, given: Sequence[Load], last: int) -> int:
    return choose_replica(policy, given, -1)


def _tokens_of_requests(policy: str, given: Sequence[Load], last: int) -> int:
    return choose_replica("least-requests" if policy == "least-tokens" else policy, given, last)


def _most_tokens(policy: str, given: Sequence[Load], last: int) -> int:
    return choose_replica(policy, [Load({k: -n for k, n in each.num_tokens.items()}) for each in given], last)


def _waits_for_reports(policy: str, given: Sequence[Load], last: int) -> int:
    """Requests that no report has counted yet do not count."""
    return choose_replica(policy, [Load() for _ in given], last)


BUGS = Bugs("replicas", "choose_replica", "CHOICES")
BUGS.add_all(_ties_to_the_first, _tokens_of_requests, _most_tokens, _waits_for_reports)


@BUGS.found_by()
def test_a_planted_bug_chooses_another(bug: Bug) -> bool:
    return any(bug.plant(*given) != expected for *given, expected in CHOICES)


def _serve(*arguments: Any) -> None:
    with contextlib.suppress(OSError):  # it is ended while it works
        serve_calls(*arguments)


def in_threads(
    config: EngineConfig, num_replicas: int, controller: type[Controller] = Controller
) -> tuple[Assembly, Controller]:
    """A controller whose other replicas are threads of this process."""
    config = config.updated(dp=num_replicas)
    others, sizes = [], []
    for i in range(1, num_replicas):
        assembly = assemble(config_of_replica(config, i))
        mine, theirs = channel.pair()
        inbox = Inbox(theirs, list, leave=lambda code: None)
        others.append(Child(f"replica {i}", mine))
        inbox.start(assembly.parts.allocator.size)
        sizes.append(others[-1].next_message(10))
        threading.Thread(
            target=_serve, args=(assembly.scheduler, assembly.grammars, inbox), daemon=True
        ).start()
    assembly = assemble(config_of_replica(config, 0))
    config = assembly.config.updated(dp=num_replicas)
    return assembly, controlled(controller, config, assembly, others, sizes)


def finish(controller: Controller, reqs: list[Req]) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {req.rid: [] for req in reqs}
    for req in reqs:
        controller.add_request(req)
    while controller.has_work():
        for output in controller.step():
            outputs[output.rid].append(output)
    return outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_answer_as_one(folders: dict[str, str], policy: str) -> None:
    config = make_config(folders["llama"], dp_policy=policy, max_total_tokens=256)
    alone = answers_of_one(config)
    _, controller = in_threads(config, 3)
    reqs = requests()
    outputs = finish(controller, reqs)
    for req, expected in zip(reqs, alone):
        pieces = outputs[req.rid]
        assert [i for piece in pieces for i in piece.new_token_ids] == expected.output_ids
        found = [logprob for piece in pieces for logprob in piece.output_logprobs]
        assert [each.token_id for each in found] == [each.token_id for each in expected.output_logprobs]
        assert req.run_start_time is not None
    stats = controller.stats()
    assert stats.num_generated_tokens == sum(len(req.output_ids) for req in alone)
    assert stats.num_prompt_tokens == sum(len(req.origin_input_ids) for req in alone)
    assert [len(load.num_tokens) for load in controller.loads] == [0, 0, 0]


def test_requests_are_refused_aborted_and_flushed_wherever_they_are(folders: dict[str, str]) -> None:
    _, controller = in_threads(make_config(folders["llama"], dp_policy="round-robin"), 2)

    def req(rid: str, **fields: Any) -> Req:
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        return Req(**{"rid": rid, "origin_input_ids": [1, 2], "sampling_params": params, "seed": 0} | fields)

    for rid in "abcd":
        controller.add_request(req(rid))
    assert [sorted(load.num_tokens) for load in controller.loads] == [["a", "c"], ["b", "d"]]
    with pytest.raises(ValueError, match="'b' is in use"):
        controller.add_request(req("b"))
    for bad, message in (
        ({"origin_input_ids": []}, "prompt is empty"),
        ({"origin_input_ids": [131]}, "outside the vocabulary"),
        ({"logit_processor": len}, "logit processors"),
    ):
        with pytest.raises(ValueError, match=message):
            controller.add_request(req("e", **bad))
    assert [len(load.num_tokens) for load in controller.loads] == [2, 2]  # nothing of them is left
    assert not controller.flush_cache()
    assert not controller.retract("e")
    assert controller.retract("b")
    assert not controller.abort("e")
    assert all(controller.abort(rid) for rid in "abcd")
    ended = {}
    while controller.has_work():
        ended |= {output.rid: output.finished_reason for output in controller.step()}
    assert ended == dict.fromkeys("abcd", FinishAbort("aborted"))
    assert controller.flush_cache()


def test_a_call_goes_to_the_replica_of_its_number(folders: dict[str, str]) -> None:
    _, controller = in_threads(make_config(folders["llama"]), 3)
    called: list[int] = []
    for number, replica in enumerate(controller.replicas):
        replica.call = lambda data, number=number: called.append(number)
    for number in (0, 2, 1):
        controller.call(number, "abort", "unknown")
    assert called == [0, 2, 1]


def test_a_flush_empties_every_replica(folders: dict[str, str]) -> None:
    _, controller = in_threads(make_config(folders["llama"], dp_policy="round-robin"), 2)

    def num_cached(*rids: str) -> list[int]:
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        outputs = finish(controller, [Req(rid, list(range(1, 41)), params, 0) for rid in rids])
        return [outputs[rid][-1].num_cached_tokens for rid in rids]

    assert num_cached("a", "b") == [0, 0]
    assert min(num_cached("c", "d")) > 0
    assert controller.stats().num_used_tokens > 0
    assert controller.flush_cache()
    assert controller.stats().num_used_tokens == 0
    assert num_cached("e", "f") == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_processes_and_a_replica_that_is_killed(tp: int, capfd: pytest.CaptureFixture[str]) -> None:
    """LLM(dp=2): the text of one replica. The requests of a replica that ends get an error; later ones go to
    the other."""
    flags = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    sampling = {"temperature": 0, "max_tokens": 16, "progress": False}
    prompts = ["Count from 3 to 9.", "What is 12 + 30?", "What is 7 + 5?"]
    expected = [output.text for output in LLM("tiny-dense", **flags).generate(prompts, **sampling)]
    llm = LLM("tiny-dense", dp=2, tp=tp, dp_policy="round-robin", **flags)
    assert [output.text for output in llm.generate(prompts, **sampling)] == expected
    controller: Any = llm.scheduler
    _, other = controller.replicas
    params = SamplingParams(max_new_tokens=300, ignore_eos=True)
    collectors = [llm.submit([1, 2, 3], params)[0] for _ in range(3)]
    llm.step()
    os.kill(other.process.pid, signal.SIGKILL)
    while llm.step():
        pass
    lost = FinishError("replica 1 has ended with signal SIGKILL", 503)
    assert [each.finish_reason == lost for each in collectors] in ([True, False, True], [False, True, False])
    assert controller.num_replicas == 1
    assert controller.stats().num_running == 0
    assert [output.text for output in llm.generate(prompts, **sampling)] == expected
    assert llm.flush_cache()
    assert "replica 1 has ended with signal SIGKILL; 1 replicas are left" in capfd.readouterr().err


def ends_of(controller: Controller) -> dict[str, Any]:
    """The reasons of the ends of all requests, by rid."""
    ends: dict[str, Any] = {}
    while controller.has_work():
        for output in controller.step():
            if output.finished_reason is not None:
                ends[output.rid] = output.finished_reason
    return ends


@pytest.mark.parametrize("call", ["step", "add_request", "abort"])
def test_the_first_replica_may_end_too(folders: dict[str, str], call: str) -> None:
    """One of its ranks has ended. Once the other replica ends as well, so does the engine."""
    _, controller = in_threads(make_config(folders["llama"], dp_policy="round-robin"), 2)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    def fail(*args: Any) -> Any:
        raise EngineProcessEnded("rank 1 has ended")

    setattr(controller.scheduler, call, fail)
    for rid in "ab":
        controller.add_request(Req(rid, [1, 2, 3], params, 0))
    assert controller.abort("a")
    lost = FinishError("replica 0 has ended: rank 1 has ended", 503)
    assert ends_of(controller) == {"a": lost, "b": FinishLength(3)}
    controller.add_request(Req("c", [1, 2, 3], params, 0))
    assert ends_of(controller) == {"c": FinishLength(3)}
    assert controller.flush_cache()
    controller.replicas[1].end()
    assert controller.has_work()
    for _ in range(2):
        with pytest.raises(EngineProcessEnded, match="replica 1"):
            controller.step()
    with pytest.raises(EngineProcessEnded, match="replica 1"):
        controller.add_request(Req("d", [1], params, 0))


def test_an_error_in_the_first_replica_ends_it_alone(
    folders: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    _, controller = in_threads(make_config(folders["llama"], dp_policy="round-robin"), 2)
    controller.scheduler.step = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    for rid in "ab":
        controller.add_request(Req(rid, [1, 2, 3], params, 0))
    ends = ends_of(controller)
    assert ends["b"] == FinishLength(3)
    assert "replica 0 has ended: ZeroDivisionError" in ends["a"].message
    assert "1 replicas are left" in capfd.readouterr().err


CONTROLLER = "shared.engine.processes.replicas"
CONTROLLER_BUGS = Bugs("controller of replicas")
READS = "ready = readable(self.working, POLL_SECONDS)\n"
OTHERS_ANSWER = "the others answer while the first replica is in a step"
ENDS = "for rid in load.num_tokens]"
for _name, _before, _after, _finder in (
    ("waits for the first replica", READS, "ready = [self.replicas[0]]\n", OTHERS_ANSWER),
    ("steps with the first replica", READS, READS.replace("working", "replicas[:1]"), OTHERS_ANSWER),
    ("ends with any replica", "num_replicas == 0:", "num_replicas <= 2:", "the others live on"),
    ("no ends for what a lost replica had", ENDS, f"{ENDS}[:0]", "every request ends"),
    ("a lost replica is chosen", "self._last, self.lost)", "self._last)", "later requests go to the others"),
    ("a lost replica is counted", "in self.lost:\n            each", "in ():\n            each",
     "statistics without the lost replica"),
):  # fmt: skip
    CONTROLLER_BUGS.words(_name, f"{CONTROLLER}:Controller", (CONTROLLER, _before, _after), finder=_finder)


class Watched:
    """Three replicas, the first of which is held in a step, and the requests that have ended."""

    def __init__(self, folder: str, controller: type[Controller]) -> None:
        self.goes_on, self.is_held = threading.Event(), True
        _, self.controller = in_threads(make_config(folder, dp_policy="round-robin"), 3, controller)
        step = self.controller.scheduler.step

        def stalled() -> list[StepOutput]:
            self.goes_on.wait(STALL)
            self.is_held = False
            return step()

        self.controller.scheduler.step = stalled  # type: ignore[method-assign]
        self.ends: dict[str, Any] = {}

    def add(self, rids: str, num_tokens: int = 3) -> None:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        for rid in rids:
            self.controller.add_request(Req(rid, [1, 2, 3], params, 0))

    def reach(self, rids: str) -> bool:
        """Steps until these requests have ended, for some seconds at most."""
        limit = time.monotonic() + SECONDS
        while not self.ends.keys() >= set(rids) and time.monotonic() < limit:
            self.step()
        return self.ends.keys() >= set(rids)

    def step(self) -> None:
        for output in self.controller.step():
            if output.finished_reason:
                self.ends[output.rid] = output.finished_reason


def failures(folder: str, controller: type[Controller]) -> Iterator[str]:
    """What a controller does wrong while its first replica is in a long step and another one ends."""
    watched = Watched(folder, controller)
    try:
        watched.add("abcdef")  # a and d are of replica 0, b and e of 1, c and f of 2
        if not watched.reach("bcef") or not watched.is_held:
            yield "the others answer while the first replica is in a step"
            return
        watched.add("ghi", num_tokens=100)
        stats = watched.controller._stats
        while stats[1].num_running == 0:  # as reported
            watched.step()
        watched.controller.replicas[1].end()
        if not watched.reach("hi"):
            yield "every request ends"
            return
        if not isinstance(watched.ends["h"], FinishError) or watched.ends["i"] != FinishLength(100):
            yield "only the requests of a replica that has ended get an error"
        if watched.controller.stats().num_used_tokens != stats[0].num_used_tokens + stats[2].num_used_tokens:
            yield "statistics without the lost replica"
        watched.add("jkl")
        if "replica 1" in [f"replica {watched.controller.replica_of[rid]}" for rid in "jkl"]:
            yield "later requests go to the others"
            return
        watched.goes_on.set()
        if not watched.reach("adgjkl") or {watched.ends[rid] for rid in "adjkl"} != {FinishLength(3)}:
            yield "what the held replica has is answered"
    except EngineProcessEnded:
        yield "the others live on"
    finally:
        watched.goes_on.set()


@CONTROLLER_BUGS.found_by(honest=True)
def test_the_controller_waits_for_none_and_lives_on(bug: Bug, folders: dict[str, str]) -> dict[str, str]:
    return dict.fromkeys(failures(folders["llama"], bug.planted or Controller), "")


def test_what_a_replica_refuses_has_an_end(folders: dict[str, str]) -> None:
    """For example stop_regex, with several ranks in a replica."""
    _, controller = in_threads(make_config(folders["llama"]), 2)

    def refuse(req: Req) -> None:
        raise ValueError("no regexes")

    controller.scheduler.add_request = refuse  # type: ignore[method-assign]
    controller.add_request(Req("a", [1, 2, 3], SamplingParams(max_new_tokens=3), 0))
    assert ends_of(controller) == {"a": FinishAbort("no regexes", 400)}


def test_a_burst_is_spread(folders: dict[str, str]) -> None:
    """Requests that come before any step, and before any load is reported."""
    config = make_config(folders["llama"], dp_policy="least-tokens")
    _, controller = in_threads(config, 2)
    for req in requests():
        controller.add_request(req)
    num_tokens = [sum(load.num_tokens.values()) for load in controller.loads]
    assert abs(num_tokens[0] - num_tokens[1]) <= 21  # the longest prompt
    while controller.has_work():
        controller.step()
