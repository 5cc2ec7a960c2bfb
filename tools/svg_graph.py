"""Layered drawings of directed graphs as SVG, laid out here: ranks, order within ranks, places.

The method is Sugiyama's (1981): long edges run through invisible points, one a rank; orders come
from averages of neighbours' places; coordinates are least-squares fits that keep boxes apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

GAP_X, GAP_Y, MARGIN = 26.0, 38.0, 24.0
CHAR_WIDTH, LINE_HEIGHT, PADDING = 6.7, 15.0, 9.0
SWEEPS = 12


@dataclass(frozen=True)
class Box:
    """One box: `kind` is its CSS class, `title` and `lines` its text, `tip` shown on hover."""

    id: str
    kind: str
    title: str
    lines: tuple[str, ...] = ()
    tip: str = ""

    @property
    def width(self) -> float:
        longest = max(len(text) for text in (self.title, *self.lines))
        return longest * CHAR_WIDTH + 2 * PADDING

    @property
    def height(self) -> float:
        return LINE_HEIGHT * (1 + len(self.lines)) + 2 * PADDING - 4


@dataclass(frozen=True)
class Edge:
    """A value that flows from one box to another; `tip` is its name and type."""

    source: str
    target: str
    tip: str = ""


@dataclass(frozen=True)
class Span:
    """A mark beside all boxes named, such as a layer that repeats."""

    boxes: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class Place:
    """Centre and size of a box, in pixels."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Where every box lies, and the points every edge passes."""

    places: Mapping[str, Place]
    paths: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def layout(boxes: Sequence[Box], edges: Sequence[Edge]) -> Layout:
    """Place boxes so that edges point down. Edges must form no cycle and name known boxes."""
    sizes = {b.id: (b.width, b.height) for b in boxes}
    ranks = _ranks([b.id for b in boxes], edges)
    rows, chains = _rows(boxes, edges, ranks)
    links = [pair for chain in chains for pair in zip(chain, chain[1:], strict=False)]
    above, below = _neighbours(links)
    _order(rows, above, below)
    centres = _centres(rows, above, below, {i: w for i, (w, _) in sizes.items()})
    heights = [max((sizes[i][1] for i in row if i in sizes), default=0.0) for row in rows]
    tops = [MARGIN + sum(heights[:r]) + GAP_Y * r for r in range(len(rows))]
    bands = {i: (tops[r], tops[r] + heights[r]) for r, row in enumerate(rows) for i in row}
    left = min((centres[i] - sizes[i][0] / 2 for i in sizes), default=0.0) - MARGIN
    places = {i: Place(centres[i] - left, sum(bands[i]) / 2, *sizes[i]) for i in sizes}
    paths = tuple(_path(chain, places, centres, bands, left) for chain in chains)
    right = max((x for path in paths for x, _ in path), default=0.0)
    width = max([right, *(p.x + p.width / 2 for p in places.values())]) + MARGIN
    return Layout(places, paths, width, tops[-1] + heights[-1] + MARGIN)


def _ranks(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Longest path from a source; sources are then pulled down to their first reader."""
    sources: dict[str, list[str]] = {n: [] for n in names}
    targets: dict[str, list[str]] = {n: [] for n in names}
    for edge in edges:
        sources[edge.target].append(edge.source)
        targets[edge.source].append(edge.target)
    ranks: dict[str, int] = {}
    waiting = list(names)
    while waiting:
        ready = [n for n in waiting if all(s in ranks for s in sources[n])]
        assert ready, f"a cycle among {waiting[:5]}"
        for name in ready:
            ranks[name] = max((ranks[s] + 1 for s in sources[name]), default=0)
        waiting = [n for n in waiting if n not in ranks]
    for name in sorted(names, key=lambda n: -ranks[n]):
        if targets[name] and not sources[name]:
            ranks[name] = min(ranks[t] for t in targets[name]) - 1
    return ranks


def _rows(
    boxes: Sequence[Box], edges: Sequence[Edge], ranks: Mapping[str, int]
) -> tuple[list[list[str]], list[list[str]]]:
    """Boxes and invisible points by rank, and for each edge the chain it runs through."""
    rows: list[list[str]] = [[] for _ in range(max(ranks.values(), default=0) + 1)]
    for box in boxes:
        rows[ranks[box.id]].append(box.id)
    chains, known = [], set()
    for edge in edges:
        chain = [edge.source]
        for rank in range(ranks[edge.source] + 1, ranks[edge.target]):
            point = f"\0{edge.source}\0{rank}"  # edges of one value share their way
            if point not in known:
                known.add(point)
                rows[rank].append(point)
            chain.append(point)
        chains.append([*chain, edge.target])
    return rows, chains


Links = Mapping[str, Sequence[str]]


def _neighbours(links: Sequence[tuple[str, str]]) -> tuple[Links, Links]:
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for upper, lower in dict.fromkeys(links):
        above.setdefault(lower, []).append(upper)
        below.setdefault(upper, []).append(lower)
    return above, below


def _order(rows: list[list[str]], above: Links, below: Links) -> None:
    """Sort each row by the average place of its neighbours, down and up in turns."""
    place = {name: float(i) for row in rows for i, name in enumerate(row)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            near = above if down else below
            row.sort(key=lambda name: _mean([place[n] for n in near.get(name, ())], place[name]))
            place.update({name: float(i) for i, name in enumerate(row)})


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _centres(
    rows: Sequence[Sequence[str]], above: Links, below: Links, widths: Mapping[str, float]
) -> dict[str, float]:
    """Horizontal centres: each row as near to its neighbours as boxes that keep apart can be."""
    centres = {name: 0.0 for row in rows for name in row}
    for row in rows:
        centres.update(_apart(row, {n: 0.0 for n in row}, widths))
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else list(reversed(rows)):
            wanted = {
                n: _mean([centres[m] for m in (*above.get(n, ()), *below.get(n, ()))], centres[n])
                for n in row
            }
            centres.update(_apart(row, wanted, widths))
    return centres


def _apart(
    row: Sequence[str], wanted: Mapping[str, float], widths: Mapping[str, float]
) -> dict[str, float]:
    """Least-squares places in order with gaps between: pool adjacent violators on offsets."""
    offsets, at = [], 0.0
    for i, name in enumerate(row):
        if i:
            at += (widths.get(row[i - 1], 0.0) + widths.get(name, 0.0)) / 2 + GAP_X
        offsets.append(at)
    pools: list[tuple[float, int]] = []
    for name, offset in zip(row, offsets, strict=True):
        total, count = wanted[name] - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return {n: s + o for n, s, o in zip(row, starts, offsets, strict=True)}


def _path(
    chain: Sequence[str],
    places: Mapping[str, Place],
    centres: Mapping[str, float],
    bands: Mapping[str, tuple[float, float]],
    left: float,
) -> tuple[tuple[float, float], ...]:
    """Points from box to box; past every row between straight down, clear of its boxes."""
    first, last = places[chain[0]], places[chain[-1]]
    points = [(centres[n] - left, y) for n in chain[1:-1] for y in bands[n]]
    return (
        (first.x, first.y + first.height / 2),
        *points,
        (last.x, last.y - last.height / 2),
    )


def draw(boxes: Sequence[Box], edges: Sequence[Edge], spans: Sequence[Span] = ()) -> str:
    """Return an `<svg>` element; boxes carry `data-id` for the page's script."""
    plan = layout(boxes, edges)
    band = 34.0 * bool(spans)
    size = f"{-band:.0f} 0 {plan.width + band:.0f} {plan.height:.0f}"
    parts = [f'<svg class="graph" viewBox="{size}" preserveAspectRatio="xMidYMin meet">']
    parts += [_draw_span(span, plan.places) for span in spans]
    parts += [_draw_edge(e, points) for e, points in zip(edges, plan.paths, strict=True)]
    parts += [_draw_box(box, plan.places[box.id]) for box in boxes]
    return "\n".join([*parts, "</svg>"])


def _draw_edge(edge: Edge, points: Sequence[tuple[float, float]]) -> str:
    x, y = points[0]
    path = f"M{x:.1f},{y:.1f}"
    for to_x, to_y in points[1:]:
        bend = (to_y - y) / 2
        path += f"C{x:.1f},{y + bend:.1f} {to_x:.1f},{to_y - bend:.1f} {to_x:.1f},{to_y:.1f}"
        x, y = to_x, to_y
    ends = f'data-from="{escape(edge.source)}" data-to="{escape(edge.target)}"'
    arrow = f"M{x - 3.5:.1f},{y - 7:.1f}L{x:.1f},{y:.1f}L{x + 3.5:.1f},{y - 7:.1f}"
    return (
        f'<g class="edge" {ends}><path d="{path}"/><path class="wide" d="{path}"/>'
        f'<path class="tip" d="{arrow}"/><title>{escape(edge.tip)}</title></g>'
    )


def _draw_box(box: Box, place: Place) -> str:
    x, y = place.x - place.width / 2, place.y - place.height / 2
    text = [_text(place.x, y + PADDING + 9, box.title, "title")]
    for i, line in enumerate(box.lines, start=1):
        text.append(_text(place.x, y + PADDING + 9 + LINE_HEIGHT * i, line, "line"))
    return (
        f'<g class="box {escape(box.kind)}" data-id="{escape(box.id)}" tabindex="0">'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{place.width:.1f}" height="{place.height:.1f}" '
        f'rx="7"/>{"".join(text)}<title>{escape(box.tip)}</title></g>'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _draw_span(span: Span, places: Mapping[str, Place]) -> str:
    inside = [places[name] for name in span.boxes]
    top = min(p.y - p.height / 2 for p in inside)
    bottom = max(p.y + p.height / 2 for p in inside)
    middle = (top + bottom) / 2
    return (
        f'<g class="span"><path d="M0,{top:.1f}h-8V{bottom:.1f}h8"/>'
        f'<text transform="translate(-16,{middle:.1f}) rotate(-90)">{escape(span.label)}</text></g>'
    )
