"""The cache-aware router: its choice and its proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from diptych.shared.server.router.policy import CacheAwarePolicy, Replica, RouterSettings, prompt_text
from diptych.shared.server.router.router import Router
from diptych.shared.tools.bench.serve_client import Client
from diptych.shared.tools.conformance.server.client import Server
from tests.server import in_process
from tests.server.running import serving
from tests.server.test_prefix_tree import longest_common

# ---- the choice ----


def policy(**settings: float) -> CacheAwarePolicy:
    return CacheAwarePolicy(RouterSettings(**settings))  # type: ignore[arg-type]


def test_a_known_prefix_beats_a_smaller_load() -> None:
    a, b = Replica("http://a", load=3), Replica("http://b")
    choice = policy()
    choice.tree.insert("x" * 100, a)
    assert choice.choose("x" * 100 + "y", [a, b]) is a
    assert choice.choose("x" * 20 + "y" * 80, [a, b]) is b  # 20 of 100 known: below the threshold


def test_unbalanced_loads_beat_a_known_prefix() -> None:
    choice = policy(balance_abs=4, balance_rel=1.5)
    a, b = Replica("http://a", load=5), Replica("http://b", load=0)
    choice.tree.insert("x" * 100, a)
    assert choice.choose("x" * 100, [a, b]) is b
    a.load, b.load = 20, 14  # differ by more than 4, but not by half
    assert choice.choose("x" * 100, [a]) is a


def test_ties_do_not_always_go_to_the_first() -> None:
    replicas = [Replica(f"http://{i}") for i in range(3)]
    choice = policy()
    for number in range(30):
        chosen = choice.choose(f"{number} is new", replicas)
        chosen.num_sent += 1
    assert [replica.num_sent for replica in replicas] == [10, 10, 10]


def test_prompts_of_all_apis_have_a_text() -> None:
    chat = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    longer = {**chat, "messages": [*chat["messages"], {"role": "assistant", "content": "a"}]}
    first, second = (prompt_text(json.dumps(body).encode()) for body in (chat, longer))
    assert longest_common(first, second) >= len(first) - 1
    assert prompt_text(b'{"prompt": "p"}') == "p"
    assert prompt_text(b'{"input_ids": [1, 2]}') == "[1, 2]"
    assert prompt_text(b"[" * 100_000) == prompt_text(b'{"prompt": ' + b"[" * 100_000) == ""
    assert prompt_text(b"not json") == prompt_text(b"[1]") == prompt_text(b"") == ""


def test_urls_are_checked() -> None:
    for urls in ([], ["http://a", "http://a"], ["localhost:8000"]):
        with pytest.raises(ValueError, match="URL"):
            Router(urls)


# ---- the proxy ----


class FakeServer:
    """Streams its own name; `status`: of every answer but that of /health, as of a server that drains."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = 200
        self.ready_status: int | None = None  # None: `status`
        self.num_requests = 0
        self.num_disconnects = 0
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/v1/completions", self.complete, methods=["POST"]),
        ]
        self.server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=routes), port=0, log_level="critical", lifespan="off")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def ready(self, request: Request) -> Response:
        return PlainTextResponse("ok", self.ready_status or self.status)

    async def complete(self, request: Request) -> Response:
        self.num_requests += 1
        body = await request.json()
        if self.status != 200:
            return JSONResponse({"error": {"message": self.name}}, self.status)
        if body.get("stream"):
            return StreamingResponse(self._slowly(request), media_type="text/event-stream")
        forwarded = request.headers.getlist("x-forwarded-for")
        key = request.headers.get("authorization")
        facts = {
            "id": request.headers["x-request-id"],
            "from": self.name,
            "key": key,
            "forwarded": forwarded,
            "names": [*request.headers],
        }
        answer = JSONResponse(facts)
        for name, value in (
            ("Set-Cookie", "a"),
            ("Set-Cookie", "b"),
            ("Connection", "X-Hop"),
            ("X-Hop", "1"),
        ):
            answer.headers.append(name, value)
        return answer

    async def _slowly(self, request: Request) -> AsyncIterator[str]:
        try:
            for number in range(200):
                yield f"data: {self.name} {number}\n\n"
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.num_disconnects += 1
            raise

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)


@pytest.fixture
def fakes() -> Iterator[list[FakeServer]]:
    servers = [FakeServer("one"), FakeServer("two")]
    yield servers
    for server in servers:
        server.stop()


@contextlib.asynccontextmanager
async def client_of(router: Router, address: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    async with router._lifespan(router.app), in_process.client_of(router.app, address) as client:
        yield client


def test_requests_with_one_prefix_go_to_one_server(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        router = Router([fake.url for fake in fakes])
        async with client_of(router) as client:
            answers = [
                await client.post(
                    "/v1/completions",
                    json={"prompt": f"{group}" * 100 + str(i)},
                    headers={"Authorization": "Bearer k"},
                )
                for i in range(3)
                for group in "xy"
            ]
            found = [answer.json()["from"] for answer in answers]
            assert found == found[:2] * 3
            assert set(found) == {"one", "two"}
            assert answers[0].json()["key"] == "Bearer k"
            replicas = (await client.get("/replicas")).json()
            assert [replica["load"] for replica in replicas] == [0, 0]
            assert [replica["num_sent"] for replica in replicas] == [3, 3]

    asyncio.run(play())


def test_a_server_gets_the_address_of_the_client(fakes: list[FakeServer]) -> None:
    """The administration answers this computer, but no proxy: a client must not seem to be there. Nor can it
    slip in a header by which the server would know a proxy's other clients."""

    async def play() -> None:
        router = Router([fakes[0].url])
        async with client_of(router, "203.0.113.9") as client:
            headers = [("X-Forwarded-For", "127.0.0.1"), ("x-forwarded-for", "::1")]
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert answer.json()["forwarded"] == ["203.0.113.9"]

    asyncio.run(play())


def test_headers_of_one_connection_are_not_passed_on(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        async with client_of(Router([fakes[0].url])) as client:
            names = (
                "Proxy-Authorization",
                "TE",
                "Trailer",
                "X-Hop",
                "X-Real-IP",
                "Forwarded",
                "Via",
                "X-Kept",
            )
            headers = {**dict.fromkeys(names, "a"), "Connection": "keep-alive, X-Hop"}
            answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert {name.lower() for name in names} & {*answer.json()["names"]} == {"x-kept"}
            assert answer.headers.get_list("set-cookie") == ["a", "b"]
            assert not {"x-hop"} & {*answer.headers}

    asyncio.run(play())


def test_a_proxy_of_the_environment_is_not_used(
    fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the router nor by the clients of benchmarks and checks."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def play() -> None:
        async with client_of(Router([fakes[0].url])) as client:
            assert (await client.post("/v1/completions", json={"prompt": "x"})).is_success
        async with Client(fakes[0].url) as bench:
            assert (await bench.http.get("/health")).is_success
        assert Server(fakes[0].url).http.get("/health").is_success

    asyncio.run(play())


def test_an_answer_has_one_id_which_the_server_has_too(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        async with client_of(Router([fakes[0].url])) as client:
            for given in ("mine", None):
                headers = {"X-Request-ID": given} if given else {}
                answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                (found,) = answer.headers.get_list("x-request-id")
                assert answer.json()["id"] == found
                assert given in (None, found)

    asyncio.run(play())


def test_a_server_that_fails_or_drains_is_left_out(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        router = Router([fake.url for fake in fakes], RouterSettings(health_interval=0.1))
        async with client_of(router) as client:
            body = {"prompt": "x" * 100}
            first = (await client.post("/v1/completions", json=body)).json()["from"]
            holder, other = sorted(fakes, key=lambda fake: fake.name != first)
            holder.status = 503
            assert (await client.post("/v1/completions", json=body)).json()["from"] == other.name
            await asyncio.sleep(0.5)
            before = holder.num_requests
            for i in range(4):
                assert (await client.post("/v1/completions", json={"prompt": f"{i}"})).is_success
            assert holder.num_requests == before  # /ready fails: not even tried
            found = {each["url"]: (each["is_healthy"], each["is_ready"]) for each in await status_of(client)}
            assert found == {holder.url: (True, False), other.url: (True, True)}
            holder.status = 200
            await asyncio.sleep(0.5)
            for i in range(4):
                await client.post("/v1/completions", json={"prompt": f"again {i}"})
            assert holder.num_requests > before
            other.stop()
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["from"] == holder.name
            holder.stop()
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "server_error"
            assert (await client.get("/health")).status_code == 503
            assert [replica.load for replica in router.replicas] == [0, 0]

    asyncio.run(play())


async def status_of(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/replicas")).json()
    return found


def test_a_503_leaves_a_server_out_until_the_next_check(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        router = Router([fake.url for fake in fakes], RouterSettings(health_interval=60))
        async with client_of(router) as client:
            await asyncio.sleep(0.3)  # the first check
            body = {"prompt": "x" * 100}
            first = (await client.post("/v1/completions", json=body)).json()["from"]
            holder, other = sorted(fakes, key=lambda fake: fake.name != first)
            holder.status = 503
            for _ in range(3):
                assert (await client.post("/v1/completions", json=body)).json()["from"] == other.name
            assert holder.num_requests == 2  # the first one, and the one that was refused
            assert (await client.get("/ready")).status_code == 200
            other.status = 503
            assert (await client.post("/v1/completions", json=body)).status_code == 503
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            holder.status = 200  # no check has come, but there is none that is ready
            assert (await client.post("/v1/completions", json=body)).json()["from"] == holder.name

    asyncio.run(play())


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_keeps_its_readiness_to_itself(fakes: list[FakeServer], status: int) -> None:
    """With a key for /ready, or without that route: /health decides."""

    async def play() -> None:
        fakes[0].ready_status = status
        router = Router([fakes[0].url], RouterSettings(health_interval=0.1))
        async with client_of(router) as client:
            await asyncio.sleep(0.3)
            assert (await client.get("/ready")).status_code == 200
            fakes[0].stop()
            await asyncio.sleep(0.5)
            assert (await client.get("/health")).status_code == 503

    asyncio.run(play())


def test_an_error_of_a_server_is_passed_on(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        router = Router([fakes[0].url])
        async with client_of(router) as client:
            await asyncio.sleep(0.2)
            fakes[0].status = 400
            answer = await client.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "one")

    asyncio.run(play())


def test_long_bodies_are_refused(fakes: list[FakeServer]) -> None:
    async def play() -> None:
        router = Router([fakes[0].url], RouterSettings(max_body_bytes=1000))
        async with client_of(router) as client:
            answer = await client.post("/v1/completions", json={"prompt": "x" * 2000})
            assert answer.status_code == 413

    asyncio.run(play())
    assert fakes[0].num_requests == 0


@pytest.mark.full
def test_two_engines_behind_a_router_and_one_is_killed() -> None:
    """Real processes; a client that leaves ends its request on the server."""
    flags = ("--max-total-tokens", "4096")
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(serving(*flags)) for _ in range(2))
        router = stack.enter_context(serving(one.url, two.url, command="route"))
        body = {"prompt": "Count from 3 to 9.", "max_tokens": 8, "temperature": 0}
        texts = {
            httpx.post(f"{router.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for _ in range(3)
        }
        assert len(texts) == 1
        with httpx.stream(
            "POST",
            f"{router.url}/v1/completions",
            json={**body, "stream": True, "max_tokens": 400, "ignore_eos": True},
            timeout=60,
        ) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
        for server in (one, two):
            server.wait_idle()
        assert [replica["load"] for replica in router.get("/replicas")] == [0, 0]
        one.kill()
        for _ in range(3):
            answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] in texts
        two.kill()
        answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 503
