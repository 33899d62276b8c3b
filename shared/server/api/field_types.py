"""Types of fields that several bodies have, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from diptych.shared.server.http.limits import MAX_ID_CHARS, MAX_KEY_CHARS, MAX_NAMES, MAX_PRIORITY

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048
MAX_SAMPLES = 256
MAX_TOOLS = 1024
"""Each is shown to the chat template and looked at by the event loop. OpenAI takes 128."""

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
TokenIds = Annotated[list[int], Field(max_length=MAX_NAMES)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
