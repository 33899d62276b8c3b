"""Operations of a chat template that would make large values, and the time limit of its Python code."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from jinja2 import TemplateRuntimeError

from diptych.shared.text import template_limits
from diptych.shared.text.template_limits import BoundedEnvironment
from diptych.shared.text.tokenizer import time_limit

LIMIT = 100
TEN = "a" * 10
TOO_LARGE = [
    f"{{{{ '{TEN}' * 11 }}}}",
    f"{{{{ 11 * '{TEN}' }}}}",
    "{{ 1 ** 101 }}",
    "{{ '%101d' % 1 }}",
    "{{ '%*d' % (101, 1) }}",
    "{{ '{:101}'.format(1) }}",
    "{{ '{:{}}'.format(1, 101) }}",
    "{{ 'a'.center(101) }}",
    "{{ 'a' | center(101) }}",
    f"{{{{ '{TEN}'.replace('a', '{TEN}a') }}}}",
    f"{{{{ '{TEN}' | replace('a', '{TEN}a') }}}}",
    f"{{{{ '{TEN}a'.join('{TEN}') }}}}",
]


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SIZE", LIMIT)


@pytest.mark.parametrize("template", TOO_LARGE)
def test_a_large_value_is_refused(template: str) -> None:
    """Each at the limit is made, one larger is not."""
    with pytest.raises(TemplateRuntimeError, match="may not make more than 100 characters or items"):
        BoundedEnvironment().from_string(template).render()
    smaller = template.replace("101", "100").replace("11", "10").replace(f"{TEN}a", TEN)
    assert BoundedEnvironment().from_string(smaller).render()


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        ("{{ x | wordwrap(9) }}", "MAX_WRAPPED"),
        ("{{ x | list }}", "MAX_LOOPED"),
        ("{{ x.split() }}", "MAX_LOOPED"),
    ],
)
def test_loops_in_c_are_short(template: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, limit, 20)
    assert BoundedEnvironment().from_string(template).render(x=" " * 20) is not None
    with pytest.raises(TemplateRuntimeError, match="may not visit more than 20"):
        BoundedEnvironment().from_string(template).render(x=" " * 21)


def test_no_wrapping_takes_longer_than_the_limit() -> None:
    """A run of spaces is the slowest text for it."""
    start = time.thread_time()
    BoundedEnvironment().from_string("{{ x | wordwrap(1) }}").render(x=" " * template_limits.MAX_WRAPPED)
    assert time.thread_time() - start < 1


def test_a_filter_with_one_text_counts_it_once() -> None:
    environment = BoundedEnvironment()
    assert environment.from_string("{{ words | join }}").render(words=["a"] * LIMIT) == "a" * LIMIT
    with pytest.raises(TemplateRuntimeError, match="'join'"):
        environment.from_string("{{ words | join }}").render(words=["a"] * (LIMIT + 1))


def test_a_filter_that_is_added_is_bounded() -> None:
    environment = BoundedEnvironment()
    environment.filters["tojson"] = lambda value, indent: "made"
    assert environment.from_string("{{ 1 | tojson(100) }}").render() == "made"
    with pytest.raises(TemplateRuntimeError, match="'tojson'"):
        environment.from_string("{{ 1 | tojson(101) }}").render()


def test_a_time_limit_ends_python_code_and_gives_the_trace_function_back() -> None:
    def trace(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with (
            pytest.raises(ValueError, match=r"the template takes longer than 0\.01 s of CPU time"),
            time_limit(0.01, "the template"),
        ):
            run_for_ever()
        found = sys.gettrace()
    finally:
        sys.settrace(before)
    assert found is trace


def test_waiting_for_a_busy_computer_is_not_counted() -> None:
    with time_limit(0.05, "the template"):
        time.sleep(0.2)
        assert "".join(str(i) for i in range(9)) == "012345678"


def run_for_ever() -> None:
    while True:
        pass
