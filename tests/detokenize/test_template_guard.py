# SPDX-License-Identifier: Apache-2.0
"""A chat template that is rendered in the process of the server exceeds no limit of time or size, and blocks nobody."""

from __future__ import annotations

import inspect
import threading
import time
from copy import deepcopy
from typing import Any

import jinja2.filters
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastdeploy.core.errors import InvalidRequestError, TemplateLimitError
from fastdeploy.detokenize import template_renderer
from fastdeploy.detokenize.template_budget import limited
from fastdeploy.detokenize.template_renderer import render_template

MESSAGES = [{"role": "user", "content": "the text"}, {"role": "assistant", "content": "x" * 1000}]
TEXTS, LISTS, ONES = (
    f"{{% set n = namespace(x={first}) %}}{{% for i in range(60) %}}" for first in ("'x'", "[1]", "1")
)
BIG = "{% set s = 'x' * 10000000 %}"
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over a text": "{% for i in range(99999) %}{% for c in 'x' * 100000 %}{% endfor %}{% endfor %}",
    "the filter of a loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% macro m() %}{% for i in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{% set x = loop.index %}{{ m() if x < 0 }}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a recursive macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "macros that call each other": "".join(
        f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}" for i in range(1, 60)
    ).replace("{{ m0() }}", "")
    + "{{ m59() }}",
    "blocks": "{% block a %}{% if x is not defined %}{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}"
    + "".join(
        f"{{% block {a} %}}{{% set x = 1 %}}{{{{ self.{b}() }}}}{{{{ self.{b}() }}}}{{% endblock %}}"
        for a, b in zip("bcdefghijklmnopqrstuvwxyzABCDEFGH", "cdefghijklmnopqrstuvwxyzABCDEFGHI", strict=True)
    )
    + "{% block I %}{% endblock %}",
    "call blocks": "{% macro m(n) %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m(1) %}" * 18 + "x"
    "{% for i in range(999) %}{% endfor %}" + "{% endcall %}" * 18,
    "map": "{% for i in range(99999) %}{{ range(99999) | map('abs') | map('string') | first | length * 0 }}"
    "{{ range(99999) | map('string') | list | length * 0 }}{% endfor %}",
    "select": "{% for i in range(99999) %}{{ range(99999) | select('lt', 0) | list | length }}{% endfor %}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "searches of a long text": BIG + "{% for i in range(99999) %}{{ 'y' in s }}{% endfor %}",
    "copies of a long text": BIG + "{% for i in range(99999) %}{% set t = s.upper() %}{% endfor %}",
    "loops until a break": "{% for i in range(99999) %}{% for j in range(99999) %}{% if 0 %}{% break %}{% endif %}"
    "{% continue %}{% endfor %}{% endfor %}",
}
LARGE = {
    "a repeated text": "{% set x = 'a' * 10**9 %}",
    "a repeated text, reversed": "{% set x = 10**9 * 'a' %}",
    "repeated lists": "{% set x = [[1] * 5000] * 5000 %}",
    "a power": "{{ 2 ** (10 ** 8) }}",
    "a product": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "an integer of many digits": "{% set x = 'f' * 9999999 %}{% set y = x | int(0, 16) %}{{ y % 7 }}",
    "a constant of many digits": "{{ 0x" + "f" * 99999 + " % 7 }}",
    "a percent width": "{{ '%1000000000d' % 1 }}",
    "a percent precision": "{{ '%.1000000000f' % 1 }}",
    "a percent star": "{{ '%*d' % (1000000000, 1) }}",
    "a percent name": BIG + "{{ ('%(a)s' * 100) % {'a': s} }}",
    "a formatted width": "{{ '%1000000000d' | format(1) }}",
    "a format width": "{{ '{:1000000000}'.format(1) }}",
    "a nested format width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a format by name": "{{ '{a:>1000000000}'.format_map({'a': 'x'}) }}",
    "many fields": BIG + "{{ ('{0}' * 100).format(s) }}",
    "an escaped format": "{{ ('{:1000000000}' | safe).format(1) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "center by map": "{{ ['x'] | map('center', 1000000000) | list }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "indent of many lines": "{{ ('x\n' * 99999) | indent(99999) }}",
    "wordwrap": "{{ ('x ' * 99999) | wordwrap(1, true, 'y' * 99999) }}",
    "join": "{{ range(99999) | join('y' * 99999) }}",
    "replace": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "replace of nothing": "{{ ('x' * 99999) | replace('', 'y' * 99999) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) | length }}",
    "an indentation of JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "a separator of JSON": "{{ ([1] * 99999) | tojson(separators=('x' * 99999, ':')) }}",
    **{f"method {name}": f"{{{{ 'x'.{name}(1000000000) }}}}" for name in ("center", "ljust", "rjust", "zfill")},
    "a method by key": "{{ 'x'['ljust'](1000000000) }}",
    "a method by filter": "{{ ('x' | attr('ljust'))(1000000000) }}",
    "a method under another name": "{% set n = namespace(strip='x'.ljust) %}{{ n.strip(1000000000) }}",
    "a method of markup": "{{ ('x' | safe).ljust(1000000000) }}",
    "a method of bytes": "{{ 'x'.encode().ljust(1000000000) | length }}",
    "expandtabs": "{{ '\t\t'.expandtabs(1000000000) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "a joined text": BIG + "{{ s.join(range(999) | map('string')) }}",
    "a replaced text": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "a translated text": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "keys of one value": BIG + "{{ {}.fromkeys(range(999), s) }}",
    "doubling by plus": TEXTS + "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by tilde": TEXTS + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by a block": "{% set x %}xx{% endset %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "doubling by macros": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ " + "m(" * 60 + "'x'" + ")" * 60 + " }}",
    "doubling by a filter block": "{% filter upper %}" * 19 + "{{ 'x' * 9999999 }}" * 9 + "{% endfilter %}" * 19,
    "a macro that prints a text often": BIG
    + "{% macro m() %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endmacro %}"
    "{% set x = m() %}",
    "doubling lists": LISTS + "{% set n.x = n.x + n.x %}{% endfor %}",
    "lists in lists": LISTS + "{% set n.x = [n.x, n.x] %}{% endfor %}",
    "tuples in tuples": ONES + "{% set n.x = (n.x, n.x) %}{% endfor %}",
    "mappings": ONES + "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "mappings by braces": ONES + "{% set n.x = {1: n.x, 2: n.x} %}{% endfor %}",
    "arguments": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% endif %}{% endmacro %}{{ m(60, 1) }}",
    "deep lists": "{% set n = namespace(x=1) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}",
    "namespaces": ONES + "{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "many long texts": "{% set n = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set n.x = n.x + [('x' * 999999) + 'y'] %}{% endfor %}",
    "a pattern of the time": "{{ strftime_now('%d' * 9999) }}",
}


MOST_CPU_S = 5.0  # of a limit far below it: one operation holds the interpreter's lock no longer


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_endless_template_ends_at_the_limit_of_processor_time(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "MAX_CPU_S", 0.1)
    begin_s = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    with pytest.raises(TemplateLimitError, match=r"takes more than 0\.1 s of processor time"):
        render_template(template, MESSAGES, {})
    assert time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - begin_s < MOST_CPU_S


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE)
def test_large_value_is_refused_before_it_is_made(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "MAX_CPU_S", 0.3)
    begin_s = time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)
    with pytest.raises(InvalidRequestError, match=r"more than|at most"):
        render_template(template, MESSAGES, {})
    assert time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID) - begin_s < MOST_CPU_S


PLAIN = {
    "sums": "{{ 'a' + 'b' + messages[0].role + 'c' }} {{ 1 + 2 + 3 }} {{ [1] + [messages[0].role] }}",
    "sums in sums": "{{ 'a' + ('b' + messages[0].role) }} {{ 'x' ~ 1 ~ none }} {{ nothing ~ 'a' }}",
    "long sums": "{{ " + " + ".join(["messages[0].role"] * 50) + " }}",
    "operators": "{{ ('<' | safe) + messages[0].role + '<' }} {{ 2 * 'ab' }} {{ 7 % 4 }} {{ 7 // 2 }} {{ 2 ** 10 }}",
    "filtered loop": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.length }}{{ m }}{% endfor %}",
    "recursive loop": "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is iterable else i }};{% endfor %}",
    "loop over pairs": "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}{{ (1, 'a') }}",
    "percent": "{{ '%s-%5.1f %%' % ('a', 2) }} {{ '%(x)s' | format(x=1) }} {{ '%*d' % (4, 1) }}",
    "format": "{{ '{:>4}|{a!r}'.format('b', a='c') }} {{ '{0.role}'.format(messages[0]) }}",
    "join": "{{ ['a', 1, none] | join(', ') }} {{ messages | map(attribute='role') | join('/') }}",
    "methods": "{{ 'a-b'.split('-') }} {{ 'x'.ljust(3) ~ 1 }} {{ ', '.join(messages | map(attribute='role')) }}",
    "texts": "{{ 'a\nb' | indent(2) }} {{ 'x' | center(5) }} {{ 'aXa' | replace('a', 'bb') }} {{ 12 | string }}",
    "lists": "{{ [3, 1, 2] | sort }} {{ [1, 2, 3] | sum }} {{ [[1], [2]] | sum(start=[]) }} {{ 'ab' | list }}",
    "batches": "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | list }}",
    "mappings": "{{ {'b': 1, 'a': [1]} | dictsort }} {{ {'a': 1} | tojson(indent=2) }} {{ dict(a=1) }}",
    "numbers": "{{ 1.25 | round(1) }} {{ '7' | int }} {{ 'f' | int(0, 16) }}",
    "selections": "{{ messages | selectattr('role', 'eq', 'user') | list }} {{ [] | select | list }}"
    "{{ none | reject | list }}",
    "macro": "{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{{ caller() }}{% endmacro %}"
    "{% call m(1, 2, b=3) %}c{% endcall %}",
    "blocks": "{% set x %}a{{ messages[0].role }}{% endset %}{{ x | upper }}{% block b %}b{% endblock %}{{ self.b() }}",
    "markup": "{{ '<' | e }} {% autoescape true %}{{ '<' }}{{ '<' ~ ('>' | safe) }}{{ ('{}' | safe).format('<') }}"
    "{% endautoescape %}",
    "attributes": "{{ ('x' | attr('upper'))() }} {{ messages[0]['role'] }} {{ cycler(1, 2).next() }}",
}


@pytest.mark.parametrize("template", PLAIN.values(), ids=PLAIN)
def test_guarded_templates_print_what_jinja_prints(template: str) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = template_renderer._to_json
    assert render_template(template, MESSAGES, {}) == environment.from_string(template).render(messages=MESSAGES)


def test_a_limit_holds_for_its_thread_and_its_template_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}done"
    monkeypatch.setattr(template_renderer, "MAX_CPU_S", 0.0)
    with pytest.raises(TemplateLimitError):
        render_template(loops, MESSAGES, {})
    monkeypatch.setattr(template_renderer, "MAX_CPU_S", 5.0)
    assert render_template(loops, MESSAGES, {}) == "done"
    with limited(0.0):
        results: list[str] = []
        thread = threading.Thread(target=lambda: results.append(render_template(loops, MESSAGES, {})))
        thread.start()
        thread.join()
    assert results == ["done"]


def test_long_conversations_are_within_the_limits_even_if_each_step_copies_what_came_before() -> None:
    messages = [{"role": "user", "content": "x" * 200}] * 2000
    for begin, step, end in (
        ("''", "m.role + m.content", ""),
        ("[]", "[m]", " | map(attribute='content') | join('-us-')"),
    ):
        template = (
            f"{{% set ns = namespace(x={begin}) %}}{{% for m in messages %}}{{% set ns.x = ns.x + {step} %}}"
            f"{{% endfor %}}{{{{ ns.x{end} }}}}"
        )
        assert len(render_template(template, messages, {})) == 2000 * 204 - (4 if end else 0)


VALUES: list[Any] = [
    "ab <c> a b",
    ["b", "a"],
    [{"a": 2}, {"a": 1}],
    [3, 1, 2],
    2.345,
    {"b": 1, "a": 2},
    "17",
    None,
    True,
]
ARGUMENTS: dict[str, Any] = {
    **{"old": "a", "new": "<b>", "name": "a", "attribute": "a", "linecount": 2, "slices": 2, "default_value": 1},
    **{"d": "; ", "width": 5, "length": 4, "count": 1, "base": 16, "precision": 1, "fill_with": "x"},
}
PASSED_BY_JINJA = ("context", "environment", "env", "eval_ctx")
POSITIONAL = ("map", "select", "reject", "selectattr", "rejectattr", "format")  # take any arguments
FILTERS = sorted(set(jinja2.filters.FILTERS) - {"random", "lipsum", *POSITIONAL, "tojson"})


@pytest.mark.parametrize("name", FILTERS)
def test_filters_take_the_arguments_of_jinja_by_name_and_by_position(name: str) -> None:
    function = jinja2.filters.FILTERS[name]
    signature = inspect.signature(inspect.unwrap(function))
    parameters = [p for p in signature.parameters.values() if p.name not in PASSED_BY_JINJA][1:]
    given = {p.name: ARGUMENTS.get(p.name, p.default) for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    used = {**{p: f"{p}={p}" for p in required}}
    calls = [", ".join([*used.values()]), *(", ".join([*used.values(), f"{p}={p}"]) for p in given if p not in used)]
    calls += [", ".join(given), ", ".join(f"{p}={p}" for p in given)]
    plain = ImmutableSandboxedEnvironment()
    num_compared = 0
    for call in dict.fromkeys(calls):
        template = f"{{% set r = v | {name}({call}) %}}{{{{ (r | list) if r is iterable and r is not string else r }}}}"
        for value in VALUES:
            try:
                expected = plain.from_string(template).render(v=deepcopy(value), **given)  # `indent` changes lists
            except Exception:  # the filter does not take this value
                continue
            found = render_template(template, MESSAGES, {"v": deepcopy(value), **given})
            assert found == expected, (call, value)
            num_compared += 1
    assert num_compared
