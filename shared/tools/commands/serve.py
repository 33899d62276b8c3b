"""`diptych serve`: an OpenAI-compatible server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands.options import EngineOptions, spread
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

if TYPE_CHECKING:
    from diptych.shared.server.api.state import ServerState

SERVER = "Server"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SERVER, **more)


@spread
def serve(
    *,
    engine: EngineOptions,
    host: Annotated[str, _option("Address to listen on. 0.0.0.0: every interface.")] = "127.0.0.1",
    port: Annotated[int, _option("Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, _option("Name of the model in the API. Default: --model.", show_default=False)
    ] = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    admin_key: AdminKey = None,
    admin_key_file: AdminKeyFile = None,
    allowed_host: AllowedHost = None,
    cors_origin: CorsOrigin = None,
    allow_anonymous: AllowAnonymous = False,
    lora_root: Annotated[
        Path | None,
        _option("Folder below which /load_lora_adapter may load. Default: it may not.", show_default=False),
    ] = None,
    profile_dir: Annotated[
        Path | None,
        _option("Folder that /start_profile writes to. Default: it does not.", show_default=False),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        _option("URL that gets OpenTelemetry traces of requests. Default: none.", show_default=False),
    ] = None,
    weights_root: Annotated[
        Path | None,
        _option("Folder below which /update_weights_from_disk may read. Default: none.", show_default=False),
    ] = None,
    max_live_requests: Annotated[
        int, _option("Requests in the engine at one time; beyond: 429.", min=1)
    ] = 1024,
    max_body_mib: Annotated[int, _option("Longest body, in MiB; beyond: 413.", min=1)] = 8,
    max_image_mib: Annotated[
        int, _option("MiB of a body in addition, where the model takes images.", min=0)
    ] = 24,
    drain_seconds: Annotated[
        float, _option("After SIGTERM, seconds for running requests to end.", min=0)
    ] = 30.0,
    write_timeout: Annotated[
        float, _option("Seconds that a client may take to read a piece of a stream.", min=0)
    ] = 60.0,
    log_requests: Annotated[
        bool, _option("Write a line for each answer to stderr, with the client's x-request-id.")
    ] = False,
    in_process: Annotated[
        bool | None,
        _option(
            "Run the engine in a thread of the server's process. Default: on a CPU.",
            "--in-process/--separate-process",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Without arguments: the built-in model on port 8000."""
    try:
        from diptych.shared.server.serve import run_server
    except ImportError as error:
        raise ImportError(f"serving needs {error.name}: pip install 'diptych[server]'") from None
    import asyncio

    from diptych.shared.config import EngineConfig
    from diptych.shared.engine.build.settings import default_device
    from diptych.shared.loading.model_path import load_tokenizer, resolve_model_path
    from diptych.shared.server.api.state import ServerSettings

    keys = keys_of(api_key, api_key_file, admin_key, admin_key_file)
    check_exposure(host, keys, allow_anonymous, cors_origin)
    config = EngineConfig(**engine.to_flags())
    if config.num_ranks > 1:
        from diptych.shared.engine.processes.launcher import follow_if_launched

        follow_if_launched(config)
    settings = ServerSettings(
        host=host,
        port=port,
        served_model_name=served_model_name,
        keys=keys,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        lora_root=lora_root,
        weights_root=weights_root,
        profile_dir=profile_dir,
        otlp_traces_endpoint=otlp_traces_endpoint,
        max_body_bytes=max_body_mib * 2**20,
        max_image_bytes=max_image_mib * 2**20,
        max_live_requests=max_live_requests,
        drain_seconds=drain_seconds,
        write_timeout=write_timeout,
        log_requests=log_requests,
    )
    folder = resolve_model_path(config.model, config.load_format)
    device = config.device or default_device()
    in_thread = in_process if in_process is not None else not device.startswith("cuda")
    print(f"starting {config.model} on {device} ...", file=sys.stderr)
    code = asyncio.run(
        run_server(
            config,
            settings,
            lambda: load_tokenizer(config, folder),
            in_thread=in_thread,
            announce=_announce,
        )
    )
    if code:
        raise typer.Exit(code)


def _announce(state: ServerState, port: int) -> None:
    import psutil

    from diptych.shared.loading.sampling_defaults import text_of

    ready, url = state.ready, url_of(state.settings.host, port)
    parts = ready.description
    print(f"serving {state.model_name} at {url}")
    print(
        f"  scheduler {parts.get('scheduler')}, attention {parts.get('attention')}; context "
        f"{ready.context_len:,} tokens, KV pool {ready.max_total_tokens:,} tokens, at most "
        f"{ready.max_running_requests} running requests"
    )
    if state.sampling_defaults:
        print(f"  sampling by the model unless a request says it: {text_of(state.sampling_defaults)}")
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in ready.startup_seconds.items())
    seconds = time.time() - psutil.Process().create_time()
    print(f"  ready after {seconds:.1f} s; of the engine's: {phases}")
    body = '{"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}'
    print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )
