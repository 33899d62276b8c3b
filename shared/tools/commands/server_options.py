"""Options that the servers share: where they listen, and who may use them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diptych.shared.server.http.access import Keys

ACCESS = "Access"
KEY_VARIABLE, ADMIN_VARIABLE = "DIPTYCH_API_KEY", "DIPTYCH_ADMIN_KEY"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=ACCESS, **more)


ApiKey = Annotated[
    list[str] | None,
    _option("A key that clients must send; repeatable. The list of processes shows it.", envvar=KEY_VARIABLE),
]
ApiKeyFile = Annotated[Path | None, _option("A file with such keys, one a line.", show_default=False)]
AdminKey = Annotated[
    list[str] | None,
    _option("A key for the administration. The list of processes shows it.", envvar=ADMIN_VARIABLE),
]
AdminKeyFile = Annotated[Path | None, _option("A file with such keys, one a line.", show_default=False)]
AllowedHost = Annotated[
    list[str] | None,
    _option("A name by which clients call a server without keys; repeatable. '*': any.", show_default=False),
]
CorsOrigin = Annotated[
    list[str] | None,
    _option(
        "Pages of this site may use the server from a browser (CORS), such as https://chat.example.com; "
        "repeatable. '*': any, with keys.",
        show_default=False,
    ),
]
AllowAnonymous = Annotated[bool, _option("Serve other computers without a key.")]


def keys_of(
    api_key: list[str] | None, api_file: Path | None, admin_key: list[str] | None, admin_file: Path | None
) -> Keys:
    """Raises `ValueError` for an empty key: it is most likely a variable that was not set, and must not leave
    the server open."""
    from diptych.shared.server.http.access import Keys, read_keys

    found = []
    for name, variable, keys, file in (
        ("--api-key", KEY_VARIABLE, api_key, api_file),
        ("--admin-key", ADMIN_VARIABLE, admin_key, admin_file),
    ):
        if not all(key.strip() for key in keys or ()):
            raise ValueError(f"{name} must not be empty")
        if not keys and variable in os.environ:  # typer takes an empty variable for one that is not set
            raise ValueError(f"{variable} must not be empty; unset it to serve without a key")
        found.append((*(keys or ()), *(read_keys(file) if file is not None else ())))
    return Keys(*found)


def check_exposure(
    host: str, keys: Keys, allow_anonymous: bool, cors_origin: list[str] | None = None
) -> None:
    """Raise `ValueError` for a server that other computers, or pages of any site, reach without a key, unless
    that is asked for."""
    from diptych.shared.server.http.access import is_loopback

    if not (keys or allow_anonymous or is_loopback(host)):
        raise ValueError(
            f"--host {host} lets other computers in without a key: set {KEY_VARIABLE} or --api-key-file, or "
            "pass --allow-anonymous"
        )
    if "*" in (cors_origin or ()) and not keys:
        raise ValueError("--cors-origin '*' lets every page in a browser in without a key: name the sites")


def url_of(host: str, port: int) -> str:
    """A URL at which this computer reaches a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host.replace('%', '%25')}]:{port}" if ":" in host else f"http://{host}:{port}"
