"""A proxy in front of several servers. The policy chooses the server of each request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diptych.shared.parallel.channel import signed
from diptych.shared.server.http.access import (
    FORWARDING_HEADERS,
    PREFILL_PORT,
    PREFILL_SERVER,
    require_admin,
)
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import REQUEST, ApiError
from diptych.shared.server.http.server_layers import add_layers
from diptych.shared.server.router.policy import (
    CacheAwarePolicy,
    Replica,
    RouterSettings,
    least_loaded,
    prompt_text,
)

HOP_HEADERS = {
    b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host",
    b"content-length", b"expect", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    *FORWARDING_HEADERS,
}  # fmt: skip
"""Headers of one connection, which a proxy does not pass on, and those in which it names the client itself"""


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Remove HOP_HEADERS, and those that `Connection` names."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        each.strip().lower() for name, value in lowered if name == b"connection" for each in value.split(b",")
    }
    return [(name, value) for name, value in lowered if name not in HOP_HEADERS | named]


class Router:
    """An HTTP application that sends each request to one of the replicas."""

    def __init__(self, urls: Sequence[str], settings: RouterSettings | None = None) -> None:
        if not urls or len(set(urls)) < len(urls):
            raise ValueError(f"a router needs distinct URLs of servers, got {list(urls)}")
        self.settings = settings or RouterSettings()
        for url in (*urls, *self.settings.prefill_urls):
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"a URL of a server begins with http:// or https://, got {url!r}")
        self.prefills = [Replica(url.rstrip("/")) for url in self.settings.prefill_urls]
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self.policy = CacheAwarePolicy(self.settings)
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # its servers are not behind a proxy of the environment
        )
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/replicas", self.status),
            Route("/{path:path}", self.forward, methods=["GET", "POST", "HEAD"]),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)
        add_layers(self.app, self.settings, self.settings.max_body_bytes)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        checks = asyncio.ensure_future(self._check_health())
        try:
            yield
        finally:
            checks.cancel()
            await self.client.aclose()

    async def health(self, request: Request) -> Response:
        """200 while at least one replica answers."""
        is_healthy = any(replica.is_healthy for replica in self.replicas)
        return PlainTextResponse("ok" if is_healthy else "no replica answers", 200 if is_healthy else 503)

    async def ready(self, request: Request) -> Response:
        """200 while at least one replica takes requests, and one computes prompts if they are split."""
        problem = None
        if not any(replica.is_healthy and replica.is_ready for replica in self.replicas):
            problem = "no replica is ready"
        elif self.prefills and not self._ready_prefills():
            problem = "no prefill server is ready"
        return PlainTextResponse(problem or "ok", 503 if problem else 200)

    async def status(self, request: Request) -> Response:
        """Load and tree size of each replica, for the administration."""
        try:
            require_admin(request)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        sizes = self.policy.tree.num_chars
        everyone = [*self.prefills, *self.replicas]
        return JSONResponse(
            [
                {
                    "url": replica.url,
                    "is_healthy": replica.is_healthy,
                    "is_ready": replica.is_ready,
                    "load": replica.load,
                    "num_sent": replica.num_sent,
                    "num_tree_chars": sizes.get(replica, 0),
                }
                for replica in everyone
            ]
        )

    async def forward(self, request: Request) -> Response:
        """Send the request to a replica. Another one is tried until the first byte has come."""
        try:
            return await self._forward(request)
        except ApiError as error:
            return JSONResponse(error.body(), error.status, headers=error.headers)

    async def _forward(self, request: Request) -> Response:
        content = await request.body()
        prompt = prompt_text(content)
        tried: set[Replica] = set()
        while candidates := self._candidates(tried):
            prefill = self._choose_prefill(prompt)
            replica = least_loaded(candidates) if prefill else self.policy.choose(prompt, candidates)
            tried.add(replica)
            replica.load += 1
            replica.num_sent += 1
            try:
                answer = await until_disconnect(request, self._send(request, replica, content, prefill))
            except BaseException as error:
                replica.load -= 1
                if not isinstance(error, httpx.TransportError):
                    raise
                self.on_failure(replica)
                continue
            finally:
                if prefill is not None:
                    prefill.load -= 1
            relay = Relay(self, replica, answer)
            if answer.status_code != 503:
                return relay
            await relay.close()  # another one may take the request
            replica.is_ready = False  # until the next check
        raise ApiError(503, "no replica can take the request")

    def _choose_prefill(self, prompt: str) -> Replica | None:
        """The server that computes the prompt; None: each server computes its own."""
        if not self.prefills:
            return None
        ready = self._ready_prefills()
        if not ready:
            raise ApiError(503, "no prefill server is ready")
        chosen = self.policy.choose(prompt, ready)
        chosen.load += 1
        chosen.num_sent += 1
        return chosen

    def _ready_prefills(self) -> list[Replica]:
        return [each for each in self.prefills if each.is_healthy and each.is_ready and each.prefill_address]

    def _candidates(self, tried: set[Replica]) -> list[Replica]:
        """Those that are ready; if none is, those that answer, which may be ready before the next check."""
        healthy = [each for each in self.replicas if each.is_healthy and each not in tried]
        return [each for each in healthy if each.is_ready] or healthy

    async def _send(
        self, request: Request, replica: Replica, content: bytes, prefill: Replica | None
    ) -> httpx.Response:
        """The response up to its headers. Cancelled when the client leaves."""
        headers = [each for each in end_to_end(request.headers.raw) if each[0] != PREFILL_SERVER]
        if prefill is not None and prefill.prefill_address is not None:
            address = signed(prefill.prefill_address, self.settings.cluster_secret)
            headers.append((PREFILL_SERVER, address.encode()))
        client = request.client.host if request.client is not None else "unknown"
        if (name := REQUEST.get()) is not None:
            headers = [each for each in headers if each[0] != b"x-request-id"]
            headers.append((b"x-request-id", name.id.encode()))
        headers.append((b"x-forwarded-for", client.encode()))  # a server knows by it that this is a proxy
        raw_path: bytes = request.scope.get("raw_path") or request.url.path.encode()
        url = httpx.URL(replica.url + raw_path.decode("latin-1"), query=request.scope["query_string"])
        forwarded = self.client.build_request(request.method, url, headers=headers, content=content)
        return await self.client.send(forwarded, stream=True)

    def on_failure(self, replica: Replica) -> None:
        """It takes no requests until a health check succeeds; its cache is assumed to be empty."""
        replica.is_healthy = False
        self.policy.tree.remove(replica)

    async def _check_health(self) -> None:
        while True:
            await asyncio.gather(*map(self._check, [*self.prefills, *self.replicas]))
            self.policy.tree.evict(self.settings.max_tree_chars)
            await asyncio.sleep(self.settings.health_interval)

    async def _check(self, replica: Replica) -> None:
        """Does it take requests? A server of another kind may have no /ready, or a key for it."""
        answer = await self._get(replica, "/ready")
        if answer is not None and answer.status_code in (401, 403, 404):
            answer = await self._get(replica, "/health")
        if answer is None and replica.is_healthy:
            self.on_failure(replica)
        replica.is_healthy, replica.is_ready = answer is not None, answer is not None and answer.is_success
        if answer is not None and (port := answer.headers.get(PREFILL_PORT)):
            host = httpx.URL(replica.url).host
            replica.prefill_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _get(self, replica: Replica, path: str) -> httpx.Response | None:
        """None: no answer."""
        try:
            return await self.client.get(replica.url + path, timeout=self.settings.health_interval)
        except httpx.HTTPError:
            return None


class Relay(StreamingResponse):
    """The response of a replica, passed on as it comes. Its end, however it comes, gives the load back."""

    def __init__(self, router: Router, replica: Replica, answer: httpx.Response) -> None:
        super().__init__(self._pieces(), answer.status_code)
        self.raw_headers = end_to_end(answer.headers.raw)
        self.router, self.replica, self.answer = router, replica, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self.answer.aiter_raw():
                yield piece
        except httpx.TransportError:  # after the first byte no other replica can continue
            self.router.on_failure(self.replica)
            raise

    async def close(self) -> None:
        """A replica whose client has left sees a closed connection, and aborts the request."""
        self.replica.load -= 1
        await self.answer.aclose()
