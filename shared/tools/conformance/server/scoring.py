"""Checks of log-probabilities: prompts and continuations against the reference, teacher-forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from diptych.shared.tools.conformance.server.answer import Answer
from diptych.shared.tools.conformance.server.capabilities import HOW_TO_SCORE
from diptych.shared.tools.conformance.server.checks import Context, Finding, Status, check
from diptych.shared.tools.conformance.server.diagnosis import diagnose, is_other_model, wrong_region
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE
from diptych.shared.tools.conformance.server.scored import Scored, judge, score

NUM_TOP = 5
HALF_FORMATS = ("float16", "bfloat16")
NUM_PREFIXES = 12  # of one prompt, if each position costs a request


@check(
    "api.model",
    "The server counts the prompt's tokens as the model's own tokenizer does.",
    "With another tokenizer, or a token added in front, every answer is to another prompt.",
)
def same_tokens(context: Context) -> Iterator[Finding]:
    server, tokenizer = context.server, context.oracle.tokenizer
    prompt = context.prompts[0]
    text = tokenizer.decode(prompt)
    asked: list[tuple[str, str | list[int]]] = [("text", text)]
    if context.offers.token_id_prompts:
        asked.append(("token ids", prompt))
    for what, given in asked:
        usage = server.complete(given, max_tokens=1, temperature=0.0)[0].usage or {}
        num = usage.get("prompt_tokens")
        expected = len(tokenizer.encode(text)) if isinstance(given, str) else len(prompt)
        if num is None:
            yield Finding("not offered", "the answer has no usage")
        elif num != expected:
            yield Finding("fails", f"tokens of a prompt given as {what}", expected, num)
        else:
            yield Finding("holds", f"tokens of a prompt given as {what}", expected, num)


@check(
    "scoring.entries",
    "Lists of log-probabilities have one entry for each token, in order.",
    "Programs that score texts sum these lists; a missing entry moves all others.",
)
def one_entry_each(context: Context) -> Iterator[Finding]:
    for prompt, answer in answers(context):
        yield from _lengths(context, prompt, answer)


def _lengths(context: Context, prompt: Sequence[int], answer: Answer) -> Iterator[Finding]:
    if answer.prompt_logprobs is not None:
        if len(answer.prompt_logprobs) != len(prompt):
            yield Finding("fails", "entries of the prompt", len(prompt), len(answer.prompt_logprobs))
        elif answer.prompt_logprobs[0] is not None:
            yield Finding("fails", "entry of the first prompt token", None, answer.prompt_logprobs[0])
        elif any(value is None for value in answer.prompt_logprobs[1:]):
            place = answer.prompt_logprobs.index(None, 1)
            yield Finding("fails", f"entry of prompt token {place}", "a number", None)
        wrong = [i for i, (a, b) in enumerate(zip(answer.prompt_token_ids, prompt)) if a not in (None, b)]
        if wrong:
            place = wrong[0]
            yield Finding(
                "fails", f"prompt token {place} of the echo", prompt[place], answer.prompt_token_ids[place]
            )
    num = (answer.usage or {}).get("completion_tokens")
    if answer.logprobs is None or num is None:
        yield Finding("not offered", "log-probabilities or usage of generated tokens")
        return
    # The token that ends an answer has an entry on some servers and none on others.
    allowed = {num, num - 1} if answer.finish_reason == "stop" else {num}
    status: Status = "holds" if len(answer.logprobs) in allowed else "fails"
    yield Finding(status, "entries of generated tokens", num, len(answer.logprobs))


@check(
    "scoring.prompt",
    "Each prompt token has the reference's log-probability, given the tokens before it.",
    "Evaluations (lm-eval) rank answers by it. An error here is an error of prefill.",
)
def prompt_scores(context: Context) -> Finding:
    texts = []
    if not context.offers.scoring:
        return Finding("not offered", HOW_TO_SCORE)
    if set(context.offers.scoring) & {"echo", "prompt_logprobs"}:
        for prompt, answer in answers(context):
            values = enumerate(answer.prompt_logprobs or ())
            entries = [
                (i, prompt[i], value) for i, value in values if value is not None and 0 < i < len(prompt)
            ]
            texts.append(score(context.oracle.logprobs(prompt), prompt, entries))
    else:
        texts = [_by_prefixes(context, prompt) for prompt in context.prompts]
    if not any(text.positions for text in texts):
        return Finding("not offered", "no prompt of two or more tokens")
    return verdict(context, texts, "prompt tokens")


def _by_prefixes(context: Context, prompt: Sequence[int]) -> Scored:
    """The likeliest tokens behind prefixes of the prompt, for a server that scores no prompts."""
    step = max(len(prompt) // NUM_PREFIXES, 1)
    lens = list(range(1, len(prompt) + 1, step))
    calls = [partial(_ask, context, prompt[:length], 1) for length in lens]
    found = context.server.at_once(calls, context.limits.concurrency)
    entries = [
        (length, token_id, value)
        for length, answer in zip(lens, found)
        for top in (answer.top_logprobs or ())[:1]
        for token_id, value in top.items()
        if isinstance(token_id, int)
    ]
    # A row for the token behind the last one; its id is arbitrary, because it is not read.
    return score(context.oracle.logprobs(prompt), [*prompt, 0], entries)


@check(
    "scoring.continuation",
    "Each generated token has the reference's log-probability, given the prompt and the tokens before it.",
    "An error here and not in scoring.prompt is an error of decode: positions, pages, batches.",
)
def continuation_scores(context: Context) -> Finding:
    for needed in ("completion_logprobs", "generated_ids"):
        if not getattr(context.offers, needed):
            return Finding("not offered", context.offers.reason(needed))
    texts = []
    for prompt, answer in answers(context):
        text = [*prompt, *(answer.token_ids or ())]
        entries = [
            (len(prompt) + i, token_id, value)
            for i, (token_id, value) in enumerate(zip(answer.token_ids or (), answer.logprobs or ()))
        ]
        texts.append(score(context.oracle.logprobs(text), text, entries))
    return verdict(context, texts, "generated tokens")


@check(
    "scoring.alternatives",
    "Each of the top log-probabilities of a generated token is the reference's.",
    "Programs read probabilities of answers (yes, no) from this list.",
)
def alternative_scores(context: Context) -> Finding:
    if not context.offers.generated_ids or not context.offers.num_top_logprobs:
        return Finding("not offered", context.offers.reason("generated_ids"))
    texts = []
    for prompt, answer in answers(context):
        text = [*prompt, *(answer.token_ids or ())]
        entries = [
            (len(prompt) + i, token_id, value)
            for i, top in enumerate((answer.top_logprobs or ())[: len(answer.token_ids or ())])
            for token_id, value in top.items()
            if isinstance(token_id, int)
        ]
        texts.append(score(context.oracle.logprobs(text), text, entries))
    return verdict(context, texts, "alternatives")


def verdict(context: Context, texts: Sequence[Scored], what: str) -> Finding:
    """One finding about all texts, with the diagnosis of the worst one."""
    found = judge(texts, context.tolerance)
    evidence = {"tolerance": f"{context.dtype}: {context.tolerance.reason}", **found.evidence}
    if not found.reasons:
        return Finding("holds", f"log-probabilities of {what}", evidence=evidence, num_cases=found.num)
    if found.worst is None:
        return Finding("fails", f"{what}: {found.reasons[0]}")
    why = _why(texts, found.worst, context)
    worst = found.evidence["worst token"]
    reasons = "; ".join(found.reasons)
    sentence = f"log-probabilities of {what}: " + (f"{why} ({reasons})" if why not in reasons else reasons)
    evidence["worst text"] = context.oracle.tokenizer.decode(found.worst.ids)[:400]
    return Finding("fails", sentence, worst["expected"], worst["actual"], evidence, found.num)


def _why(texts: Sequence[Scored], worst: Scored, context: Context) -> str:
    """The diagnosis of the worst text, or of another one with a pattern. Errors of the size of a half format
    are more likely caused by the format than by a wrong page, which causes large errors."""
    wrong = [text for text in texts if len(text.positions) and text.beyond(context.tolerance).any()]
    for text in (worst, *wrong):
        if why := diagnose(text, context.oracle.logprobs(text.ids), context.tolerance):
            return why
    if why := _format(texts, context, HALF_FORMATS):
        return why
    for text in (worst, *wrong):
        if why := wrong_region(text, context.tolerance):
            return why
    if is_other_model([text for text in texts if len(text.positions)]):
        return "most values are wrong: another model, other weights or another tokenizer than --model"
    return _format(texts, context, tuple(TABLE))


def _format(texts: Sequence[Scored], context: Context, names: Sequence[str]) -> str:
    for name in names:
        limits = TABLE[name]
        if limits.mean_error > context.tolerance.mean_error and not judge(texts, limits).reasons:
            return (
                f"errors of this size are those of {name}: if the server computes in it, give --dtype {name}"
            )
    return ""


def answers(context: Context) -> Iterator[tuple[list[int], Answer]]:
    """Each prompt with its greedy answer, one request at a time; other checks cover dependence on other
    requests. The other checks of this file reuse the answers."""
    if not context.answers:
        for prompt in context.prompts:
            context.answers.append(_ask(context, prompt, context.limits.max_tokens, with_prompt=True))
    yield from zip(context.prompts, context.answers)


def _ask(context: Context, prompt: Sequence[int], max_tokens: int, with_prompt: bool = False) -> Answer:
    offers = context.offers
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    if offers.completion_logprobs:
        params["logprobs"] = max(1, min(NUM_TOP, offers.num_top_logprobs))
    if offers.ignore_eos:
        params["ignore_eos"] = True
    if with_prompt:
        params |= offers.prompt_params(1)
    return context.server.complete(context.prompt_of(prompt), **params)[0]
