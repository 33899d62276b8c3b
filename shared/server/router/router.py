"""A cache-aware router in front of several servers: a prompt goes where its prefix probably is in the cache.

No server is asked what it has cached. The router remembers, in a tree of prompt text, which replica has
computed which prefix, and forgets what was not used for the longest time. When the loads differ too much,
the least loaded replica takes the request. Source of the rule: the gateway of SGLang (cache_aware policy).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diptych.shared.server.http.access import FORWARDING_HEADERS, Guard, Keys, require_admin
from diptych.shared.server.http.bodies import BodyLimit
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import ApiError
from diptych.shared.server.http.limits import MAX_BODY_BYTES, MAX_IMAGE_BYTES

HOP_HEADERS = {
    b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host",
    b"content-length", b"expect", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    *FORWARDING_HEADERS,
}  # fmt: skip
"""Headers of one connection, which a proxy does not pass on, and those in which it names the client itself"""


@dataclass(frozen=True)
class RouterSettings:
    """When the tree decides, and when the load does."""

    cache_threshold: float = 0.3  # matched fraction of a prompt from which its replica is chosen
    balance_abs: int = 32  # loads are unbalanced when they differ by more requests than this ...
    balance_rel: float = 1.5  # ... and the largest is more than so many times the smallest
    max_tree_chars: int = 2**24  # for each replica
    health_interval: float = 5.0  # seconds
    keys: Keys = field(default_factory=Keys)
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES + MAX_IMAGE_BYTES  # its servers have their own limits


@dataclass(eq=False)
class Replica:
    """One server. `load`: requests in flight."""

    url: str
    is_healthy: bool = True  # it answers
    is_ready: bool = True  # it takes new requests; when it drains or is paused, it does not
    load: int = 0
    num_sent: int = 0


# ---- the tree ----


@dataclass(eq=False)
class Node:
    """`text` follows the text of the parents. `used`: replica -> time of its last request through here."""

    text: str
    parent: Node | None
    children: dict[str, Node] = field(default_factory=dict)  # by their first character
    used: dict[Replica, int] = field(default_factory=dict)


class PrefixTree:
    """Which replica has computed which prefix. Both operations cost one walk along the prompt."""

    def __init__(self) -> None:
        self.root = Node("", None)
        self.num_chars: dict[Replica, int] = {}
        self._clock = itertools.count()

    def match(self, prompt: str, replicas: Iterable[Replica]) -> tuple[int, set[Replica]]:
        """The longest prefix, in characters, that some of the replicas have computed, and which have."""
        node, num_matched, found = self.root, 0, set(replicas)
        while num_matched < len(prompt):
            child = node.children.get(prompt[num_matched])
            holders = found & child.used.keys() if child is not None else set()
            if child is None or not holders:
                break
            num_common = _num_common(child.text, prompt[num_matched : num_matched + len(child.text)])
            node, num_matched, found = child, num_matched + num_common, holders
            if num_common < len(child.text):
                break
        return num_matched, found if num_matched else set()

    def insert(self, prompt: str, replica: Replica) -> None:
        """The replica computes this prompt."""
        node, start, now = self.root, 0, next(self._clock)
        while start < len(prompt):
            child = node.children.get(prompt[start])
            if child is None:
                child = node.children[prompt[start]] = Node(prompt[start:], node)
            num_common = _num_common(child.text, prompt[start : start + len(child.text)])
            if num_common < len(child.text):
                child = self._split(child, num_common)
            if replica not in child.used:
                self.num_chars[replica] = self.num_chars.get(replica, 0) + len(child.text)
            child.used[replica] = now
            node, start = child, start + len(child.text)

    def _split(self, node: Node, num_first: int) -> Node:
        """Two nodes of one; returns the upper one."""
        assert node.parent is not None
        upper = Node(node.text[:num_first], node.parent, {node.text[num_first]: node}, dict(node.used))
        node.parent.children[node.text[0]] = upper
        node.text, node.parent = node.text[num_first:], upper
        return upper

    def evict(self, max_chars: int) -> None:
        """Forget what each replica has not used for the longest time, until it has at most `max_chars`."""
        for replica in [each for each, num_chars in self.num_chars.items() if num_chars > max_chars]:
            nodes = [node for node in self._nodes() if replica in node.used]
            heap = [(node.used[replica], id(node), node) for node in nodes if _is_leaf(node, replica)]
            heapq.heapify(heap)
            while self.num_chars[replica] > max_chars:
                _, _, node = heapq.heappop(heap)
                parent = node.parent
                self._forget(node, replica)
                if parent is not None and replica in parent.used and _is_leaf(parent, replica):
                    heapq.heappush(heap, (parent.used[replica], id(parent), parent))

    def remove(self, replica: Replica) -> None:
        """The replica has started anew: its cache is empty."""
        for node in [*self._nodes()]:
            if replica in node.used:
                self._forget(node, replica)

    def _forget(self, node: Node, replica: Replica) -> None:
        del node.used[replica]
        self.num_chars[replica] -= len(node.text)
        while node.parent is not None and not node.used and not node.children:
            del node.parent.children[node.text[0]]
            node = node.parent

    def _nodes(self) -> Iterable[Node]:
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _is_leaf(node: Node, replica: Replica) -> bool:
    return not any(replica in child.used for child in node.children.values())


def _num_common(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: comparing slices is much faster than characters."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---- the choice ----


class CacheAwarePolicy:
    """Longest known prefix first; the least load where no prefix is known or loads are unbalanced."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.tree = PrefixTree()

    # --8<-- [start:choose-a-replica]
    def choose(self, prompt: str, replicas: Sequence[Replica]) -> Replica:
        """One of the healthy replicas. Remembers that it computes this prompt."""
        settings, loads = self.settings, [replica.load for replica in replicas]
        is_unbalanced = max(loads) - min(loads) > settings.balance_abs and max(
            loads
        ) > settings.balance_rel * min(loads)
        num_matched, holders = self.tree.match(prompt, replicas)
        if is_unbalanced or num_matched <= settings.cache_threshold * len(prompt):
            chosen = least_loaded(replicas)
        else:
            chosen = least_loaded([replica for replica in replicas if replica in holders])
        self.tree.insert(prompt, chosen)
        self.tree.evict(2 * settings.max_tree_chars)  # the interval's eviction is the regular one
        return chosen

    # --8<-- [end:choose-a-replica]


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    """Return the replica with the least load. Ties go to the one that was sent fewer requests: else the first
    would get them all."""
    return min(replicas, key=lambda replica: (replica.load, replica.num_sent))


def prompt_text(content: bytes) -> str:
    """The text that the cache of a server is about, of a body of any API: earlier parts of a prompt come
    first. Empty where there is none; whether the body is valid, the replica decides."""
    try:
        body = json.loads(content)
        if not isinstance(body, dict):
            return ""
        parts = [body.get(name) for name in ("cache_salt", "system", "instructions", "messages")]
        parts += [body.get(name) for name in ("prompt", "input", "text", "input_ids")]
        texts = [part if isinstance(part, str) else json.dumps(part) for part in parts if part is not None]
    except (ValueError, RecursionError):
        return ""
    return "\n".join(texts)


# ---- the proxy ----


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
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"a URL of a server begins with http:// or https://, got {url!r}")
        self.settings = settings or RouterSettings()
        self.replicas = [Replica(url.rstrip("/")) for url in urls]
        self.policy = CacheAwarePolicy(self.settings)
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None)
        )
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/replicas", self.status),
            Route("/{path:path}", self.forward, methods=["GET", "POST", "HEAD"]),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)
        self.app.add_middleware(BodyLimit, max_bytes=self.settings.max_body_bytes)
        self.app.add_middleware(Guard, keys=self.settings.keys, hosts=self.settings.allowed_hosts)

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
        """200 while at least one replica takes requests."""
        is_ready = any(replica.is_healthy and replica.is_ready for replica in self.replicas)
        return PlainTextResponse("ok" if is_ready else "no replica is ready", 200 if is_ready else 503)

    async def status(self, request: Request) -> Response:
        """Load and tree size of each replica, for the administration."""
        try:
            require_admin(request)
        except ApiError as error:
            return JSONResponse(error.body(), error.status)
        sizes = self.policy.tree.num_chars
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
                for replica in self.replicas
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
            replica = self.policy.choose(prompt, candidates)
            tried.add(replica)
            replica.load += 1
            replica.num_sent += 1
            try:
                answer = await until_disconnect(request, self._send(request, replica, content))
            except BaseException as error:
                replica.load -= 1
                if not isinstance(error, httpx.TransportError):
                    raise
                self.on_failure(replica)
                continue
            relay = Relay(self, replica, answer)
            if answer.status_code != 503:
                return relay
            await relay.close()  # another one may take the request
            replica.is_ready = False  # until the next check
        raise ApiError(503, "no replica can take the request")

    def _candidates(self, tried: set[Replica]) -> list[Replica]:
        """Those that are ready; if none is, those that answer, which may be ready before the next check."""
        healthy = [each for each in self.replicas if each.is_healthy and each not in tried]
        return [each for each in healthy if each.is_ready] or healthy

    async def _send(self, request: Request, replica: Replica, content: bytes) -> httpx.Response:
        """The response up to its headers. Cancelled when the client leaves."""
        headers = end_to_end(request.headers.raw)
        client = request.client.host if request.client is not None else "unknown"
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
            await asyncio.gather(*map(self._check, self.replicas))
            self.policy.tree.evict(self.settings.max_tree_chars)
            await asyncio.sleep(self.settings.health_interval)

    async def _check(self, replica: Replica) -> None:
        """Does it take requests? A server of another kind may have no /ready, or a key for it."""
        status = await self._status_of(replica, "/ready")
        if status in (401, 403, 404):
            status = await self._status_of(replica, "/health")
        if status is None and replica.is_healthy:
            self.on_failure(replica)
        replica.is_healthy, replica.is_ready = status is not None, status == 200

    async def _status_of(self, replica: Replica, path: str) -> int | None:
        """None: no answer."""
        try:
            answer = await self.client.get(replica.url + path, timeout=self.settings.health_interval)
        except httpx.HTTPError:
            return None
        return answer.status_code


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
