"""The session of a check: a server, its features, and the prompts of the run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from diptych.shared.tools.conformance.server.capabilities import Offers, probe
from diptych.shared.tools.conformance.server.checks import Context, Limits
from diptych.shared.tools.conformance.server.client import Server, Unreachable
from diptych.shared.tools.conformance.server.logprob_tolerance import tolerance_of
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.corpus.corpus import held_out_questions

SEEDED = ("auto", "diptych", "greedy")
LEAST_TIMEOUT = 120.0
LENS = (1, 2, 7, 16, 17, 31, 33)
"""Lengths of the first prompts: one token, and beside the sizes of pages. The others have prompt_len."""


def connect(
    url: str,
    model: str,
    *,
    api_key: str | None = None,
    served_model: str = "",
    dtype: str = "auto",
    seed: int = 0,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda text: None,
    oracle: Oracle | None = None,
    tool_call_parser: str = "auto",
    seeded: str = "auto",
    ends_at: float = math.inf,
) -> Context:
    """Probes the server and makes the prompts. `oracle`: an already loaded oracle of the same model.
    `seeded`: whether its noise is this project's (diptych), or unknown (greedy); auto: by its name.
    `ends_at`: of time.monotonic, when the check ends. Raises `ValueError` for a server that does not answer
    or cannot be scored, and for a model that is not found."""
    check_noise(seeded)
    limits = limits or Limits()
    oracle = oracle or Oracle(model, tool_call_parser)
    _ = oracle.chat  # an unknown parser is an error before anything is asked
    name, tolerance = tolerance_of(dtype, oracle.folder)
    server = Server(
        url, api_key, served_model, timeout_of(ends_at), token_ids=oracle.id_of_text, ends_at=ends_at
    )
    try:
        server.find_model()
        progress("what the server offers")
        text = oracle.tokenizer.decode(texts(oracle, random.Random(seed), [12])[0])
        offers = probe(server, oracle.tokenizer.encode(text), text)
    except Unreachable as error:
        server.close()
        raise ValueError(f"no server answers: {error}") from None
    oracle.num_rows = find_rows(server, offers, oracle, random.Random(seed))
    room = oracle.context_len - limits.max_tokens - 1
    limits = replace(
        limits,
        prompt_len=min(limits.prompt_len, room // 2),
        long_prompt_len=min(limits.long_prompt_len, room),
    )
    rng = random.Random(seed)
    lens = [
        LENS[i // 2] if i % 2 and i // 2 < len(LENS) else limits.prompt_len for i in range(limits.num_prompts)
    ]
    prompts = texts(oracle, rng, lens)
    if offers.token_id_prompts:
        prompts[2::4] = [random_ids(oracle, rng, len(prompt)) for prompt in prompts[2::4]]
    is_known = seeded == "diptych" or (seeded == "auto" and offers.kind == "diptych")
    return Context(
        server, offers, oracle, seed, limits, prompts, progress, tolerance, name, noise_is_known=is_known
    )


def timeout_of(ends_at: float) -> float:
    """Seconds for an answer, by the time that the check has: a server without a GPU takes minutes where 24
    requests run beside each other."""
    left = ends_at - time.monotonic()
    return LEAST_TIMEOUT if math.isinf(left) else max(LEAST_TIMEOUT, left / 24)


def check_noise(seeded: str) -> None:
    """Raises `ValueError` for a name of --seeded that is not known."""
    if seeded not in SEEDED:
        raise ValueError(f"--seeded must be one of {', '.join(SEEDED)}, got {seeded!r}")


def find_rows(server: Server, offers: Offers, oracle: Oracle, rng: random.Random) -> int:
    """How many rows of the LM head the server's softmax covers: those with a token, or all. The server scores
    the token behind that beginning of a random prompt after which the two differ most."""
    rows = {oracle.vocab_size, oracle.config.vocab_size}
    if len(rows) == 1 or not (
        offers.token_id_prompts and offers.completion_logprobs and offers.generated_ids
    ):
        return oracle.vocab_size
    prompt = random_ids(oracle, rng, min(256, oracle.context_len - 1))
    expected: dict[int, np.ndarray] = {}
    for oracle.num_rows in sorted(rows):
        expected[oracle.num_rows] = oracle.logprobs(prompt)
    fewer, more = (expected[num][:, : oracle.vocab_size] for num in sorted(rows))
    at = int((fewer - more).max(axis=1).argmax())
    (answer,) = server.complete(prompt[: at + 1], max_tokens=1, temperature=0.0, logprobs=1)[:1]
    if not answer.token_ids or not answer.logprobs:
        return oracle.vocab_size
    token_id, logprob = answer.token_ids[0], answer.logprobs[0]
    return min(sorted(rows), key=lambda num: abs(expected[num][at][min(token_id, num - 1)] - logprob))


def texts(oracle: Oracle, rng: random.Random, lens: Sequence[int]) -> list[list[int]]:
    """Token ids of plain English of these lengths, whose text is tokenized to the same ids."""
    found = []
    for length in lens:
        ids: list[int] = []
        while len(ids) < length:
            ids = oracle.tokenizer.encode(
                oracle.tokenizer.decode(ids, skip_special_tokens=True) + _story(rng), add_special_tokens=False
            )
        found.append(_stable(oracle, ids[:length]))
    return found


def random_ids(oracle: Oracle, rng: random.Random, length: int) -> list[int]:
    """Random token ids without special tokens."""
    special = oracle.tokenizer.special_ids | oracle.eos_token_ids
    ids = [token_id for token_id in range(oracle.vocab_size) if token_id not in special]
    return [rng.choice(ids) for _ in range(length)]


def _story(rng: random.Random) -> str:
    (question,) = held_out_questions(1, seed=rng.randrange(2**31))
    return "".join(message["content"] + "\n" for message in question.messages)


def _stable(oracle: Oracle, ids: list[int]) -> list[int]:
    """Ids that survive decoding and tokenizing. A text cut between two tokens may be tokenized differently,
    so the result may be shorter."""
    text = oracle.tokenizer.decode(ids)
    again = oracle.tokenizer.encode(text, add_special_tokens=False)
    return again if 0 < len(again) <= len(ids) else ids
