"""Chat templates: what jinja says they mean, and an end to those that would not end."""

from datetime import datetime, timedelta
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tilewright.runtime.chat_template import render
from tilewright.runtime.prompt import MAX_TEXT_CHARS

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "100% of x*y?"}]
ORDINARY = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] + eos }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index % 2 }}{{ m.content ~ '!' }}"
    "{% else %}none{% endfor %}",
    "{% macro show(m) %}[{{ m.content|trim }}{{ caller() }}]{% endmacro %}"
    "{% for m in messages %}{% call show(m) %}{{ loop.index0 }}{% endcall %}{% endfor %}",
    "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text ~ m.role ~ loop.index ~ none %}{% endfor %}{{ ns.text }}",
    "{{ messages[0].content.replace('b', 'bb') }}{{ 'a-b'|replace('-', '+') }}",
    "{{ '%s and %03d' % ('x', 7) }}{{ 'x' * 3 }}{{ 2 ** 10 }}{{ 'x'|center(9) }}{{ 7 % 4 }}",
    "{% set turn = 1 %}{% set join = 2 %}{% for i in range(3) %}{{ i ~ turn }}{% endfor %}",
    "{{ '**%s** 12345: {%s} 100%% %5.1f' % ('x', 'y', 2.5) }}{{ '%d items'|format(3) }}",
    "{{ '**{}** 12345 {{\"a\": {}}} {:>5} {b[0]}'.format('x', 'y', 'z', b=[1]) }}",
    "{{ messages[1:][0].role }}{{ messages[::-1][0].role }}{{ 'abcdef'[1:-1:2] }}",
    "{{ messages|map(attribute='role')|join(', ') }}",
    "{{ ', '.join(messages|map(attribute='role')) }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ [[1], [2]]|sum(start=[]) }}",
    "{{ 'a\nb'|indent(2, true) }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ range(5)|slice(2)|list }}",
    "{{ messages[0]|dictsort }}{{ messages|first|string }}{{ 2.345|round(1) }}",
    "{{ [messages[0].role] }}",
    "{{ 'a b c d'|wordwrap(3) }}{{ 'é'.encode('utf-8').hex() }}{{ 'ab'.translate({97: 'x'}) }}",
    "{{ 7 * 8 }}{{ -3 * 2.5 }}{{ true * 2 }}{{ none }}{{ missing }}",
    "{{ ['x'] * 2 }}{{ 'x' ~ 1.0 ~ [2] }}",
    "{% set text %}{% for m in messages %}{{ m.role }}\n{% endfor %}{% endset %}"
    "{{ text|trim|upper }}",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
]
ENDLESS = [
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set turn = 0 %}{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
]
HUGE = [
    "{% for i in range(999) %}{{ 'x' * 10 ** 6 }}{% endfor %}",
    "{% for i in range(9000) %}" + "x" * 10**5 + "{% endfor %}",
    "{% set t %}{% for i in range(999) %}{{ 'x' * 10 ** 7 }}{% endfor %}{% endset %}",
    "{% macro f() %}" + "x" * 10**5 + "{% endmacro %}"
    "{% for i in range(40000) %}{% set t = f() %}{% endfor %}",
    "{% set ns = namespace(l=[], s='x' * 10 ** 7) %}"
    "{% for i in range(999) %}{% set ns.l = ns.l + [ns.s[1:]] %}{% endfor %}",
    "{% set ns = namespace(l=[], s='x' * 10 ** 7) %}"
    "{% for i in range(999) %}{% set ns.l = ns.l + [ns.s.upper()] %}{% endfor %}",
    "{% set ns = namespace(l=[], s='x' * 10 ** 7) %}"
    "{% for i in range(999) %}{% set ns.l = ns.l + [ns.s|lower] %}{% endfor %}",
    "{{ range(999)|map('center', 10 ** 7)|list }}",
    "{{ ([1] * 10 ** 5)|join('x' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5).join(['a'] * 10 ** 5) }}",
    "{{ ['x' * 10 ** 6] * 1000 }}",
    "{{ 'x' ~ ['x' * 10 ** 6] * 1000 }}",
    "{{ (['x' * 10 ** 6] * 1000)|tojson }}",
    "{{ (['x' * 10 ** 6] * 1000)|string }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=10 ** 9) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 1000).format('x' * 10 ** 6) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '%.*f' % (1000000000, 1) }}",
    "{{ ('%s' * 1000) % (('x' * 10 ** 6,) * 1000) }}",
    "{{ 'a'|indent(10 ** 9, true) }}",
    "{{ [1]|batch(10 ** 9, 1)|list }}",
    "{{ [1]|slice(10 ** 9)|list }}",
    "{{ ([[1] * 10 ** 6] * 10 ** 4)|sum(start=[]) }}",
    "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "{{ '\\t'.expandtabs(tabsize=10 ** 9) }}",
    "{{ 'x'.encode().ljust(10 ** 9) }}",
    "{{ 'x'|center(width=10 ** 9) }}",
    "{{ ('x' * 10 ** 5)|replace(old='x', new='y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5).translate({120: 'y' * 10 ** 5}) }}",
    "{{ ('x ' * 10 ** 4)|wordwrap(1, wrapstring='y' * 10 ** 5) }}",
    "{{ messages|tojson(indent=10 ** 9) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='x' * 99) %}"
    "{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}"
    "{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'x' * 10 ** 9 }}",
    "{{ 10 ** 9 * [1] }}",
    "{{ 10 ** 9999999 }}",
    "{{ 10 ** 99 ** 99 ** 99 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ 'x'.ljust(10 ** 9) }}",
    "{{ 'x'|center(10 ** 9) }}",
    "{{ strftime_now('%Y' * 10 ** 6) }}",
    "{{ ('x' * 10 ** 6).replace('x', 'y' * 10 ** 6) }}",
    "{{ ('x' * 10 ** 6)|replace('x', 'y' * 10 ** 6) }}",
]


def rendered_plainly(source: str, values: dict[str, Any]) -> str:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return plain.from_string(source).render(**values)


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_mean_what_jinja_says(source: str) -> None:
    values = {"messages": MESSAGES, "eos": "</s>"}
    assert render(source, values) == rendered_plainly(source, values)


@given(st.lists(st.text(max_size=20), max_size=6), st.sampled_from(ORDINARY[:4]))
def test_any_content_goes_through_unchanged(contents: list[str], source: str) -> None:
    values = {"messages": [{"role": "user", "content": c} for c in contents], "eos": "</s>"}
    assert render(source, values) == rendered_plainly(source, values)


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_end(source: str) -> None:
    with pytest.raises(SecurityError, match="ran 100000 times"):
        render(source, {})


@pytest.mark.parametrize("source", HUGE)
def test_texts_that_grow_without_bound_are_refused(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, {"messages": MESSAGES})


def test_published_templates_use_more_than_jinja_has() -> None:
    """Loops that are left, marks for training, and the date, which `transformers` gives too."""
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{%- generation %}{{ m.role }}{% endgeneration -%}{% endfor %}{{ strftime_now('%Y-%%') }}"
    )
    years = {str(now.year) for now in (datetime.now(), datetime.now() - timedelta(seconds=60))}
    assert render(source, {"messages": MESSAGES}) in {f"system{year}-%" for year in years}
    with pytest.raises(SecurityError, match="ran 100000 times"):
        loop = "{% for j in range(9999) %}{% if j %}{% continue %}{% endif %}{% endfor %}"
        render(f"{{% for i in range(99) %}}{loop}{{% endfor %}}", {})


def test_the_bound_on_texts_is_where_it_says() -> None:
    assert render("{{ ('x' * n)|length }}", {"n": MAX_TEXT_CHARS}) == str(MAX_TEXT_CHARS)
    with pytest.raises(SecurityError, match=f"want at most {MAX_TEXT_CHARS}"):
        render("{{ ('x' * n)|length }}", {"n": MAX_TEXT_CHARS + 1})


def test_a_template_reaches_nothing_but_its_values() -> None:
    with pytest.raises(SecurityError):
        render("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", {"messages": []})
