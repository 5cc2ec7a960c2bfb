"""Other engines, measured on request. Runs as a script, perhaps in another interpreter, so it
imports nothing of ours: one JSON request a line on stdin, one JSON answer a line on stdout.

Requests: {"op": "open", "peer": name, ...}, {"op": "prefill", "tokens": n},
{"op": "decode", "batch": b, "start": n, "tokens": m}. Answers: {"seconds": s}, {"facts": {...}}
or {"error": text}, with "missing": name where a module is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

UBATCH = 512


class Peer(Protocol):
    """An engine that times a prompt, and tokens after a prompt, in seconds."""

    facts: dict[str, Any]

    def prefill(self, tokens: int) -> float: ...

    def decode(self, batch: int, start: int, tokens: int) -> float: ...


def prompt_ids(count: int, vocab_size: int, salt: int = 0) -> list[int]:
    """Return the same token ids that our own measurements use."""
    return [((i + 7919 * salt) * 2654435761 >> 7) % vocab_size for i in range(count)]


class LlamaCpp:
    """llama.cpp on a GGUF file, through the plain C interface of llama-cpp-python."""

    def __init__(self, request: dict[str, Any]) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        self._c.llama_backend_init()
        params = self._c.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self._c.llama_model_load_from_file(request["path"].encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load '{request['path']}'")
        settings = self._c.llama_context_default_params()
        settings.n_ctx = request["positions"] * request["sequences"]
        settings.n_batch = settings.n_ubatch = UBATCH
        settings.n_seq_max = request["sequences"]
        settings.n_threads = settings.n_threads_batch = request["threads"]
        self._session = self._c.llama_init_from_model(self._model, settings)
        if not self._session:
            raise ValueError("llama.cpp cannot make a session of this size")
        self._memory = self._c.llama_get_memory(self._session)
        self._vocab = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self._batch = self._c.llama_batch_init(UBATCH, 0, 1)
        self.facts = {
            "version": llama_cpp.__version__,
            "dtype": f"{self._description()}, f16 cache",
            "system": self._c.llama_print_system_info().decode(),
        }

    def _description(self) -> str:
        import ctypes

        text = ctypes.create_string_buffer(128)
        self._c.llama_model_desc(self._model, text, 128)
        return text.value.decode()

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, wants logits), at most UBATCH of them."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        if self._c.llama_decode(self._session, batch):
            raise ValueError("llama.cpp failed to decode")

    def _argmax(self, row: int) -> int:
        import numpy as np

        logits = self._c.llama_get_logits_ith(self._session, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def _fill(self, tokens: list[int], sequence: int) -> int:
        rows = [(t, i, sequence, i == len(tokens) - 1) for i, t in enumerate(tokens)]
        for begin in range(0, len(rows), UBATCH):
            self._run(rows[begin : begin + UBATCH])
        return self._argmax(-1)

    def prefill(self, tokens: int) -> float:
        self._c.llama_memory_clear(self._memory, False)
        prompt = prompt_ids(tokens, self._vocab)
        begin = time.perf_counter()
        self._fill(prompt, 0)
        return time.perf_counter() - begin

    def decode(self, batch: int, start: int, tokens: int) -> float:
        self._c.llama_memory_clear(self._memory, False)
        last = [self._fill(prompt_ids(start, self._vocab, i), i) for i in range(batch)]
        begin = time.perf_counter()
        for position in range(start, start + tokens):
            self._run([(last[i], position, i, True) for i in range(batch)])
            last = [self._argmax(i) for i in range(batch)]
        return time.perf_counter() - begin


class Transformers:
    """The same shape in transformers with random weights: rates do not depend on values."""

    def __init__(self, request: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        torch.set_num_threads(request["threads"])
        torch.manual_seed(0)
        config = dict(request["config"])
        kind = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        self._vocab = int(kind.vocab_size)
        dtype = getattr(torch, request["dtype"])
        with torch.inference_mode():
            made: Any = transformers.AutoModelForCausalLM.from_config(kind, dtype=dtype)
            self._model = made.eval()
        self.facts = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": f"{request['dtype']}, random weights",
        }

    def _fill(self, prompts: list[list[int]]) -> tuple[Any, Any]:
        out = self._model(self._torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, tokens: int) -> float:
        with self._torch.inference_mode():
            prompt = prompt_ids(tokens, self._vocab)
            begin = time.perf_counter()
            self._fill([prompt])
            return time.perf_counter() - begin

    def decode(self, batch: int, start: int, tokens: int) -> float:
        with self._torch.inference_mode():
            last, cache = self._fill([prompt_ids(start, self._vocab, i) for i in range(batch)])
            begin = time.perf_counter()
            for _ in range(tokens):
                out = self._model(last, past_key_values=cache, use_cache=True)
                last, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
            return time.perf_counter() - begin


PEERS: Mapping[str, Callable[[dict[str, Any]], Peer]] = {
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def answer(peers: list[Peer], request: dict[str, Any]) -> dict[str, Any]:
    """Serve one request; `peers` holds the opened peer."""
    match request["op"]:
        case "open":
            peers[:] = [PEERS[request["peer"]](request)]
            return {"facts": peers[0].facts}
        case "prefill":
            return {"seconds": peers[0].prefill(request["tokens"])}
        case "decode":
            keys = ("batch", "start", "tokens")
            return {"seconds": peers[0].decode(*(request[k] for k in keys))}
    return {"error": f"unknown request '{request['op']}'"}


@contextmanager
def private_stdout() -> Iterator[TextIO]:
    """Give the real stdout; what libraries print goes to nowhere instead of between answers."""
    with os.fdopen(os.dup(1), "w", buffering=1) as real, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        yield real


def main() -> None:
    peers: list[Peer] = []
    with private_stdout() as out:
        for line in sys.stdin:
            try:
                reply = answer(peers, json.loads(line))
            except ModuleNotFoundError as error:
                reply = {"error": str(error), "missing": error.name}
            except Exception as error:  # the other side must hear of anything a peer can raise
                reply = {"error": f"{type(error).__name__}: {error}"}
            out.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
