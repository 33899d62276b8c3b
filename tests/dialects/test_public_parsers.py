"""GPT-OSS and Mistral against their makers' libraries, which read the same answers from their own tokens.

openai-harmony takes its vocabulary from the folder in TIKTOKEN_ENCODINGS_BASE, or downloads it.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.dialects.gpt_oss import GptOss
from diptych.shared.dialects.mistral import ARGS, CALL_ID, Mistral
from diptych.shared.dialects.mistral import START as TOOL_CALLS
from diptych.shared.dialects.mistral_args import MistralArgs
from diptych.shared.dialects.parts.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from diptych.shared.interfaces.dialect import Dialect
from diptych.shared.tools.conformance.oracles.read_answers import Read, pieces, read

NUM_ANSWERS = 500
TEXTS = (
    "",
    "Hi",
    " ",
    "a\n\nb",
    "ü😀",
    '{"a": "}"}',
    "<|x|>",
    "< |end|>",
    "to=functions.g",
    "analysis",
    "x" * 300,
)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice("abü"): random_value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return [None, True, -1, 2.5, rng.choice(TEXTS), '\\"\n'][kind]


def random_text(rng: random.Random) -> str:
    """White space at its ends is left out, because it is no content beside calls."""
    return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(1, 4))).strip()


def harmony_message(rng: random.Random) -> str:
    """Behind `<|start|>assistant`, up to its end."""
    arguments = json.dumps({"x": random_value(rng)}, ensure_ascii=rng.random() < 0.5)
    name, blank = rng.choice(["f", "get_weather", "a.b-c"]), rng.choice(["", " "])
    typed = rng.choice(["", " json", f"{blank}{CONSTRAIN}json", " code"])
    return rng.choice([
        f"{CHANNEL}analysis{MESSAGE}{random_text(rng)}{END}",
        f"{CHANNEL}commentary{MESSAGE}{random_text(rng)}{END}",
        f"{CHANNEL}final{MESSAGE}{random_text(rng)}{rng.choice([END, RETURN])}",
        f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}{arguments}{END}",
        f"{CHANNEL}commentary to=functions.{name}{typed}{MESSAGE}{arguments}{CALL}",
        f"{CHANNEL}analysis to=functions.{name}{typed}{MESSAGE}{arguments}{CALL}",
        f" to=functions.{name}{CHANNEL}commentary{typed}{MESSAGE}{arguments}{CALL}",
    ])  # fmt: skip


def harmony_answer(rng: random.Random) -> str:
    messages = [harmony_message(rng) for _ in range(rng.randrange(1, 5))]
    text = f"{START}assistant".join(messages)
    if rng.random() < 0.2:
        return text.removesuffix(END).removesuffix(CALL).removesuffix(RETURN)
    return text


def read_by_harmony(harmony: Any, encoding: Any, text: str) -> Read:
    parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT, strict=False)
    for token in encoding.encode(text, allowed_special="all"):
        parser.process(token)
    parser.process_eos()
    found = Read("", "", [])
    for message in parser.messages:
        body = "".join(each.text for each in message.content)
        # `final <|constrain|>json`, a form of OpenAI's page, has a recipient for the library.
        if message.recipient not in (None, f"{CONSTRAIN}json"):
            found.calls.append((message.recipient.removeprefix("functions."), body))
        elif message.channel in ("final", "commentary"):
            found = found._replace(content=found.content + body)
        else:
            found = found._replace(reasoning=found.reasoning + body)
    return found


@pytest.mark.full
@pytest.mark.library("openai_harmony")
def test_harmony_is_read_as_by_openais_parser() -> None:
    harmony, rng = pytest.importorskip("openai_harmony"), random.Random(0)
    try:
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"no vocabulary: {error}")
    for _ in range(NUM_ANSWERS):
        text = harmony_answer(rng)
        assert read_in_pieces(GptOss(), text, rng) == read_by_harmony(harmony, encoding, text), text


def read_in_pieces(dialect: Dialect, text: str, rng: random.Random) -> Read:
    """With tokens for markers."""
    controls = {marker: chr(0xFDD0 + i) for i, marker in enumerate(dialect.markers)}
    for marker, character in controls.items():
        text = text.replace(marker, character)
    cuts = [rng.randrange(len(text)) for _ in range(5)]
    return read(dialect, pieces(text, cuts), {"f": True}, controls=controls)


def mistral_tokenizer(folder: Path, version: str) -> Any:
    """mistral-common's own, of another version."""
    common = pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = json.loads((Path(common.__file__).parent / "data" / "tekken_240911.json").read_text())
    special = [str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    data["config"]["version"] = version
    data["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True}
        for rank, name in enumerate([*special, ARGS, CALL_ID])
    ]
    (folder / "tekken.json").write_text(json.dumps(data))
    return Tekkenizer.from_file(folder / "tekken.json")


def mistral_answer(rng: random.Random, form: str) -> str:
    content = random_text(rng) if rng.random() < 0.5 else ""
    calls = [
        (rng.choice(["f", "get_weather", "a.b-c"]), json.dumps({"x": random_value(rng)}))
        for _ in range(rng.randrange(4))
    ]
    if form == "v3":
        ids = [rng.choice(["", ', "id": "abcdefgh1"']) for _ in calls]
        listed = [
            f'{{"name": "{name}", "arguments": {body}{given}}}' for (name, body), given in zip(calls, ids)
        ]
        return content + (f"{TOOL_CALLS}[{', '.join(listed)}]" if calls else "")
    given = f"{CALL_ID}abcdefgh1" if form == "v11 with ids" else ""
    return content + "".join(f"{TOOL_CALLS}{name}{given}{ARGS}{body}" for name, body in calls)


def read_by_mistral_common(tokenizer: Any, text: str) -> Read:
    from mistral_common.experimental.tools import _decode_tool_calls, _split_content_and_tool_calls

    ids: list[int] = []
    for part in filter(None, re.split(r"(\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\])", text)):
        is_control = part in (TOOL_CALLS, ARGS, CALL_ID)
        ids += [tokenizer.get_special_token(part)] if is_control else tokenizer.encode(part, False, False)
    content, calls = _split_content_and_tool_calls(ids, tokenizer.get_special_token(TOOL_CALLS))
    found = _decode_tool_calls(calls, tokenizer)
    return Read(
        tokenizer.decode(content), "", [(each.function.name, each.function.arguments) for each in found]
    )


@pytest.mark.full
@pytest.mark.library("mistral_common")
@pytest.mark.parametrize("form", ["v3", "v11", "v11 with ids", "v13"])
def test_mistral_is_read_as_by_mistral_common(form: str, tmp_path: Path) -> None:
    rng, tokenizer = random.Random(0), mistral_tokenizer(tmp_path, form.split()[0])
    dialect = Mistral() if form == "v3" else MistralArgs()
    for _ in range(NUM_ANSWERS):
        text = mistral_answer(rng, form)
        if not text:
            continue
        ours, theirs = read_in_pieces(dialect, text, rng), read_by_mistral_common(tokenizer, text)
        assert ours[:2] == theirs[:2], text
        as_values = [[(name, json.loads(body)) for name, body in each.calls] for each in (ours, theirs)]
        assert as_values[0] == as_values[1], text
