"""The arena of a bucket as SVG: launches from left to right, offsets from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from tilewright.runtime.artifact import BucketRecord

WIDTH, HEIGHT, LEFT, TOP = 1000.0, 300.0, 84.0, 8.0
COLOURS = 8


@dataclass(frozen=True)
class Life:
    """A buffer's place and the launches from which to which it must keep its content."""

    name: str
    offset: int
    num_bytes: int
    first: int
    last: int


def lives(bucket: BucketRecord) -> tuple[Life, ...]:
    """Return the lifetimes of a bucket's buffers, in the order of their places."""
    spans: dict[str, tuple[int, int]] = {}
    for i, launch in enumerate(bucket.launches):
        for argument in launch.arguments:
            if argument.kind == "buffer":
                spans[argument.name] = (spans.get(argument.name, (i, i))[0], i)
    return tuple(
        Life(p.name, p.offset, p.num_bytes, *spans[p.name])
        for p in bucket.placements
        if p.name in spans
    )


def draw_arena(bucket: BucketRecord, kinds: dict[str, str]) -> str:
    """Return an `<svg>` element; `kinds` gives the type of every buffer for its tip."""
    across = WIDTH / max(len(bucket.launches), 1)
    down = HEIGHT / max(bucket.arena_bytes, 1)
    parts = [
        f'<svg class="arena" viewBox="0 0 {LEFT + WIDTH + 10:.0f} {TOP + HEIGHT + 26:.0f}">',
        f'<rect class="field" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    for i, life in enumerate(lives(bucket)):
        x, y = LEFT + life.first * across, TOP + life.offset * down
        width = (life.last - life.first + 1) * across
        tip = (
            f"{life.name}: {kinds.get(life.name, '')}\n{life.num_bytes} bytes at {life.offset}, "
            f"launches {life.first} to {life.last}"
        )
        parts.append(
            f'<rect class="c{i % COLOURS}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{max(life.num_bytes * down, 0.6):.1f}"><title>{escape(tip)}</title></rect>'
        )
    for quarter in range(5):
        y = TOP + HEIGHT * quarter / 4
        size = bytes_text(bucket.arena_bytes * quarter // 4)
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{size}</text>')
    base = TOP + HEIGHT + 18
    parts.append(f'<text x="{LEFT}" y="{base}">launch 0</text>')
    parts.append(
        f'<text class="end" x="{LEFT + WIDTH}" y="{base}">launch {len(bucket.launches) - 1}</text>'
    )
    return "\n".join([*parts, "</svg>"])


def bytes_text(count: int) -> str:
    """Print bytes with a decimal unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
