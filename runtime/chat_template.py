"""Chat templates: programs that come with a model, run in a sandbox with bounds on time and size.

Jinja's sandbox keeps a template away from everything but its arguments; it does not end loops,
recursion or texts that double. Here every pass of a loop and every call of a macro counts, and no
operator makes a text longer than MAX_TEXT_CHARS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tilewright.runtime.prompt import MAX_TEXT_CHARS

MAX_TURNS = 100_000  # passes of loops and calls of macros in one rendering
MAX_POWER_BITS = 1 << 14
MAX_DATE_GROWTH = 256  # characters of a date for one of its form: no more come from Python


def conversation(
    messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], refuse: Callable[[str], None]
) -> dict[str, Any]:
    """Return what published templates expect to find, with the values of those they test for.

    `special`: texts of tokens by name; `refuse` is what a template calls to turn messages down.
    """
    return {
        "messages": [dict(message) for message in messages], "tools": None, "documents": None,
        "add_generation_prompt": True, "raise_exception": refuse, "bos_token": "", "eos_token": "",
        **special,
    }  # fmt: skip


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as published templates mean it: jinja's own filter writes it for web pages."""
    width = indent if isinstance(indent, int) else 0
    text = json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    _check_length(len(text) * (1 + max(width, 0)))
    if indent is None:
        return text
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text that a template makes of `values`.

    Raises jinja2's SecurityError where a bound is passed, and whatever the template raises.
    """
    environment = _Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals["strftime_now"] = _now
    tree = environment.parse(source)
    _count_turns(tree)
    _MeasuredJoins().visit(tree)
    template = Template.from_code(environment, environment.compile(tree), environment.globals)
    return template.render(**values)


def _now(form: str) -> str:
    """Return the local time, for templates that tell the model the date."""
    _check_length(len(form) * MAX_DATE_GROWTH)
    return datetime.now().strftime(form)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the model said: here it is its content."""

    tags: set[str] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts turns and measures texts of one rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._turns = 0
        for name in ("replace", "center"):
            self.filters[name] = _measured_filter(name, self.filters[name])
        self.filters["tojson"] = _to_json

    def turn(self) -> None:
        """Count a pass of a loop or a call of a macro; raise SecurityError after MAX_TURNS."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"loops and macros ran {MAX_TURNS} times, and no more may")

    def join(self, *parts: Any) -> str:
        """Return the texts of `parts` together, as the operator ~ does."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result could be far larger than its operands."""
        match operator:
            case "+" if _sized(left) and _sized(right):
                _check_length(len(left) + len(right))
            case "*":
                for many, times in ((left, right), (right, left)):
                    if _sized(many) and isinstance(times, int):
                        _check_length(len(many) * times)
            case "**" if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > MAX_POWER_BITS:
                    raise SecurityError(f"a power of over {MAX_POWER_BITS} bits")
            case "%" if isinstance(left, str) and _WIDE.search(left):
                raise SecurityError("a format with a width that is too large or an argument")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805
        """Call what a template calls; methods of texts that pad or replace are measured first."""
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ in _GROWING:
            _check_length(_GROWING[__obj.__name__](text, *args))
        return super().call(__context, __obj, *args, **named)


def _count_turns(tree: nodes.Template) -> None:
    """Let every loop's pass and every macro's call begin by counting itself.

    The count is an attribute of the environment, which no name in a template can hide.
    """
    for node in tree.find_all(nodes.Stmt):
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            count = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))


class _MeasuredJoins(NodeTransformer):
    """Replaces every `a ~ b` by a call that looks at the length first."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("join")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)


def _measured_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of jinja's filters behind a look at the length of its result."""

    @wraps(plain)
    def measured(*args: Any, **named: Any) -> Any:
        texts = args[1:] if name == "replace" else args  # jinja passes its settings first
        _check_length(_GROWING[name](str(texts[0]), *texts[1:]))
        return plain(*args, **named)

    return measured


def _replaced(text: str, old: str = "", new: str = "", *_: Any) -> int:
    return len(text) + text.count(old) * len(new)


def _padded(text: str, width: int = 0, *_: Any) -> int:
    return max(len(text), width)


_GROWING: Mapping[str, Callable[..., int]] = {
    "replace": _replaced, "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded,
    "expandtabs": lambda text, size=8: len(text) * max(size, 1),
}  # fmt: skip
_WIDE = re.compile(r"\*|\d{5,}")


def _sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _check_length(length: int) -> None:
    if length > MAX_TEXT_CHARS:
        raise SecurityError(f"a text of {length} characters, want at most {MAX_TEXT_CHARS}")
