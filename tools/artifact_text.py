"""The readable side of an artifact: printed graphs, decisions, kernel sources; digests checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewright.runtime import ArtifactError
from tilewright.runtime.artifact import Manifest
from tilewright.runtime.artifact_files import read_manifest


@contextmanager
def named(root: Path) -> Iterator[None]:
    """Say in every error which artifact it is about."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(f"artifact '{root}': {error}") from None
    except OSError as error:
        raise ArtifactError(f"artifact '{root}': {error.filename}: {error.strerror}") from None


class ArtifactText:
    """Reads an artifact without loading its kernels: also one built for another machine."""

    def __init__(self, root: Path) -> None:
        """Raises ArtifactError for anything that is no artifact."""
        self.root = root
        with named(root):
            self.manifest: Manifest = read_manifest(root)

    def text(self, name: str) -> str:
        """Return a text file of the artifact; raise ArtifactError if it was edited."""
        with named(self.root):
            if name not in self.manifest.digests:
                raise ArtifactError(f"file '{name}' has no digest")
            content = (self.root / name).read_bytes()
            got, want = hashlib.sha256(content).hexdigest(), self.manifest.digests[name]
            if got != want:
                raise ArtifactError(
                    f"file '{name}' was edited or damaged: got SHA-256 {got[:12]}, "
                    f"want {want[:12]}; compile the model again"
                )
        return content.decode()

    def decisions(self) -> dict[str, Any]:
        """Return what every rule and template decided."""
        tree: dict[str, Any] = json.loads(self.text("sources/decisions.json"))
        return tree
