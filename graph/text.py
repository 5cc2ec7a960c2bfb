"""Print a graph as text and parse it back, exactly: `parse_graph(print_graph(g)) == g`.

One declaration a line, starting with its keyword, so that two dumps can be compared line by line.
Numbers print as Python prints them, which reads back to the same bits; a name that is not a plain
word, and every string, is quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tilewright.graph.dims import DimDecl, Role, parse_dim
from tilewright.graph.errors import ShapeError, VerifyError
from tilewright.graph.ir import Attr, Graph, Group, Input, Node, State, Weight, WeightExpr
from tilewright.graph.types import TensorType, element_type

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_PLAIN_ORIGIN = re.compile(r"[!#-~](?:[ -~]*[!-~])?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)")
_TYPE = re.compile(r"([a-z0-9_]+(?:\[[^\[\]]*=[^\[\]]*\])?)\[([^\[\]]*)\]")
_QUOTE_NEXT = re.compile(r'(?=")')

T = TypeVar("T")


def print_graph(graph: Graph) -> str:
    """Return the graph as text; equal graphs give equal bytes."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    yield f"graph {_word(graph.name)}"
    for d in graph.dims:
        yield f"dim {_word(d.name)} {d.role.value} {d.lower}..{d.upper}"
    for i in graph.inputs:
        yield f"input {_word(i.name)}: {i.type}"
    for s in graph.states:
        window = f" {s.window}" if s.scope == "window" else ""
        yield f"state {_word(s.name)}: {s.type} {_word(s.scope)} {s.positions_per_entry}{window}"
    for w in graph.weights:
        args = ", ".join(_attr(a) for a in w.expr.args)
        yield f"weight {_word(w.name)}: {w.type} = {_word(w.expr.kind)}({args})"
    yield from map(print_node, graph.nodes)
    for public, value in graph.outputs:
        yield f"output {_word(public)} = {_word(value)}"
    for state, value in graph.state_outputs:
        yield f"next {_word(state)} = {_word(value)}"
    for g in graph.groups:
        nodes = "".join(f" {_word(n)}" for n in g.nodes)
        yield f"group {_word(g.name)} {_word(g.kind)}:{nodes}"


def print_node(node: Node) -> str:
    """Return one node as a line, its origin as a trailing comment."""
    args = ", ".join(
        [*map(_word, node.inputs), *(f"{_word(k)}={_attr(v)}" for k, v in node.attrs)]
    )
    line = f"node {_word(node.name)}: {node.type} = {_word(node.op)}({args})"
    if not node.origin:
        return line
    plain = _PLAIN_ORIGIN.fullmatch(node.origin)
    return f"{line}  # {node.origin if plain else json.dumps(node.origin)}"


def _word(name: str) -> str:
    return name if _WORD.fullmatch(name) else json.dumps(name)


def _attr(value: Attr) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value)
        case tuple():
            return f"({', '.join(_attr(v) for v in value)})"


def parse_graph(text: str) -> Graph:
    """Return the graph printed as `text`.

    Blank lines, and lines that start with #, are skipped. Raises VerifyError naming the line for
    anything that is not well formed; whether the graph makes sense is `verify`'s question.
    """
    parts = _Parts()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            _parse_line(_Line(line, parts.types), parts)
        except ShapeError as error:
            raise VerifyError(f"graph text line {number}: {error}") from None
    if len(parts.names) != 1:
        got = len(parts.names)
        raise VerifyError(f"graph text: wrong number of 'graph' lines: got {got}, want 1")
    return Graph(
        name=parts.names[0],
        dims=tuple(parts.dims),
        inputs=tuple(parts.inputs),
        states=tuple(parts.states),
        weights=tuple(parts.weights),
        nodes=tuple(parts.nodes),
        outputs=tuple(parts.outputs),
        state_outputs=tuple(parts.state_outputs),
        groups=tuple(parts.groups),
    )


@dataclass
class _Parts:
    """What has been parsed so far, and every type text met (most occur many times)."""

    names: list[str] = field(default_factory=list)
    dims: list[DimDecl] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    state_outputs: list[tuple[str, str]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)


class _Line:
    """A cursor over one line. Every method raises ShapeError for what it does not find."""

    def __init__(self, text: str, types: dict[str, TensorType]) -> None:
        self._text = text
        self._at = 0
        self._types = types

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        self._skip_spaces()
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match.group()

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r":
            self._at += 1

    def _fail(self, want: str) -> ShapeError:
        got = self._text[self._at : self._at + 24].strip() or "the end of the line"
        return ShapeError(f"malformed at column {self._at + 1}: got {got}, want {want}")

    def accept(self, mark: str) -> bool:
        """Step over a punctuation mark if it comes next."""
        self._skip_spaces()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            raise self._fail(f"'{mark}'")

    def word(self, want: str = "a name") -> str:
        """Take a plain or a quoted name."""
        if (word := self._take(_WORD)) is not None:
            return word
        return self._string(want)

    def _string(self, want: str) -> str:
        self._skip_spaces()
        start = self._at
        if (quoted := self._take(_STRING)) is not None:
            try:
                return str(json.loads(quoted))
            except ValueError:
                self._at = start
        raise self._fail(want)

    def number(self) -> int | float:
        self._skip_spaces()
        start = self._at
        text = self._take(_NUMBER)
        if text is None:
            raise self._fail("a number")
        try:
            return float(text) if set(text) & set(".aeinf") else int(text)
        except ValueError:  # more digits than Python reads
            self._at = start
            raise self._fail("a number of fewer digits") from None

    def integer(self) -> int:
        self._skip_spaces()
        start = self._at
        value = self.number()
        if isinstance(value, int):
            return value
        self._at = start
        raise self._fail("an integer")

    def attr(self) -> Attr:
        if self.accept("("):
            return tuple(self.listed(self.attr))
        for word, value in (("true", True), ("false", False)):
            if self.accept(word):
                return value
        if self._take(_QUOTE_NEXT) is not None:
            return self._string("a string")
        return self.number()

    def type(self) -> TensorType:
        text = self._take(_TYPE)
        if text is None:
            raise self._fail("a type, as f32[tokens, 64]")
        if text not in self._types:
            self._types[text] = parse_type(text)
        return self._types[text]

    def listed(self, item: Callable[[], T]) -> list[T]:
        """Take items separated by commas, up to a closing parenthesis."""
        found: list[T] = []
        while not self.accept(")"):
            if found:
                self.expect(",")
            found.append(item())
        return found

    def origin(self) -> str:
        """Take the trailing comment, if there is one."""
        if not self.accept("#"):
            return ""
        self._skip_spaces()
        if self._text.startswith('"', self._at):
            return self._string("a quoted origin")
        rest = self._text[self._at :].strip()
        self._at = len(self._text)
        return rest

    def words(self) -> Iterator[str]:
        """Take all names up to the end of the line."""
        while True:
            self._skip_spaces()
            if self._at == len(self._text):
                return
            yield self.word()

    def end(self) -> None:
        self._skip_spaces()
        if self._at < len(self._text):
            raise self._fail("the end of the line")


def parse_type(text: str) -> TensorType:
    """Return the type printed as `text`; raise ShapeError for an unknown one."""
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ShapeError(f"type '{text}': malformed: want an element type and [dims]")
    return TensorType(
        element_type(match.group(1)), tuple(parse_dim(d) for d in _split(match.group(2)))
    )


def _split(text: str) -> list[str]:
    """Split at the commas outside parentheses."""
    parts: list[str] = []
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    last = text[start:]
    return [*parts, last] if parts or last.strip() else []


def _parse_line(line: _Line, parts: _Parts) -> None:
    keyword = line.word("a keyword")
    if keyword not in _PARSERS:
        raise ShapeError(f"unknown keyword: got {keyword}, want {', '.join(_PARSERS)}")
    _PARSERS[keyword](line, parts)
    line.end()


def _parse_dim_line(line: _Line, parts: _Parts) -> None:
    name, role = line.word(), line.word("a role")
    known = [r.value for r in Role]
    if role not in known:
        raise ShapeError(f"unknown role: got {role}, want {' or '.join(known)}")
    lower = line.integer()
    line.expect("..")
    parts.dims.append(DimDecl(name, Role(role), lower, line.integer()))


def _parse_state(line: _Line, parts: _Parts) -> None:
    name, type_ = _typed(line)
    scope, positions = line.word("a scope"), line.integer()
    window = line.integer() if scope == "window" else 0
    parts.states.append(State(name, type_, scope, positions, window))


def _parse_weight(line: _Line, parts: _Parts) -> None:
    name, type_ = _typed(line)
    line.expect("=")
    kind = line.word()
    line.expect("(")
    parts.weights.append(Weight(name, type_, WeightExpr(kind, tuple(line.listed(line.attr)))))


def _parse_node(line: _Line, parts: _Parts) -> None:
    name, type_ = _typed(line)
    line.expect("=")
    op = line.word("an op")
    line.expect("(")
    inputs: list[str] = []
    attrs: list[tuple[str, Attr]] = []

    def operand_or_attr() -> None:
        word = line.word("an operand")
        if line.accept("="):
            attrs.append((word, line.attr()))
        elif attrs:
            raise ShapeError(f"operand after an attribute: got {word}, want operands first")
        else:
            inputs.append(word)

    line.listed(operand_or_attr)
    origin = line.origin()
    parts.nodes.append(Node(name, op, tuple(inputs), tuple(attrs), type_, origin))


def _parse_group(line: _Line, parts: _Parts) -> None:
    name, kind = line.word(), line.word("a kind")
    line.expect(":")
    parts.groups.append(Group(name, kind, tuple(line.words())))


def _typed(line: _Line) -> tuple[str, TensorType]:
    name = line.word()
    line.expect(":")
    return name, line.type()


def _pair(line: _Line) -> tuple[str, str]:
    name = line.word()
    line.expect("=")
    return name, line.word()


_PARSERS: Mapping[str, Callable[[_Line, _Parts], None]] = {
    "graph": lambda line, parts: parts.names.append(line.word()),
    "dim": _parse_dim_line,
    "input": lambda line, parts: parts.inputs.append(Input(*_typed(line))),
    "state": _parse_state,
    "weight": _parse_weight,
    "node": _parse_node,
    "output": lambda line, parts: parts.outputs.append(_pair(line)),
    "next": lambda line, parts: parts.state_outputs.append(_pair(line)),
    "group": _parse_group,
}
