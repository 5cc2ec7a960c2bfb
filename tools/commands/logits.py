"""`tilewright logits ARTIFACT --tokens 1,2,3 -o out.npy`."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilewright.tools.commands import options
from tilewright.tools.failures import writing

if TYPE_CHECKING:
    from numpy.typing import NDArray


def logits(
    artifact: options.Artifact,
    tokens: options.Tokens,
    output: Annotated[Path, options.place("--output", "-o", help="File to write, .npy.")],
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Write the logits after every token: float32 [tokens, vocab]."""
    ids = options.ids_of(tokens, "--tokens")
    from tilewright import runtime
    from tilewright.tools.progress import waiting

    with waiting("loading"):
        engine = runtime.load(artifact, num_threads=threads)
    with engine:
        values = engine.logits(ids)
    with writing(output):
        write_array(output, values)
    # Where the numbers may go to stdout themselves, a note there would spoil them.
    where = sys.stdout if output.is_file() else sys.stderr
    if as_json:
        written = {"file": str(output), "dtype": "float32", "shape": list(values.shape)}
        print(json.dumps(written), file=where)
    else:
        print(f"{output}: float32 [{values.shape[0]}, {values.shape[1]}]", file=where)


def write_array(path: Path, values: NDArray[Any]) -> None:
    """Write beside `path` and rename, so that the file is whole or absent; raise OSError.

    A link stands for the file it leads to; a pipe or device is written to, never replaced.
    """
    import numpy as np

    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(_npy(values))
        return
    place = Path(os.path.realpath(path))
    handle, name = _open_beside(place, path)
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, values)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, place)
    except BaseException:
        os.unlink(name)
        raise


def _npy(values: NDArray[Any]) -> bytes:
    """Return the content of a file: a pipe has no place, which numpy asks for."""
    import numpy as np

    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def _open_beside(place: Path, path: Path) -> tuple[int, str]:
    """Open a new file beside `place`; an error is about the file that was asked for."""
    try:
        return tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
