"""Open an artifact: verify everything first, then load its kernels and map its weights.

Digests detect damage, not malice: an artifact is code, so load only what you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tokenizers import Tokenizer

from tilewright.runtime.artifact import ABI, FORMAT, Manifest, evaluate, from_json, weight_tensor
from tilewright.runtime.devices.device import Device, Library
from tilewright.runtime.devices.memory import Array, Bytes, numpy_type, release_unused_memory
from tilewright.runtime.devices.registry import open_device
from tilewright.runtime.errors import ArtifactError
from tilewright.runtime.json_pairs import repeated_key
from tilewright.runtime.plan_check import check_manifest
from tilewright.runtime.prompt import load_tokenizer

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class LoadedArtifact:
    """A verified artifact, and the device it was loaded for.

    `weights` are read-only views of the file, as kernels see them.
    """

    path: Path
    manifest: Manifest
    library: Library
    tokenizer: Tokenizer | None
    weights: Mapping[str, Array]
    device: Device


def load_artifact(
    path: str | os.PathLike[str],
    device: Device | None = None,
    *,
    choose_device: Callable[[Manifest], Device] = open_device,
) -> LoadedArtifact:
    """Verify and load the artifact in a directory, for a device: by default the one it is for.

    Raises ArtifactError, one sentence, for anything that is missing, damaged, inconsistent, of
    another format, or for another machine. Weights are checked by size (see verify_weights).
    `choose_device` is called before anything is loaded, and may refuse likewise.
    """
    root = _root(path)
    try:
        manifest = read_manifest(root)
        device = device or choose_device(manifest)
        device.check(manifest)
        _check_files(root, manifest)
        library = device.load_library(
            root.absolute() / manifest.library, [k.symbol for k in manifest.kernels]
        )
        tokenizer = load_tokenizer(root, manifest.model)
        release_unused_memory()  # before the weights come, so that the peak is lower
        weights = _view_weights(device.load_weights(_file(root, manifest.weights_file)), manifest)
    except ArtifactError as error:
        raise ArtifactError(f"artifact '{root}': {error}") from None
    except OSError as error:
        raise ArtifactError(f"artifact '{root}': {error.filename}: {error.strerror}") from None
    return LoadedArtifact(root, manifest, library, tokenizer, weights, device)


def _root(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ArtifactError(f"artifact: wrong type: got {type(path).__name__}, want a path")
    if not os.fspath(path):  # Python takes it for the current directory
        raise ArtifactError("artifact '': got an empty path, want the directory of an artifact")
    return Path(path)


def read_manifest(root: Path) -> Manifest:
    """Read and check the manifest alone, without touching the other files."""
    if not root.is_dir():
        raise ArtifactError("there is no such directory")
    if not (root / MANIFEST).exists() and (root / "config.json").exists():
        raise ArtifactError("is the directory of a model: want an artifact, so compile it first")
    tree = _parse(_file(root, MANIFEST))
    for field, want in (("format", FORMAT), ("abi", ABI)):
        if tree.get(field) != want or isinstance(tree.get(field), bool):
            got = tree.get(field, "none")
            got = got if type(got) is type(want) else repr(got)  # a text '3' is not 3
            raise ArtifactError(
                f"{field} {got} is not supported: want {want}; compile the model again"
            )
    manifest: Manifest = from_json(Manifest, tree, "manifest")
    check_manifest(manifest)
    return manifest


def verify_weights(artifact: LoadedArtifact) -> None:
    """Raise ArtifactError unless the weights file has the digest it was written with."""
    manifest = artifact.manifest
    digest = _digest(artifact.path / manifest.weights_file)
    if digest != manifest.weights_digest:
        raise ArtifactError(
            f"artifact '{artifact.path}': file '{manifest.weights_file}' is damaged: got SHA-256 "
            f"{digest[:12]}, want {manifest.weights_digest[:12]}; compile the model again"
        )


def _parse(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
        raise ArtifactError(
            f"file '{MANIFEST}' is too large: got {size} bytes, want at most {MAX_MANIFEST_BYTES}"
        )
    try:
        tree = json.loads(path.read_bytes(), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"file '{MANIFEST}' is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ArtifactError(f"file '{MANIFEST}': got {type(tree).__name__}, want an object")
    return tree


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = repeated_key(pairs)
    if twice is not None:
        raise ArtifactError(f"file '{MANIFEST}': field '{twice}' is given twice")
    return dict(pairs)


def _file(root: Path, name: str) -> Path:
    """Return the path of an artifact's file; refuse any name that could lead outside."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ArtifactError(f"file '{name}': want a path inside the artifact")
    path = root.joinpath(*parts)
    if not path.is_file():
        raise ArtifactError(f"file '{name}' is missing")
    if not path.resolve().is_relative_to(root.resolve()):
        raise ArtifactError(f"file '{name}': links outside the artifact")
    return path


def _check_files(root: Path, manifest: Manifest) -> None:
    """Check every file's digest, and the size of the weights."""
    needed = [manifest.library, *(k.source for k in manifest.kernels)]
    if manifest.model.tokenizer is not None:
        needed.append(manifest.model.tokenizer)
    for name in needed:
        if name not in manifest.digests:
            raise ArtifactError(f"file '{name}' has no digest")
    for name, want in manifest.digests.items():
        got = _digest(_file(root, name))
        if got != want:
            raise ArtifactError(
                f"file '{name}' was edited or damaged: got SHA-256 {got[:12]}, want {want[:12]}; "
                "compile the model again"
            )
    if not manifest.weights_digest and not (root / manifest.weights_file).exists():
        raise ArtifactError("has no weights: it was compiled from a configuration without them")
    size = _file(root, manifest.weights_file).stat().st_size
    if size != manifest.weights_bytes:
        raise ArtifactError(
            f"file '{manifest.weights_file}' has the wrong size: got {size} bytes, "
            f"want {manifest.weights_bytes}; compile the model again"
        )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _view_weights(memory: Bytes, manifest: Manifest) -> dict[str, Array]:
    views: dict[str, Array] = {}
    for weight in manifest.weights:
        tensor = weight_tensor(weight)
        part = memory[weight.offset : weight.offset + weight.num_bytes]
        shape = tuple(evaluate(extent, {}) for extent in tensor.shape)
        views[weight.name] = part.view(numpy_type(tensor.dtype)).reshape(shape)
    return views
