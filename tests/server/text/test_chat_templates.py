"""Chat templates that loop or grow end with an error; others are not changed by the limits."""

import time
from typing import Any

import jinja2
import pytest

from pdserve.server.text.chat_templates import (
    MOST_CHARACTERS,
    MOST_STEPS,
    _written_size,
    compile_template,
    limited_rendering,
)

STEPS = f"it takes more than {MOST_STEPS} turns of loops and calls"
CHARACTERS = f"it makes a text of more than {MOST_CHARACTERS} characters"


WRITTEN = (
    *("{{ ns.x }}", "{{ ns.x ~ '' }}", "{{ ns.x | tojson }}", "{{ ns.x | join }}", "{{ ns.x | string | length }}"),
    *("{{ '%s' % ns.x[0] }}", "{{ '{}'.format(ns.x) }}", "{{ '%s' | format(ns.x) }}", "{{ ', '.join(ns.x) }}"),
)
"""Ways to write a list."""


def grown_by(change: str) -> str:
    return f"{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{change}{{% endfor %}}"


def render(template: str, **variables: Any) -> str:
    with limited_rendering():
        return compile_template(template).render(variables)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", STEPS),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", STEPS),
        (grown_by("{% set ns.x = ns.x ~ ns.x %}"), CHARACTERS),
        (grown_by("{% set ns.x = ns.x + ns.x %}"), CHARACTERS),
        (grown_by("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"), CHARACTERS),
        ("{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", CHARACTERS),
        *((grown_by("{% set ns.x = [ns.x, ns.x] %}") + written, CHARACTERS) for written in WRITTEN),
        (grown_by("{% set ns.x = {'a': ns.x, 'b': (ns.x, 1)} %}") + "{{ ns.x }}", CHARACTERS),
        ("{{ 'a' * 10 ** 12 }}", CHARACTERS),
        ("{{ 10 ** 12 * [1] }}", CHARACTERS),
        ("{{ 9 ** 999999999 }}", CHARACTERS),
        ("{% for i in range(999) %}{% for j in range(999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}", CHARACTERS),
    ],
)
def test_template_that_loops_or_grows_ends_with_an_error(template: str, problem: str) -> None:
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=5) >= 5:  # busy cores may make the first one slow
        began = time.process_time()
        with pytest.raises(jinja2.TemplateRuntimeError, match=problem):
            render(template)
        took_s.append(time.process_time() - began)
    assert min(took_s) < 5


def test_limits_change_no_other_template() -> None:
    messages = [{"a": "b", "c": [{"a": "z", "c": []}]}, {"a": "d", "c": []}]
    assert render("{% for m in x %}{{ loop.index ~ m.a ~ none }}{% else %}-{% endfor %}", x=messages) == "1bNone2dNone"
    assert render("{% for m in x %}{{ m.a }}{% else %}empty{% endfor %}", x=[]) == "empty"
    assert render("{% for m in x recursive %}{{ m.a }}{{ loop(m.c) }}{% endfor %}", x=messages) == "bzd"
    assert render("{{ 'a' * 3 + 'b' }}{{ [1] + [2] }}{{ 2 ** 10 * 3 }}") == "aaab[1, 2]3072"
    assert render("{{ '%s %d' % ('a', 5 % 3) }}{{ [x, {'a': x}] }}{{ x | join }}", x=[1, 2]) == (
        "a 2[[1, 2], {'a': [1, 2]}]12"
    )


def test_size_of_what_is_written_counts_each_element() -> None:
    shared = ["abc", 1]
    values: tuple[object, ...] = ([], [[]], {}, "abc", 10**9, shared, [shared, shared], {"a": (shared, {"c": []})})
    for value in values:
        assert len(str(value)) / 4 <= _written_size(value) <= len(str(value)), value
    nested: object = "x"
    for _ in range(10):
        nested = [nested, nested]
    assert 2**10 <= _written_size(nested) <= len(str(nested))


def test_each_rendering_has_its_own_steps() -> None:
    for _ in range(3):
        render("{% for a in range(2) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
