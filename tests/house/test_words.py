"""Pages, docstrings, comments and messages use the field's words (docs/glossary.md), not private ones."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shared", "reference", "optimized", "tests", "docs", "notebooks")
LAB = ROOT / "docs" / "lab"  # a record: it keeps the words of its time

BANNED = {
    r"(some|no|any|every)body|anyone|whoever": "name the request, caller or component",
    r"wants": "needs, reads, requests",
    r"thrown out|throws? out|throwing out|gives? way": "retracted, preempted, evicted",
    r"(is|are|was|were|be|been|being) told": "gets, receives, is called for",
    r"lent|lends": "borrowed, borrows",
    r"steps? of prompts|prompt steps?": "prefill steps",
    r"one batch ahead": "overlap scheduling",
    r"rows? of nobody|ids? of no token": "padding rows, padding token ids",
    r"matrix products?|products? of matrices": "GEMM",
    r"longest gap|gaps between (the )?tokens": "max ITL, ITL",
    r"dealt out|deal(s|ing)? out": "distributed, scheduled",
    r"the host(?! (pool|tier))": "the CPU",
    r"news": "pending outputs, events",
    r"for the sake of": "for",
    r"put(s|ting)? off": "deferred, defers",
    r"dealt|dealing": "distributed, divided",
    r"(kernels?|launch|batch|ones?) ahead": "the previous kernel, launch or batch",
    r"floor (is|of the)|(the|their) floor|floor ms|floor /": "roofline bound",
    r"(QKV|gate-up|grouped|merged|head's|second|first) products?|products? (by|of) (cuBLAS|matrices)": "GEMM",
    r"programs? (a|per|for each) (row|slice|request|tree|multiprocessor)|Triton programs?": "CTA",
    r"(requests|streams|numbers?|[0-9]+) at once": "concurrency, concurrent",
    r"gaps between|first token ms": "ITL, TTFT",
    r"today|nowadays": "the present tense",
}
IN_KERNELS = {
    r"programs?": "CTA",
    r"products?": "GEMM, multiplication",
    r"Floor:": "Roofline bound:",
}
"""In optimized/ and tests/kernels."""
_THING = r"(tokens?|quer(y|ies)|nodes?|rows?|layers?|siblings?|grammars?|pools?)"
IN_PAGES = {rf"{_THING}( that)?( can| may| must)? (sees?|has seen)": "attends to, reads, needs"}
BANNED_NAMES = {
    "takes_bounds": "accepts_seq_len_upper_bounds",
    "most_at_stake_first": "retraction_order",
    "ids_of_no_token": "padding_token_ids",
    "is_few": "use_gemv",
    "is_own": "is_builtin_layer",
    "hand_out_input_logprobs": "distribute_input_logprobs",
}
IDENTIFIER_WORDS = {
    "nobody nobodys": "no_request, padding",
    "somebody somebodys whoever": "user_provided",
    "told": "hidden_states, reason",
    "lent lend lends": "borrowed",
    "news": "pending, events",
    "spoilt": "nan",
    "wishes": "params",
}
"""Words of identifiers, between underscores or capitals."""
ALLOWED = (
    "tests/house/test_words.py",
    "shared/tools/corpus/small_talk.py",  # sentences of the training corpus
    "shared/tools/corpus/stories.py",
    "shared/tools/corpus/words.py",
    "tests/tiny/test_corpus.py",
    "tests/kernels/test_small_batch_linear.py",  # quotes an identifier
    "tests/conformance/mutants/optimized_draft_tree.py",  # quotes an identifier
)


def _compiled(banned: dict[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(rf"\b({words})(?!\w)", re.IGNORECASE), instead) for words, instead in banned.items()]


_ANY = re.compile(rf"\b({'|'.join([*BANNED, *IN_KERNELS, *IN_PAGES])})(?!\w)", re.IGNORECASE)
_BANNED, _IN_KERNELS, _IN_PAGES = _compiled(BANNED), _compiled(IN_KERNELS), _compiled(IN_PAGES)


@cache
def tokens_of(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """(line, text) of the comments and strings of a source, and its names."""
    texts, names = [], set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            texts += enumerate(token.string.splitlines(), start=token.start[0])
        elif token.type == tokenize.NAME:
            names.add(token.string)
    return texts, names


def texts_of(path: Path) -> list[tuple[int, str]]:
    """(line, text) of a page or settings file, or of the comments and strings of a source."""
    if path.suffix == ".py":
        return tokens_of(path)[0]
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def found_in(line: str, is_kernel: bool, is_page: bool) -> list[str]:
    banned = _BANNED + _IN_KERNELS * is_kernel + _IN_PAGES * is_page
    return [f"{match[0]!r}, use: {instead}" for words, instead in banned if (match := words.search(line))]


def private_words(path: Path) -> list[str]:
    where = path.relative_to(ROOT).as_posix()
    is_kernel = where.startswith(("optimized/", "tests/kernels/"))
    is_page = path.suffix == ".md"
    lines = texts_of(path) if _ANY.search(path.read_text(encoding="utf-8")) else []  # tokens take long
    return [f"{where}:{n}: {found}" for n, line in lines for found in found_in(line, is_kernel, is_page)]


def files(suffix: str) -> list[Path]:
    """Files of the folders, and of the root itself."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob(f"*{suffix}"))]
    found += sorted(ROOT.glob(f"*{suffix}"))
    return [p for p in found if LAB not in p.parents and p.relative_to(ROOT).as_posix() not in ALLOWED]


@pytest.mark.parametrize("suffix", [".md", ".py", ".toml", ".yml"])
def test_texts_use_the_words_of_the_field(suffix: str) -> None:
    """Pages and settings; of sources the comments, docstrings and other strings."""
    paths = files(suffix)
    assert paths
    assert [found for path in paths for found in private_words(path)] == []


def test_names_are_those_of_the_field() -> None:
    names = re.compile(rf"\b({'|'.join(BANNED_NAMES)})\b")
    found = {
        path.relative_to(ROOT).as_posix(): f"{match[0]}, use: {BANNED_NAMES[match[0]]}"
        for path in files(".py")
        if (match := names.search(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def words_of(identifier: str) -> set[str]:
    """The words of a snake_case, CamelCase or UPPER_CASE name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_identifiers_have_the_words_of_the_field() -> None:
    instead = {word: text for words, text in IDENTIFIER_WORDS.items() for word in words.split()}
    found = set()
    for path in files(".py"):
        is_there = words_of(path.read_text(encoding="utf-8")) & instead.keys()
        for name in tokens_of(path)[1] if is_there else ():
            where = f"{path.relative_to(ROOT).as_posix()}: {name}"
            found |= {f"{where}, use: {instead[word]}" for word in words_of(name) & instead.keys()}
    assert sorted(found) == []
