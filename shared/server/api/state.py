"""What the routes share: the engine, the prompts, the metrics, and whether new work is taken."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from diptych import __version__
from diptych.shared.server.api.chat_choice import AnswerForm
from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.sampling_fields import SamplingFields
from diptych.shared.server.engine.engine_client import EngineClient
from diptych.shared.server.engine.messages import Ready
from diptych.shared.server.http.access import Keys
from diptych.shared.server.http.errors import ApiError, bad_request
from diptych.shared.server.http.limits import MAX_BODY_BYTES, MAX_IMAGE_BYTES, WRITE_SECONDS
from diptych.shared.server.http.metrics import Metrics
from diptych.shared.types import SamplingParams

HEAD = ("id", "object", "created", "model", "system_fingerprint")
"""Fields of `ServerState.head_of`."""


@dataclass(frozen=True)
class ServerSettings:
    """Flags of `diptych serve` that concern HTTP; the engine's are in EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # default: the engine's `model`
    keys: Keys = field(default_factory=Keys)
    allowed_hosts: tuple[str, ...] = ()  # names of a server without keys; "*": any
    cors_origins: tuple[str, ...] = ()  # pages of other sites that may use it; "*": any
    lora_root: Path | None = None  # adapters are loaded from below it; None: not over HTTP
    weights_root: Path | None = None  # the same of new weights
    otlp_traces_endpoint: str | None = None  # gets OpenTelemetry traces of requests
    profile_dir: Path | None = None  # profiles are written there; None: there are none
    max_body_bytes: int = MAX_BODY_BYTES
    max_image_bytes: int = MAX_IMAGE_BYTES  # in addition, where the model takes images
    max_live_requests: int = 1024  # samples in the engine at one time; beyond: 429
    drain_seconds: float = 30.0  # after SIGTERM, for running requests to end
    write_timeout: float = WRITE_SECONDS  # seconds that one write to a slow reader may take
    heartbeat_timeout: float = 60.0  # seconds without a heartbeat until /health fails
    log_requests: bool = False  # a line for each answer, on stderr


@dataclass
class ServerState:
    """Made when the engine is ready."""

    settings: ServerSettings
    model_name: str
    client: EngineClient
    ready: Ready
    prompts: Prompts
    metrics: Metrics = field(default_factory=Metrics)
    start_time: int = field(default_factory=lambda: int(time.time()))
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)  # the model's, of OpenAI's routes
    is_draining: bool = False
    adapters: set[str] = field(default_factory=set)  # names of LoRA adapters, which are models to clients

    def generation(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: SamplingFields,
        images: Sequence[bytes] = (),
        form: AnswerForm | None = None,
    ) -> Generation:
        """A generation of a validated body; 429 or 503 when the server takes no more. form: how the answers
        are read, of a chat."""
        self.check_admission(len(prompts), params.n)
        return Generation(
            self.client,
            self.prompts.tokenizer,
            self.metrics,
            prompts,
            params,
            seed=body.seed if body.seed is not None else secrets.randbits(63),
            extra_key=body.namespace(body.cache_salt),
            priority=body.priority,
            routing_key=body.routing_key,
            lora=self.adapter_of(body.model),
            images=images,
            diffusion=None if body.diffusion is None else body.diffusion.params(),
            name=body.rid,
            form=form,
        )

    def head_of(self, prefix: str, kind: str, model: str | None) -> dict[str, Any]:
        """What all chunks of an answer have in common."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model or self.model_name,
            "system_fingerprint": self.fingerprint,
        }

    @cached_property
    def fingerprint(self) -> str:
        """The same for servers of one version, model and choice of components."""
        parts = (__version__, self.model_name, sorted(self.ready.description.items()))
        return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"

    def adapter_of(self, model: str | None) -> str | None:
        """The LoRA adapter that a request means by its `model`; None: the model alone."""
        return model if model in self.adapters else None

    def check_admission(self, num_prompts: int, n: int = 1) -> None:
        """400 for more samples than the server ever takes, 429 when too many are live, 503 while draining or
        after the engine's death."""
        limit, num_samples = self.settings.max_live_requests, num_prompts * n
        queue = self.ready.max_queued_requests  # the samples of a request arrive together
        largest = limit if queue is None else min(limit, queue)
        if num_samples > largest:
            raise bad_request(
                f"{num_prompts} prompts with n={n} are {num_samples} requests; this server takes at most "
                f"{largest} at one time"
            )
        if not self.client.is_alive:
            raise ApiError(503, f"the engine is not running: {self.client.death_reason}")
        if self.client.load.problem is not None:
            raise ApiError(503, f"the engine is about to end: {self.client.load.problem}")
        if self.is_draining:
            raise ApiError(503, "the server is shutting down")
        if self.client.num_live + num_samples > limit:
            raise ApiError(
                429, f"the server is full: {self.client.num_live} requests are live, the limit is {limit}"
            )

    @property
    def health_problem(self) -> str | None:
        """Why /health fails; None: it does not."""
        if not self.client.is_alive:
            return f"the engine is not running: {self.client.death_reason}"
        if self.client.load.problem is not None:
            return self.client.load.problem
        age = time.monotonic() - self.client.last_beat
        if age > self.settings.heartbeat_timeout:
            return f"the engine has given no heartbeat for {age:.0f} s"
        return None
