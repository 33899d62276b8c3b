"""Values of generation_config.json stand for what a request leaves open: by way in, and by flag."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from diptych import LLM, EngineConfig, SamplingParams
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.sampling_defaults import read_sampling_defaults, text_of
from tests.server.in_process import client_of, make_app

OF_MODEL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.05}


def folder_with(tmp_path: Path, **values: Any) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return tmp_path


def read(folder: Path | str, **values: Any) -> dict[str, Any]:
    return read_sampling_defaults(EngineConfig(generation_config=str(folder), **values))


def test_the_file_of_a_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, **OF_MODEL, do_sample=False, max_new_tokens=3, eos_token_id=7)
    assert read(folder) == OF_MODEL
    assert text_of({"temperature": 0.6, "top_k": 20}) == "temperature 0.6, top_k 20"


def test_null_and_a_missing_value_leave_the_default(tmp_path: Path) -> None:
    assert read(folder_with(tmp_path, temperature=None, top_k=0)) == {"top_k": -1}
    assert read(folder_with(tmp_path)) == {}


def test_auto_is_the_folder_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((resolve_model_path("tiny-dense") / "config.json").read_text())
    assert read("auto", model=str(tmp_path)) == {}
    folder_with(tmp_path, top_p=0.5)
    assert read("auto", model=str(tmp_path)) == {"top_p": 0.5}
    assert read("none", model=str(tmp_path)) == {}
    assert read("auto", model="tiny-dense") == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, r"generation_config\.json: temperature must be .* --generation-config none"),
        ({"top_p": "0.5"}, "top_p must be a number"),
        ({"top_k": True}, "top_k must be -1"),
        ({"min_p": float("nan")}, "min_p must be a number"),
    ],
)
def test_values_that_no_request_may_have_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read(folder_with(tmp_path, **values))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"auto, none or a folder; there is no file .*generation_config"):
        read(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="expected an object"):
        read(tmp_path)
    (tmp_path / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        read(tmp_path)


def test_calls_of_the_engine(tmp_path: Path) -> None:
    llm = LLM("tiny-dense", panel="reference", generation_config=str(folder_with(tmp_path, top_k=1)))
    assert llm.sampling_defaults == {"top_k": 1}
    greedy = llm.generate("Otto is a", temperature=0, max_tokens=2, progress=False).text
    assert llm.generate("Otto is a", max_tokens=2, temperature=100.0, progress=False).text == greedy
    *_, piece = llm.stream("Otto is a", max_tokens=2, temperature=100.0)
    assert piece.output_ids[-1:] == llm.generate("Otto is a", max_tokens=2, progress=False).output_ids[-1:]
    own = llm.generate("Otto is a", max_tokens=2, temperature=100.0, top_k=-1, progress=False).text
    as_it_is = SamplingParams(max_new_tokens=2, temperature=100.0, seed=1)
    assert greedy not in (own, llm.generate("Otto is a", as_it_is, progress=False).text)


MESSAGES = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_before_the_model(path: str) -> None:
    """Each field apart; null is no value."""

    async def run() -> None:
        app, engine = make_app()
        app.state.server.sampling_defaults = OF_MODEL
        async with client_of(app) as client:

            async def params(**more: Any) -> dict[str, Any]:
                answer = await client.post(path, json={**BODIES[path], **more})
                assert answer.status_code == 200, answer.text
                if path == "/v1/responses":
                    assert answer.json()["temperature"] == engine.sent[-1].params.temperature
                return {name: getattr(engine.sent[-1].params, name) for name in OF_MODEL}

            assert await params() == OF_MODEL
            assert await params(temperature=None) == OF_MODEL
            assert await params(temperature=1.0) == {**OF_MODEL, "temperature": 1.0}
            assert await params(top_p=1.0) == {**OF_MODEL, "top_p": 1.0}
            if path != "/v1/responses":
                assert await params(top_k=0) == {**OF_MODEL, "top_k": -1}

    asyncio.run(run())


def test_native_requests_and_cards() -> None:
    async def run() -> None:
        app, engine = make_app()
        app.state.server.sampling_defaults = OF_MODEL
        async with client_of(app) as client:
            await client.post("/generate", json={"text": "Hi"})
            assert engine.sent[-1].params.repetition_penalty == 1.0
            card = (await client.get("/v1/models")).json()["data"][0]
            assert card["default_sampling_params"] == OF_MODEL

    asyncio.run(run())
