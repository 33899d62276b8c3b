"""Prompts and limits: text to token ids off the event loop, and refusal before any memory is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diptych.shared import registry
from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.dialects.parts.choose import choose_dialect, inert_for, reasoning_fields
from diptych.shared.dialects.parts.history import as_history
from diptych.shared.engine.requests.images import (
    MAX_IMAGES,
    bytes_of_data_url,
    expand_placeholders,
    pack_pixels,
    pixels_of,
    size_of_packed,
)
from diptych.shared.interfaces.detokenizer import Detokenizer, TokenText
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.server.api.field_types import MAX_PROMPTS
from diptych.shared.server.api.protocol import ImagePart, Message, TextPart
from diptych.shared.server.engine.messages import Ready
from diptych.shared.server.http.errors import ContextOverflow, bad_request, first_word
from diptych.shared.text.bad_words import with_bad_word_ids
from diptych.shared.text.control_text import control_chars
from diptych.shared.text.token_bytes import TokenBytes
from diptych.shared.text.tokenizer import Conversation, PromptTooLong, Tokenizer
from diptych.shared.types import FinishLength, SamplingParams

NUM_TOKENIZER_THREADS = 2
DECODE_TOKENS = 4096
"""Decoded in one piece, which takes 5 ms."""


class Prompts:
    """Tokenizes in threads and checks prompts against the model's limits."""

    def __init__(self, tokenizer: Tokenizer | None, ready: Ready, dialect: Dialect | None = None) -> None:
        """dialect: how the model writes calls and reasoning. Default: by its chat template."""
        self.tokenizer = tokenizer
        self.ready = ready
        self.dialect = dialect or choose_dialect(tokenizer)
        self.controls = control_chars(self.dialect.markers, tokenizer)
        self.marker_ids: dict[str, int] = {}
        if tokenizer is not None:
            ids = {marker: tokenizer.token_to_id(marker) for marker in self.controls}
            self.marker_ids = {marker: i for marker, i in ids.items() if i is not None}
        self._inert = inert_for(self.dialect, tokenizer) if tokenizer is not None else None
        self.token_bytes = TokenBytes(tokenizer) if tokenizer is not None else None
        self._threads = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        longest = (
            max((len(self.token_bytes.of(i)) for i in range(ready.num_token_ids)), default=1)
            if self.token_bytes is not None
            else 1
        )
        self._longest = max(longest, 1)  # token, in bytes
        self.max_text_bytes = ready.context_len * self._longest
        """No longer text can fit the context: it is refused before it is tokenized."""

    async def of_text(self, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. field: of the body."""
        tokenizer = self._need_tokenizer()
        if len(text) > self.max_text_bytes:
            raise self._too_many(len(text), field)
        return await self._run(field, tokenizer.encode, text, add_special_tokens)

    async def of_each(
        self, prompt: str | list[Any], field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of a text, of each of several texts, or what is token ids already. field: of the body."""
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not prompts:
            raise bad_request(f"{field} is an empty list", field)
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(f"{field} takes at most {MAX_PROMPTS} entries, got {len(prompts)}", field)
        return [
            await self.of_text(each, field, add_special_tokens) if isinstance(each, str) else each
            for each in prompts
        ]

    async def of_messages(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, template_args: dict[str, Any]
    ) -> tuple[Conversation, list[bytes]]:
        """A conversation as a prompt, by the model's chat template, and the pixels of its images, as the
        engine takes them. Each row of an image has a placeholder."""
        tokenizer = self._need_tokenizer()
        num_chars = sum(map(_num_chars, messages)) + _num_chars_in(tools)
        if num_chars > self.max_text_bytes:
            raise self._too_many(num_chars, "messages")
        images = await self._of_images(messages)
        sizes, vision = [size_of_packed(each) for each in images], self.ready.vision

        markers = (self.dialect.reasoning or ())[:2]
        is_continued = template_args.get("continue_final_message", False)

        def render() -> Conversation:
            prompt = tokenizer.conversation(
                as_history(self.dialect, [_plain(message) for message in messages]),
                tools=tools or None,
                max_chars=self.max_text_bytes,
                inert=self._inert,
                ending_with=() if is_continued else markers,
                **template_args,
            )
            ids = expand_placeholders(prompt.ids, sizes, vision) if images and vision else prompt.ids
            ending = markers[1] if markers and is_continued else prompt.ending  # the answer has begun
            return Conversation(ids, ending)

        conversation: Conversation = await self._run("messages", render)
        return conversation, images

    def reasoning_fields(self, prompt: Conversation) -> dict[str, Any]:
        """Fields of SamplingParams: a constraint on the answer begins behind its reasoning."""
        return reasoning_fields(self.dialect, prompt.ending, self._need_tokenizer())

    def check_template_args(self, template_args: dict[str, Any]) -> None:
        """400 for a client's argument that is no switch of the chat template."""
        try:
            self._need_tokenizer().check_template_args(template_args)
        except ValueError as error:
            raise bad_request(f"chat_template_kwargs: {error}", "chat_template_kwargs") from None

    async def to_text(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of token ids, of which there may be as many as a text can have."""
        tokenizer = self._need_tokenizer()
        if len(ids) > self.max_text_bytes:
            raise bad_request(f"tokens takes at most {self.max_text_bytes} ids, got {len(ids)}", "tokens")
        if ids and not 0 <= min(ids) <= max(ids) < self.ready.vocab_size:
            raise bad_request(f"tokens must be in [0, {self.ready.vocab_size})", "tokens")
        return await self._run("tokens", decode_in_pieces, tokenizer, ids, skip_special_tokens)

    async def with_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with the token ids of its bad words."""
        if not params.bad_words:
            return params
        resolved: SamplingParams = await self._run("bad_words", with_bad_word_ids, params, self.tokenizer)
        return resolved

    async def _of_images(self, messages: Sequence[Message]) -> list[bytes]:
        urls = [part.image_url.url for message in messages for part in _parts(message) if _is_image(part)]
        if not urls:
            return []
        if len(urls) > MAX_IMAGES:
            raise bad_request(f"a request has at most {MAX_IMAGES} images, got {len(urls)}", "messages")
        config = self._need_vision()
        return [await self._run("messages", _pixels, url, config) for url in urls]

    def _need_vision(self) -> VisionConfig:
        if self.ready.vision is None:
            raise bad_request(self.ready.no_images, "messages")
        return self.ready.vision

    async def _run(self, field: str, function: Any, *args: Any) -> Any:
        """In a thread. field: of the body, from which the arguments come."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, function, *args)
        except PromptTooLong as error:
            raise self._too_many(error.num_chars, field) from None
        except ValueError as error:
            raise bad_request(str(error), field) from None

    def _too_many(self, num_chars: int, field: str) -> ContextOverflow:
        """The error for a text of so many characters. No token has more bytes than the longest."""
        num_tokens = -(-num_chars // self._longest)
        size = f"{num_chars} characters, which are at least {num_tokens} tokens"
        return ContextOverflow(num_tokens, self.ready.context_len, field, size=size)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer: send token ids")
        return self.tokenizer

    def check(
        self,
        prompt: list[int],
        field: str,
        params: SamplingParams | None = None,
        length_field: str = "max_tokens",
    ) -> None:
        """400 for a prompt or parameters that the engine cannot serve. field, length_field: of the body, from
        which the prompt and the longest answer come."""
        ready = self.ready
        if not prompt:
            raise bad_request("the prompt is empty; it needs at least one token", field)
        limit = min(ready.context_len, ready.max_total_tokens)
        if len(prompt) >= limit:
            size = f"{len(prompt)} tokens, which leave none for the answer"
            raise ContextOverflow(len(prompt), limit, field, size=size)
        if min(prompt) < 0 or max(prompt) >= ready.vocab_size:
            raise bad_request(f"prompt token ids must be in [0, {ready.vocab_size})", field)
        if params is None:
            return
        if len(prompt) + params.max_new_tokens > ready.context_len:
            raise ContextOverflow(len(prompt), ready.context_len, length_field, params.max_new_tokens)
        if (params.stop or params.stop_regex) and self.tokenizer is None:
            name = "stop" if params.stop else "stop_regex"
            raise bad_request("this model has no tokenizer: stop texts need one", name)
        try:
            params.check_against_vocab(ready.vocab_size)
        except ValueError as error:
            raise bad_request(str(error), first_word(error)) from None


async def for_each(check: Callable[..., None], prompts: Sequence[list[int]], *args: Any) -> None:
    """`check(prompt, *args)` of each prompt. Other requests get their turn between two of them."""
    for index, prompt in enumerate(prompts):
        if index:
            await asyncio.sleep(0)
        check(prompt, *args)


def decode_in_pieces(tokenizer: TokenText, ids: list[int], skip_special_tokens: bool) -> str:
    """`decode`, which keeps other threads from running until it returns, of a few tokens at a time."""
    if len(ids) <= DECODE_TOKENS:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    params = SamplingParams(skip_special_tokens=skip_special_tokens)
    detokenizer: Detokenizer = registry.load("detokenizer", "reference")(tokenizer, params)
    pieces = [detokenizer.append(ids[i : i + DECODE_TOKENS]) for i in range(0, len(ids), DECODE_TOKENS)]
    return "".join(pieces) + detokenizer.append([], FinishLength(len(ids)))


def _pixels(url: str, config: VisionConfig) -> bytes:
    """Read the pixels of a data URL. Other URLs are refused: a client names no file of the server."""
    return pack_pixels(pixels_of(bytes_of_data_url(url), config))


def _parts(message: Message) -> list[Any]:
    return message.content if isinstance(message.content, list) else []


def _is_image(part: TextPart | ImagePart) -> bool:
    return part.type == "image_url"


def _num_chars(message: Message) -> int:
    """Count the characters that a chat template writes into the prompt: some leave out earlier reasoning."""
    text = message.content if isinstance(message.content, str) else ""
    parts = (part.text for part in _parts(message) if not _is_image(part))
    arguments = (call.function.arguments for call in message.tool_calls or ())
    return sum(map(len, (text, *parts, *arguments)))


def _num_chars_in(value: Any) -> int:
    """Count the characters of all texts in a JSON value, which may be nested deeply."""
    num_chars, open_values = 0, [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, dict):
            open_values += [*value, *value.values()]
        elif isinstance(value, list):
            open_values += value
    return num_chars


def _plain(message: Message) -> dict[str, Any]:
    """A message as a mapping."""
    content: Any = message.content
    if isinstance(content, list) and any(map(_is_image, content)):  # templates of such models take parts
        content = [{"type": "image"} if _is_image(part) else part.model_dump() for part in content]
    elif isinstance(content, list):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    return plain
