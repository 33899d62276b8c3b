"""Every planted fault is found, by the check that names it; a correct server has none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diptych.shared.tools.conformance.server.checks import QUICK, Context, chosen, run_checks
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.session import connect
from tests.server_check.false_alarms import alarms, main
from tests.server_check.faults import CHAT_CHECKS, all_faults
from tests.server_check.faulty_proxy import Fault
from tests.server_check.local_server import LocalServer

FAULTS = {fault.name: fault for fault in all_faults() if not fault.check.startswith(CHAT_CHECKS)}
SLOW = (
    "temperature squared",
    "temperature ignored",
    "logit_bias ignored",
    "frequency penalty ignored",
    "presence penalty ignored",
    "prompt penalized",
    "repetition penalty ignored",
    "min_p ignored",
    "top_p ignored",
    "one seed",
)
"""Others of their kind, drawn in the same way, are in the fast cut."""
HIDDEN_BY_ROUNDING = ("concurrency dependence", "rounded logprobs", "top_k off by one")
"""Faults whose effect is as large as the errors of bfloat16, one for each rule that finds such faults: two
answers of one server, digits, the server's own log-probabilities."""
PARAMS = [
    pytest.param(fault, id=name, marks=[pytest.mark.full] if name in SLOW or i % 2 else [])
    for i, (name, fault) in enumerate(FAULTS.items())
]
PARAMS_OF_BFLOAT16 = [
    pytest.param(fault, id=name, marks=[] if name in HIDDEN_BY_ROUNDING else [pytest.mark.full])
    for name, fault in FAULTS.items()
]


def find(server: LocalServer, context: Context, fault: Fault) -> list[str]:
    """The failing checks, of the one that names the fault."""
    server.proxy.plant(fault)
    try:
        context = replace(context, rng=random.Random(1), answers=[])
        return list(alarms(list(run_checks(context, chosen([fault.check])))))
    finally:
        server.proxy.plant(None)


@pytest.mark.parametrize("fault", PARAMS)
def test_the_check_of_a_fault_finds_it(
    correct_server: LocalServer, quick_context: Context, fault: Fault
) -> None:
    assert find(correct_server, quick_context, fault) == [fault.check]


@pytest.mark.parametrize("fault", PARAMS_OF_BFLOAT16)
def test_it_is_found_in_bfloat16(rounded_server: LocalServer, rounded_context: Context, fault: Fault) -> None:
    assert find(rounded_server, rounded_context, fault) == [fault.check]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_runs_raise_no_alarm(dtype: str) -> None:
    assert main(["--runs", "2", "--first-seed", "0", "--dtype", dtype]) == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_correct_server_raises_no_alarm(correct_server: LocalServer, oracle: Oracle, seed: int) -> None:
    """The distributions of the sampler have tests of their own: they take the longest."""
    context = connect(
        correct_server.url, "tiny-dense", dtype="float32", seed=seed, limits=QUICK, oracle=oracle
    )
    groups = ["api", "scoring", "dependence", "streaming", "semantics"]
    results = list(run_checks(context, chosen(groups, skip=["semantics.unsupported"])))
    context.server.close()
    assert alarms(results) == {}
    assert [result.check.name for result in results if result.status == "not offered"] == []
