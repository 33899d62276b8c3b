"""Checks that parameters act in chat, or are refused. They need no log-probabilities: greedy texts decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Refused
from diptych.shared.tools.conformance.server.prompt_checks import no_chat
from diptych.shared.tools.conformance.server.refusals import refusal
from diptych.shared.tools.conformance.server.semantics import CHAT, MESSAGES, compared, post

JSON = dict[str, Any]
NUM_TOKENS = 20
QUESTIONS = (
    "Say the word bell 5 times.",
    "Count from 1 to 12.",
    "What is 12 + 30?",
    "Say this again: a cat and a dog and a cat.",
    "Write a short story about Mara and the train.",
)
NUM_CASES = 2  # of each parameter
NUM_TEXTS = 6  # more questions are texts of the run
PENALTIES: tuple[JSON, ...] = ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0})


class Case(NamedTuple):
    """A question with the reference's texts without and with a parameter; they differ."""

    question: str
    plain: str
    changed: str


def template_args(context: Context) -> JSON:
    """Thinking off, where there is a switch."""
    chat = context.oracle.chat
    return {chat.thinking_switch: False} if chat.thinking_switch and chat.dialect.reasoning else {}


def prompt_ids(context: Context, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return context.oracle.chat.prompt(messages, None, **template_args(context)).ids


def cases(context: Context, **params: Any) -> list[Case]:
    """Questions whose greedy text a parameter changes, with certainty within the tolerance."""
    tolerance = context.tolerance
    least = 4 * (tolerance.typical_error if tolerance.outliers else tolerance.max_error)
    found: list[Case] = []
    english = [ids for i, ids in enumerate(context.prompts) if i % 4 != 2]  # the others are random ids
    texts = [context.oracle.tokenizer.decode(ids, True) for ids in english[:NUM_TEXTS]]
    for question in (*QUESTIONS, *texts):
        if len(found) == NUM_CASES:
            break
        ids = prompt_ids(context, question)
        plain, lead = context.oracle.chat.greedy_text(ids, NUM_TOKENS)
        changed, other_lead = context.oracle.chat.greedy_text(ids, NUM_TOKENS, **params)
        if plain != changed and min(lead, other_lead) > least:
            found.append(Case(question, plain, changed))
    return found


def text_of(context: Context, question: str, **fields: Any) -> str:
    body: JSON = {"messages": [{"role": "user", "content": question}], "max_tokens": NUM_TOKENS, **fields}
    if args := template_args(context):
        body["chat_template_kwargs"] = args
    return (post(context, CHAT, **body)["choices"][0].get("message") or {}).get("content") or ""


def judged(context: Context, name: str, params: JSON, case: Case) -> Finding:
    """Compare one text. Raises `Refused` for a status of 500 or more."""
    try:
        text = text_of(context, case.question, **params)
    except Refused as error:
        if error.status >= 500:
            raise
        return Finding("holds", f"{name} is refused with {error.status}")
    if text.strip() == case.changed.strip():
        return Finding("holds", f"{name} acts in chat")
    rule = "has no effect" if text.strip() == case.plain.strip() else "follows another rule"
    return Finding("fails", f"{name} {rule}", case.changed, text, {"question": case.question, **params})


@check(
    "sampling.chat",
    "In chat, penalties, logit_bias, top_k, top_p, n and max_completion_tokens act, or are refused.",
    "A parameter without effect is not seen in a text.",
)
def chat_sampling(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for params in PENALTIES:
        (name,) = params
        found = cases(context, **params)
        if not found:
            yield Finding("not offered", f"{name} changes no certain greedy text of this model")
        for case in found:
            yield judged(context, name, params, case)
    question = QUESTIONS[2]
    ids = prompt_ids(context, question)
    plain, lead = context.oracle.chat.greedy_text(ids, NUM_TOKENS)
    first = int(context.oracle.logits(ids)[-1].argmax())
    banned, other_lead = context.oracle.chat.greedy_text(ids, NUM_TOKENS, logit_bias={first: -100.0})
    if min(lead, other_lead) > 8 * context.tolerance.typical_error:
        bias = {"logit_bias": {str(first): -100}}
        yield judged(context, "logit_bias", bias, Case(question, plain, banned))
        for params in ({"top_k": 1}, {"top_p": 1e-6}):
            (name,) = params
            fields = {**params, "temperature": 3.0}
            yield judged(context, name, fields, Case(question, "", plain))
    yield from _counts(context)


def _counts(context: Context) -> Iterator[Finding]:
    for name, fields in (("n", {"n": 2, "temperature": 1.0}), ("max_completion_tokens", {})):
        limit = "max_tokens" if name == "n" else name
        try:
            body = post(context, CHAT, messages=MESSAGES, **{limit: 3}, **fields)
        except Refused as error:
            if error.status >= 500:
                raise
            yield Finding("holds", f"{name} is refused with {error.status}")
            continue
        if name == "n":
            yield compared("choices of n=2 in chat", 2, len(body["choices"]))
        else:
            num = (body.get("usage") or {}).get("completion_tokens")
            is_right = num is None or num <= 3
            yield Finding("holds" if is_right else "fails", "tokens of max_completion_tokens=3", 3, num)


@check(
    "semantics.unsupported",
    "A field that the server does not know is refused, not ignored.",
    "A misspelt penalty is a penalty that is not applied.",
)
def unsupported(context: Context) -> Iterator[Finding]:
    if (missing := no_chat(context)) is not None:
        yield missing
        return
    for name in ("presence_penalti", "no_such_field"):
        body = {"model": context.server.model, "messages": MESSAGES, "max_tokens": 2, name: 1.5}
        yield refusal(f"the unknown field {name}", context.server.post(CHAT, body))
