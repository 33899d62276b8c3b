"""Messages between the API process and the engine process: tagged msgspec structs in MessagePack.

The API sends `Generate`, `Abort` and `Control`; the engine sends `Ready` first, then `Outputs`, `Reply`,
`Heartbeat`, and `Dead` as its last word. Decoding is typed: a frame that is none of these raises
`msgspec.ValidationError`, and no frame can run code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.parallel.channel import decoder
from diptych.shared.types import (
    DiffusionParams,
    FinishAbort,
    FinishError,
    FinishLength,
    FinishReason,
    FinishRegex,
    FinishString,
    FinishToken,
    SamplingParams,
    TokenLogprob,
)

VERSION = 13
"""Of this protocol. The API refuses an engine of another version at `Ready`."""


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages; the class name is the tag."""


# ---- API to engine ----


# --8<-- [start:generate-and-abort]
class Generate(Message):
    """Start one sample of one prompt."""

    rid: str  # unique among live requests; made by the server, never by a client
    input_ids: list[int]
    params: SamplingParams  # n is ignored: each sample is a Generate of its own
    seed: int
    extra_key: str | None = None  # namespace in the prefix cache
    client: str = ""  # the key or address it comes from: clients share the compiler of grammars fairly
    priority: int = 0
    routing_key: str | None = None
    prefill_server: str | None = None  # that computes the prompt, signed by the router
    lora: str | None = None  # name of an adapter
    is_pooling: bool = False  # no tokens, but an embedding
    images: list[bytes] = []  # of `pack_pixels`; input_ids have their placeholders
    input_embeds: bytes = b""  # float32 [len(input_ids), hidden_size] in place of input_ids; empty: none
    diffusion: DiffusionParams | None = None  # None: token by token


class Abort(Message):
    """End requests. Unknown ids are ignored: a request may have ended meanwhile."""

    rids: list[str]


# --8<-- [end:generate-and-abort]


class Unreadable(msgspec.Struct):
    """Stands for a request whose parameters were right in the API and are refused here: checks with a time
    limit may end differently."""

    rid: str
    problem: str


class Control(Message):
    """An operation on the whole engine; answered by one `Reply` with the same call_id."""

    call_id: int
    action: str  # a method `on_<action>` of EngineLoop
    args: dict[str, Any] = {}


# ---- engine to API ----


class Ready(Message):
    """The first message: the engine has its weights and pools."""

    version: int
    context_len: int  # tokens of prompt and output together
    vocab_size: int
    num_token_ids: int  # ids [0, this) have a token
    max_total_tokens: int  # slots of the KV pool
    max_running_requests: int
    max_queued_requests: int | None  # None: any number
    eos_token_ids: list[int]
    num_labels: int  # of a reward model; 0: the model gives tokens and embeddings
    vision: VisionConfig | None  # None: the engine takes no images, because of `no_images`
    description: dict[str, str]  # component -> implementation, memory
    prefill_port: int | None  # of a prefill server, for decode servers
    startup_seconds: dict[str, float]  # phase of the engine's start -> how long it took
    no_images: str = ""


class Finish(msgspec.Struct, kw_only=True):
    """A FinishReason on the wire. `kind` is one of its words: stop, length, abort, error."""

    kind: str
    token_id: int | None = None  # stop token
    matched: str | None = None  # stop string, or the text that a stop regex matched
    pattern: str | None = None  # stop regex
    length: int = 0
    message: str = ""
    status: int = 500


class RequestOutput(msgspec.Struct, kw_only=True, array_like=True):
    """What one step gave one request."""

    rid: str
    new_token_ids: list[int]
    finish: Finish | None
    output_logprobs: list[TokenLogprob]  # one for each new id, if asked for
    input_logprobs: list[TokenLogprob]  # of the prompt, if asked for: parts before the first token
    num_cached_tokens: int
    num_accepted_tokens: int
    queue_time: float | None = None  # seconds until its first step; in the first output only
    embedding: list[float] | None = None  # with is_pooling, in the last output
    weight_version: int = 0  # updates of the weights before


class Outputs(Message):
    """The outputs of one step, or some of them."""

    outputs: list[RequestOutput]


class Reply(Message):
    """The answer to a Control. `error`: why it failed; then `result` is empty."""

    call_id: int
    result: dict[str, Any] = {}
    error: str | None = None


class Load(msgspec.Struct, kw_only=True):
    """A snapshot of the engine."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_grammar: int = 0
    num_steps: int = 0
    num_used_tokens: int = 0  # slots of the KV pool that requests or cached prefixes hold
    num_evictable_tokens: int = 0  # of these, the ones of cached prefixes that no request uses
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_verifications: int = 0
    num_accepted_tokens: int = 0
    num_drafted_tokens: int = 0
    num_overlapped: int = 0  # steps launched while the step before was in flight
    num_compiled_kernels: int = 0  # since the engine was ready
    is_paused: bool = False
    num_replicas: int = 1  # with dp: those that have not ended
    problem: str | None = None  # why the engine ends as soon as no request is left
    not_ready: str | None = None  # why requests that come now would fail
    weight_version: int = 0


class Heartbeat(Message):
    """The engine's loop is alive: `counter` grows with every step and every idle tick."""

    counter: int
    load: Load


class Dead(Message):
    """The engine ends after this, and every request with it."""

    reason: str


ToEngine = Generate | Abort | Control
FromEngine = Ready | Outputs | Reply | Heartbeat | Dead

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
_to_engine, _anything = decoder(ToEngine), decoder(Any)
decode_from_engine = decoder(FromEngine)


MAX_LOGPROBS = 2**15
"""In one message: reading it is one call, which keeps the other threads of the API waiting."""


def in_messages(outputs: list[RequestOutput]) -> Iterator[Outputs]:
    """The messages of a step with outputs. One, unless there are many log-probabilities."""
    if not any(each.input_logprobs or each.output_logprobs for each in outputs):
        yield from [Outputs(outputs=outputs)] if outputs else []
        return
    found, room = list[RequestOutput](), MAX_LOGPROBS
    for output in outputs:
        for part in _parts(output):
            size = num_logprobs(part.input_logprobs) + num_logprobs(part.output_logprobs)
            if found and size > room:
                yield Outputs(outputs=found)
                found, room = [], MAX_LOGPROBS
            found.append(part)
            room -= size
    yield Outputs(outputs=found)


def num_logprobs(tokens: list[TokenLogprob]) -> int:
    """Each token has as many as the last one: only the first of a prompt has none."""
    return len(tokens) * (1 + len(tokens[-1].top) + len(tokens[-1].asked)) if tokens else 0


def _parts(output: RequestOutput) -> Iterator[RequestOutput]:
    """The output, before it others with the beginning of its prompt's log-probabilities."""
    tokens = output.input_logprobs
    size = num_logprobs(tokens)
    if size <= MAX_LOGPROBS:
        yield output
        return
    step = max(MAX_LOGPROBS * len(tokens) // size, 1)
    last = (len(tokens) - 1) // step * step
    for start in range(0, last, step):
        yield msgspec.structs.replace(
            output, new_token_ids=[], finish=None, output_logprobs=[], queue_time=None, embedding=None,
            input_logprobs=tokens[start : start + step],
        )  # fmt: skip
    yield msgspec.structs.replace(output, input_logprobs=tokens[last:])


def finish_of(reason: FinishReason) -> Finish:
    """The wire form of a reason."""
    finish = Finish(kind=reason.kind)
    if isinstance(reason, FinishToken):
        finish.token_id = reason.token_id
    elif isinstance(reason, FinishString):
        finish.matched = reason.matched
    elif isinstance(reason, FinishRegex):
        finish.matched, finish.pattern = reason.matched, reason.pattern
    elif isinstance(reason, FinishLength):
        finish.length = reason.length
    elif isinstance(reason, (FinishAbort, FinishError)):
        finish.message, finish.status = reason.message, reason.status
    return finish


def reason_of(finish: Finish) -> FinishReason:
    """The reason that a wire form stands for."""
    if finish.kind == "length":
        return FinishLength(finish.length)
    if finish.kind == "abort":
        return FinishAbort(finish.message, finish.status)
    if finish.kind == "error":
        return FinishError(finish.message, finish.status)
    if finish.pattern is not None:
        return FinishRegex(finish.pattern, finish.matched or "")
    if finish.matched is not None:
        return FinishString(finish.matched)
    assert finish.token_id is not None
    return FinishToken(finish.token_id)


class Channel(Protocol):
    """The engine's end: where messages come from and go to."""

    def receive(self, timeout: float) -> ToEngine | Unreadable | None:
        """The next message; None when none comes within `timeout` seconds (0: none is there)."""

    def send(self, message: FromEngine) -> None: ...


def decode_to_engine(data: bytes) -> ToEngine | Unreadable:
    """Raises `ValueError` for what is no message at all."""
    try:
        message: ToEngine = _to_engine(data)
    except msgspec.ValidationError as error:
        found = _anything(data)
        if not (isinstance(found, dict) and isinstance(found.get("rid"), str)):
            raise
        return Unreadable(found["rid"], str(error))
    return message


def refusal(rid: str, reason: FinishReason) -> RequestOutput:
    return RequestOutput(
        rid=rid,
        new_token_ids=[],
        finish=finish_of(reason),
        output_logprobs=[],
        input_logprobs=[],
        num_cached_tokens=0,
        num_accepted_tokens=0,
    )
