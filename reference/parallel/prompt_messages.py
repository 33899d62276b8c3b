"""Messages between the engine that decodes and the one that computes its prompts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from diptych.shared.engine.processes.input_log import Request
from diptych.shared.parallel.channel import decoder
from diptych.shared.types import StepOutput

Page = Annotated[int, msgspec.Meta(ge=0)]


class Start(msgspec.Struct, tag=True):
    """A message: compute a prompt and the first token, and send the KV from page `first_page` on to these
    pages, and the state of linear attention to this row."""

    room: str
    request: Request
    first_page: Page
    target_pages: list[Page]
    target_row: Page | None = None


class Computed(msgspec.Struct, tag=True):
    """A message, ahead of the pages: the output of the request's first step, and what the drafter keeps of
    the request beside its KV."""

    room: str
    first: StepOutput
    draft_state: bytes = b""


class Failed(msgspec.Struct, tag=True):
    """A message: why the prefill engine has aborted a room."""

    room: str
    reason: str
    status: int = 503


Message = Start | Computed | Failed
encode = msgspec.msgpack.Encoder().encode
decode = decoder(Message)
