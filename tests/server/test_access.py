"""Who may use a server: API keys, and the address from which a client comes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from typer.testing import CliRunner

from shared.cli import app
from shared.server.middleware import ApiKeys


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [(["--api-key", ""], None), (["--api-key", "a", "--api-key", " "], None), ([], ""), ([], " ")],
)
def test_empty_keys_are_refused(arguments: list[str], variable: str | None) -> None:
    result = CliRunner().invoke(
        app, ["serve", "--model", "/nowhere", *arguments], env={"DIPTYCH_API_KEY": variable}
    )
    assert result.exit_code == 2
    assert "must not be empty" in result.output


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "bearer  secret "}, 200),
    ],
    ids=str,
)
def test_an_empty_key_opens_nothing(headers: dict[str, str], status: int) -> None:
    async def ask() -> Any:
        guarded = ApiKeys(PlainTextResponse("ok"), ("", "secret"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://x") as client:
            return await client.get("/metrics", headers=headers)

    assert asyncio.run(ask()).status_code == status
