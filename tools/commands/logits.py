"""`tilewright logits ARTIFACT --tokens 1,2,3 -o out.npy`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.tools.commands import options

if TYPE_CHECKING:
    from numpy.typing import NDArray


def logits(
    artifact: options.Artifact,
    tokens: options.Tokens,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, .npy.")],
    threads: options.Threads = None,
) -> None:
    """Write the logits after every token: float32 [tokens, vocab]."""
    ids = options.ids_of(tokens, "--tokens")
    from tilewright import runtime
    from tilewright.tools.progress import waiting

    with waiting("loading"):
        engine = runtime.load(artifact, num_threads=threads)
    with engine:
        values = engine.logits(ids)
    write_array(output, values)
    print(f"{output}: float32 [{values.shape[0]}, {values.shape[1]}]")


def write_array(path: Path, values: NDArray[Any]) -> None:
    """Write beside `path` and rename, so that the file is whole or absent; raise OSError."""
    import numpy as np

    handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, values)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
