"""Planted bugs in the detokenizer: words of its source, changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import diptych.shared.text.detokenizer
from tests.conformance.mutants.mutant import mutant_of

SOURCE = Path(diptych.shared.text.detokenizer.__file__).read_text("utf-8")


def changed(before: str, after: str) -> Any:
    """The class of a source in which `before`, which is there once, became `after`."""
    assert SOURCE.count(before) == 1, f"{SOURCE.count(before)} times: {before!r}"
    module = ModuleType("changed_detokenizer")
    exec(compile(SOURCE.replace(before, after), "changed_detokenizer.py", "exec"), module.__dict__)
    return module.IncrementalDetokenizer


# Characters


@mutant_of("detokenizer")
class DecodesTokensAlone(
    changed(
        "return self._tokenizer.decode(self._context + ids)[len(self._context_text) :]",
        "return self._tokenizer.decode(ids)",
    )
):
    """Without context the space of a word may be lost."""


@mutant_of("detokenizer")
class GivesHalfCharacters(
    changed(
        "if text and not text.endswith(REPLACEMENT):\n            return self._take(len(self._pending)",
        "if text:\n            return self._take(len(self._pending)",
    )
):
    """Bytes of a character that is not complete come out as U+FFFD."""


@mutant_of("detokenizer")
class HoldsWholeCharacters(
    changed(
        'num_whole, whole = self._whole_characters() if num_new > 1 else (0, "")', 'num_whole, whole = 0, ""'
    )
):
    """A step that ends inside a character holds back the whole characters before it."""


@mutant_of("detokenizer")
class LosesAnIncompleteEnd(
    changed(
        "        if self._is_finished:\n            return self._take(len(self._pending), text)\n",
        '        if self._is_finished:\n            return ""\n',
    )
):
    """A text that ends inside a character loses its end."""


@mutant_of("detokenizer")
class HoldsBrokenBytesForever(changed("_MAX_PENDING_TOKENS = 16", "_MAX_PENDING_TOKENS = 1 << 30")):
    """Bytes that form no character are decoded again with each token."""


@mutant_of("detokenizer")
class KeepsAllContext(
    changed(
        "self._context, self._pending = self._pending[:num_tokens],",
        "self._context, self._pending = self._context + self._pending[:num_tokens],",
    )
):
    """The whole text is decoded for each token."""


@mutant_of("detokenizer")
class ForgetsThePrompt(changed("self._prompt_tail(prompt_ids)", "[]")):
    """The first word loses its space."""


@mutant_of("detokenizer")
class ShowsSpecialTokens(changed("if not self._params.skip_special_tokens:", "if True:")):
    """Special tokens are text."""


# Ends


@mutant_of("detokenizer")
class HoldsNothingBack(changed("len(self._held_text) - num_held_chars(self._held_text, stop)", "None")):
    """The beginning of a stop string is given out."""


@mutant_of("detokenizer")
class HoldsUntilTheEnd(changed("        elif stop_regex:\n", "        elif stop or stop_regex:\n")):
    """With a stop string the text comes in one piece."""


@mutant_of("detokenizer")
class LosesANearMatch(
    changed(
        "        elif self._is_finished:\n            text = _cut(",
        "        elif False:\n            text = _cut(",
    )
):
    """What is held back at the end is lost, and a stop string inside a token comes out."""


@mutant_of("detokenizer")
class GivesTheStopString(
    changed(
        "return text.partition(reason.matched)[0]\n    if isinstance(reason, FinishRegex)",
        "return text\n    if isinstance(reason, FinishRegex)",
    )
):
    """The stop string is part of the text."""


@mutant_of("detokenizer")
class CutsAtTheLastOccurrence(
    changed(
        "return text.partition(reason.matched)[0]\n    if isinstance(reason, FinishRegex)",
        "return text.rpartition(reason.matched)[0]\n    if isinstance(reason, FinishRegex)",
    )
):
    """Of two occurrences in one token the first stays."""


@mutant_of("detokenizer")
class TrimsAlways(changed("trim = not self._params.no_stop_trim", "trim = True")):
    """no_stop_trim has no effect."""


@mutant_of("detokenizer")
class StopTokenIsText(changed("            new_ids = new_ids[:-1]\n", "            pass\n")):
    """The stop token is part of the text."""


@mutant_of("detokenizer")
class CountsBeyondTheEnd(changed("if finished_len is not None:", "if False:")):
    """Tokens that speculation computed behind the end are part of the text."""


@mutant_of("detokenizer")
class GivesBeforeTheRegex(changed('        elif stop_regex:\n            text = ""\n', "")):
    """Text that the regex's match will cut off is given out."""
