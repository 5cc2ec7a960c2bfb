"""`tilewright logits ARTIFACT --tokens 1,2,3 -o out.npy`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tilewright.tools.commands import options
from tilewright.tools.failures import writing
from tilewright.tools.whole_file import write_whole

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
        write_whole(output, npy(values))
    # Where the numbers may go to stdout themselves, a note there would spoil them.
    where = sys.stdout if output.is_file() else sys.stderr
    if as_json:
        written = {"file": str(output), "dtype": "float32", "shape": list(values.shape)}
        print(json.dumps(written), file=where)
    else:
        print(f"{output}: float32 [{values.shape[0]}, {values.shape[1]}]", file=where)


def npy(values: NDArray[Any]) -> bytes:
    """Return the content of a file, made before it is opened: what numpy says of a full disk names
    no reason, and a pipe has no place, which it asks for."""
    import numpy as np

    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()
