"""What the executor asks of a device, and nothing else.

A device opens one session for each executor: memory, launches and their order are the session's;
which bucket a step takes and whether its inputs fit is the executor's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.runtime.artifact import BucketRecord, LaunchRecord, Manifest
from tilewright.runtime.devices.memory import Array, Bytes

if TYPE_CHECKING:
    from tilewright.runtime.artifact_files import LoadedArtifact
    from tilewright.runtime.cache_layout import CacheLayout
    from tilewright.runtime.choose import Chooser
    from tilewright.runtime.snapshot import CacheMemory


class Observer(Protocol):
    """Sees every launch of a step: arguments in kernel order, then ints, before and after the call.

    Arrays are the live memory, or copies where that is not on the host: bf16 as uint16. An
    observer must not write them.
    """

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Called with outputs not yet written."""

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Called with outputs written."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step to run: the dims it was given, all dims bound, and its bucket."""

    given: Mapping[str, int]
    dims: Mapping[str, int]
    bucket: BucketRecord


class Library(Protocol):
    """The kernels of an artifact, loaded. Stays loaded for the life of the process."""

    path: Path

    @property
    def module(self) -> Any:
        """The library as a TVM-FFI module: kernels by symbol, called one by one."""


class Session(Protocol):
    """Memory and launches of one executor, which lets one thread in at a time."""

    def allocate_states(self, dims: Mapping[str, int]) -> None:
        """Make zeroed states of these dims; earlier ones are dropped."""

    def state(self, name: str, dims: Mapping[str, int]) -> Array:
        """Return a state's memory on the host: live, or a copy."""

    def cache_memory(self, layout: CacheLayout) -> CacheMemory:
        """Return what copies between the states that are allocated when it is called and
        snapshots."""

    def write_inputs(self, step: Step, inputs: Mapping[str, Array]) -> None:
        """Take arrays that have the types and shapes the step wants."""

    def run(self, step: Step) -> None:
        """Launch the step's kernels. Raises LaunchFailed for the first that fails."""

    def time_launches(self, step: Step) -> Sequence[float]:
        """Launch the step's kernels; return the seconds of each."""

    def observe(self, step: Step, observer: Observer) -> None:
        """Launch the step's kernels one by one, showing each. Raises LaunchFailed."""

    def outputs(self, step: Step) -> Mapping[str, Any]:
        """Return the outputs where they lie, valid until the next step."""

    def host_outputs(self, step: Step) -> Mapping[str, Array]:
        """Return the outputs on the host, valid until the next step."""

    def chooser(self) -> Chooser:
        """Return what chooses tokens from the outputs where they lie."""

    def close(self) -> None:
        """Stop threads and give memory back; the session must not run again."""


class Device(Protocol):
    """A processor that runs artifacts."""

    def check(self, manifest: Manifest) -> None:
        """Raise ArtifactError unless this device can run kernels built for the target."""

    def cache_blocks(self, manifest: Manifest, wanted: int, *, is_exact: bool) -> int:
        """Return how many blocks the cache gets: `wanted`, or fewer if that was only a default.

        Raises ArtifactError, with the numbers, if the memory cannot hold them.
        """

    def load_library(self, path: Path, symbols: Sequence[str]) -> Library:
        """Load an artifact's kernels; raise ArtifactError if one is missing."""

    def load_weights(self, path: Path) -> Bytes:
        """Return the bytes of the weights file on the host, as this device likes to read them."""

    def open(self, artifact: LoadedArtifact, *, poison: bool = False) -> Session:
        """Make the memory and threads of one executor."""

