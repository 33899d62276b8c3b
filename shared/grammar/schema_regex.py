"""Regexes of JSON Schema and of the field `regex`, rewritten so that xgrammar reads them alike.

xgrammar ignores inner anchors, takes unknown escapes for letters, and compares a `pattern` with the raw text
between the quotes of a JSON string. So a regex is parsed here, and written again from its parts. What has no
exact form there is refused with `ValueError`. A negated class may become smaller, never larger.
"""

from __future__ import annotations

import re
from typing import NamedTuple

Ranges = list[tuple[int, int]]
"""Code points from first to last, sorted, apart from each other."""

LAST = 0x10FFFF
MAX_VARIANTS = 64
MAX_LENGTH = 4096
"""Of a rewritten sequence with optional groups, in characters."""
SURROGATES = (0xD800, 0xDFFF)
DIGIT: Ranges = [(48, 57)]
WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
SPACE: Ranges = [(9, 13), (32, 32)]
SEPARATORS: Ranges = [(28, 31)]
"""White space in Python, none in JavaScript."""
CLASSES = {"d": DIGIT, "w": WORD, "s": SPACE}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
ESCAPED = {
    34: '"',
    92: "\\",
    8: "b",
    9: "t",
    10: "n",
    12: "f",
    13: "r",
}  # in a JSON string, behind a backslash
_QUANTIFIER = re.compile(r"\{(\d+)(,?)(\d*)\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


class Repeated(NamedTuple):
    """A regex that is one character class, repeated: its length can be bounded."""

    characters: str
    least: int
    most: int | None


def json_pattern(pattern: str, lengths: tuple[int, int | None] = (0, None)) -> list[str]:
    """The keyword `pattern`, which searches: regexes for the raw text of the whole JSON string, one of which
    matches. None of them: the lengths exclude each other. lengths: minLength and maxLength."""
    parser = _Parser(pattern, in_json=True)
    texts = parser.whole(is_search=True)
    low, high = lengths
    if (low, high) == (0, None):
        return [f"^{text}$" for text in texts]
    if parser.repeated is None:
        raise ValueError("has lengths beside it: state them in the pattern, as in ^[a-z]{2,5}$")
    least = max(low, parser.repeated.least)
    most = min((n for n in (high, parser.repeated.most) if n is not None), default=None)
    if most is not None and least > most:
        return []
    return [f"^{parser.repeated.characters}{{{least},{'' if most is None else most}}}$"]


def whole_match(pattern: str) -> str:
    """The field `regex`: a regex that matches the same whole texts."""
    (*full,) = filter(None, texts := _Parser(pattern, in_json=False).whole(is_search=False))
    text = full[0] if len(full) == 1 else f"(?:{'|'.join(full)})" if full else ""
    return f"(?:{text}){{0,1}}" if text and "" in texts else text


def search_match(pattern: str) -> list[str]:
    """The keyword `pattern` for a text that is not in JSON: regexes for the whole text, of which one
    matches."""
    return _Parser(pattern, in_json=False).whole(is_search=True)


def union(ranges: Ranges) -> Ranges:
    found: Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def complement(ranges: Ranges, last: int = LAST) -> Ranges:
    found, start = [], 1
    for low, high in union([*ranges, SURROGATES, (last + 1, LAST + 1)]):
        if start < low:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return found


class _Parser:
    """Recursive descent; the methods return the text of what they have read."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self.pattern, self.in_json, self.at = pattern, in_json, 0
        self.repeated: Repeated | None = None

    def whole(self, is_search: bool) -> list[str]:
        """The alternatives of the top level, each with the anchors at its ends."""
        anything = f"{self.write(complement([]), is_negated=True)}*"
        alternatives: list[str] = []
        num_parts = 0
        while True:
            starts = self.skip(("^", r"\A"))
            texts = self.sequence()
            ends = self.skip(("$", r"\Z", r"\z"))
            if is_search and not (starts and ends):
                self.repeated = None
            before, behind = ("" if starts else anything), ("" if ends else anything)
            alternatives += [f"{before}{text}{behind}" if is_search else text for text in texts]
            num_parts += 1
            if not self.skip(("|",)):
                break
        if num_parts > 1:
            self.repeated = None
        if self.at < len(self.pattern):
            self.refuse(f"{self.pattern[self.at]!r} inside is not supported: anchors stand at the ends")
        return list(dict.fromkeys(alternatives))

    def join(self, variants: list[str]) -> str:
        full = list(dict.fromkeys(text for text in variants if text))
        return full[0] if len(full) == 1 else f"(?:{'|'.join(full)})" if full else ""

    def sequence(self) -> list[str]:
        """Atoms with their quantifiers, up to `|`, `)`, an anchor or the end: texts of which one matches.
        xgrammar takes wrong texts for an optional group, so there is a text with it and one without it."""
        variants = [""]
        self.repeated, num_atoms = None, 0
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)$":
            if self.pattern.startswith((r"\Z", r"\z"), self.at):
                break
            is_class = self.pattern[self.at] != "("
            atom, is_nullable = self.atom()
            least, most = self.quantifier()
            repeats = self.repeat(atom, 0 if is_nullable else least, most, is_class)
            variants = list(dict.fromkeys(before + text for before in variants for text in repeats))
            if len(variants) > MAX_VARIANTS or (variants[1:] and sum(map(len, variants)) > MAX_LENGTH):
                self.refuse("it has too many optional groups or bounded repetitions: write it shorter")
            num_atoms += 1
            is_one = is_class and num_atoms == 1 and atom.startswith("[")
            self.repeated = Repeated(atom, least, most) if is_one else None
        return variants

    def repeat(self, atom: str, least: int, most: int | None, is_class: bool) -> list[str]:
        """An atom with a quantifier, as texts of which one matches."""
        if not atom or most == 0:
            return [""]
        if not self.in_json:  # xgrammar's other engine
            return (
                [f"(?:{atom})" + f"{{{least},{'' if most is None else most}}}"]
                if (least, most) != (1, 1)
                else [atom]
            )
        if max(least, most or 0) * len(atom) > MAX_LENGTH:
            self.refuse("a bounded repetition beside other parts is too long")
        unit = atom if is_class or (least, most) == (1, 1) else f"(?:{atom})"
        if most is None:
            return [unit * (least - 1) + unit + "+" if least else unit + "*"]
        if is_class and atom.startswith("["):
            return [unit * least + f"{unit}?" * (most - least)]
        return [unit * count for count in range(least, most + 1)]

    def quantifier(self) -> tuple[int, int | None]:
        match = _QUANTIFIER.match(self.pattern, self.at)
        if match is not None:
            least = int(match[1])
            most = (int(match[3]) if match[3] else None) if match[2] else least
            self.at = match.end()
            if most is not None and most < least:
                self.refuse(f"{match[0]} has its bounds exchanged")
        elif found := self.skip(("*", "+", "?")):
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found]
        else:
            return 1, 1
        self.skip(("?",))  # lazy or greedy: the same texts
        if self.pattern.startswith(("*", "+", "?", "{"), self.at):
            self.refuse("a quantifier behind a quantifier is not supported")
        return least, most

    def atom(self) -> tuple[str, bool]:
        """Its text, and whether it matches the empty text too."""
        character = self.take()
        if character == "(":
            return self.group()
        if character == "[":
            return self.characters(), False
        if character == ".":
            return self.write(complement([(10, 10), (13, 13), (0x2028, 0x2029)]), is_negated=True), False
        if character == "\\":
            ranges, is_negated = self.escape()
            return self.write(ranges, is_negated), False
        if character in "^*+?{}]":
            self.refuse(
                f"{character!r} stands where it is not supported: write \\{character} for the character"
            )
        return self.write([(ord(character), ord(character))]), False

    def group(self) -> tuple[str, bool]:
        if self.skip(("?",)):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self.pattern, self.at)
            if named is not None:
                self.at = named.end()
            elif not self.skip((":",)):
                self.refuse(
                    f"(?{self.pattern[self.at : self.at + 2]} is not supported: no lookaround, no flags"
                )
        variants = self.sequence()
        while self.skip(("|",)):
            variants += self.sequence()
        if not self.skip((")",)):
            self.refuse("anchors inside of a group are not supported, and each group ends with ')'")
        return self.join(variants), "" in variants

    def characters(self) -> str:
        is_negated, ranges = bool(self.skip(("^",))), Ranges()
        is_ascii = False
        while not self.skip(("]",)):
            start, is_wide = self.member()
            is_ascii |= is_wide
            ranges += start
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.take()
                end, is_class = self.member()
                if is_wide or is_class or len(start) != 1 or len(end) != 1 or start[0][0] > end[0][1]:
                    self.refuse("a class has a range without two ends in order")
                ranges.append((start[0][0], end[0][1]))
        if not ranges:
            self.refuse("an empty class is not supported")
        if is_negated:  # Unicode digits and blanks belong to \d and \s in some dialects
            ranges = complement([*ranges, *SEPARATORS], 126) if is_ascii else complement(ranges)
        return self.write(ranges, is_negated)

    def member(self) -> tuple[Ranges, bool]:
        """What a character or an escape in a class stands for, and whether that is a class itself."""
        character = self.take()
        if character == "\\":
            is_class = self.pattern[self.at : self.at + 1].lower() in CLASSES
            return self.escape()[0], is_class
        if character == "[" or (character in "&|~" and self.pattern.startswith(character, self.at)):
            self.refuse(f"{character!r} in a class is not supported: write \\{character}")
        return [(ord(character), ord(character))], False

    def escape(self) -> tuple[Ranges, bool]:
        match = _HEX.match(self.pattern, self.at)
        if match is not None:
            self.at = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            if not 0 < code <= LAST or SURROGATES[0] <= code <= SURROGATES[1]:
                self.refuse(f"\\{match[0]} is no character")
            return [(code, code)], False
        letter = self.take()
        if letter in CLASSES:
            return CLASSES[letter], False
        if letter.lower() in CLASSES:
            return complement([*CLASSES[letter.lower()], *SEPARATORS], 126), True
        if letter in CONTROLS or not (letter.isalnum() or letter == "_"):
            code = CONTROLS.get(letter, ord(letter))
            return [(code, code)], False
        self.refuse(f"\\{letter} is not supported")
        raise AssertionError

    def write(self, ranges: Ranges, is_negated: bool = False) -> str:
        """A class. In a JSON string some characters are written with a backslash; a negated class that has
        others leaves these out."""
        ranges = union(ranges)
        if not self.in_json:
            return _write_class(ranges)
        banned: Ranges = [(0, 31), (34, 34), (92, 92), SURROGATES]
        plain = complement([*complement(ranges), *banned])
        texts = [_write_class(plain)] if plain else []
        if not (is_negated and plain):
            special = [c for low, high in ranges for c in range(low, min(high, 92) + 1) if c in ESCAPED]
            texts += [rf"\\{_write_one(ord(ESCAPED[c]))}" for c in special]
        if not texts:
            self.refuse("a class has only control characters: no JSON string of xgrammar has them")
        return texts[0] if plain and len(texts) == 1 else f"(?:{'|'.join(texts)})"

    def take(self) -> str:
        if self.at == len(self.pattern):
            self.refuse("it ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def skip(self, texts: tuple[str, ...]) -> str:
        for text in texts:
            if self.pattern.startswith(text, self.at):
                self.at += len(text)
                return text
        return ""

    def refuse(self, why: str) -> None:
        raise ValueError(f"{self.pattern!r:.80}: {why}")


def _write_class(ranges: Ranges) -> str:
    pairs = [(_write_one(low), _write_one(high)) for low, high in ranges]
    return "[" + "".join(low if low == high else f"{low}-{high}" for low, high in pairs) + "]"


def _write_one(code: int) -> str:
    if code > 0xFFFF or chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}"
