"""Contract of a dialect: how a family of models writes tool calls and reasoning.

An answer reaches a dialect as a `Stream`: text that comes in pieces. A dialect reads it in a generator, which
waits for more text inside the methods of the stream (`yield from stream.until(...)`). So an answer is read
once, in order, in time linear in its length, and the same however it is cut into pieces.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Waits for more text at each yield, and returns a T."""

Constraint = Literal["none", "whole", "behind_reasoning"]
"""Of a grammar on an answer: there is none, or it begins with the answer, or behind the reasoning."""

ReasoningState = Literal["open", "closed", "may_open"]
"""Of a block of reasoning at the prompt's end, by what the chat template wrote after the last message."""


class Call(NamedTuple):
    """A tool call as a whole."""

    name: str
    arguments: dict[str, Any]
    call_id: str = ""


class Reasoning(NamedTuple):
    """The markers around a block of reasoning. `is_open`: models of this family begin inside a block, also
    where the chat template has written no marker."""

    start: str
    end: str
    is_open: bool = False


class NotACall(Exception):
    """What was read is no call. Before a call's name is known, its text becomes content; later, what was
    given out stays."""


class Stream(ABC):
    """An answer as a dialect reads it.

    Markers are spelled out. One that the tokenizer calls special is found as its token only, any other one as
    text. `emit` gets the text that is read, piece by piece, without markers.
    """

    tools: Mapping[str, Any]
    """Name -> JSON schema of the arguments. Empty: the request takes no calls."""
    constraint: Constraint = "none"
    """What the grammar does not hold is no call."""
    has_call: bool = False
    """Whether the block that is read has given a call."""

    @abstractmethod
    def until(self, *markers: str, emit: Callable[[str], None] | None = None) -> Steps[str]:
        """Read to the first of the markers, and behind it. Returns the marker; "" at the end of the answer.
        No marker may begin with another one."""

    @abstractmethod
    def accept(self, text: str) -> Steps[bool]:
        """Read this text if it is next; else nothing."""

    @abstractmethod
    def space(self) -> Steps[str]:
        """Read white space, and return it."""

    @abstractmethod
    def word(self) -> Steps[str]:
        """Read letters, digits and `_ . + -`, and return them."""

    @abstractmethod
    def peek(self) -> Steps[str]:
        """The next character, which is not read; "" at the end."""

    def at_once(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Read what the pattern matches in the text that has come, if anything: a fast path for what would be
        read in the same way without it."""
        return None

    def as_read(self, marker: str) -> str:
        """What stands for a marker in the text that such a pattern sees."""
        return marker

    @abstractmethod
    def json(self, emit: Callable[[str], None]) -> Steps[bool]:
        """Read a JSON value up to its balanced end. False: it ends before, at a special token or with the
        answer. Raises `NotACall` for what begins no value."""

    @abstractmethod
    def head(self, *markers: str) -> Steps[str]:
        """Read to the first of the markers and behind it; return what is before it, without white space at
        its ends. Raises `NotACall` when none comes, or not soon."""

    @abstractmethod
    def attempt(self, block: Steps[None], opening: str, emit: Callable[[str], None]) -> Steps[bool]:
        """Run a generator that reads calls, behind `opening`. False: it gave no call; then `emit` has got the
        opening, and what was read behind it comes again."""

    @abstractmethod
    def content(self, text: str) -> None:
        """Give out text of the answer. White space before a call, and behind the last one, is left out."""

    @abstractmethod
    def reasoning(self, text: str) -> None:
        """Give out text of the reasoning."""

    @abstractmethod
    def skip_newlines(self) -> None:
        """Leave out newlines at the beginning of what is given out next."""

    @abstractmethod
    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call. Without an id it gets one of the dialect's."""

    @abstractmethod
    def arguments(self, text: str) -> None:
        """Give out a piece of the call's arguments, which are JSON."""


class Dialect(ABC):
    """One family of models. Stateless: one object serves all requests."""

    markers: tuple[str, ...]
    """All that may be tokens of their own: around calls, their results and reasoning. Where one is spelled in
    a message it is plain text."""
    reasoning: Reasoning | None = None
    tool_parsers: tuple[str, ...] = ()
    """Names for --tool-call-parser, which are SGLang's."""
    separator: str = ""
    """Between two calls."""
    constrains_reasoning: bool = False
    """Whether the formats of calls and text hold the reasoning before them too."""

    @abstractmethod
    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model's chat template writes them, markers included."""

    def write_answer(self, reasoning: str, text: str) -> str:
        """An answer without calls, as the model writes it."""
        start, end, _ = self.reasoning or ("", "", False)
        return f"{start}{reasoning}{end}{text}" if start else text

    @abstractmethod
    def read(self, stream: Stream, state: ReasoningState) -> Steps[None]:
        """Read a whole answer. `self.reasoning` is None where the request does not separate reasoning."""

    @abstractmethod
    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        """One call of a tool as an xgrammar format, markers included. A schema of True: any object."""

    def calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> dict[str, Any]:
        """At least one call as an xgrammar format; exactly one unless `is_parallel`."""
        tags = [self.tag(name, schema) for name, schema in tools.items()]
        return {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not is_parallel,
        }

    def optional_calls_format(self, tools: Mapping[str, Any], is_parallel: bool) -> dict[str, Any] | None:
        """Text with any number of calls as an xgrammar format; unless `is_parallel` it ends with the first
        one. The reader finds no other calls in such an answer. None: the family has no such format."""
        return None

    def text_format(self, text: dict[str, Any]) -> dict[str, Any]:
        """An xgrammar format of the final text, with what stands around it."""
        return text

    def free_text(self, state: ReasoningState) -> tuple[str | None, str] | None:
        """What comes before a text that is constrained: the marker with which it begins (None: it has begun),
        and the text that ends it. None: nothing comes before."""
        if self.reasoning is None or state == "closed":
            return None
        return None if state == "open" else self.reasoning.start, self.reasoning.end

    def new_id(self, name: str, index: int) -> str:
        """An id for call number `index` of the answer."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the family's chat templates take them. Arguments of calls are objects, and content is
        never None. Raises `ValueError` for what they cannot show."""
        return messages

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        """Whether a chat template, or without one a vocabulary, looks like this family."""
        return False
