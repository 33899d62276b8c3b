"""Who may use a server: API keys, and the address from which a client comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from typer.testing import CliRunner

from diptych.shared.server.http import admin
from diptych.shared.server.http.middleware import ApiKeys
from diptych.shared.tools.cli import app
from tests.server.running import ROOT, RunningServer, serving


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


def admin_routes() -> set[str]:
    """Paths of the administration."""
    return set(re.findall(r'@app\.\w+\("(.*?)"', Path(admin.__file__).read_text("utf-8")))


def test_nginx_keeps_the_administration_to_itself() -> None:
    text = (ROOT / "docs/deploy/nginx.conf").read_text("utf-8")
    locations = re.findall(r"location ~ (\S+) \{\n(.*?)\n    \}", text, re.DOTALL)
    assert len(locations) == 2

    def is_passed_on(path: str) -> bool:
        block = next((body for pattern, body in locations if re.search(pattern, path)), "return 404;")
        return "proxy_pass" in block

    assert is_passed_on("/v1/chat/completions")
    assert "/v1/load_lora_adapter" in admin_routes()
    assert [path for path in admin_routes() if is_passed_on(path)] == []


@pytest.fixture(scope="module")
def routed() -> Iterator[RunningServer]:
    """A router in front of a server without a key."""
    with serving("--max-total-tokens", "1024") as server, serving(server.url, command="route") as router:
        yield router


@pytest.mark.full
@pytest.mark.parametrize(("address", "status"), [("203.0.113.9", 403), ("127.0.0.1", 200)])
def test_administration_through_a_router(routed: RunningServer, address: str, status: int) -> None:
    """A proxy on the router's computer, such as nginx, gives it the address."""
    headers = {"X-Forwarded-For": address}
    assert httpx.post(f"{routed.url}/flush_cache", headers=headers, timeout=60).status_code == status
