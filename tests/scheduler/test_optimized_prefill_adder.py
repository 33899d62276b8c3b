"""The optimized adder beyond its contract."""

from __future__ import annotations

from diptych.optimized.prefill_adder import PrefillAdder
from diptych.shared.interfaces import AddReqResult
from diptych.shared.tools.conformance.contracts.prefill_adder.any_requests import Run, random_requests


def test_fill_ids_are_the_requests_own() -> None:
    added = 0
    for seed in range(20):
        case = random_requests(seed)
        req = case.wanted[1].req("a")
        added += Run(PrefillAdder, case).adder.add_one_req(req) is AddReqResult.CONTINUE
        before = req.all_ids
        req.fill_ids.append(9)
        assert req.all_ids == before
    assert added > 5
