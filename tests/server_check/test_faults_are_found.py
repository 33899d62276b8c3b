"""Every planted fault is found, by the check that names it; a correct server has none."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.conformance.server.checks import QUICK, Context, Result, chosen, run_checks
from shared.conformance.server.oracle import Oracle
from shared.conformance.server.session import connect
from tests.server_check.faults import all_faults
from tests.server_check.faulty_proxy import Fault
from tests.server_check.local_server import LocalServer, local_server

FAULTS = {fault.name: fault for fault in all_faults()}
SERVERS = {
    f"{panel}, {dtype}": {"panel": panel, "dtype": dtype}
    for panel in ("reference", "optimized")
    for dtype in ("float32", "bfloat16")
}


def alarms(results: list[Result]) -> dict[str, list[str]]:
    """Failing checks with what they found."""
    return {
        result.check.name: [finding.what for finding in result.findings if finding.status == "fails"]
        for result in results
        if result.status == "fails"
    }


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_check_of_a_fault_finds_it(proxied: LocalServer, quick_context: Context, fault: Fault) -> None:
    proxied.proxy.plant(fault)
    context = replace(quick_context, rng=random.Random(1), answers=[])
    assert list(alarms(list(run_checks(context, chosen([fault.check]))))) == [fault.check]


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_whole_run_finds_a_fault(proxied: LocalServer, oracle: Oracle, fault: Fault) -> None:
    """What the server offers is found out behind the fault, too."""
    proxied.proxy.plant(fault)
    context = connect(proxied.url, "tiny-dense", dtype="float32", seed=2, limits=QUICK, oracle=oracle)
    assert fault.check in alarms(list(run_checks(context, chosen())))
    context.server.close()


def no_alarms(server: LocalServer, oracle: Oracle, dtype: str, seeds: range) -> None:
    for seed in seeds:
        context = connect(server.url, "tiny-dense", dtype=dtype, seed=seed, limits=QUICK, oracle=oracle)
        results = list(run_checks(context, chosen()))
        context.server.close()
        assert alarms(results) == {}, f"seed {seed}"


def test_a_correct_server_raises_no_alarm(correct_server: LocalServer, oracle: Oracle) -> None:
    no_alarms(correct_server, oracle, "float32", range(2))


@pytest.mark.full
@pytest.mark.parametrize("name", SERVERS)
def test_correct_servers_raise_no_alarm(oracle: Oracle, name: str) -> None:
    """50 runs of all four servers."""
    seeds = range(2, 14) if name.startswith("optimized") else range(2, 15)
    with local_server(**SERVERS[name]) as server:
        no_alarms(server, oracle, SERVERS[name]["dtype"], seeds)
