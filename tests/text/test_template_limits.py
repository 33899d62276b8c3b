"""Operations of a chat template that would make large values, and the number of its steps."""

from __future__ import annotations

import pytest
from jinja2 import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from diptych.shared.text import template_limits
from diptych.shared.text.template_limits import BoundedEnvironment

LIMIT = 100
LARGE = 10**8 + 1
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


@pytest.mark.parametrize("value", [-LARGE, LARGE, 2147483647, 10**30])
@pytest.mark.parametrize("name", ["tojson", "center(9)", "indent(9)", "wordwrap(9)"])
def test_a_number_that_is_filtered_is_no_width(name: str, value: int) -> None:
    template = f"{{{{ x | string | {name} }}}} {{{{ x | tojson(indent=2) }}}}"
    found = BoundedEnvironment().from_string(template).render(x=value)
    assert str(value) in found


# ---- steps ----

ENDLESS = {
    "nested loops": "{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop with a condition": "{% for i in range(600) if i < 0 %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set x = f(n - 1) %}{% endif %}"
    "{% endmacro %}{{ f(9) }}",
    "output": "{% set x %}{% for i in range(300) %}a{% endfor %}{% endset %}",
    "a recursive loop": "{% for x in [[[[[[[[[1]] * 2] * 2] * 2] * 2] * 2] * 2] * 2] recursive %}"
    "{% if x is iterable %}{{ loop(x) }}{% endif %}{% endfor %}",
    "filters": "{% for i in range(99) %}{% set x = i | string | upper | trim | length %}{% endfor %}",
    "long texts": "{% for i in range(99) %}{% set y = x | upper %}{% set y = x.strip() %}{% endfor %}",
    "sums": "{% for i in range(99) %}{% set y = x + x %}{% set y = x ~ x %}{% endfor %}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_steps_end_every_loop(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SIZE", 10**6)
    environment = BoundedEnvironment()
    template_limits.start_counting()
    environment.from_string(template).render(x="a" * 1500, r=range(9))
    monkeypatch.setattr(template_limits, "MAX_STEPS", 300)
    template_limits.start_counting()
    with pytest.raises(TemplateRuntimeError, match="more than 300 steps"):
        environment.from_string(template).render(x="a" * 1500, r=range(9))


def test_texts_do_not_double_without_end() -> None:
    for operator in ("~", "+"):
        doubling = f"{{% set n.x = n.x {operator} n.x %}}"
        template = "{% set n = namespace(x='aaaa') %}{% for i in range(9) %}" + doubling + "{% endfor %}"
        with pytest.raises(TemplateRuntimeError, match="may not make more than 100"):
            BoundedEnvironment().from_string(template).render()


def test_loops_are_as_without_counting() -> None:
    template = (
        "{% for x in y %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}"
        "{{ x ~ 1 ~ none }};{% else %}none{% endfor %}{% for k, v in z.items() %}{{ k + v }}"
        "{% endfor %}{{ missing ~ 'a' }}"
    )
    for y in ([], "ab", [1, 2, 3], {"a": 1}):
        plain = ImmutableSandboxedEnvironment().from_string(template).render(y=y, z={"a": "b"})
        assert BoundedEnvironment().from_string(template).render(y=y, z={"a": "b"}) == plain


QUADRATIC = (
    "{% for m in messages %}{% set n = namespace(last=0) %}{% for other in messages %}"
    "{% if other.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.full
def test_a_template_that_looks_at_all_turns_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 4's does. Neither the time nor the number of characters matters."""
    monkeypatch.setattr(template_limits, "MAX_SIZE", 10**8)
    turns = [{"role": "user", "content": "word " * 800}] * 600
    template_limits.start_counting()
    assert len(BoundedEnvironment().from_string(QUADRATIC).render(messages=turns)) == 600 * 4000
    template_limits.start_counting()
    with pytest.raises(TemplateRuntimeError, match="more than 1000000 steps"):
        BoundedEnvironment().from_string(QUADRATIC).render(messages=turns * 2)


def test_a_list_takes_and_gives_items_and_nothing_else_changes() -> None:
    """Kimi K2's templates keep the ids of calls in a list."""
    template_limits.start_counting()
    template = "{% set ids = [] %}{% set _ = ids.append('f:0') %}{{ ids.pop(0) }}"
    assert BoundedEnvironment().from_string(template).render() == "f:0"
    for change in ("ids.clear()", "ids.extend([1])", "{}.update({1: 2})"):
        with pytest.raises(SecurityError):
            BoundedEnvironment().from_string(f"{{% set ids = [1] %}}{{{{ {change} }}}}").render()
