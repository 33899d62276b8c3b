"""`diptych route`: a cache-aware router in front of several servers."""

from __future__ import annotations

from typing import Annotated

import typer


def route(
    urls: Annotated[list[str], typer.Argument(help="URLs of running servers.")],
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
) -> None:
    """Send each request to the server that probably has its prefix in the cache. Servers whose /ready fails
    get no requests until it succeeds, unless all fail."""
    try:
        import uvicorn

        from diptych.shared.server.http.connections import listen
        from diptych.shared.server.router.router import Router, RouterSettings
    except ImportError as error:
        raise ImportError(f"the router needs {error.name}: pip install 'diptych[server]'") from None
    settings = RouterSettings(
        cache_threshold=cache_threshold, balance_abs=balance_abs, balance_rel=balance_rel
    )
    router = Router(urls, settings)
    listener = listen(host, port)
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    print(f"routing to {len(urls)} servers at http://{address}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(router.app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
