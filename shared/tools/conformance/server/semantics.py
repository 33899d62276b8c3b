"""Checks of API semantics that OpenAI documents and public clients rely on: shapes, counts, stops, echo,
errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Malformed, Refused
from diptych.shared.tools.conformance.server.same import ask_prompt, greedy

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
FINISH_REASONS = ("stop", "length", "content_filter", "tool_calls")
JSON = dict[str, Any]


def post(context: Context, path: str, **fields: Any) -> JSON:
    """The unchanged response. Raises `Refused`, and `Malformed` for a response without choices."""
    status, _, body = context.server.post(path, {"model": context.server.model, "temperature": 0, **fields})
    if not 200 <= status < 300:
        raise Refused(status, body)
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list) or not body["choices"]:
        raise Malformed("a response without choices", body)
    return body


def compared(what: str, expected: Any, actual: Any, **evidence: Any) -> Finding:
    return Finding("holds" if expected == actual else "fails", what, expected, actual, evidence)


@check(
    "semantics.response",
    "A response has an id of its own, object, created, model, and choices with index and finish_reason.",
    "The types of OpenAI's clients need these fields.",
)
def response(context: Context) -> Iterator[Finding]:
    found = [post(context, COMPLETIONS, prompt=ask_prompt(context), max_tokens=2) for _ in range(2)]
    kinds = {"id": str, "object": str, "created": int, "model": str, "choices": list}
    actual = {name: type(found[0].get(name)).__name__ for name in kinds}
    yield compared("types of the fields", {name: kind.__name__ for name, kind in kinds.items()}, actual)
    yield compared("object of a completion", "text_completion", found[0].get("object"))
    choice = found[0]["choices"][0]
    yield compared("index of the only choice", 0, choice.get("index"))
    yield compared("type of its text", "str", type(choice.get("text")).__name__)
    reason = choice.get("finish_reason")
    if reason not in FINISH_REASONS:
        yield Finding("fails", "finish_reason", FINISH_REASONS, reason)
    if found[0].get("id") == found[1].get("id"):
        yield Finding("fails", "two responses have the same id", actual=found[0].get("id"))


@check(
    "semantics.usage",
    "usage counts the tokens of the prompt and the generated ones, and their sum.",
    "Clients bill and budget by these numbers.",
)
def usage(context: Context) -> Iterator[Finding]:
    for prompt, max_tokens in zip(context.prompts, (1, 5, context.limits.max_tokens)):
        given = ask_prompt(context, prompt)
        body = post(context, COMPLETIONS, prompt=given, max_tokens=max_tokens)
        counts, reason = body.get("usage"), body["choices"][0].get("finish_reason")
        if not isinstance(counts, dict):
            yield Finding("fails", "a response without usage", actual=counts)
            continue
        is_full = reason == "length"
        num_output = counts.get("completion_tokens")
        expected: JSON = {
            "prompt_tokens": counts.get("prompt_tokens") if isinstance(given, str) else len(given),
            "completion_tokens": max_tokens if is_full else num_output,
        }
        expected["total_tokens"] = (expected["prompt_tokens"] or 0) + (expected["completion_tokens"] or 0)
        yield compared(
            "usage", expected, {name: counts.get(name) for name in expected}, max_tokens=max_tokens
        )


@check(
    "semantics.max_tokens",
    "An answer has at most max_tokens tokens; one that reaches them ends with finish_reason length.",
    "A client takes stop for a complete answer.",
)
def max_tokens(context: Context) -> Iterator[Finding]:
    for prompt, limit in zip(context.prompts, (1, 2, 7)):
        answer = greedy(context, prompt, limit)
        num = len(answer.tokens) if answer.tokens else (answer.usage or {}).get("completion_tokens", limit)
        if num > limit:
            yield Finding("fails", "more tokens than max_tokens", limit, num, {"text": answer.text})
        # An answer of fewer tokens ended by itself; an end-of-sequence token may count as the last one.
        allowed: tuple[str, ...] = ("stop",) if num < limit else ("length", "stop")
        if num == limit and answer.token_ids and answer.token_ids[-1] not in context.oracle.eos_token_ids:
            allowed = ("length",)
        is_right = answer.finish_reason in allowed
        yield Finding(
            "holds" if is_right else "fails",
            f"finish_reason of {num} tokens of {limit}",
            allowed,
            answer.finish_reason,
        )


@check(
    "semantics.stop",
    "Text ends right before the first stop string, with finish_reason stop.",
    "Few-shot prompts and agents cut their answers with stop.",
)
def stop(context: Context) -> Iterator[Finding]:
    num_found = 0
    for prompt in context.prompts:
        whole = greedy(context, prompt, 24)
        for cut in _stops_in(whole.text):
            num_found += 1
            for given in (cut, ["\u2603 never", cut]):
                yield _stopped(context, prompt, whole.text, cut, given)
        if num_found >= 4:
            return
    if not num_found:
        yield Finding("not offered", "no answer has a text to cut")


def _stops_in(text: str) -> list[str]:
    """Two stop strings, of one character and of several, each at its first occurrence and not at the
    start."""
    found: list[str] = []
    for width, start in ((1, 1), (4, 2)):
        for at in range(start, len(text) - width):
            piece = text[at : at + width]
            if text.index(piece) == at and "\ufffd" not in text[: at + width] and piece.strip():
                found.append(piece)
                break
    return found


def _stopped(context: Context, prompt: list[int], whole: str, cut: str, given: Any) -> Finding:
    answer = greedy(context, prompt, 24, stop=given)
    expected = whole[: whole.index(cut)]
    evidence = {"stop": given, "text without stop": whole}
    if cut in answer.text:
        return Finding("fails", "the stop string is in the text", expected, answer.text, evidence)
    if answer.text == expected:
        return compared(
            "finish_reason of a text that a stop string ends", "stop", answer.finish_reason, **evidence
        )
    if expected.startswith(answer.text) or answer.text.startswith(expected):
        return Finding("fails", "the text is cut at another place", expected, answer.text, evidence)
    return Finding("near tie", "the text differs before the stop string", expected, answer.text, evidence)


@check(
    "semantics.n",
    "n choices have the indices 0 to n-1.",
    "Clients find a choice by its index.",
)
def n(context: Context) -> Iterator[Finding]:
    if not context.offers.n:
        yield Finding("not offered", context.offers.reason("n"))
        return
    prompt = ask_prompt(context)
    body = post(context, COMPLETIONS, prompt=prompt, max_tokens=3, n=3, temperature=1)
    yield compared("indices of n=3 choices", [0, 1, 2], sorted(each.get("index") for each in body["choices"]))


@check(
    "semantics.usage_n",
    "usage of n choices counts the prompt's tokens once, and the generated ones of all choices.",
    "Clients bill and budget by these numbers.",
)
def usage_n(context: Context) -> Iterator[Finding]:
    if not context.offers.n:
        yield Finding("not offered", context.offers.reason("n"))
        return
    prompt = ask_prompt(context)
    ends = {"ignore_eos": True} if context.offers.ignore_eos else {}
    single = post(context, COMPLETIONS, prompt=prompt, max_tokens=1).get("usage") or {}
    for num in (2, 3):
        body = post(context, COMPLETIONS, prompt=prompt, max_tokens=5, n=num, temperature=1, **ends)
        counts = body.get("usage")
        if not isinstance(counts, dict):
            yield Finding("fails", "a response without usage", actual=counts)
            continue
        yield compared(
            f"prompt_tokens with n={num}", single.get("prompt_tokens"), counts.get("prompt_tokens")
        )
        if any(choice.get("finish_reason") != "length" for choice in body["choices"]):
            yield Finding("not offered", "a choice ended by itself, and its tokens are not known")
            continue
        found = {name: counts.get(name) for name in ("completion_tokens", "total_tokens")}
        total = (counts.get("prompt_tokens") or 0) + 5 * num
        expected = {"completion_tokens": 5 * num, "total_tokens": total}
        yield compared(f"usage of {num} choices of 5 tokens each", expected, found)


@check(
    "semantics.prompt_list",
    "A list of prompts gives one choice for each, in their order.",
    "lm-eval sends its requests in lists.",
)
def prompt_list(context: Context) -> Iterator[Finding]:
    prompts = context.prompts[:3]
    alone = [greedy(context, prompt, 6) for prompt in prompts]
    try:
        body = post(
            context, COMPLETIONS, prompt=[ask_prompt(context, each) for each in prompts], max_tokens=6
        )
    except Refused as error:
        if error.status < 500:
            yield Finding("not offered", f"lists of prompts are refused: {error}")
            return
        raise
    yield compared("indices", list(range(len(prompts))), [each.get("index") for each in body["choices"]])
    texts = [each.get("text") for each in sorted(body["choices"], key=lambda each: each.get("index") or 0)]
    for i, text in enumerate(texts):
        expected = alone[i].text
        if text == expected:
            yield Finding("holds", "a prompt of a list", expected, text)
        elif text in [each.text for each in alone]:
            yield Finding("fails", f"choice {i} answers another prompt of the list", expected, text)
        else:
            yield Finding("near tie", "a prompt of a list gives another text", expected, text)


@check(
    "semantics.echo",
    "echo puts the prompt in front; its log-probabilities begin with null and have one entry for each token.",
    "Scoring tools cut the prompt off by its number of tokens.",
)
def echo(context: Context) -> Iterator[Finding]:
    if not context.offers.echo_logprobs:
        yield Finding("not offered", context.offers.reason("echo_logprobs"))
        return
    prompt = ask_prompt(context)
    body = post(context, COMPLETIONS, prompt=prompt, max_tokens=3, logprobs=1, echo=True)
    choice = body["choices"][0]
    lists = choice.get("logprobs") or {}
    num = (body.get("usage") or {}).get("prompt_tokens", 0) + (body.get("usage") or {}).get(
        "completion_tokens", 0
    )
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        yield compared(f"length of {name}", num, len(lists.get(name) or ()))
    values = lists.get("token_logprobs") or [0]
    yield compared("first of token_logprobs", None, values[0])
    if None in values[1:]:
        yield Finding("fails", "null behind the first of token_logprobs", actual=values)
    text, joined = choice.get("text") or "", "".join(lists.get("tokens") or ())
    for special in context.oracle.tokenizer.special_ids:  # texts may lack them, lists of tokens have them
        name = context.oracle.tokenizer.decode([special], skip_special_tokens=False)
        text, joined = text.replace(name, ""), joined.replace(name, "")
    if "\ufffd" not in text + joined and "token_id:" not in joined:
        yield compared("text, and its tokens joined", joined, text)
    offsets = lists.get("text_offset") or []
    if offsets and offsets != sorted(offsets):
        yield Finding("fails", "text_offset is not in order", actual=offsets)


@check(
    "semantics.lm_eval",
    "The request of lm-eval's local-completions gets what its loglikelihood reads.",
    "Otherwise scores of benchmarks are wrong without an error.",
)
def lm_eval(context: Context) -> Iterator[Finding]:
    offers = context.offers
    if not (offers.echo_logprobs and offers.token_id_prompts):
        yield Finding("not offered", "it needs echo with logprobs, and prompts of token ids")
        return
    for prompt in context.prompts[:2]:
        fields = {"max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
        choices = post(context, COMPLETIONS, prompt=[prompt], **fields)["choices"]
        lists = choices[0].get("logprobs") or {}
        values, tops = lists.get("token_logprobs") or [], lists.get("top_logprobs") or []
        yield compared("token_logprobs: one for each prompt token and one more", len(prompt) + 1, len(values))
        for i, (value, top) in enumerate(zip(values, tops)):
            if value is not None and top and value not in top.values():
                where = f"the log-probability of token {i} is not in its top_logprobs, as the same number"
                yield Finding("fails", where, list(top.values()), value)
                break


@check(
    "semantics.chat",
    "A chat response has one message of the assistant with a text, usage and a finish_reason.",
    "Clients read choices[0].message.content.",
)
def chat(context: Context) -> Iterator[Finding]:
    if not context.offers.chat:
        yield Finding("not offered", context.offers.reason("chat"))
        return
    body = post(context, CHAT, messages=MESSAGES, max_tokens=4)
    choice = body["choices"][0]
    message = choice.get("message") or {}
    yield compared("object of a chat", "chat.completion", body.get("object"))
    yield compared("role", "assistant", message.get("role"))
    text = message.get("content")
    if not isinstance(text, str) and not message.get("reasoning_content") and not message.get("reasoning"):
        yield Finding("fails", "content is no text", actual=text)
    num = (body.get("usage") or {}).get("completion_tokens")
    if choice.get("finish_reason") == "length":
        yield compared("completion_tokens of a chat that max_tokens ends", 4, num)
    elif choice.get("finish_reason") not in FINISH_REASONS:
        yield Finding("fails", "finish_reason", FINISH_REASONS, choice.get("finish_reason"))


@check(
    "semantics.chat_logprobs",
    "Chat log-probabilities have one entry for each token: token, bytes, logprob and top_logprobs.",
    "OpenAI's types need these fields.",
)
def chat_logprobs(context: Context) -> Iterator[Finding]:
    if not context.offers.chat:
        yield Finding("not offered", context.offers.reason("chat"))
        return
    try:
        body = post(context, CHAT, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2)
    except Refused as error:
        yield Finding("not offered", f"logprobs of chat are refused: {error}")
        return
    entries = (body["choices"][0].get("logprobs") or {}).get("content")
    if not entries:
        yield Finding("not offered", "logprobs of chat have no content")
        return
    if body["choices"][0].get("finish_reason") == "length":
        yield compared("number of entries", 4, len(entries))
    for entry in entries:
        missing = {"token", "logprob", "top_logprobs"} - set(entry)
        if missing or len(entry["top_logprobs"]) < 2:
            yield Finding("fails", "an entry without a field or an alternative", 2, entry)
            continue
        yield compared("bytes of a token", _bytes_of(entry["token"], entry.get("bytes")), entry.get("bytes"))


def _bytes_of(token: str, given: Any) -> Any:
    """Check the bytes of a token's text. A token that is part of a character may have any bytes, and null is
    allowed."""
    return given if given is None or "\ufffd" in token or not token else list(token.encode())
