"""How the states of an artifact lie in pages: one pool for what lives as long as its request, one
for what only the newest positions need.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.artifact import Manifest, StateRecord, evaluate
from tilewright.runtime.errors import ArtifactError
from tilewright.runtime.plan_check import tensor_bytes

BLOCKS, WINDOW = "block", "window"  # scopes of states, and the names of their pools
PAGES_DIM = {BLOCKS: "cache_blocks", WINDOW: "window_blocks"}
TABLES_INPUT = {BLOCKS: "block_tables", WINDOW: "window_tables"}
TAIL_TABLES = "tail_window_tables"


@dataclass(frozen=True)
class PoolLayout:
    """The states of one scope. A page is `page_positions` positions in every one of them."""

    scope: str
    page_positions: int
    states: tuple[StateRecord, ...]

    @property
    def pages_dim(self) -> str:
        """The dim that counts the pages of these states."""
        return PAGES_DIM[self.scope]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all states together."""
        return sum(tensor_bytes(s, {self.pages_dim: 1}) for s in self.states)


@dataclass(frozen=True)
class CacheLayout:
    """Both pools. `window` is None where no state is of that scope.

    `reach`: the newest positions that some window state may still read, the next one included.
    `ring_width`: pages in a row of the window tables. `replay`: how many of a prompt's last tokens
    go through the layers whose window rows lie in tables of their own; None if all tokens do.
    """

    blocks: PoolLayout
    window: PoolLayout | None
    reach: int
    ring_width: int
    replay: int | None = None

    @property
    def windows(self) -> int:
        """Window tables of a request."""
        return 0 if self.window is None else 1 if self.replay is None else 2

    @property
    def pools(self) -> tuple[PoolLayout, ...]:
        """The pools there are."""
        return (self.blocks,) if self.window is None else (self.blocks, self.window)

    @property
    def bytes_per_token(self) -> float:
        """Bytes by which the cache of a request grows with every position, on average."""
        return self.blocks.page_bytes / self.blocks.page_positions


def cache_layout(manifest: Manifest) -> CacheLayout:
    """Read the layout out of the states and tables of a manifest.

    Raises ArtifactError for states that do not lie in pages of their pool, and for a window table
    too narrow for a step.
    """
    grouped = {scope: _pool(manifest, scope) for scope in (BLOCKS, WINDOW)}
    window = grouped[WINDOW] if grouped[WINDOW].states else None
    reach = max((s.window for s in grouped[WINDOW].states), default=0)
    width = _ring_width(manifest, window, reach) if window else 0
    return CacheLayout(grouped[BLOCKS], window, reach, width, _replay(manifest))


def _replay(manifest: Manifest) -> int | None:
    """Return the tokens of a tail, where the graph has one."""
    if not any(i.name == TAIL_TABLES for i in manifest.inputs):
        return None
    found = manifest.compile_config.get("replay_tokens")
    if type(found) is not int or found < 1:
        raise ArtifactError(f"setting 'replay_tokens': got {found!r}, want a positive int")
    return found


def _pool(manifest: Manifest, scope: str) -> PoolLayout:
    states = tuple(s for s in manifest.states if s.scope == scope)
    size = _positions(states[0]) if states else manifest.model.block_size
    if scope == BLOCKS and size != manifest.model.block_size:
        raise ArtifactError(
            f"model 'block_size': differs from the pages of state '{states[0].name}': "
            f"got {manifest.model.block_size} positions, want {size}"
        )
    for state in states:
        if not state.shape or state.shape[0] != PAGES_DIM[scope]:
            raise ArtifactError(
                f"state '{state.name}': not in pages: got shape {list(state.shape)}, "
                f"want {PAGES_DIM[scope]} first"
            )
        if scope == WINDOW and state.positions_per_entry != 1:
            raise ArtifactError(
                f"state '{state.name}': positions_per_entry of scope window: got "
                f"{state.positions_per_entry}, want 1"
            )
        if _positions(state) != size:
            raise ArtifactError(
                f"state '{state.name}': page size differs: got {_positions(state)} positions, "
                f"want {size}"
            )
    return PoolLayout(scope, size, states)


def _positions(state: StateRecord) -> int:
    """Positions in a page: the second but last extent counts entries."""
    entries = state.shape[-2] if len(state.shape) > 2 else None
    if not isinstance(entries, int) or entries < 1:
        raise ArtifactError(
            f"state '{state.name}': not in pages: got shape {list(state.shape)}, "
            "want a positive count of entries second but last"
        )
    return entries * state.positions_per_entry


def _ring_width(manifest: Manifest, window: PoolLayout, reach: int) -> int:
    tables = next((i for i in manifest.inputs if i.name == TABLES_INPUT[WINDOW]), None)
    if tables is None or len(tables.shape) != 2:
        raise ArtifactError(
            f"input '{TABLES_INPUT[WINDOW]}': missing: states "
            f"such as '{window.states[0].name}' are of scope window"
        )
    limits = {d.name: d.upper for d in manifest.dims}
    width, tokens = evaluate(tables.shape[1], limits), limits["tokens"]
    needed = ring_pages(reach, tokens, window.page_positions)
    if width < needed:
        raise ArtifactError(
            f"input '{TABLES_INPUT[WINDOW]}': too narrow: got {width} pages of "
            f"{window.page_positions} positions, want at least {needed} "
            f"for a window of {reach} and steps of {tokens} tokens"
        )
    return width


def ring_widths(manifest: Manifest) -> frozenset[str]:
    """Return the dims that are widths of window tables: every step has them at their limit."""
    names = (TABLES_INPUT[WINDOW], TAIL_TABLES)
    widths = [i.shape[1] for i in manifest.inputs if i.name in names and len(i.shape) == 2]
    return frozenset(w for w in widths if isinstance(w, str))


def ring_pages(reach: int, tokens: int, page_positions: int) -> int:
    """Pages that `tokens` consecutive positions and the `reach` - 1 before them may touch."""
    return -(-(reach + tokens - 2) // page_positions) + 1


def default_window_pages(layout: CacheLayout, *, tokens: int, requests: int, retained: int) -> int:
    """Pages with which `requests` decode at once while a step of `tokens` tokens is prefilled.

    `retained`: older positions that each keeps so that it can be set back.
    """
    if layout.window is None:
        return 0
    size = layout.window.page_positions
    kept = ring_pages(layout.reach + retained, 1, size)
    return layout.windows * (requests * kept + -(-tokens // size) + 1)
