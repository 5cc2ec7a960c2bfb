"""What is decided of an engine before anything is loaded: its device, and the size of its cache."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.runtime.artifact import Manifest
from tilewright.runtime.devices.device import Device
from tilewright.runtime.devices.registry import open_device
from tilewright.runtime.errors import RequestError

CACHED_CONTEXTS = 4  # full contexts the cache holds by default; pages are taken when touched


@dataclass
class Opening:
    """Settings of an engine; `choose` decides its device, and `cache_blocks`, from a manifest."""

    device_name: str | None
    num_threads: int | None
    cache_tokens: int | None
    graphs: bool | None

    def choose(self, manifest: Manifest) -> Device:
        """Return the device; raise RequestError or ArtifactError if the engine cannot be opened."""
        wanted = self._blocks(manifest)
        device = open_device(
            manifest, self.device_name, num_threads=self.num_threads, graphs=self.graphs
        )
        device.check(manifest)
        is_exact = self.cache_tokens is not None
        self.cache_blocks = device.cache_blocks(manifest, wanted, is_exact=is_exact)
        return device

    def _blocks(self, manifest: Manifest) -> int:
        size, tokens = manifest.model.block_size, self.cache_tokens
        most = next(d.upper for d in manifest.dims if d.name == "cache_blocks")
        contexts = min(max(manifest.model.max_context * CACHED_CONTEXTS, size), most * size)
        wanted = contexts if tokens is None else tokens
        if type(wanted) is not int or not size <= wanted <= most * size:
            raise RequestError(
                f"engine 'cache_tokens': got {tokens!r}, want an int in {size}..{most * size}"
            )
        return -(-wanted // size)
