"""`diptych route`: a cache-aware router in front of several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from diptych.shared.tools.commands.server_options import (
    AdminKey,
    AdminKeyFile,
    AllowAnonymous,
    AllowedHost,
    ApiKey,
    ApiKeyFile,
    CorsOrigin,
    check_exposure,
    keys_of,
    url_of,
)


def route(
    urls: Annotated[
        list[str] | None, typer.Argument(help="URLs of running servers.", show_default=False)
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URL of a prefill server; repeat it.", metavar="URL", show_default=False),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(help="URL of a decode server; repeat it.", metavar="URL", show_default=False),
    ] = None,
    cluster_secret_file: Annotated[
        str | None,
        typer.Option(
            help="With --prefill: the secret of its servers. Default: DIPTYCH_CLUSTER_SECRET.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0: every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8080,
    cache_threshold: Annotated[
        float, typer.Option(help="Known fraction of a prompt from which its server is chosen.", min=0, max=1)
    ] = 0.3,
    balance_abs: Annotated[
        int, typer.Option(help="Loads are unbalanced when they differ by more requests ...", min=0)
    ] = 32,
    balance_rel: Annotated[
        float, typer.Option(help="... and the largest is more than so many times the smallest.", min=1)
    ] = 1.5,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    allow_anonymous: AllowAnonymous = False,
) -> None:
    """Send each request to the server that probably has its prefix in the cache. Servers whose /ready fails
    get no requests until it succeeds, unless all fail. Keys are those of the servers, which get them too.

    With --prefill and --decode: a prompt goes to the prefill server that probably has its prefix, and its
    answer comes from the decode server with the fewest requests."""
    try:
        from diptych.shared.server.http.connections import listen, server_config
        from diptych.shared.server.http.request_log import log_sparsely
        from diptych.shared.server.router.policy import RouterSettings
        from diptych.shared.server.router.router import Router
    except ImportError as error:
        raise ImportError(f"the router needs {error.name}: pip install 'diptych[server]'") from None
    import uvicorn

    from diptych.shared.engine.processes.cluster_secret import cluster_secret
    from diptych.shared.engine.python_runtime import gc_freeze

    if bool(prefill) != bool(decode) or (decode and urls):
        raise ValueError("split servers need --prefill URL and --decode URL, and no other URLs")
    servers = [*(decode or urls or ())]
    keys = keys_of(api_key, api_key_file, admin_key, admin_key_file)
    check_exposure(host, keys, allow_anonymous, cors_origin)
    settings = RouterSettings(
        cache_threshold=cache_threshold,
        balance_abs=balance_abs,
        balance_rel=balance_rel,
        keys=keys,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        prefill_urls=tuple(prefill or ()),
        cluster_secret=cluster_secret(cluster_secret_file) if prefill else b"",
    )
    router = Router(servers, settings)
    listener = listen(host, port)
    to = f"{len(prefill)} prefill and {len(servers)} decode servers" if prefill else f"{len(servers)} servers"
    print(f"routing to {to} at {url_of(host, listener.getsockname()[1])}", flush=True)
    log_sparsely()
    with gc_freeze():
        uvicorn.Server(server_config(router.app)).run(sockets=[listener])
