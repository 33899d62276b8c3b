"""Mutants of code that only a GPU reaches, and the tests that are run for them there.

A table names the tests of a file, because measuring which test runs which line would take longer than the
mutants. Before the mutants all these tests run once, with the tree as it is: their kernels are compiled then,
and a test that fails is left out. As a plugin of pytest (`-p tests.mutation.gpu`), the module records the
times of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.mutation.mutants import Mutant

MARKS = "not gpus"  # graphs are also played on the CPU
_GRAPHS = "tests/model_runner/test_graphs.py::test_"
_EXTEND = "tests/model_runner/test_extend_graphs.py::test_"
_SPECULATION = "tests/gpu/test_speculation.py::test_"
_AHEAD = "tests/gpu/test_running_ahead.py::test_"
_SCHEDULER = "tests/gpu/test_scheduler.py::test_"
_FLASHINFER = "tests/attention/test_flashinfer.py::test_"
_CONTRACT = "tests/conformance/test_contracts.py::test_clause[attention-flashinfer-"
_WAITS = "tests/gpu/test_waits.py::test_a_step_is_launched_without_waiting[tiny-dense-"
GRAPHS = (
    f"{_GRAPHS}logits_that_are_still_held_are_not_overwritten",
    f"{_GRAPHS}ops_are_seen_although_there_are_graphs",
    f"{_GRAPHS}sizes_in_any_order[0-triton]",
    f"{_GRAPHS}long_sequences[triton]",
    f"{_WAITS}graphs-triton]",
)
PROMPTS = (
    f"{_EXTEND}what_is_replayed_and_what_is_not",
    f"{_EXTEND}mixed_steps_are_replayed_whole",
    f"{_EXTEND}attention_writes_where_the_next_piece_reads[replayed]",
    f"{_EXTEND}a_model_that_waits_for_the_gpu_is_said_and_works",
    f"{_EXTEND}replaying_changes_no_bit[tiny-dense-triton]",
)
DRAFTS = (
    f"{_SPECULATION}a_round_waits_for_nothing",
    f"{_SPECULATION}replays_are_what_is_launched[default-float32]",
)
STREAMS = (
    f"{_SCHEDULER}models_run_on_a_stream_of_their_own",
    f"{_SCHEDULER}the_next_batch_is_queued_while_one_runs",
    f"{_SCHEDULER}nothing_waits_in_a_steady_decode_step[greedy-1]",
    f"{_SCHEDULER}what_requests_ask_of_the_sampler_is_the_references[tiny-dense]",
    f"{_AHEAD}the_next_round_is_queued_while_one_runs",
    f"{_AHEAD}nothing_waits_in_a_steady_round[greedy-1]",
    f"{_AHEAD}what_requests_ask_of_the_sampler_is_as_without_drafts",
    "tests/gpu/test_structured_output.py::test_answers_are_the_references[default]",
)
FLASHINFER = (
    f"{_FLASHINFER}a_capture_without_a_run_before_it_says_what_is_missing",
    f"{_FLASHINFER}refusals[options0-dtype torch.float32: not supported-flashinfer]",
    f"{_FLASHINFER}refusals[options1-head_dim 80: not supported-flashinfer]",
    f"{_FLASHINFER}refusals[options2-sinks: not supported-flashinfer]",
    f"{_FLASHINFER}refusals[options0-dtype torch.float32: not supported-fa3]",
    f"{_FLASHINFER}a_replay_gives_what_launching_gives[{{'sliding_window': 33, 'page_size': 4}}-2]",
    f"{_FLASHINFER}a_replay_gives_what_launching_gives[{{'page_size': 16}}-1]",
    f"{_FLASHINFER}graphs_of_several_sizes_take_turns",
    f"{_FLASHINFER}padding_may_read_nan",
    f"{_FLASHINFER}several_tokens_a_request_in_a_graph[causal-flashinfer]",
    f"{_FLASHINFER}several_tokens_a_request_in_a_graph[causal-fa3]",
    f"{_FLASHINFER}several_tokens_a_request_in_a_graph[tree-flashinfer]",
    *(
        f"{_CONTRACT}{case}]"
        for case in (
            "extend-cached_prefixes,_page_4,_bfloat16",
            "plans-follow-one-another-mixed,_bfloat16,_page_1",
            "trees-trees,_bfloat16,_page_16",
            "tokens-without-visible-keys-blind_rows,_bfloat16,_page_16",
            "sliding-window-mixed,_window_7,_bfloat16",
        )
    ),
    f"{_WAITS}graphs-flashinfer]",
)
PLAYED = (
    "tests/model_runner/test_model_runner.py",
    "tests/model_runner/test_extend_graphs.py",
    "tests/model_runner/test_verify_buffers.py",
    "tests/model_runner/test_draft_graphs.py",
)
"""Files of tests that play graphs on a CPU too."""
VARIANTS = ("tests/model_runner/test_compile_ahead.py",)
LATE = ("tests/scheduler/test_overlap.py", "tests/engine/test_embedding.py")
BESIDE = ("tests/attention/test_flashinfer_wrappers.py", "tests/attention/test_page_tables.py")
TESTS = {
    "optimized/graphs/draft_graphs.py": PLAYED + DRAFTS + GRAPHS,
    "optimized/graphs/verify_graph.py": PLAYED + DRAFTS + GRAPHS,
    "optimized/graphs/extend_graph.py": PLAYED + PROMPTS + GRAPHS,
    "optimized/graphs/mixed_graph.py": PLAYED + PROMPTS + GRAPHS,
    "optimized/graphs/token_buffers.py": PLAYED + PROMPTS + GRAPHS,
    "optimized/graphs/rehearsal.py": VARIANTS + PLAYED,
    "optimized/graphs/all_steps.py": VARIANTS + PLAYED + GRAPHS + PROMPTS + DRAFTS,
    "optimized/graphs/": PLAYED + GRAPHS + PROMPTS + DRAFTS,
    "optimized/overlap/": LATE + STREAMS,
    "optimized/attention/flashinfer.py": BESIDE + FLASHINFER,
    "optimized/attention/flashinfer_wrappers.py": BESIDE + FLASHINFER,
    "optimized/attention/fa3.py": BESIDE + FLASHINFER,
    "optimized/attention/page_tables.py": BESIDE + FLASHINFER,
}
"""A file, or the other files of a folder -> their tests: names, or files of tests."""
FOLDERS = list(TESTS)


class GpuTests:
    """The table in place of a recording, with the times that `record` measured."""

    marks = MARKS
    memory = None  # CUDA reserves addresses
    wall = 1

    def __init__(self, folder: Path) -> None:
        self.times: dict[str, float] = json.loads((folder / "times.json").read_text())

    def tests_for(self, mutant: Mutant, file: str, budget: float) -> list[str]:
        """Names of the tests of the mutant's file, the fastest first, at most `budget` seconds of them. Those
        that failed without a mutant are left out."""
        named = next(tests for path, tests in TESTS.items() if mutant.path.startswith(path))
        chosen, total = [], 0.0
        measured = [test for test in self.times if test in named or test.partition("::")[0] in named]
        for test in sorted(measured, key=self.times.__getitem__):
            total += self.times[test]
            if total <= budget or not chosen:
                chosen.append(test)
        return chosen

    def limit(self, tests: list[str]) -> int:
        return 30 + 2 * round(sum(self.times[test] for test in tests))


def record(folder: Path, workers: int) -> None:
    """Run the tests of the table twice: the second time, when their kernels are compiled, is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({test for tests in TESTS.values() for test in tests})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.mutation.gpu"]
    command += ["-n", str(min(workers, len(names))), "--dist", "load", "--maxschedchunk", "1", *names]
    environment = {**os.environ, "MUTATION_TIMES": str(folder / "times.json")}
    for _ in range(2):
        subprocess.run(command, cwd=ROOT, env=environment, check=False)


_times: dict[str, float] = defaultdict(float)
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _times[report.nodeid] += report.duration
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        times = {name: round(seconds, 3) for name, seconds in _times.items() if name not in _failed}
        Path(os.environ["MUTATION_TIMES"]).write_text(json.dumps(times, indent=0))
