"""Prefill servers and decode servers behind a router: the answers of one server, whatever ends when."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from diptych.reference.parallel.split_servers import PrefillServers
from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.parallel.channel import Listener, connect, signed, verified
from diptych.shared.types import Req, SamplingParams
from tests.parallel.split_ranks import servers_of, until_ready
from tests.parallel.test_listening import listening
from tests.parallel.test_processes import descendants
from tests.server.running import RunningServer, serving

SECRET = b"a secret of the cluster"
ENGINE = ("--panel", "reference", "--max-total-tokens", "2048", "--context-len", "256", "--page-size", "4")
PROMPTS = [
    "What is 12 + 30?",
    "Read this story: Mara lives in Bergen. Mara works as a baker. In which city does Mara live?",
    "Count from 3 to 9.",
    "Read this story: Mara lives in Bergen. Mara works as a baker. Who works as a baker?",
]
BODY = {"temperature": 0, "max_tokens": 24}


def brief(prompt: str) -> str:
    return f"{prompt} Be brief."


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The answers of one engine."""
    llm = LLM("tiny-dense", panel="reference", device="cpu", dtype="float32", context_len=256)
    found = {}
    for prompt in (*PROMPTS, *map(brief, PROMPTS)):
        answer: Any = llm.chat([{"role": "user", "content": prompt}], temperature=0, max_tokens=24)
        found[prompt] = answer.text
    return found


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return "--cluster-secret-file", str(file)


def ask(url: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": prompt}], **BODY, **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found


def streamed(url: str, prompt: str) -> str:
    found = ""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, **BODY}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    return found


@contextlib.contextmanager
def cluster(secret: tuple[str, str], num_prefill: int, num_decode: int) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(mode: str) -> RunningServer:
            return stack.enter_context(serving("--disaggregation-mode", mode, *ENGINE, *secret))

        with ThreadPoolExecutor() as threads:
            servers = list(threads.map(start, ["prefill"] * num_prefill + ["decode"] * num_decode))
        flags = [each for server in servers[:num_prefill] for each in ("--prefill", server.url)]
        flags += [each for server in servers[num_prefill:] for each in ("--decode", server.url)]
        flags += ["--cache-threshold", "1"]  # the servers take turns
        router = stack.enter_context(serving(*flags, *secret, command="route"))
        until_ready(router.url)
        yield router, servers[:num_prefill], servers[num_prefill:]


def check_listens_on_loopback(server: RunningServer, num_addresses: int) -> None:
    if Path("/proc/net/tcp").exists():
        found = listening([server.process.pid, *descendants(server.process.pid)])
        assert len(found) == num_addresses
        assert all(address.startswith("0100007F:") for address in found), found


def check_idle(server: RunningServer) -> None:
    server.wait_idle()
    httpx.post(f"{server.url}/flush_cache?timeout=20", timeout=60).raise_for_status()
    assert server.wait_idle()["num_used_tokens"] == 0


@pytest.mark.full
def test_a_cluster_answers_as_one_server(secret: tuple[str, str], expected: dict[str, str]) -> None:
    """Two of each; then servers are killed one after the other."""
    with cluster(secret, 2, 2) as (router, prefills, decodes), ThreadPoolExecutor(4) as threads:

        def answers(prompts: Sequence[str]) -> None:
            found = list(threads.map(lambda prompt: text_of(ask(router.url, prompt)), prompts))
            assert found == [expected[prompt] for prompt in prompts]

        for _ in range(2):
            answers(PROMPTS)
        assert streamed(router.url, PROMPTS[1]) == expected[PROMPTS[1]]
        loads = [server.get("/server_info")["load"] for server in (*prefills, *decodes)]
        assert all(load["num_steps"] for load in loads), "all servers have worked"
        assert all(load["num_generated_tokens"] for load in loads[2:]), "both decode servers have answered"

        refused = ask(prefills[0].url, PROMPTS[0])
        assert refused.status_code == 400
        assert "send requests to one of those" in refused.text
        forged = {"x-diptych-prefill-server": signed("127.0.0.1:1", b"another secret of 16")}
        body = {"messages": [{"role": "user", "content": "Hi"}], **BODY}
        answer = httpx.post(f"{decodes[0].url}/v1/chat/completions", json=body, headers=forged, timeout=60)
        assert answer.status_code == 400
        assert "not signed" in answer.text

        prefills[0].kill()  # requests that come now move to the other one
        answers([*map(brief, PROMPTS)])
        decodes[0].process.send_signal(signal.SIGKILL)
        decodes[0].process.wait()
        answers(PROMPTS)
        for server in (prefills[1], decodes[1]):
            check_idle(server)
        prefills[1].kill()
        until_ready(router.url, 503)
        assert ask(router.url, "What is 1 + 1?").status_code == 503
        assert httpx.get(f"{router.url}/health", timeout=10).status_code == 200


def test_without_a_router(secret: tuple[str, str], expected: dict[str, str]) -> None:
    """A decode server is not ready while none of its prefill servers answers, and recovers. Both sides have
    flags of speculation, of which the prefill server needs none."""
    listener = Listener("127.0.0.1", SECRET)
    port = listener.port
    listener.close()
    drafts = ("--speculative", "ngram")
    known = ("--prefill-servers", f"127.0.0.1:{port}", *drafts)
    with serving("--disaggregation-mode", "decode", *known, *ENGINE, *secret) as decode:
        until_ready(decode.url, 503)
        assert ask(decode.url, PROMPTS[0]).status_code == 503
        prefill_flags = ("--disaggregation-mode", "prefill", "--disaggregation-port", str(port), *drafts)
        with serving(*prefill_flags, *ENGINE, *secret) as prefill:
            until_ready(decode.url)
            check_listens_on_loopback(prefill, 2)
            check_listens_on_loopback(decode, 1)
            assert text_of(ask(decode.url, PROMPTS[0])) == expected[PROMPTS[0]]
            assert decode.wait_idle()["num_verifications"] > 0
            assert prefill.get("/server_info")["load"]["num_verifications"] == 0
        until_ready(decode.url, 503)
        assert text_of(ask(decode.url, PROMPTS[0])) == expected[PROMPTS[0]], "its prompt is cached"
        assert ask(decode.url, "What is 7 + 5?").status_code == 503
        check_idle(decode)


def test_a_connection_with_another_secret_is_no_prefill_server() -> None:
    listener = Listener("127.0.0.1", b"another secret of 16")
    servers = PrefillServers(lambda channel: pytest.fail("connected"), SECRET)
    address = f"127.0.0.1:{listener.port}"
    req = Req("r", [1, 2], SamplingParams(), seed=0, prefill_server=address)
    assert servers.choose(req, Counter()) is None
    end = time.monotonic() + 20
    while servers.is_connecting(req):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert servers.choose(req, Counter()) is None
    assert not servers.is_alive()
    listener.close()


def test_a_prefill_server_listens_on_loopback() -> None:
    config = EngineConfig(disaggregation_mode="prefill")
    listener = Listener(config.disaggregation_host, SECRET, config.disaggregation_port)
    assert listener.socket.getsockname()[0] == "127.0.0.1"
    listener.close()


def test_an_address_is_signed() -> None:
    text = signed("10.0.0.7:8998", SECRET)
    assert verified(text, SECRET) == "10.0.0.7:8998"
    for forged in (text.replace("7:", "8:"), text[:-1], "10.0.0.7:8998", ""):
        with pytest.raises(ValueError, match="not signed"):
            verified(forged, SECRET)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"disaggregation_mode": "prefill", "pp": 2}, "disaggregation_mode=prefill does not work with pp=2"),
        ({"disaggregation_mode": "decode", "disaggregation": True}, "disaggregation=True starts both"),
        ({"disaggregation_mode": "decode", "use": {"transport": "shared_memory"}}, "only with reference"),
        ({"prefill_servers": "a:1"}, "needs disaggregation_mode=decode"),
        ({"disaggregation_mode": "decode", "prefill_servers": "a"}, "must be HOST:PORT"),
        ({"disaggregation_mode": "decode", "prefill_servers": "a:0"}, "must be HOST:PORT"),
    ],
)
def test_what_cannot_run(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**flags)


def test_the_python_api_is_no_server() -> None:
    with pytest.raises(ValueError, match="diptych serve"):
        LLM("tiny-dense", disaggregation_mode="decode")


def test_connect_to_nothing(tmp_path: Path) -> None:
    listener = Listener("127.0.0.1", SECRET)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", listener.port, SECRET)


@pytest.mark.full
def test_servers_of_two_ranks(secret: tuple[str, str], expected: dict[str, str]) -> None:
    """The answers of one engine. A rank that is killed ends its server; the other side goes on."""
    with servers_of((2, 2), *ENGINE, *secret) as (prefill, decode), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda prompt: text_of(ask(decode.url, prompt)), PROMPTS))
        assert found == [expected[prompt] for prompt in PROMPTS]
        check_listens_on_loopback(prefill, 4)  # the ranks' own among them
        check_listens_on_loopback(decode, 3)
        running = threads.submit(ask, decode.url, PROMPTS[0], max_tokens=180, ignore_eos=True)
        kill_a_rank(prefill)
        until_ready(decode.url, 503)
        assert running.result().status_code == 200
        assert ask(decode.url, "What is 7 + 5?").status_code == 503
        check_idle(decode)
        running = threads.submit(ask, decode.url, PROMPTS[0], max_tokens=180, ignore_eos=True)
        kill_a_rank(decode)
        with contextlib.suppress(httpx.TransportError):  # the server may end before it has answered
            assert running.result().status_code in (200, 500, 503)


@pytest.mark.full
def test_the_optimized_panel_on_two_ranks(
    secret: tuple[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for the servers
    engine = ("--panel", "optimized", "--device", "cpu", "--dtype", "float32", *ENGINE[2:])
    engine += ("--max-running-requests", "4")
    with servers_of((2, 2), *engine, *secret) as (_, decode):
        found = text_of(ask(decode.url, PROMPTS[0], max_tokens=6))
        assert found
        assert expected[PROMPTS[0]].startswith(found)


def kill_a_rank(server: RunningServer) -> None:
    """The server and all its processes end within seconds."""
    ranks = descendants(server.process.pid)
    (rank,) = ranks
    os.kill(rank, signal.SIGKILL)
    start = time.monotonic()
    assert server.process.wait(60) != 0
    assert time.monotonic() - start < 20
    assert not any(Path(f"/proc/{each}").exists() for each in ranks)
    assert "rank 1 has ended with signal SIGKILL" in "".join(server.log)
