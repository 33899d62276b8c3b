"""Files of a model folder that are made to harm: refused with a ValueError, within a second."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.config.hf_config import parse_config, read_config, read_json
from diptych.shared.config.hf_draft_config import parse_draft_config
from diptych.shared.config.hf_quantization import parse_quantization
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.safetensors_file import INDEX_FILE, read_checkpoint, read_header
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from tests.config import test_quantization_config as quantized
from tests.config.test_draft_config import EAGLE3
from tests.house.tree import ROOT

ASSET = ROOT / "shared" / "assets" / "tiny-dense"


@pytest.fixture(autouse=True)
def within_a_few_seconds() -> Iterator[None]:
    start = time.process_time()  # other processes may be busy
    yield
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"max_position_embeddings": 10**9},
        {"vocab_size": 10**12},
        {"num_attention_heads": 10**9, "num_key_value_heads": 10**9},
        {"head_dim": 10**9},
        {"rms_norm_eps": 10**400},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e300}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e300}},
    ],
    ids=str,
)
def test_numbers_beyond_any_model(changes: dict[str, Any]) -> None:
    config = json.loads((ASSET / "config.json").read_text())
    with pytest.raises(ValueError, match=r"at most|context of|must be"):
        parse_config({**config, **changes})


class Watched(dict[str, Any]):
    """A JSON object that notes the paths of all keys that are looked up in it, `x.y` of an inner one."""

    def __init__(self, values: dict[str, Any], noted: set[str], place: str = "") -> None:
        inner = {k: Watched(v, noted, f"{place}{k}.") for k, v in values.items() if isinstance(v, dict)}
        super().__init__(values | inner)
        self.noted, self.place = noted, place
        noted |= {place + key for key in values}

    def get(self, key: str, default: Any = None) -> Any:
        self.noted.add(self.place + key)
        return super().get(key, default)


def parse_draft(config: dict[str, Any]) -> object:
    return parse_draft_config(config, read_config(ASSETS / "configs" / "Llama-3.1-8B"))


def parse_quantized(config: dict[str, Any]) -> object:
    return parse_quantization(config, "config.json")


FILES: dict[str, tuple[Callable[[dict[str, Any]], object], dict[str, Any]]] = {
    **{name: (parse_config, config) for name, config in CONFIGS.items()},
    "eagle3": (parse_draft, EAGLE3),
    "fp8": (parse_quantized, quantized.group(quantized.FP8, quantized.TOKEN)),
    **{name.lower(): (parse_quantized, getattr(quantized, name)) for name in ("GPTQ", "AWQ", "TORCHAO")},
}
LONG = "x" * 5000
HOSTILE = [
    None,
    False,
    0,
    -1,
    2**63,
    10**400,
    1e-308,
    1e308,
    float("nan"),
    float("inf"),
    "",
    LONG,
    "a\nb",
    [],
    {},
]
HOSTILE += [[["x"]], [None], [1e308], [LONG] * 100, {"x": {"y": [1]}}, {"x": LONG}]


@pytest.mark.parametrize("name", FILES)
def test_hostile_values_of_every_key(name: str) -> None:
    """One key of a file at a time: it is read, or refused in one short line."""
    parse, config = FILES[name]
    keys: set[str] = set()
    parse(Watched(config, keys))
    for key in sorted(keys):
        *outer, last = key.split(".")
        for value in HOSTILE:
            changed = deepcopy(config)
            place = changed
            for part in outer:
                place = place[part]
            place[last] = value
            try:
                parse(changed)
            except ValueError as error:
                message = str(error)
            except Exception as error:
                raise AssertionError(f"{key}={value!r:.80}: {error!r}") from error
            else:
                continue
            assert len(message.splitlines()) == 1, (key, message)
            assert len(message) < 700, (key, message)


@pytest.mark.parametrize(
    "text",
    [json.dumps({"weight_map": {"w": LONG}}), json.dumps({"weight_map": {LONG: "a"}}), '{"a":' * 10_000],
)
def test_hostile_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"is not an index|is not a file name|are not there") as raised:
        read_checkpoint(tmp_path)
    assert len(str(raised.value)) < 700


def test_nested_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match="is not JSON"):
        read_json(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [10**30, 10**30], "data_offsets": [0, 8]},
        {"shape": [1e999], "data_offsets": [0, 8]},
        {"shape": [2], "data_offsets": [8, 0]},
        {"shape": [-2], "data_offsets": [0, 8]},
        {"shape": [3], "data_offsets": [0, 8]},
    ],
    ids=str,
)
def test_headers_that_contradict_themselves(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = tmp_path / "model.safetensors"
    good = {"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    header = json.dumps({"a": {"dtype": "F32", **entry}, **good}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"damaged|header is invalid|cut off"):
        read_header(path)


def test_nested_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b"[" * 200_000
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="header is invalid"):
        read_header(path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "takes more than"),
        ("{{ raise_exception('no') }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{% for i in range(10 ** 12) %}{% endfor %}", "refuses these messages"),
        ("{{ messages[0].content.nothing.at_all }}", "refuses these messages"),
        *(
            (large, "may not make more than 100000000")
            for large in (
                "{{ 'a' * 2000000000 }}",
                "{% set n = 1000 %}{{ 'a' * n * n * n }}",
                "{{ 2000000000 * [1] }}",
                "{{ 10 ** 1000000000 }}",
                "{{ '%1000000000d' % 1 }}",
                "{{ '%*d' % (1000000000, 1) }}",
                "{{ '{:>1000000000}'.format(1) }}",
                "{{ '{:>{}}'.format(1, 1000000000) }}",
                "{{ 'a'.ljust(1000000000) }}",
                "{{ 'a' | center(1000000000) }}",
                "{{ 'a' | indent(1000000000, true) }}",
                "{{ '%1000000000d' | format(1) }}",
                "{{ messages | tojson(indent=1000000000) }}",
                "{% set many = 'a' * 100000 %}{{ many.replace('a', many) }}",
                "{% set many = 'a' * 100000 %}{{ many | replace('a', many) }}",
                "{% set many = 'a' * 100000 %}{{ many.join(many | list) }}",
                "{% set many = 'a' * 100000 %}{{ many | list | join(many) }}",
            )
        ),
    ],
)
def test_chat_templates(template: str, message: str) -> None:
    tokenizer = Tokenizer.from_pretrained(ASSET)
    tokenizer.hf_tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        tokenizer.chat([{"role": "user", "content": "a"}])


def test_a_chat_template_may_multiply_and_format() -> None:
    tokenizer = Tokenizer.from_pretrained(ASSET)
    tokenizer.hf_tokenizer.chat_template = (
        "{{ '-' * 3 }}{{ 3 * 1000000000 }}{{ 2 ** 40 }}{{ 7 % 4 }}{{ '%d' % 1700000000 }}"
        "{{ '%s%s' % ('1' * 12, 2) }}{{ '{:>4}'.format(1700000000) }}{{ 'a'.replace('a', 'b') }}"
        "{{ ['c', 'd'] | join('*') }}{{ {'e': 1} | tojson }}"
    )
    text = tokenizer.decode(tokenizer.chat([{"role": "user", "content": "a"}]))
    assert text == '---300000000010995116277763170000000011111111111121700000000bc*d{"e": 1}'


def test_code_of_a_model_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even after a "y" on standard input, which is what transformers asks for."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((ASSET / name).read_bytes())
    (tmp_path / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Evil(PreTrainedTokenizerFast): pass\n"
    )
    auto_map = {"AutoTokenizer": [None, "evil.Evil"]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": auto_map})
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with contextlib.suppress(ValueError):
        Tokenizer.from_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists()
