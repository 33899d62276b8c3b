"""Which dialect a model speaks: by option, by its chat template, by its vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from diptych.shared import registry
from diptych.shared.dialects.parts.answer_parser import AnswerParser, ToolDelta
from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.interfaces.dialect import Call, Dialect, Reasoning, ReasoningState
from diptych.shared.text.inert import Inert
from diptych.shared.text.tokenizer import Tokenizer

FOLDER = "diptych.shared.dialects"
DIALECTS = {
    "gpt_oss": "GptOss",
    "gemma4": "Gemma4",
    "kimi": "Kimi",
    "minimax": "MiniMax",
    "deepseek_v32": "DeepSeekV32",
    "deepseek_v4": "DeepSeekV4",
    "deepseek_v3": "DeepSeekV3",
    "deepseek_v31": "DeepSeekV31",
    "mistral_args": "MistralArgs",
    "mistral": "Mistral",
    "glm": "Glm",
    "glm47": "Glm47",
    "qwen3_coder": "Qwen3Coder",
    "hermes": "Hermes",
    "llama3": "Llama3",
    "pythonic": "Pythonic",
    "phi4": "Phi4",
    "plain": "Plain",
}
"""Module of this folder -> class, in the order in which templates are tried."""

AUTO, NONE = "auto", "none"
THINK = Reasoning("<think>", "</think>")
THINK_OPEN = Reasoning("<think>", "</think>", is_open=True)
REASONING: dict[str, Reasoning] = {
    "qwen3": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "deepseek-v3": THINK,
    "interns1": THINK,
    "nano_v3": THINK,
    "deepseek-r1": THINK_OPEN,
    "qwen3-thinking": THINK_OPEN,
    "minimax": THINK_OPEN,
    "step3": THINK_OPEN,
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "kimi": Reasoning("◁think▷", "◁/think▷"),
    "gemma4": Reasoning("<|channel>thought\n", "<channel|>"),
}
"""Name for --reasoning-parser, which is SGLang's -> markers. gpt-oss: its dialect reads them."""

PROBE = Call("get_weather", {"city": "Bergen", "days": 3}, "call12345")
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


@cache
def dialects() -> dict[str, type[Dialect]]:
    """Name -> class, in the order in which templates are tried."""
    return {name: registry.load("dialect", f"{FOLDER}.{name}:{cls}") for name, cls in DIALECTS.items()}


@cache
def tool_parsers() -> dict[str, type[Dialect]]:
    """Each name for --tool-call-parser -> class."""
    return {name: dialect for dialect in dialects().values() for name in dialect.tool_parsers}


def dialect_of(config: EngineFlags, tokenizer: Tokenizer | None) -> Dialect:
    """The dialect that the flags choose. Raises `ValueError` for a name that is none, or a class that cannot
    be loaded."""
    own = config.use.get("dialect")
    given = None if own is None else registry.load("dialect", own)()
    return choose_dialect(tokenizer, config.tool_call_parser, config.reasoning_parser, given)


def choose_dialect(
    tokenizer: Tokenizer | None,
    tool_call_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    given: Dialect | None = None,
) -> Dialect:
    """`given`, or the dialect of a name, or for AUTO the one that the model's template has."""
    if given is not None:
        dialect = given
    elif tool_call_parser == AUTO:
        dialect = detect(tokenizer)
    elif tool_call_parser in tool_parsers():
        dialect = tool_parsers()[tool_call_parser]()
    else:
        names = ", ".join([AUTO, *sorted(tool_parsers())])
        raise ValueError(f"tool_call_parser must be one of {names}, got {tool_call_parser!r}")
    own = dialect.reasoning
    if reasoning_parser == NONE:
        dialect.reasoning = None
    elif reasoning_parser in REASONING:
        dialect.reasoning = REASONING[reasoning_parser]
    elif reasoning_parser not in (AUTO, "gpt-oss"):
        names = ", ".join([AUTO, NONE, "gpt-oss", *sorted(REASONING)])
        raise ValueError(f"reasoning_parser must be one of {names}, got {reasoning_parser!r}")
    elif own is None or not _has(tokenizer, own.start):
        found = [each for each in REASONING.values() if _has(tokenizer, each.start) and not each.is_open]
        dialect.reasoning = found[0] if found else own
    return dialect


def detect(tokenizer: Tokenizer | None) -> Dialect:
    """The first dialect whose form of a call is in a conversation that the chat template has written, exactly
    or else but for white space; else the first whose words are in the template, or without a template in the
    vocabulary."""
    if tokenizer is not None:
        each = [dialect() for dialect in dialects().values()]
        probes = [(dialect, *_probe(dialect, tokenizer)) for dialect in each]
        for dialect, written, text in probes:
            if written and written in text:
                return dialect
        for dialect, written, text in probes:
            if written and "".join(written.split()) in "".join(text.split()):
                return dialect
        for dialect in each:
            if dialect.matches(tokenizer.chat_template, _has_token(tokenizer)):
                return dialect
    return tool_parsers()[NONE]()


def reasoning_state(dialect: Dialect, ending: str) -> ReasoningState:
    """ending: of the prompt, what the chat template wrote after the last message."""
    if dialect.reasoning is None:
        return "closed"
    start, end, is_open = dialect.reasoning
    last_start, last_end = ending.rfind(start.strip()), ending.rfind(end)
    if last_start == last_end:  # there is neither
        return "open" if is_open else "may_open"
    return "open" if last_start > last_end else "closed"


def reasoning_fields(dialect: Dialect, ending: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields of SamplingParams: a constraint on the answer begins behind its reasoning. None where the
    markers are no tokens of their own."""
    free = dialect.free_text(reasoning_state(dialect, ending))
    if free is None:
        return {}
    start, end = free
    start_id = None if start is None else tokenizer.token_to_id(start)
    end_ids = tokenizer.encode(end, False)
    if (start is not None and start_id is None) or not {end_ids[0], end_ids[-1]} <= tokenizer.added_ids:
        return {}
    return {"reasoning_start": start_id, "reasoning_end": tuple(end_ids)}


def inert_for(dialect: Dialect, tokenizer: Tokenizer) -> Inert:
    """For the spellings of special tokens and of the dialect's markers."""
    added = tokenizer.hf_tokenizer.added_tokens_decoder
    special = [added[token_id].content for token_id in tokenizer.special_ids]
    return Inert([*special, *dialect.markers, *(dialect.reasoning or ())[:2]])


def without_reasoning(dialect: Dialect) -> Dialect:
    """The same dialect, to which reasoning is content."""
    plain = copy.copy(dialect)
    plain.reasoning = None
    return plain


@lru_cache(4096)
def carries_name(dialect: type[Dialect], name: str) -> bool:
    """Whether a call of a tool with this name is read as it is written."""
    own = dialect()
    parser = AnswerParser(own, {name: True}, "closed")
    events = [*parser.feed(own.write([Call(name, {}, "call00000")])), *parser.finish()]
    return [event.name for event in events if isinstance(event, ToolDelta) and event.name] == [name]


def _probe(dialect: Dialect, tokenizer: Tokenizer) -> tuple[str, str]:
    """A call as the dialect writes it, and a conversation with it by the chat template; "": it cannot."""
    try:
        written = dialect.write([PROBE])
        messages = dialect.history([
            {"role": "user", "content": "How is the weather in Bergen?"},
            {"role": "assistant", "content": "", "tool_calls": [_as_message(PROBE)]},
            {"role": "tool", "tool_call_id": PROBE.call_id, "name": PROBE.name, "content": "Rain."},
        ])  # fmt: skip
        text = tokenizer.render(messages, tools=[PROBE_TOOL])
    except (ValueError, NotImplementedError):
        return "", ""
    return written, text


def _as_message(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _has_token(tokenizer: Tokenizer) -> Callable[[str], bool]:
    return lambda token: tokenizer.token_to_id(token) is not None


def _has(tokenizer: Tokenizer | None, marker: str) -> bool:
    """Whether a model knows a marker: from its template, or as a token."""
    if tokenizer is None:
        return False
    return marker in tokenizer.chat_template or _has_token(tokenizer)(marker.split("thought")[0])
