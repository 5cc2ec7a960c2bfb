"""Chat templates: programs that come with a model, run in a sandbox with bounds on time and size.

Jinja's sandbox keeps a template away from everything but its arguments; it does not end loops,
recursion or texts that double. Here every pass of a loop and every call of a macro counts, nothing
makes a text longer than MAX_TEXT_CHARS, and all that is made together has a bound too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tilewright.runtime.template_growth import (
    FILTERS,
    METHODS,
    check_bits,
    check_length,
    percent_formatted,
    size_of,
    written,
)

MAX_TURNS = 100_000  # passes of loops and calls of macros in one rendering
MAX_MADE_CHARS = 1 << 31  # of all texts that one rendering makes on its way
MAX_DATE_GROWTH = 256  # characters of a date for one of its form: no more come from Python
_NOT_OF_CHATS = ("lipsum", "urlize")  # of web pages


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
    check_length(len(text) * (1 + max(width, 0)))
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
    _Measured().visit(tree)
    template = Template.from_code(environment, environment.compile(tree), environment.globals)
    pieces, length = [], 0
    for piece in template.generate(**values):
        length += len(piece)
        check_length(length)
        pieces.append(piece)
    return "".join(pieces)


def _now(form: str) -> str:
    """Return the local time, for templates that tell the model the date."""
    check_length(len(form) * MAX_DATE_GROWTH)
    return datetime.now().strftime(form)


class _Generation(Extension):
    """`{% generation %}` marks, for training, what the model said: here it is its content."""

    tags: set[str] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts turns, and measures what one rendering makes."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **settings: Any) -> None:
        # Without the optimizer nothing is computed before the rendering that counts it.
        super().__init__(finalize=_put_out, optimized=False, **settings)
        self._turns = self._made = 0
        self.filters["tojson"] = _to_json
        for name in _NOT_OF_CHATS:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters |= {name: self._measured(name, plain) for name, plain in self.filters.items()}

    def turn(self, num_chars: int) -> None:
        """Count a pass of a loop or a call of a macro, which puts out so many characters of the
        template itself; raise SecurityError after MAX_TURNS."""
        self._turns += 1
        if self._turns > MAX_TURNS:
            raise SecurityError(f"loops and macros ran {MAX_TURNS} times, and no more may")
        self._charge(num_chars)

    def made(self, value: Any) -> Any:
        """Return a value that was made, and count its characters."""
        self._charge(size_of(value))
        return value

    def _charge(self, num_chars: int) -> None:
        self._made += num_chars
        if self._made > MAX_MADE_CHARS:
            raise SecurityError(f"texts of more than {MAX_MADE_CHARS} characters together")

    def join(self, *parts: Any) -> str:
        """Return the texts of `parts` together, as the operator ~ does."""
        check_length(sum(written(part) - 1 for part in parts))
        return str(self.made("".join(map(str, parts))))

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return value[start:stop:step]."""
        return self.made(value[start:stop:step])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result could be far larger than its operands."""
        match operator:
            case "+" if _sized(left) and _sized(right):
                check_length(len(left) + len(right))
            case "*" if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
            case "*":
                for many, times in ((left, right), (right, left)):
                    if _sized(many) and isinstance(times, int):
                        check_length(len(many) * times)
            case "**" if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() * right)
            case "%" if isinstance(left, (str, bytes)):
                check_length(percent_formatted(left, right))
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:  # noqa: N805
        """Call what a template calls; methods of texts that grow are measured first."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja wraps `format` in its own
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, (str, bytes)) and name in METHODS:
            args = _listed(args) if name == "join" else args
            check_length(METHODS[name](text, *args, **named))
        return __self.made(super().call(__context, __obj, *args, **named))

    def _measured(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return one of jinja's filters behind a look at the length of its result."""
        skipped = 1 if hasattr(plain, "jinja_pass_arg") else 0  # jinja passes its settings first

        @wraps(plain)
        def measured(*args: Any, **named: Any) -> Any:
            if name in FILTERS:
                args = (*args[:skipped], *_listed(args[skipped:]))
                check_length(FILTERS[name](*args[skipped:], **named))
            return self.made(plain(*args, **named))

        return measured


@pass_context
def _put_out(context: Context, value: Any) -> str:
    """Return the text of a value that a template puts out, measured."""
    environment = context.environment
    assert isinstance(environment, _Bounded)
    written(value)
    return str(environment.made(value if isinstance(value, str) else str(value)))


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with the first one as a list where it gives its items only once."""
    return (list(args[0]), *args[1:]) if args and isinstance(args[0], Iterator) else args


def _count_turns(tree: nodes.Template) -> None:
    """Let every loop's pass and every macro's call begin by counting itself.

    The count is an attribute of the environment, which no name in a template can hide.
    """
    for node in tree.find_all(nodes.Stmt):
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            said = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
            turn = nodes.EnvironmentAttribute("turn")
            count = nodes.Call(turn, [nodes.Const(said)], [], None, None)
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))


class _Measured(NodeTransformer):
    """Replaces every `a ~ b` and `a[b:c]` by a call that looks at the length."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("join")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = [node.arg.start, node.arg.stop, node.arg.step]
        parts = [node.node, *(end or nodes.Const(None) for end in ends)]
        cut = nodes.EnvironmentAttribute("cut")
        return nodes.Call(cut, parts, [], None, None, lineno=node.lineno)


def _sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))
