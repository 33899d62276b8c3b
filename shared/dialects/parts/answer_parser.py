"""The text of an answer while it streams, and the parser that runs a dialect over it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from diptych.shared.interfaces import dialect as interface
from diptych.shared.interfaces.dialect import Constraint, Dialect, NotACall, ReasoningState, Steps
from diptych.shared.text.control_text import CONTROLS

MAX_HEAD_CHARS = 4096
"""Of a call before its name is known."""
MAX_SKIPPED_CHARS = 16384
"""In front of such a head."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.+-]*")
_PLAIN = re.compile(rf'[^"{{}}\[\]{CONTROLS}]*')
_SCALAR = re.compile(rf'[^\s,"{{}}\[\]{CONTROLS}]*')
_STRING = re.compile(rf'[^"\\{CONTROLS}]*(?:\\[^{CONTROLS}][^"\\{CONTROLS}]*)*')
_CONTROL = re.compile(f"[{CONTROLS}]")

Emit = Callable[[str], None]


class Piece(NamedTuple):
    """Text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


class ToolDelta(NamedTuple):
    """A piece of a tool call. `name` and `call_id` are set in its first piece only."""

    index: int  # type: ignore[assignment]  # in place of tuple.index
    arguments: str
    name: str | None = None
    call_id: str | None = None


class Stream(interface.Stream):
    """Keeps only the text that is not read yet, which is never more than a marker and the last piece."""

    def __init__(
        self, dialect: Dialect, tools: Mapping[str, Any], max_calls: int | None, controls: Mapping[str, str]
    ) -> None:
        """controls: special marker -> the character that stands for its token."""
        self.tools = tools
        self.num_calls = 0
        self.has_call = self.is_reasoning = self._is_in_block = False
        self.is_ended = self.is_cut = False
        self._dialect = dialect
        self._max_calls = max_calls
        self._controls = controls
        self._spellings: dict[str, str] = {}  # text -> the same with controls
        self._text, self._at = "", 0
        self._raw: list[str] | None = None  # what was read of a call without a name
        self._space: list[str] = []  # behind the content that was given out
        self._has_text = False  # whether content was given out since the last call
        self._skips_newlines = False
        self._call_ids: set[str] = set()
        self._events: list[tuple[tuple[Any, ...], list[str]]] = []

    # ---- the parser's side ----

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def take_events(self) -> list[Piece | ToolDelta]:
        """What was given out since the last time."""
        events, self._events = self._events, []
        return [_event(key, "".join(parts)) for key, parts in events]

    # ---- reading ----

    def until(self, *markers: str, emit: Emit | None = None) -> Steps[str]:
        markers_of, pattern, starts, longest = _compiled(tuple(map(self.as_read, markers)), markers)
        most = MAX_SKIPPED_CHARS if emit is None and self._raw is not None else None
        while True:
            found = pattern.search(self._text, self._at) if markers else None
            held = 0 if found is not None else self._num_held(markers_of, starts, longest)
            end = found.start() if found is not None else len(self._text) - held
            if most is not None:
                if end - self._at > most:
                    self._take(self._at + most)
                    raise NotACall
                most -= end - self._at
            self._take(end, emit)
            if found is not None:
                self._take(found.end())
                return markers_of[found[0]]
            if not (yield from self._more()):
                # What is left is the beginning of a marker.
                is_much = len(self._text) - self._at > 3
                is_markup = self._is_in_block or (bool(self.tools) and (is_much or not self._has_text))
                self._take(len(self._text), None if self.is_cut and is_markup else emit)
                return ""

    def accept(self, text: str) -> Steps[bool]:
        text = self.as_read(text)
        while (have := self._text[self._at : self._at + len(text)]) != text:
            if not text.startswith(have) or not (yield from self._more()):
                return False
        self._take(self._at + len(text))
        return True

    def space(self) -> Steps[str]:
        return self._run_of(_SPACE)

    def word(self) -> Steps[str]:
        return self._run_of(_WORD)

    def peek(self) -> Steps[str]:
        while self._at == len(self._text) and (yield from self._more()):
            pass
        return self._text[self._at : self._at + 1]

    def at_once(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._take(match.end())
        return match

    def as_read(self, text: str) -> str:
        """The text with characters in place of special markers."""
        if text not in self._spellings:
            read = text
            for marker, character in self._controls.items():
                read = read.replace(marker, character)
            self._spellings[text] = read
        return self._spellings[text]

    def json(self, emit: Emit) -> Steps[bool]:
        first = yield from self.peek()
        if not first or first not in '{["-0123456789tfn':
            raise NotACall
        depth, in_string, is_whole = 0, False, False
        while True:
            text, at = self._text, self._at
            while at < len(text) and not is_whole:
                pattern = _STRING if in_string else _PLAIN if depth or first in '{["' else _SCALAR
                at = _end(pattern, text, at)
                character = text[at : at + 1]
                if not character or character == "\\":
                    break
                if _CONTROL.match(character):
                    self._take(at, emit)
                    return not depth and not in_string
                if pattern is _SCALAR:
                    is_whole = True
                    break
                at += 1
                if character == '"':
                    in_string = not in_string
                else:
                    depth += 1 if character in "{[" else -1
                is_whole = not depth and not in_string
            self._take(at, emit)
            if is_whole:
                return True
            if not (yield from self._more()):
                return pattern is _SCALAR

    def head(self, *markers: str) -> Steps[str]:
        parts: list[str] = []
        num_chars = 0

        def keep(text: str) -> None:
            nonlocal num_chars
            parts.append(text)
            num_chars += len(text)
            if num_chars > MAX_HEAD_CHARS:
                raise NotACall

        if not (yield from self.until(*markers, emit=keep)):
            raise NotACall
        return "".join(parts).strip()

    def attempt(self, block: Steps[None], opening: str, emit: Emit) -> Steps[bool]:
        self.has_call, self._raw, self._is_in_block = False, [], True
        with contextlib.suppress(NotACall):
            yield from block
        self._is_in_block = False
        if self.has_call:
            return True
        raw, self._raw = "".join(self._raw or ()), None
        if self.is_ended and self.is_cut:  # it may have become a call
            self._take(len(self._text))
            self._space = []
            return False
        emit("" if opening in self._controls else opening)
        if len(raw) > MAX_HEAD_CHARS:  # reading it once more at each opening could take long
            emit(_CONTROL.sub("", raw))
        else:
            self._text, self._at = raw + self._text[self._at :], 0
        return False

    # ---- giving out ----

    def content(self, text: str) -> None:
        self.is_reasoning = False
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        if self.tools:
            kept = text.rstrip()
            if kept:
                self._has_text = True
                self._give(("content",), "".join(self._space) + kept)
                self._space = []
            self._space.append(text[len(kept) :])
        elif text:
            self._give(("content",), text)

    def reasoning(self, text: str) -> None:
        self.is_reasoning = True
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        if text:
            self._give(("reasoning",), text)

    def skip_newlines(self) -> None:
        self._skips_newlines = True

    def call(self, name: str, call_id: str = "") -> None:
        self._raw, self._space, self._has_text = None, [], False
        self.has_call, self._skips_newlines, self.is_reasoning = True, False, False
        index = self.num_calls
        self.num_calls += 1
        if not call_id or call_id in self._call_ids:  # a model may write one twice
            call_id = self._dialect.new_id(name, index)
        self._call_ids.add(call_id)
        if self._max_calls is None or index < self._max_calls:
            self._events.append((("call", index, name, call_id), []))

    def arguments(self, text: str) -> None:
        index = self.num_calls - 1
        if text and (self._max_calls is None or index < self._max_calls):
            self._give(("arguments", index), text)

    def end_content(self) -> None:
        """White space that was held is content, unless calls came."""
        if self._space and not self.num_calls:
            self._give(("content",), "".join(self._space))
        self._space = []

    # ---- within ----

    def _run_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what matches, and return it."""
        parts: list[str] = []
        while True:
            self._take(_end(pattern, self._text, self._at), parts.append)
            if self._at < len(self._text) or not (yield from self._more()):
                return "".join(parts)

    def _more(self) -> Steps[bool]:
        """Wait for text. False: none will come."""
        if self.is_ended:
            return False
        yield
        return True

    def _take(self, end: int, emit: Emit | None = None) -> None:
        """Read to a place of the text."""
        text, self._at = self._text[self._at : end], end
        if self._raw is not None and text:
            self._raw.append(text)
        if emit is not None and text:
            text = text if text.isascii() else _CONTROL.sub("", text)
            emit(text)

    def _num_held(self, markers: Mapping[str, str], starts: frozenset[str], longest: int) -> int:
        """Length of the longest end of the text with which a marker may begin."""
        tail = self._text[max(self._at, len(self._text) - longest + 1) :]
        if not starts.isdisjoint(tail):
            for i, character in enumerate(tail):
                if character in starts and any(marker.startswith(tail[i:]) for marker in markers):
                    return len(tail) - i
        return 0

    def _give(self, key: tuple[Any, ...], text: str) -> None:
        if not text:
            return
        if not self._events or self._events[-1][0] != key:
            self._events.append((key, []))
        self._events[-1][1].append(text)


class AnswerParser:
    """Splits one answer into content, reasoning and tool calls. However the text is cut into pieces, the
    events together say the same."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Mapping[str, Any],
        state: ReasoningState,
        max_calls: int | None = None,
        controls: Mapping[str, str] | None = None,
        constraint: Constraint = "none",
    ) -> None:
        """tools: name -> schema of the arguments; empty: no calls are looked for. Calls beyond `max_calls`
        are dropped. controls: of `control_chars`."""
        self._stream = Stream(dialect, tools, max_calls, controls or {})
        self._stream.constraint = constraint
        self._steps = dialect.read(self._stream, state)
        self._run()

    @property
    def num_calls(self) -> int:
        return self._stream.num_calls

    def feed(self, text: str) -> list[Piece | ToolDelta]:
        self._stream.add(text)
        self._run()
        return self._stream.take_events()

    def finish(self, is_cut: bool = False) -> list[Piece | ToolDelta]:
        """The rest. `is_cut`: the answer was ended by its length. Then a call without a name is left out;
        else it is content."""
        self._stream.is_ended, self._stream.is_cut = True, is_cut
        self._run()
        self._stream.end_content()
        return self._stream.take_events()

    def _run(self) -> None:
        next(self._steps, None)


@lru_cache(256)
def _compiled(
    read: tuple[str, ...], spelled: tuple[str, ...]
) -> tuple[dict[str, str], re.Pattern[str], frozenset[str], int]:
    """Markers as they are read -> spelled; a pattern of them; their first characters; the longest length."""
    assert not any(a != b and b.startswith(a) for a in read for b in read), (
        f"{spelled}: a marker begins another"
    )
    pattern = re.compile("|".join(map(re.escape, read)) or r"(?!)")
    return (
        dict(zip(read, spelled, strict=True)),
        pattern,
        frozenset(m[0] for m in read),
        max(map(len, read), default=1),
    )


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "it matches nothing too"
    return match.end()


def _event(key: tuple[Any, ...], text: str) -> Piece | ToolDelta:
    text = _whole(text)
    if key[0] == "call":
        return ToolDelta(key[1], "", _whole(key[2]), _whole(key[3]))
    return ToolDelta(key[1], text) if key[0] == "arguments" else Piece(key[0], text)


def _whole(text: str) -> str:
    """Half of a surrogate pair, which a model can write as an escape, is no text that UTF-8 has."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
