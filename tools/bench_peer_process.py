"""Our side of a peer: a process that holds one opened engine and answers one request at a time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright.runtime import RequestError

SCRIPT = Path(__file__).with_name("bench_peers.py")
PACKAGES = {"llama.cpp": "llama-cpp-python", "transformers": "transformers torch"}


@dataclass(frozen=True)
class PeerRequest:
    """A peer to open: its engine and what that engine needs."""

    label: str
    peer: str
    settings: Mapping[str, Any]


def parse_peer(text: str, config: Mapping[str, Any]) -> list[PeerRequest]:
    """Read `llama.cpp=FILE.gguf` or `transformers`; the second is measured in two dtypes.

    Raises RequestError for a file that is not there.
    """
    name, _, path = text.partition("=")
    if name == "llama.cpp":
        if not Path(path).is_file():
            raise RequestError(
                f"bench 'peer': no such file: got {text!r}, want llama.cpp=FILE.gguf"
            )
        return [PeerRequest("llama.cpp", name, {"path": path})]
    assert name == "transformers", text
    return [
        PeerRequest(f"transformers {dtype}", name, {"config": dict(config), "dtype": dtype})
        for dtype in ("bfloat16", "float32")
    ]


class PeerProcess:
    """One peer in an interpreter that has it installed. A context manager."""

    def __init__(self, request: PeerRequest, python: str, *, common: Mapping[str, Any]) -> None:
        """`common`: threads, positions and sequences to make room for."""
        self.label = request.label
        self._install = f"{python} -m pip install {PACKAGES[request.peer]}"
        try:
            # -P: this folder must not be searched for modules, some of ours have common names.
            self._process = subprocess.Popen(
                [python, "-P", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise RequestError(f"bench 'peer-python': {python}: {error.strerror}") from None
        try:
            opened = self._ask({"op": "open", "peer": request.peer, **request.settings, **common})
        except RequestError:
            self.close()
            raise
        self.facts: dict[str, Any] = opened["facts"]

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it may be gone already, with bytes still unsent
                if stream is not None:
                    stream.close()
        self._process.wait()

    def prefill_seconds(self, tokens: int) -> float:
        """Return the time to compute a prompt and its first token."""
        return float(self._ask({"op": "prefill", "tokens": tokens})["seconds"])

    def decode_seconds(self, *, batch: int, start: int, tokens: int) -> float:
        """Return the time in which each of `batch` requests generates `tokens` tokens."""
        asked = {"op": "decode", "batch": batch, "start": start, "tokens": tokens}
        return float(self._ask(asked)["seconds"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "missing" in reply:
            raise RequestError(
                f"peer '{self.label}': module '{reply['missing']}' is not installed: run "
                f"{self._install}, or name another interpreter in --peer-python"
            )
        if "error" in reply:
            raise RequestError(f"peer '{self.label}': {reply['error']}")
        return reply
