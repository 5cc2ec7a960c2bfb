"""Chat templates of the shapes that published models have: none of them is refused at compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.graph.errors import VerifyError
from tilewright.models.record import Checkpoint, Generation
from tilewright.tools.template_check import check_template

SHAPES = {
    "tools and a date, each of which may be undefined": (
        "{%- if not tools is defined %}{% set tools = none %}{% endif %}"
        "{%- if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ bos_token }}Today: {{ day }}"
        "{% if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}"
        "{% endif %}{% for m in messages %}{% if 'tool_calls' in m %}"
        "{% for name, value in m.tool_calls[0].function.arguments | items %}{{ name ~ value }}"
        "{% endfor %}{% else %}{{ m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "thinking is cut from all but the last answers": (
        "{%- set ns = namespace(last=messages|length - 1, searching=true) %}"
        "{%- for m in messages[::-1] %}{% if ns.searching and m.role == 'user' and "
        "m.content is string and not m.content.startswith('<result>') %}"
        "{% set ns.searching = false %}{% set ns.last = messages|length - 1 - loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ text }}{% endfor %}"
        "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "<think></think>{% endif %}"
    ),
    "roles have to alternate": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "no system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"
    ),
    "documents": (
        "{% if documents %}{% for d in documents %}{{ loop.index0|string + d.title }}{% endfor %}"
        "{% endif %}{% if 'citations' in controls and documents %}cite{% endif %}"
        "{{ messages[-1].content }}"
    ),
    "tools are tested for none alone": (
        "{% if tools is not none %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"
    ),
    "macros that call themselves": (
        "{% macro kind(s) %}{% if s.type == 'array' %}list[{{ kind(s['items']) }}]{% else %}"
        "{{ {'string': 'str'}[s.type] }}{% endif %}{% endmacro %}"
        "{{ kind({'type': 'array', 'items': {'type': 'string'}}) }}{{ messages[0].content }}"
    ),
    "neighbours and loop controls": (
        "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
        "{% continue %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "parts alone": "{% for p in messages[0].content %}{{ p.text + '' }}{% endfor %}",
    "parts or text": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif %}"
        "{% endfor %}"
    ),
    "a token for padding": "{{ pad_token + messages[0].content + eos_token }}",
    "another script is kept": "{{ messages | tojson(ensure_ascii=False) }}",
    "another name for every role": (
        "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% else %}"
        "{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
    ),
}


def checkpoint_with(template: str) -> Checkpoint:
    nothing = Generation(eos_ids=(), bos_id=None, add_bos=False)
    return Checkpoint("m", Path("m"), {}, {}, tokenizer_json=None, chat_template=template,
                      generation=nothing, special_tokens={"pad_token": "<pad>"})  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_are_taken(shape: str) -> None:
    check_template(checkpoint_with(SHAPES[shape]))


def test_one_that_can_never_work_is_refused() -> None:
    with pytest.raises(VerifyError) as caught:
        check_template(checkpoint_with("{{ missing.part + 'x' }}"))
    assert str(caught.value) == (
        "chat template of 'm': cannot be rendered: UndefinedError: \"'missing' is undefined\": "
        "want one that works, or none (m)"
    )
