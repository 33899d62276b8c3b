"""The prefill engine samples the first token, and the decode engine goes on from there."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.engine.build.assembly import assemble
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, Req, SamplingParams
from tests.parallel.engine_pair import config_of, expected_of, output_ids, pair_of
from tests.parallel.tiny_ranks import make_config, requests


@pytest.mark.parametrize("scheduler", ["reference", "optimized"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_no_token_of_a_prompt_is_computed_twice(
    folders: dict[str, str], scheduler: str, page_size: int
) -> None:
    config = make_config(folders["llama"], use={"scheduler": scheduler}, page_size=page_size)
    expected = expected_of(config)
    with pair_of(config) as pair:
        runner, modes = pair.decode.parts.model_runner, set()
        forward = runner.forward

        def noting(batch: ForwardBatch) -> LogitsOutput:
            modes.add(batch.forward_mode)
            return forward(batch)

        runner.forward = noting  # type: ignore[method-assign]
        reqs = requests()
        for req in reqs:
            pair.decode_side.add_request(req)
        pair.finish()
        assert modes == {ForwardMode.DECODE}
        assert output_ids(reqs) == output_ids(expected)
        for req, alone in zip(reqs, expected):
            found, wanted = (each.input_logprobs[1:] + each.output_logprobs for each in (req, alone))
            assert [one.token_id for one in found] == [one.token_id for one in wanted]
            logprobs = [one.logprob for one in wanted]
            assert [one.logprob for one in found] == pytest.approx(logprobs, abs=1e-4)


def test_what_the_first_token_decides(folders: dict[str, str]) -> None:
    """It may end the request; stop tokens are banned in it; there may be none."""
    config = config_of(folders, "reference")
    first = expected_of(config)[0].output_ids[0]
    params: list[dict[str, Any]] = [
        {"max_new_tokens": 1},
        {"stop_token_ids": [first]},
        {"stop_token_ids": [first], "min_new_tokens": 2},
        {"max_new_tokens": 0, "logprob_start_len": 0, "return_logprob": True},
        {"logit_bias": {first: -100.0}},
    ]

    usual = {"temperature": 0.0, "max_new_tokens": 3}

    def asked() -> list[Req]:
        return [
            Req(f"a{i}", requests()[0].origin_input_ids, SamplingParams(**usual | given), seed=0)
            for i, given in enumerate(params)
        ]

    alone, apart = assemble(config), asked()
    expected = asked()
    for req in expected:
        alone.scheduler.add_request(req)
        while alone.scheduler.has_work():
            alone.scheduler.step()
    with pair_of(config) as pair:
        for req in apart:
            pair.decode_side.add_request(req)
            pair.finish()  # flushes both caches
        assert output_ids(apart) == output_ids(expected)
        assert [req.finished_reason for req in apart] == [req.finished_reason for req in expected]
        assert [len(req.input_logprobs) for req in apart] == [len(req.input_logprobs) for req in expected]


def test_a_prefill_engine_whose_memory_is_in_flight(folders: dict[str, str]) -> None:
    """The next prompt waits until the transport has read the one before."""
    with pair_of(config_of(folders, "reference"), max_total_tokens=32) as pair:
        reqs = requests()[3:]
        for req in reqs:
            pair.decode_side.add_request(req)
        pair.gate.clear()
        pair.until(pair.is_copying.is_set)
        for _ in range(5):
            pair.prefill_side.turn()
        assert len(pair.prefill_side.prefill) == 1
        pair.finish()
        assert [len(req.output_ids) for req in reqs] == [11, 11]
