"""Planted bugs in the detokenizer: words of its source, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("detokenizer", "reference.detokenizer:IncrementalDetokenizer", folder="reference.")

# fmt: off

# Characters
bug("DecodesTokensAlone", "Without context the space of a word may be lost.",
    ("detokenizer", "return self._tokenizer.decode(self._context + ids)[len(self._context_text) :]",
     "return self._tokenizer.decode(ids)"))
bug("GivesHalfCharacters", "Bytes of a character that is not complete come out as U+FFFD.",
    ("detokenizer",
     "if text and not text.endswith(REPLACEMENT):\n            return self._take(len(self._pending)",
     "if text:\n            return self._take(len(self._pending)"))
bug("HoldsWholeCharacters", "A step that ends inside a character holds back the whole characters before it.",
    ("detokenizer", 'num_whole, whole = self._whole_characters() if num_new > 1 else (0, "")',
     'num_whole, whole = 0, ""'))
bug("LosesAnIncompleteEnd", "A text that ends inside a character loses its end.",
    ("detokenizer",
     "        if self._is_finished:\n            return self._take(len(self._pending), text)\n",
     '        if self._is_finished:\n            return ""\n'))
bug("HoldsBrokenBytesForever", "Bytes that form no character are decoded again with each token.",
    ("detokenizer", "_MAX_PENDING_TOKENS = 16", "_MAX_PENDING_TOKENS = 1 << 30"))
bug("KeepsAllContext", "The whole text is decoded for each token.",
    ("detokenizer", "self._context, self._pending = self._pending[:num_tokens],",
     "self._context, self._pending = self._context + self._pending[:num_tokens],"))
bug("ForgetsThePrompt", "The first word loses its space.",
    ("detokenizer", "self._prompt_tail(prompt_ids)", "[]"))
bug("ShowsSpecialTokens", "Special tokens are text.",
    ("detokenizer", "if not self._params.skip_special_tokens:", "if True:"))

# Ends
bug("HoldsNothingBack", "The beginning of a stop string is given out.",
    ("detokenizer", "len(self._held_text) - num_held_chars(self._held_text, stop)", "None"))
bug("HoldsUntilTheEnd", "With a stop string the text comes in one piece.",
    ("detokenizer", "        elif stop_regex:\n", "        elif stop or stop_regex:\n"))
bug("LosesANearMatch", "What is held back at the end is lost, and a stop string inside a token comes out.",
    ("detokenizer", "        elif self._is_finished:\n            text = self._held_text[: _match(",
     "        elif False:\n            text = self._held_text[: _match("))
bug("GivesTheStopString", "The stop string is part of the text.",
    ("detokenizer", "(self._held_text, finished_reason)[0]", "(self._held_text, finished_reason)[1]"))
bug("CutsAtTheLastOccurrence", "Of two occurrences in one token the first stays.",
    ("detokenizer", "text.index(reason.matched)", "text.rindex(reason.matched)"))
bug("TrimsAlways", "no_stop_trim has no effect.",
    ("detokenizer", "keeps_stop = self._params.no_stop_trim", "keeps_stop = False"))
bug("KeepsWhatIsBehind", "With no_stop_trim the text goes on behind the stop string.",
    ("detokenizer", "[len(given) : _match(given + text, finished_reason)[1]]", "[len(given) :]"))
bug("StopTokenIsText", "The stop token is part of the text.",
    ("detokenizer", "            new_ids = new_ids[:-1]\n", "            pass\n"))
bug("CountsBeyondTheEnd", "Tokens that speculation computed behind the end are part of the text.",
    ("detokenizer", "if finished_len is not None:", "if False:"))
bug("GivesBeforeTheRegex", "Text that the regex's match will cut off is given out.",
    ("detokenizer", '        elif stop_regex:\n            text = ""\n', ""))
bug("OneTokenOfAStep", "Of the tokens of a step the first is decoded.",
    ("detokenizer", "self._pending += visible", "self._pending += visible[:1]"))
bug("HoldsOneToken", "The text of a token comes with the next one.",
    ("detokenizer", "if text and not text.endswith(REPLACEMENT):\n            return",
     "if len(self._pending) > 1 and text and not text.endswith(REPLACEMENT):\n            return"))
bug("HoldsForTheFirstStopString", "Only the beginning of the first stop string is held back.",
    ("detokenizer", "num_held_chars(self._held_text, stop)", "num_held_chars(self._held_text, stop[:1])"))
bug("LosesReplacementsAtTheEnd", "Bytes at the end that are no character have no text.",
    ("detokenizer", "return self._take(len(self._pending), text)\n        if len",
     "return self._take(len(self._pending), text.rstrip(REPLACEMENT))\n        if len"))
