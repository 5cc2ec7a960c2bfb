"""Opening a checkpoint of any kind, and accounting for every tensor in it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path

from tilewright.graph.errors import VerifyError
from tilewright.models.gguf_config import Metadata, read_config, read_generation, read_tensors
from tilewright.models.gguf_file import read_gguf
from tilewright.models.hugging_face import PICKLE_SUFFIXES, open_directory
from tilewright.models.packaged import find_packaged
from tilewright.models.record import Checkpoint, Generation, TensorEntry, shown
from tilewright.models.tokenizer import gguf_tokenizer

__all__ = ["Checkpoint", "Generation", "TensorEntry", "account", "open_checkpoint"]

MAX_NAMED = 3


def _open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file."""
    file = read_gguf(path)
    meta = Metadata(file.metadata, path)
    template = "tokenizer.chat_template"
    return Checkpoint(
        name=meta.text("general.name", path.stem),
        source=path,
        config=read_config(file),
        tensors=read_tensors(file),
        tokenizer_json=gguf_tokenizer(meta),
        chat_template=meta.text(template) if template in meta.values else None,
        generation=read_generation(file),
    )


def _open_path(path: Path) -> Checkpoint:
    """Open what exists at a path."""
    if path.is_dir():
        return open_directory(path)
    if path.suffix == ".safetensors":
        checkpoint = open_directory(path.parent)
        if not any(each.path == path for each in checkpoint.tensors.values()):
            raise VerifyError(f"file '{path}': not among the weights of directory '{path.parent}'")
        return checkpoint
    if path.suffix in PICKLE_SUFFIXES:
        raise VerifyError(
            f"file '{path}': pickle files can run code and are never read; "
            "convert it to safetensors"
        )
    return _open_gguf(path)


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Check settings that a caller loops over or indexes with."""
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(checkpoint.tensors):
        raise VerifyError(
            f"checkpoint {shown(checkpoint.name)}: more layers than tensors: got {layers} layers, "
            f"want at most {len(checkpoint.tensors)} ({checkpoint.source})"
        )
    size = checkpoint.config.get("vocab_size")
    generation = checkpoint.generation
    for token in (*generation.eos_ids, generation.bos_id):
        if isinstance(size, int) and token is not None and token >= size:
            raise VerifyError(
                f"checkpoint {shown(checkpoint.name)}: special token outside the vocabulary: "
                f"got {token}, want below {size} ({checkpoint.source})"
            )


def open_checkpoint(path_or_name: str | PathLike[str]) -> Checkpoint:
    """Open a Hugging Face directory, a GGUF file, or a packaged model by its name.

    Headers are read and checked; tensors stay on disk until asked for. Raises VerifyError, in one
    sentence that names file and tensor, for everything that does not fit.
    """
    if not str(path_or_name):
        raise VerifyError("model '': got an empty name, want a path or a packaged name")
    path = Path(path_or_name)
    try:
        exists = path.exists()
    except (ValueError, OSError):  # A name with a zero byte, or too long, is no path.
        exists = False
    if exists:
        checkpoint = _open_path(path)
    else:
        name = str(path_or_name)
        checkpoint = replace(_open_path(find_packaged(name)), name=name)
    _check_sizes(checkpoint)
    return checkpoint


def _listed(names: list[str]) -> str:
    """A count and the first few names."""
    more = ", ..." if len(names) > MAX_NAMED else ""
    return f"{len(names)} ({', '.join(names[:MAX_NAMED])}{more})"


def account(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    *,
    ignored: Iterable[str] = (),
) -> None:
    """Check that the checkpoint has exactly the expected tensors, each of its shape.

    `ignored` names tensors that may be there besides; `*` in them stands for any text. Raises one
    VerifyError with counts and first names of the missing, extra and wrongly shaped ones.
    """
    tensors, patterns = checkpoint.tensors, tuple(ignored)
    missing = [shown(name) for name in expected if name not in tensors]
    extra = [
        shown(name)
        for name in tensors
        if name not in expected and not any(fnmatchcase(name, each) for each in patterns)
    ]
    shaped = [
        f"{shown(name)} got {list(tensors[name].shape)} want {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != tuple(shape)
    ]
    groups = (("missing", missing), ("extra", extra), ("wrongly shaped", shaped))
    problems = [f"{what} {_listed(names)}" for what, names in groups if names]
    if problems:
        raise VerifyError(
            f"checkpoint {shown(checkpoint.name)}: tensors do not fit the model: "
            f"{'; '.join(problems)} ({checkpoint.source})"
        )
