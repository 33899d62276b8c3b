"""Text to token ids and back, through a Hugging Face tokenizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from diptych.shared.text.inert import BREAKER, Inert
from diptych.shared.text.segments import Segments, cut_tokens

TEMPLATE_DATA = ("documents",)
"""Parameters of `apply_chat_template` that are no options of it, but data for the template."""

MAX_ENDING_CHARS = 1000
"""What a chat template writes behind the last message."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Conversation(NamedTuple):
    """The prompt of a conversation. `ending`: what the chat template wrote behind the last message."""

    ids: list[int]
    ending: str


class PromptTooLong(ValueError):
    """A conversation whose prompt has more characters than the context can hold."""

    def __init__(self, num_chars: int, max_chars: int) -> None:
        super().__init__(f"the conversation has {num_chars} characters; the context holds {max_chars}")
        self.num_chars = num_chars


class Tokenizer:
    """Wraps a tokenizer of `transformers`; the engine knows only this class."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer
        self.special_ids = frozenset(
            token_id for token_id, token in hf_tokenizer.added_tokens_decoder.items() if token.special
        )
        self.added_ids = frozenset(hf_tokenizer.added_tokens_decoder)
        eos = hf_tokenizer.eos_token_id
        self.eos_token_ids: frozenset[int] = frozenset(() if eos is None else (eos,))
        vocab = hf_tokenizer.get_vocab()
        # Ids are below this. A model's vocab_size may be larger: rows of padding without a token.
        self.vocab_size: int = max(vocab.values()) + 1
        # Of the longest token's spelling: a text of N bytes has at least N / this tokens.
        self.max_token_bytes = max(len(token.encode()) for token in vocab)
        self._decoder = _plain_decoder(hf_tokenizer)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Raises `ValueError` for a folder that holds no tokenizer, or one that cannot be loaded. Code that
        the folder brings along is never run."""
        folder = Path(folder)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
        try:
            loader = _loader_for(folder)
            return cls(loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # of any kind: what a broken file raises depends on how it is broken
            reason = (str(error).splitlines() or [""])[0]
            raise ValueError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens: those that the tokenizer puts around a text, such as a begin-of-sequence token.
        A special token that is spelt out in the text becomes that token in any case. Raises `ValueError` for
        a text with surrogates, which is what bytes become that are no UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start} is {text[error.start]!r}"
            raise ValueError(f"the text is no valid Unicode: {where}") from None
        return self.hf_tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,  # nor types: lists as long as the ids, which nothing reads
            return_token_type_ids=False,
        )

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The exact text: no space before a comma is "cleaned up", whatever the tokenizer's configuration.
        Bytes that form no character become U+FFFD; an id without a token becomes nothing."""
        if self._decoder is not None:
            text: str = self._decoder.decode(ids, skip_special_tokens=skip_special_tokens)
            return text
        return self.hf_tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int | None = None,
        **template_args: Any,
    ) -> list[int]:
        """A conversation (`{"role": ..., "content": ...}`) as a prompt, by the model's chat template. What
        is spelled like a special token in a message is plain text.

        max_chars: of the prompt's text; a longer one is refused before it is tokenized. `template_args` are
        the template's own switches, such as enable_thinking. Raises `PromptTooLong`, and `ValueError` when
        there is no template or it refuses the messages, for malformed ones, and for names of `template_args`
        that are reserved."""
        return self.conversation(
            messages,
            tools=tools,
            max_chars=max_chars,
            add_generation_prompt=add_generation_prompt,
            **template_args,
        ).ids

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int | None = None,
        inert: Inert | None = None,
        ending_with: Sequence[str] = (),
        **template_args: Any,
    ) -> Conversation:
        """As `chat`, with what the template wrote behind the last message, if one of `ending_with` may be in
        it. inert: default, of the special tokens alone."""
        check_messages(messages)
        inert = inert or self.inert
        plain, plain_tools = [inert(dict(message)) for message in messages], inert(tools)
        text = self.render(plain, tools=plain_tools, max_chars=max_chars, **template_args)
        ending = ""
        if any(marker in text[-MAX_ENDING_CHARS:] for marker in ending_with):
            without = self.render(
                plain, tools=plain_tools, **{**template_args, "add_generation_prompt": False}
            )
            ending = text[_num_equal(text, without) :]
        ids = self._segments.ids if self._segments is not None else self._encode_plain
        return Conversation([i for piece in text.split(BREAKER) for i in ids(piece)], ending)

    def _encode_plain(self, text: str) -> list[int]:
        return self.encode(text, False)

    @cached_property
    def _segments(self) -> Segments | None:
        added = cut_tokens(self.hf_tokenizer)
        return None if added is None else Segments(self._encode_plain, added)

    @cached_property
    def inert(self) -> Inert:
        """For the spellings of special tokens."""
        added = self.hf_tokenizer.added_tokens_decoder
        return Inert(added[token_id].content for token_id in self.special_ids)

    @property
    def chat_template(self) -> str:
        """The template for conversations with tools; "": there is none."""
        template = self.hf_tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return template or ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: list[dict[str, Any]] | None = None,
        max_chars: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_args: Any,
    ) -> str:
        """The text that the chat template makes of a conversation. Raises as `chat`."""
        if not self.hf_tokenizer.chat_template:
            raise ValueError("this tokenizer has no chat template: give a text instead of messages")
        if template_args:
            self.check_template_args(template_args)
        from jinja2 import TemplateError

        from diptych.shared.text.template_limits import bound_templates, start_counting

        if tools and "xml_tools" in self.chat_template:  # what SmolLM3's template calls them
            template_args = {"xml_tools": tools, **template_args}
        bound_templates()
        start_counting()
        try:
            text: str = self.hf_tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_args,
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except RecursionError:
            raise ValueError(
                "the chat template calls itself, or the messages are nested too deeply"
            ) from None
        if max_chars is not None and len(text) > max_chars:
            raise PromptTooLong(len(text), max_chars)
        return text

    def check_template_args(self, names: Iterable[str]) -> None:
        """Raise `ValueError` for a name that is no switch of the template, but a parameter of `chat` or of
        `transformers`: among these is the template itself."""
        for name in names:
            if name in self._reserved and name not in TEMPLATE_DATA:
                raise ValueError(f"{name!r} is no switch of the chat template: the name is reserved")

    @cached_property
    def _reserved(self) -> set[str]:
        reserved = {"self", "conversations"}
        for function in (self.chat, self.conversation, self.render, self.hf_tokenizer.apply_chat_template):
            reserved |= set(inspect.signature(function).parameters)
        return reserved

    def token_to_id(self, token: str) -> int | None:
        token_id = self.hf_tokenizer.convert_tokens_to_ids(token)
        is_known = token_id is not None and self.id_to_token(token_id) == token  # else: the unknown token's
        return token_id if is_known else None

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, in which bytes may be encoded; for text use `decode`."""
        return self.hf_tokenizer.convert_ids_to_tokens(token_id)


def check_messages(messages: Any) -> None:
    """Raise `ValueError` for what is no conversation: errors of templates do not name the cause."""
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            "messages must be a non-empty list of mappings with role and content, got "
            f"{type(messages).__name__}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} has no role; it needs role and content")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list, tuple)):
            raise ValueError(
                f"content of message {i} must be a text or a list of parts, got {type(content).__name__}"
            )


def _num_equal(a: str, b: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _loader_for(folder: Path) -> Any:
    """The class of `transformers` that loads a tokenizer. AutoTokenizer imports the configurations of all
    models, a third of a second, to find a class that the folder may name."""
    config = folder / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8") if config.is_file() else "{}"
    if json.loads(text).get("tokenizer_class") == "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _plain_decoder(hf_tokenizer: Any) -> Any:
    """What decodes below `transformers`, whose own part takes three times as long: each step decodes every
    request. None where the class does more than to call it."""
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(hf_tokenizer)
    is_plain = isinstance(hf_tokenizer, Plain) and kind.decode is Plain.decode
    return hf_tokenizer.backend_tokenizer if is_plain and kind._decode is Plain._decode else None
