"""Block diffusion over HTTP: the answers of `LLM.generate`, beside plain ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.server.engine.engine_loop import EngineLoop
from diptych.shared.server.engine.messages import Generate, RequestOutput, decode_to_engine, encode
from diptych.shared.types import DiffusionParams, SamplingParams
from tests.server.running import RunningServer, serving
from tests.server.test_engine_loop import Driver, Script

MASK_ID, PROMPTS = 300, ([5, 6, 7, 8, 9], [11, 12, 13])
PARAMS = DiffusionParams(MASK_ID, 4, 0.5)
GREEDY = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)


def engine(**flags: Any) -> LLM:
    return LLM("tiny-dense", device="cpu", panel="reference", max_total_tokens=512, page_size=4, **flags)


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(PROMPTS), GREEDY, diffusion=PARAMS, progress=False)
    assert isinstance(outputs, list)
    return [output.output_ids for output in outputs]


@pytest.mark.full
def test_the_engine_answers_in_blocks_beside_plain_requests() -> None:
    expected, plain = answers(engine()), engine().generate(PROMPTS[0], GREEDY, progress=False).output_ids
    script = Script()
    driver = Driver(EngineLoop(engine().assembly, script), script)
    messages = [
        Generate(rid=rid, input_ids=ids, params=GREEDY, seed=1, diffusion=diffusion)
        for rid, ids, diffusion in zip("abc", (*PROMPTS, PROMPTS[0]), (PARAMS, PARAMS, None))
    ]
    assert decode_to_engine(encode(messages[0])) == messages[0]
    wrong = Generate(rid="d", input_ids=[5, MASK_ID], params=GREEDY, seed=1, diffusion=PARAMS)
    outputs: list[RequestOutput] = driver.step(*messages, wrong)
    while driver.loop.scheduler.has_work():
        outputs += driver.step()
    ids: dict[str, list[int]] = {rid: [] for rid in "abcd"}
    for output in outputs:
        ids[output.rid] += output.new_token_ids
    assert [ids[rid] for rid in "abcd"] == [*expected, plain, []]
    (refused,) = (output.finish for output in outputs if output.rid == "d")
    assert refused is not None
    assert (refused.status, refused.message) == (400, f"the prompt has the mask token ({MASK_ID})")


ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [5]},
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "2 + 2"}]},
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_out_of_range_is_refused_by_its_name(server: RunningServer, route: str) -> None:
    for fields, message in (
        ({"mask_id": -1}, "mask_id must be a token id, got -1"),
        ({"mask_id": 3, "block_len": 0}, "block_len must be at least 1, got 0"),
        ({"mask_id": 3, "threshold": 2.0}, "threshold must be between 0 and 1, got 2.0"),
        ({"block_len": 4}, "mask_id"),
        ({"mask_id": 3, "steps": 2}, "steps"),
        ({"mask_id": 3}, "page_size (1) must be a multiple of block_len (4)"),
        ({"mask_id": 10**6, "block_len": 1}, "mask_id (1000000) must be below the"),
    ):
        answer = httpx.post(f"{server.url}{route}", json={**ROUTES[route], "diffusion": fields})
        assert answer.status_code == 400
        assert message in answer.text
    if route != "/generate":
        body = {**ROUTES[route], "diffusion": {"mask_id": 300, "block_len": 1}, "presence_penalty": 0.5}
        answer = httpx.post(f"{server.url}{route}", json=body)
        assert answer.status_code == 400
        assert "diffusion requests do not support presence_penalty" in answer.text


def streamed(url: str, body: dict[str, Any]) -> list[list[int]]:
    """The token ids of each chunk."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return [choice["token_ids"] for choice in choices if choice.get("token_ids")]


SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7}


def body_of(block_len: int) -> dict[str, Any]:
    diffusion = {"mask_id": MASK_ID, "block_len": block_len, "threshold": 0.5}
    fixed = {"max_tokens": 10, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": PROMPTS[0], "diffusion": diffusion, **fixed, **SAMPLED}


def test_completions_and_chats_are_sampled_in_blocks(server: RunningServer) -> None:
    """Blocks of one token, because the server's pages have one."""
    body = body_of(1)
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    native = {
        "input_ids": PROMPTS[0],
        "diffusion": body["diffusion"],
        "sampling_params": {"max_new_tokens": 10, "ignore_eos": True, **SAMPLED},
    }
    expected = httpx.post(f"{server.url}/generate", json=native, timeout=60).json()["output_ids"]
    assert whole["token_ids"] == expected
    assert [i for ids in streamed(f"{server.url}/v1/completions", body) for i in ids] == expected
    del body["prompt"]
    chat = {**body, "messages": [{"role": "user", "content": "2 + 2"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).json()
    ids = [i for chunk in streamed(f"{server.url}/v1/chat/completions", chat) for i in chunk]
    assert answer["choices"][0]["token_ids"] == ids
    assert len(ids) == 10


@pytest.mark.full
def test_a_server_gives_the_offline_answers() -> None:
    body = {
        "input_ids": list(PROMPTS),
        "diffusion": {"mask_id": MASK_ID, "block_len": 4, "threshold": 0.5},
        "sampling_params": {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True},
    }
    sampling = GREEDY.updated(**SAMPLED)
    expected = engine().generate(PROMPTS[0], sampling, diffusion=PARAMS, progress=False).output_ids
    with serving("--page-size", "4", "--max-total-tokens", "512") as server:
        found = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        chunks = streamed(f"{server.url}/v1/completions", body_of(4))
    assert [each["output_ids"] for each in found] == answers(engine())
    assert [len(chunk) for chunk in chunks] == [3, 4, 3]
    assert [i for chunk in chunks for i in chunk] == expected
