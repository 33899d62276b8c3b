"""Every flag refuses values of other types and out of its range, with its name and the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.flags.flag import flags_of

FLAGS = flags_of(EngineConfig)
VALUES: list[Any] = [
    *(
        True,
        1,
        0,
        -2,
        1.5,
        float("nan"),
        float("inf"),
        10**400,
        "a",
        "1",
        "false",
        b"a",
        None,
        (),
        (1, 1),
        [1, "a"],
    ),
    *({"a": 5}, {5: "a"}, {}, object(), int),
]
"""One value of each kind that a caller may confuse with another."""


def is_of_the_kind(name: str, value: Any) -> bool:
    flag = FLAGS[name]
    if value is None:
        return flag.is_optional
    if flag.kind is Mapping:
        return value == {}
    if flag.kind is float:
        return type(value) in (int, float) and abs(value) < 2
    return type(value) is flag.kind and value not in ((), (1, 1), 10**400) and not flag.choices


@pytest.mark.parametrize("name", FLAGS)
def test_wrong_types_are_refused_by_name_and_value(name: str) -> None:
    for value in VALUES:
        if not is_of_the_kind(name, value):
            with pytest.raises(ValueError, match=f"^{name} must be ") as raised:
                EngineConfig(**{name: value})
            assert f"got {value!r:.100}" in str(raised.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be an integer >= 1, got 0"),
        ({"max_queued_requests": 0}, "max_queued_requests must be an integer >= 1 or None, got 0"),
        ({"mem_fraction_static": 1.0}, "mem_fraction_static must be a number > 0 and < 1, got 1.0"),
        ({"waiting_timeout": 0}, "waiting_timeout must be a number > 0 or None, got 0"),
        ({"load_format": None}, "load_format must be one of auto, dummy, got None"),
        ({"cuda_graph_bs": (1, 1)}, "cuda_graph_bs must be a tuple of distinct integers >= 1 or None, got"),
        (
            {"cuda_graph_bs": (0, 1)},
            "cuda_graph_bs must be a tuple of distinct integers >= 1 or None, got (0, 1)",
        ),
        ({"cuda_graph_max_tokens": -1}, "cuda_graph_max_tokens must be an integer >= 0 or None, got -1"),
        ({"use": {"scheduler": 5}}, "use must be a mapping of texts to texts, got {'scheduler': 5}"),
        ({"cuda_graph_bs": (1,), "cuda_graph_max_bs": 2}, "graph_bs ((1,)) or cuda_graph_max_bs (2), not"),
    ],
)
def test_messages(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("page_size", "16", 16),
        ("max_total_tokens", "None", None),
        ("enable_mixed_chunk", "TRUE", True),
        ("cuda_graph_bs", "1+2+8", (1, 2, 8)),
        ("mem_fraction_static", "0.5", 0.5),
        ("schedule_policy", "lpm", "lpm"),
    ],
)
def test_parse(name: str, text: str, value: object) -> None:
    assert FLAGS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("page_size", "x"), ("page_size", "none"), ("check_idle", "1"), ("cuda_graph_bs", "1,2")],
)
def test_texts_of_other_types_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .* got '{text}'"):
        FLAGS[name].parse(text)
