"""Standard streams as every command may count on them: open, and able to take any text."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper


def prepare_streams() -> None:
    """Open what the process was started without, and let no character be an error.

    A file opened later would take the number of a closed stream, and get what is meant for it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))
    # Bytes that are no text come in as what every prompt refuses; on the way out names of files
    # and texts that the terminal's encoding lacks are escaped.
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "backslashreplace")):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
