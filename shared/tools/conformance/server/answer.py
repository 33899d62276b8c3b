"""One choice of a response, in a common form for vLLM, SGLang, llama.cpp, transformers and this project."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Top = dict[int | str, float]
LOWEST = -9000.0
"""JSON has no -inf: servers write -9999.0 or the least float32. What is below this reads as -inf."""


class Malformed(Exception):
    """A response with status 200 that does not have the shape of the API."""

    def __init__(self, what: str, body: Any) -> None:
        super().__init__(f"{what}: {str(body)[:300]}")


@dataclass(frozen=True)
class Answer:
    """One choice of a response. `token_ids`, `tokens`, `logprobs` and `top_logprobs` have one entry for each
    generated token; fields named prompt_ have one for each prompt token. None: the server does not report it.
    `text` includes the prompt if the request asked for `echo`. `raw`: the response, or the list of chunks of
    a stream."""

    token_ids: tuple[int, ...] | None
    tokens: tuple[str, ...]
    text: str
    logprobs: tuple[float, ...] | None
    top_logprobs: tuple[Top, ...] | None  # by id where it is known, otherwise by token text
    prompt_logprobs: tuple[float | None, ...] | None  # the first is None
    finish_reason: str | None
    usage: dict[str, Any] | None
    raw: Any
    prompt_tokens: tuple[str, ...] = ()
    prompt_top_logprobs: tuple[Top | None, ...] | None = None
    prompt_token_ids: tuple[int | None, ...] = ()  # of the entries that `echo` adds
    index: int = 0


@dataclass(frozen=True)
class Entry:
    """A token with its log-probability, as read from any format."""

    token: str
    token_id: int | None
    logprob: float | None
    top: Top | None


def read_answer(
    choice: dict[str, Any],
    response: dict[str, Any],
    raw: Any,
    num_prompt: int,
    echo: bool,
    ids: Mapping[str, int],
) -> Answer:
    """Read one choice. `num_prompt`: the number of prompt tokens, whose entries `echo` puts in front. `ids`:
    token text -> id, for servers that report no ids. Raises `Malformed`."""
    try:
        entries = read_entries(choice.get("logprobs"), ids)
        text = choice["message"].get("content") or "" if "message" in choice else choice["text"]
        listed = choice.get("token_ids")
        prompt = entries[:num_prompt] if echo and entries else None
        generated = entries[num_prompt:] if echo and entries else entries
        found = _prompt_logprobs(choice, response)
        prompt_values, prompt_tops = found if found else (None, None)
        if prompt is not None:
            prompt_values = tuple(entry.logprob for entry in prompt)
            prompt_tops = tuple(entry.top for entry in prompt)
        token_ids = tuple(map(int, listed)) if listed is not None else _all_known(generated)
        return Answer(
            token_ids=token_ids,
            tokens=tuple(entry.token for entry in generated or ()),
            text=text,
            logprobs=None if generated is None else tuple(_number(entry.logprob) for entry in generated),
            top_logprobs=None if generated is None else tuple(entry.top or {} for entry in generated),
            prompt_logprobs=prompt_values,
            finish_reason=choice.get("finish_reason"),
            usage=response.get("usage"),
            raw=raw,
            prompt_tokens=tuple(entry.token for entry in prompt or ()),
            prompt_top_logprobs=prompt_tops,
            prompt_token_ids=tuple(entry.token_id for entry in prompt or ()),
            index=int(choice.get("index") or 0),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Malformed(f"a choice that cannot be read ({type(error).__name__}: {error})", choice) from None


def read_entries(logprobs: Any, ids: Mapping[str, int]) -> list[Entry] | None:
    """Read either form of `logprobs`: `content`, a list of entries (chat; llama.cpp also in completions), or
    parallel lists of tokens and values (completions)."""
    if not logprobs:
        return None
    if "content" in logprobs:
        return None if logprobs["content"] is None else [_entry(each, ids) for each in logprobs["content"]]
    tokens, values = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    if not len(tokens) == len(values) == len(tops):
        raise ValueError(f"{len(tokens)} tokens, {len(values)} logprobs, {len(tops)} top_logprobs")
    return [
        Entry(
            token,
            _id_of(token, ids),
            value if value is None else _number(value),
            None if top is None else {_key(key, ids): _number(each) for key, each in top.items()},
        )
        for token, value, top in zip(tokens, values, tops)
    ]


def _entry(given: dict[str, Any], ids: Mapping[str, int]) -> Entry:
    top = {
        _key(each["token"], ids, each.get("id")): _number(each["logprob"])
        for each in given.get("top_logprobs") or ()
    }
    token_id = given.get("id")
    known = token_id if isinstance(token_id, int) else _id_of(given["token"], ids)
    return Entry(given["token"], known, _number(given["logprob"]), top)


def _prompt_logprobs(
    choice: dict[str, Any], response: dict[str, Any]
) -> tuple[tuple[float | None, ...], tuple[Top | None, ...]] | None:
    """vLLM's `prompt_logprobs`: for each prompt token None or {id: {logprob, rank, decoded_token}}, in which
    the prompt's own token comes first."""
    given = choice.get("prompt_logprobs") or response.get("prompt_logprobs")
    if not given:
        return None
    tops: list[Top | None] = [
        None if each is None else {int(key): _number(value["logprob"]) for key, value in each.items()}
        for each in given
    ]
    return tuple(None if top is None else next(iter(top.values())) for top in tops), tuple(tops)


def _all_known(entries: Sequence[Entry] | None) -> tuple[int, ...] | None:
    if entries is None:
        return None
    found = [entry.token_id for entry in entries if entry.token_id is not None]
    return tuple(found) if len(found) == len(entries) else None


def _id_of(token: str, ids: Mapping[str, int]) -> int | None:
    """`token_id:7` is vLLM's spelling of an id, with return_tokens_as_token_ids."""
    prefix, _, number = token.partition("token_id:")
    if not prefix and number.isdigit():
        return int(number)
    return ids.get(token)


def _key(token: str, ids: Mapping[str, int], token_id: Any = None) -> int | str:
    found = token_id if isinstance(token_id, int) else _id_of(token, ids)
    return token if found is None else found


def _number(value: Any) -> float:
    """Convert to a number. Raises `TypeError` or `ValueError` for anything else."""
    number = float(value)
    return -math.inf if number <= LOWEST else number
