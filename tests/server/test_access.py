"""Who may use a server: keys, addresses, pages in browsers, paths; and what clients know of each other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from diptych.shared.server import admin, weight_routes
from diptych.shared.server.http.access import PUBLIC_PATHS, Keys, read_keys, require_admin
from diptych.shared.server.router.policy import RouterSettings
from diptych.shared.server.router.router import Router
from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.server_options import url_of
from tests.server.in_process import client_of, make_app
from tests.server.running import ROOT, serving

TEXT = {"prompt": "a", "max_tokens": 1}
SEVERAL = Keys(("one", "two"), ("root",))


@pytest.mark.parametrize("name", ["API", "ADMIN"])
@pytest.mark.parametrize(("values", "variable"), [([""], None), (["a", " "], None), ([], ""), ([], " ")])
def test_empty_keys_are_refused(name: str, values: list[str], variable: str | None) -> None:
    arguments = [part for value in values for part in (f"--{name.lower()}-key", value)]
    for command in (["serve", "--model", "/nowhere"], ["route", "http://127.0.0.1:1"]):
        result = CliRunner().invoke(app, [*command, *arguments], env={f"DIPTYCH_{name}_KEY": variable})
        assert result.exit_code == 2
        assert "must not be empty" in result.output


@pytest.mark.parametrize("command", [["serve"], ["route", "http://127.0.0.1:1"]], ids=["serve", "route"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.1", "example.com"])
def test_no_other_computer_without_a_key(command: list[str], host: str) -> None:
    result = CliRunner().invoke(app, [*command, "--host", host], env={"DIPTYCH_API_KEY": None})
    assert result.exit_code == 2
    assert "lets other computers in without a key" in re.sub(r"[\s│]+", " ", result.output)


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# two\n\n  one \ntwo\n")
    assert read_keys(path) == ("one", "two")
    for text in ("", "# none\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="has no key"):
            read_keys(path)
    with pytest.raises(ValueError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def ask(
    method: str, path: str, headers: Any = None, address: str = "127.0.0.1", **settings: Any
) -> httpx.Response:
    async def play() -> httpx.Response:
        async with client_of(make_app(**settings)[0], address) as client:
            json = TEXT if method == "POST" else None
            return await client.request(method, path, json=json, headers=headers)

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "bearer  secret "}, 200),
        ({"x-api-key": "secret", "Origin": "https://ui.example.com", "Host": "llm.example.com"}, 200),
    ],
    ids=str,
)
def test_an_empty_key_opens_nothing(headers: dict[str, str], status: int) -> None:
    assert ask("GET", "/metrics", headers, keys=Keys(("", "secret"))).status_code == status


# ---- administration ----


def admin_routes() -> set[str]:
    """Paths of the administration."""
    texts = [Path(module.__file__).read_text("utf-8") for module in (admin, weight_routes)]
    return set(re.findall(r'@app\.\w+\("(.*?)"', "".join(texts)))


@pytest.mark.parametrize(
    ("keys", "key", "status"),
    [
        (SEVERAL, "one", 403),
        (SEVERAL, "root", 200),
        (Keys(("one", "two")), "one", 403),
        (Keys(("one",)), "one", 200),
        (Keys((), ("root",)), "root", 200),
        (Keys(("one",), ("root",)), "one", 403),
    ],
)
def test_keys_of_the_administration(keys: Keys, key: str, status: int) -> None:
    assert ask("GET", "/server_info", {"x-api-key": key}, keys=keys).status_code == status
    assert ask("POST", "/v1/completions", {"x-api-key": key}, keys=keys).status_code == 200


def test_every_route_of_the_administration_is_guarded() -> None:
    guarded = set()
    for route in make_app()[0].routes:
        dependencies = [each.dependency for each in getattr(route, "dependencies", ())]
        if require_admin in dependencies:
            guarded.add(route.path)
    assert guarded == admin_routes() - {"/abort_request"}  # it has rules of its own


@pytest.mark.parametrize(
    "headers",
    [{}, *({name: "127.0.0.1"} for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"))],
    ids=str,
)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "203.0.113.9", "testclient"])
def test_loopback_is_no_credential_behind_a_proxy(address: str, headers: dict[str, str]) -> None:
    is_local = address in ("127.0.0.1", "::1") and not headers
    for method, path in (("GET", "/server_info"), ("POST", "/pause_generation")):
        answer = ask(method, path, headers, address)
        assert answer.status_code in ((200, 400) if is_local else (403,))
    assert ask("POST", "/v1/completions", headers, address).status_code == 200


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


@pytest.mark.full
def test_administration_through_a_router() -> None:
    with serving("--max-total-tokens", "1024") as server, serving(server.url, command="route") as router:
        for headers in ({}, {"X-Forwarded-For": "127.0.0.1"}, {"X-Forwarded-For": "testclient"}):
            answer = httpx.post(f"{router.url}/flush_cache", headers=headers, timeout=60)
            assert answer.status_code == 403
        assert httpx.post(f"{server.url}/flush_cache", timeout=60).status_code == 200


# ---- pages in browsers ----

LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (LOCAL, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "192.0.2.1:8000"}, 200),
        ({"Host": "named.example:8000"}, 200),
        ({"Host": "evil.example:8000"}, 403),  # its name was rebound to this address
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({**LOCAL, "Origin": "http://127.0.0.1:8000"}, 200),
        ({**LOCAL, "Origin": "http://127.0.0.1:9000"}, 403),
        ({**LOCAL, "Origin": "https://evil.example"}, 403),
        ({**LOCAL, "Origin": "null"}, 403),
        ({**LOCAL, "Sec-Fetch-Site": "same-origin"}, 200),
        ({**LOCAL, "Sec-Fetch-Site": "none"}, 200),
        ({**LOCAL, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**LOCAL, "Sec-Fetch-Site": "same-site"}, 403),
    ],
    ids=str,
)
def test_pages_of_other_sites_reach_nothing(headers: dict[str, str], status: int) -> None:
    settings = {"allowed_hosts": ("named.example",)}
    assert ask("GET", "/server_info", headers, **settings).status_code == status
    assert ask("POST", "/continue_generation", headers, **settings).status_code == status
    assert ask("GET", "/health", headers, **settings).status_code == 200  # a link to the page opens it


# ---- CORS ----

PAGE = "https://chat.example"
PREFLIGHT = {
    **LOCAL,
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


@pytest.mark.parametrize(
    ("origins", "keys", "is_allowed"),
    [((), (), False), ((), ("secret",), False), (("https://other.example",), (), False),
     ((PAGE,), (), True), ((PAGE,), ("secret",), True), (("*",), ("secret",), True)],
    ids=str,
)  # fmt: skip
def test_pages_of_named_sites(origins: tuple[str, ...], keys: tuple[str, ...], is_allowed: bool) -> None:
    """The question of a browser has no key; the request that follows needs it."""
    settings = {"cors_origins": origins, "keys": Keys(keys)}
    asked = ask("OPTIONS", "/v1/completions", PREFLIGHT, **settings)
    assert asked.is_success is is_allowed
    assert ("access-control-allow-origin" in asked.headers) is is_allowed
    headers = {**LOCAL, "Origin": PAGE, "Sec-Fetch-Site": "cross-site"}
    with_key = headers | ({"Authorization": "Bearer secret"} if keys else {})
    answer = ask("POST", "/v1/completions", with_key, **settings)
    assert answer.is_success is (is_allowed or bool(keys))
    assert (answer.headers.get("access-control-allow-origin") in (PAGE, "*")) is is_allowed
    if is_allowed:
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        allowed = asked.headers["access-control-allow-headers"]
        assert all(name in allowed for name in ("authorization", "x-stainless-os"))
    if keys:
        assert ask("POST", "/v1/completions", headers, **settings).status_code == 401
    rebound = {**with_key, "Host": "evil.example"}
    assert ask("POST", "/v1/completions", rebound, **settings).is_success is bool(keys)


@pytest.mark.parametrize("command", [["serve"], ["route", "http://127.0.0.1:1"]], ids=["serve", "route"])
def test_no_page_of_any_site_without_a_key(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--cors-origin", "*"], env={"DIPTYCH_API_KEY": None})
    assert result.exit_code == 2
    assert "name the sites" in re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"),
     ("::", "http://[::1]:8000"), ("fe80::1%eth0", "http://[fe80::1%25eth0]:8000"), ("a.b", "http://a.b:8000")],
)  # fmt: skip
def test_the_printed_url(host: str, url: str) -> None:
    assert url_of(host, 8000) == url


@pytest.mark.full
def test_a_server_on_ipv6() -> None:
    with serving("--max-total-tokens", "1024", "--host", "::1") as server:
        assert httpx.get(f"{server.url}/health", timeout=60).is_success


# ---- paths ----


@pytest.mark.parametrize(
    "path",
    ["/v1/../server_info", "/v1/%2e%2e/server_info", "/v1%2f..%2fserver_info", "/./server_info", "/%00",
     "/health%0a", "/v1\\server_info", "/%7f"],
)  # fmt: skip
def test_paths_that_could_be_read_differently(path: str) -> None:
    async def play() -> None:
        router = Router(["http://127.0.0.1:1"], RouterSettings(keys=Keys(("one",))))
        for application in (make_app()[0], router.app):
            sent: list[Any] = []

            async def receive() -> Any:
                raise AssertionError("the body was read")

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            scope = {
                "type": "http", "method": "GET", "path": httpx.QueryParams(f"a={path}")["a"],
                "raw_path": path.encode(), "query_string": b"", "headers": [], "client": ("127.0.0.1", 1),
            }  # fmt: skip
            await application(scope, receive, send)
            assert sent[0]["status"] == 400

    asyncio.run(play())


def test_a_router_asks_for_keys_before_it_reads_a_body() -> None:
    async def play() -> None:
        router = Router(["http://127.0.0.1:1"], RouterSettings(keys=SEVERAL))
        sent: list[Any] = []

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any) -> None:
            sent.append(message)

        for path in ("/v1/completions", "/replicas", "/server_info"):
            scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
            await router.app(scope, receive, send)
            assert sent[-2]["status"] == 401
        async with client_of(router.app) as client:
            for key, status in (("one", 403), ("root", 200)):
                assert (await client.get("/replicas", headers={"x-api-key": key})).status_code == status
        async with client_of(Router(["http://127.0.0.1:1"]).app, "203.0.113.9") as client:
            assert (await client.get("/replicas")).status_code == 403
            assert (await client.get("/health")).status_code == 200

    asyncio.run(play())


# ---- clients of one server ----


def test_clients_share_no_prefixes() -> None:
    async def play(keys: Keys, *used: str) -> list[Any]:
        application, engine = make_app(keys=keys)
        async with client_of(application) as client:
            for key in used:
                for path, body in (
                    ("/v1/completions", TEXT),
                    ("/v1/completions", {**TEXT, "cache_salt": "s"}),
                    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                    ("/v1/embeddings", {"input": "a"}),
                    ("/generate", {"text": "a"}),
                ):
                    answer = await client.post(path, json=body, headers={"x-api-key": key})
                    assert answer.status_code == 200, answer.text
        return [message.extra_key for message in engine.sent]

    alone = asyncio.run(play(Keys(("one",)), "one"))
    assert alone == [None, "s", None, None, None]
    keys = asyncio.run(play(SEVERAL, "one", "two", "root"))
    groups = [keys[:5], keys[5:10], keys[10:]]
    for group in groups:
        assert group[0] == group[2] == group[3] == group[4] != group[1]
    assert len({key for group in groups for key in group}) == 6


def test_a_client_aborts_only_its_own_requests() -> None:
    async def play() -> None:
        application, engine = make_app(keys=SEVERAL)
        engine.holds = True
        async with client_of(application) as client:

            async def post(path: str, key: str, body: Any) -> httpx.Response:
                return await client.post(path, json=body, headers={"x-api-key": key})

            def start(key: str) -> Any:
                return asyncio.ensure_future(post("/generate", key, {"text": "a", "rid": "same"}))

            running = {key: start(key) for key in ("one", "two")}
            while len(engine.lives) < 2:
                await asyncio.sleep(0.01)
            rid = next(rid for rid, live in engine.lives.items() if live.owner != engine.lives)
            assert (await post("/abort_request", "one", {"abort_all": True})).status_code == 403
            owners = {rid: live.owner for rid, live in engine.lives.items()}
            assert (await post("/abort_request", "one", {"rid": "same"})).json() == {"num_aborted": 1}
            assert (await running["one"]).status_code == 503
            (left,) = engine.lives
            assert owners[left] != owners[rid] or rid == left
            assert (await post("/abort_request", "one", {"rid": left})).json() == {"num_aborted": 0}
            assert (await post("/abort_request", "root", {"rid": "same"})).json() == {"num_aborted": 1}
            await running["two"]

    asyncio.run(play())


def test_what_shows_all_requests_needs_an_admin_key() -> None:
    for key, status in (("one", 403), ("root", 200)):
        assert ask("GET", "/status", {"x-api-key": key}, keys=SEVERAL).status_code == status
    assert ask("GET", "/status", {"x-api-key": "one"}, keys=Keys(("one",))).status_code == 200


# ---- files of the server ----


@pytest.mark.parametrize("path", ["..", "../other", "/etc", "a/../../other", "link/x", "a\0"])
def test_adapters_come_from_below_their_root(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)

    async def play(lora_root: Path | None, path: str) -> tuple[int, Any]:
        application, engine = make_app(lora_root=lora_root)
        async with client_of(application) as client:
            answer = await client.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
            return answer.status_code, engine.actions

    assert asyncio.run(play(root, path)) == (400, [])
    assert asyncio.run(play(None, "a")) == (400, [])
    status, actions = asyncio.run(play(root, "a"))
    assert (status, actions[0][1]["path"]) == (200, str(root / "a"))


def test_public_paths() -> None:
    for path in PUBLIC_PATHS:
        assert ask("GET", path, {}, "203.0.113.9", keys=SEVERAL).status_code == 200
    for path in (
        "/metrics",
        "/openapi.json",
        "/status",
        "/v1/models",
        "http://127.0.0.1//health",
        "/health/",
    ):
        assert ask("GET", path, {}, keys=SEVERAL).status_code == 401
