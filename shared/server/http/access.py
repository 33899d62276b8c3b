"""Who may reach what: keys, addresses, pages in browsers, and paths. docs/security.md has the promises."""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.shared.server.http.errors import ApiError

PUBLIC_PATHS = ("/", "/health", "/ready")
"""Answered without an API key, for probes and routers. The page at / holds no data: it asks for /status with
the key."""

FORWARDING_HEADERS = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
"""A request with one of them comes from a proxy, whose own address says nothing about the client."""

PREFILL_SERVER = b"x-diptych-prefill-server"
"""Header of a request from the router: the prefill server that it has chosen."""
PREFILL_PORT = "x-diptych-prefill-port"
"""Header of /ready of a prefill server."""

_BAD_PATH = re.compile(r"[\x00-\x1f\x7f\\]|(^|/)\.{1,2}(/|$)")


@dataclass(frozen=True)
class Keys:
    """Keys for inference, and for administration too. Without any, everything is open to this computer, and
    inference to every address that reaches the port."""

    inference: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.inference or self.admin)


@dataclass(frozen=True)
class Caller:
    """Who sends a request. `owner`: a digest of the key; "": the server has no keys. `name`: the owner, or
    else the address. `has_others`: there are clients with other keys."""

    owner: str
    name: str
    is_admin: bool
    has_others: bool = False
    prefill_server: str | None = None  # which the router has chosen, signed


def caller_of(request: Request) -> Caller:
    """Return the caller that `Guard` has found."""
    caller: Caller = request.scope["diptych.caller"]
    return caller


def require_admin(request: Request) -> None:
    """403 for a caller that may not administer the server."""
    caller = caller_of(request)
    if not caller.is_admin:
        what = "need an admin key" if caller.owner else "answer loopback only, without a proxy, or need a key"
        raise ApiError(403, f"admin endpoints {what}")


def require_overview(request: Request) -> None:
    """403 where clients with other keys use the server, unless the caller administers it: what is shown is of
    their requests too."""
    if caller_of(request).has_others:
        require_admin(request)


class Guard:
    """Refuses before a body is read: 400 for a path that proxies and servers could read differently, 401
    without a known key, 403 for a page of another site. Keys are compared by hashes, all in constant time."""

    def __init__(
        self, app: ASGIApp, keys: Keys, hosts: Sequence[str] = (), origins: Sequence[str] = ()
    ) -> None:
        """hosts: names by which clients may call a server without keys, beside addresses and its own.
        origins: other sites whose pages may use it."""
        self.app = app
        self.keys = keys
        self._inference = [_hash(key.encode()) for key in keys.inference]
        self._admin = [_hash(key.encode()) for key in keys.admin]
        if not self._admin and len(self._inference) == 1:
            self._admin = self._inference  # one user, who owns the server
        own = socket.gethostname().lower()
        self._origins = {origin.lower() for origin in origins}
        self._hosts = {"localhost", own, own.partition(".")[0], *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                chosen = dict(scope["headers"]).get(PREFILL_SERVER)
                caller = self._caller(scope)
                scope["diptych.caller"] = replace(caller, prefill_server=chosen and chosen.decode("latin-1"))
            except ApiError as error:
                await send_error(error, scope, send)
                return
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if _BAD_PATH.search(scope["path"]):
            raise ApiError(400, "the path has a control character, a backslash or a dot segment")
        headers = dict(scope["headers"])
        is_public = scope["path"] in PUBLIC_PATHS
        if self.keys:
            return self._caller_with_key(headers, is_public)
        if not is_public:
            self._check_page(headers)
        address = scope["client"][0] if scope.get("client") else "127.0.0.1"  # none: a Unix socket
        is_direct = not any(name in headers for name in FORWARDING_HEADERS)
        return Caller("", address, is_admin=is_direct and is_loopback(address))

    def _caller_with_key(self, headers: dict[bytes, bytes], is_public: bool) -> Caller:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        found = _hash(key)
        is_inference, is_admin = _is_among(found, self._inference), _is_among(found, self._admin)
        if not (key and (is_inference or is_admin)):
            if is_public:
                return Caller("", "", is_admin=False)
            raise ApiError(401, "missing or wrong API key", code="invalid_api_key")
        owner = found.hex()[:16]
        return Caller(owner, owner, is_admin, has_others=len({*self._inference, *self._admin}) > 1)

    def _check_page(self, headers: dict[bytes, bytes]) -> None:
        """403 for a page of another site, in a browser that reaches this server: one that sends requests
        here, or whose name was rebound to this address."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = _name_of(host)
        if host and name not in self._hosts and "*" not in self._hosts and not is_address(name):
            how = "name it with --allowed-host, or use API keys"
            raise ApiError(403, f"host {host[:100]!r} is not allowed: {how}")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin in self._origins:
            return
        site = headers.get(b"sec-fetch-site", b"none")
        is_foreign = b"origin" in headers and origin.partition("://")[2] != host
        if is_foreign or site not in (b"none", b"same-origin"):
            raise ApiError(403, "pages of other sites may not use a server without API keys")


@lru_cache
def _name_of(host: str) -> str:
    """Remove the port of a host. "" for what is no host."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


@lru_cache
def is_address(name: str) -> bool:
    """An address is no name, so no name server can let it point elsewhere."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


@lru_cache
def is_loopback(name: str) -> bool:
    return name == "localhost" or (is_address(name) and ip_address(name).is_loopback)


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines with # are left out. Raises `ValueError`."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {path} cannot be read: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no key")
    return keys


def _is_among(found: bytes, known: Sequence[bytes]) -> bool:
    matches = [hmac.compare_digest(found, each) for each in known]  # all: constant time
    return any(matches)


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """An answer from outside of the application."""

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await JSONResponse(error.body(), error.status, headers=error.headers)(scope, receive, send)
