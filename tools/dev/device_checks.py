"""What must hold of an artifact on its device: tokens, launches, bits, samples, refusals."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright import runtime
from tilewright.runtime.artifact import LaunchRecord
from tilewright.runtime.artifact_files import load_artifact, read_manifest
from tilewright.runtime.choose import HostChooser, Question
from tilewright.runtime.devices.memory import Array
from tilewright.runtime.devices.registry import open_device
from tilewright.runtime.executor import Executor
from tilewright.runtime.philox import Draw
from tilewright.runtime.sample_logits import SampleRules
from tilewright.tools.bench_engine import prompt_ids
from tilewright.tools.commands.check import check_artifact
from tilewright.tools.dev.device_steps import Part, logits_in_company, logits_in_cuts, step_of
from tilewright.tools.progress import StageBars

MARGIN = 0.05  # a smaller gap between the two best logits may fall either way
CACHE_BLOCKS = 512
Found = dict[str, Any]


def check_greedy(path: Path, expected: Path) -> Found:
    """Greedy tokens against those of the fp32 evaluation, with and without graphs."""
    found: Found = {}
    for graphs in (True, False):
        with runtime.load(path, graphs=graphs) as engine:
            for i, want in enumerate(json.loads(expected.read_text())["prompts"]):
                params = runtime.SamplingParams(
                    max_tokens=len(want["greedy_ids"]), temperature=0.0, ignore_eos=True
                )
                (output,) = engine.generate(want["prompt"], params)
                pairs = zip_longest(output.token_ids, want["greedy_ids"])  # short if it failed
                differ = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
                margin = 0.0 if differ is None else float(want["argmax_margin"][differ])
                found[f"prompt {i}, {'graphs' if graphs else 'eager'}"] = {
                    "tokens": len(output.token_ids), "first_difference": differ, "margin": margin,
                    "ok": margin <= MARGIN, "text": output.text,
                }  # fmt: skip
    return found


def check_launches(path: Path) -> Found:
    """Every launch of a prefill and a few decodes against the reference in fp64."""
    with StageBars(visible=False) as bars:
        worst = check_artifact(path, None, bars)
    return {
        each.kernel: {"relative": each.relative, "tolerance": each.tolerance, "group": each.group,
                      "launches": each.num_launches, "ok": each.is_within}
        for each in worst
    }  # fmt: skip


def _executor(path: Path, *, graphs: bool) -> Executor:
    artifact = load_artifact(path, choose_device=lambda m: open_device(m, graphs=graphs))
    executor = Executor(artifact, artifact.device, poison=True)
    executor.allocate_states({"cache_blocks": CACHE_BLOCKS})
    return executor


def check_invariance(path: Path, *, num_tokens: int = 150, seed: int = 0) -> Found:
    """Logits of one request, byte for byte: cuts of its prompt, company, buckets, graphs."""
    r = random.Random(seed)
    ids = prompt_ids(num_tokens, 1000)
    plans = [[], [1], [num_tokens // 2], [num_tokens - 1], list(range(1, num_tokens))]
    plans += [sorted(r.sample(range(1, num_tokens), r.randint(1, 9))) for _ in range(8)]
    companies = [[], [5], [40, 3, 99], [1] * 15, [30] * 40, [9] * 63]
    found: Found = {}
    whole: bytes | None = None
    for graphs in (True, False):
        with _executor(path, graphs=graphs) as executor:
            size = executor.artifact.manifest.model.block_size
            most = executor.artifact.manifest.dims[1].upper
            for cuts in plans:
                got = logits_in_cuts(executor, ids, cuts, block_size=size)
                whole = whole or got
                found[f"cuts {_short(cuts)}, graphs {graphs}"] = {"ok": got == whole}
            tail = num_tokens - 6
            for others in companies:
                at = r.randint(0, len(others))
                got = logits_in_company(
                    executor, ids, others[: most - 1], block_size=size, num_prefilled=tail,
                    at=min(at, most - 1),
                )  # fmt: skip
                name = f"among {len(others)} others, graphs {graphs}"
                found[name] = {"ok": got == (whole or b"")[-len(got) :]}
    return found


class _LastRows:
    """An observer that keeps the last row of every buffer and output of every launch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []

    def before(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Nothing is kept of what is not yet written."""

    def after(self, launch: LaunchRecord, tensors: Sequence[Array], ints: Sequence[int]) -> None:
        """Keep the rows; they are in the order of the launches."""
        for argument, tensor in zip(launch.arguments, tensors, strict=True):
            if argument.kind in ("buffer", "output") and tensor.ndim:
                self.seen.append((launch.group, argument.name, tensor[-1].tobytes()))


def find_difference(path: Path, *, num_tokens: int = 150) -> Found:
    """For every size of step, the first launch whose last row differs from that of one prefill."""
    ids = tuple(prompt_ids(num_tokens, 1000))
    blocks = tuple(range(1, 64))
    found: Found = {}
    with _executor(path, graphs=False) as executor:
        size = executor.artifact.manifest.model.block_size
        whole = step_of([Part(ids, 0, blocks)], size)
        executor.observe(whole.inputs, whole.dims, want := _LastRows())
        for count in (1, 3, 16, 40, 100):
            start = num_tokens - count
            step = step_of([Part(ids[start:], start, blocks)], size)
            executor.observe(step.inputs, step.dims, got := _LastRows())
            pairs = zip(got.seen, want.seen, strict=True)
            first = next((f"{a[0]}: {a[1]}" for a, b in pairs if a != b), None)
            name = f"{count} tokens, bucket {executor.bucket(step.dims).name}"
            found[name] = {"first_difference": first, "ok": first is None}
    return found


def _short(cuts: list[int]) -> str:
    text = str(cuts)
    return text if len(text) < 40 else text[:36] + " ...]"


def check_sampling(path: Path, *, rounds: int = 40, seed: int = 0) -> Found:
    """Tokens chosen on the device against the host's sampler, on logits made there."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    count = 0
    with _executor(path, graphs=True) as executor:
        chooser, host = executor.chooser(), HostChooser()
        for _ in range(rounds):
            rows, vocab = int(rng.integers(1, 65)), int(rng.choice([700, 5000, 49152]))
            logits = _random_logits(rng, rows, vocab)
            argmax = np.nan_to_num(logits, nan=np.inf).argmax(1).astype(np.int32)
            questions = [_random_question(rng, row, vocab) for row in range(rows)]
            device = {"logits": torch.from_numpy(logits).cuda(),
                      "argmax": torch.from_numpy(argmax).cuda()}  # fmt: skip
            torch.cuda.synchronize()
            got = chooser.choose(device, questions)
            want = host.choose({"logits": logits, "argmax": argmax}, questions)
            for asked, mine, theirs in zip(questions, got, want, strict=True):
                count += 1
                if str(mine) != str(theirs):
                    wrong.append(f"{mine} for {theirs}: {asked.rules.params}"[:400])
    return {"rows": count, "wrong": wrong[:5], "ok": not wrong}


def _random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray[Any, Any]:
    scale = rng.choice([0.0, 1e-3, 1.0, 4.0, 12.0], (rows, 1))
    logits: np.ndarray[Any, Any] = rng.standard_normal((rows, vocab)) * scale
    logits = logits.astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1::5][:, rng.random(vocab) < 0.7] = -np.inf
    logits[7::11, 3] = np.nan
    logits[8::13, 5] = np.inf
    return logits


def _random_question(rng: np.random.Generator, row: int, vocab: int) -> Question:
    def sometimes(value: Any, default: Any, chance: float = 0.4) -> Any:
        return value if rng.random() < chance else default

    params = runtime.SamplingParams(
        temperature=sometimes(0.0, float(rng.choice([0.1, 0.7, 1.0, 2.5])), 0.2),
        top_k=sometimes(int(rng.choice([1, 20, 700, 1500])), 0),
        top_p=sometimes(float(rng.choice([0.1, 0.5, 0.9, 0.99])), 1.0),
        min_p=sometimes(float(rng.choice([1e-6, 0.01, 0.3])), 0.0, 0.3),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0, 0.2),
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0, 0.2),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0, 0.2),
    )
    draw = Draw(int(rng.integers(0, 2**63)), int(rng.integers(0, 10**6)), int(rng.integers(128)))
    output = rng.integers(0, vocab, 20).tolist()
    return Question(row, SampleRules.build(params), draw, rng.integers(0, vocab, 300), output)


def check_refusals(path: Path) -> Found:
    """What cannot work on this machine is told in one sentence."""

    def other_chip(tree: dict[str, Any]) -> None:
        tree["target"].update(name="sm100", features=["sm_100a"])

    def newer_driver(tree: dict[str, Any]) -> None:
        tree["target"]["features"].append("cuda-99.0")

    cases: Mapping[str, tuple[Callable[[dict[str, Any]], None] | None, dict[str, Any]]] = {
        "another architecture": (other_chip, {}),
        "a newer driver": (newer_driver, {}),
        "another target's device": (None, {"device": "cpu"}),
        "no such GPU": (None, {"device": "cuda:9"}),
        "too little memory": (None, {"cache_tokens": _most_tokens(path)}),
    }
    found: Found = {}
    for name, (edit, options) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = _edited(path, Path(folder) / "m", edit)
            try:
                runtime.load(root, **options).close()
                text = ""
            except (runtime.ArtifactError, runtime.RequestError) as error:
                text = str(error).replace(str(root), "m")
        found[name] = {"says": text, "ok": bool(text)}
    return found


def _most_tokens(path: Path) -> int:
    manifest = read_manifest(path)
    most = next(d.upper for d in manifest.dims if d.name == "cache_blocks")
    return most * manifest.model.block_size


def _edited(path: Path, root: Path, edit: Callable[[dict[str, Any]], None] | None) -> Path:
    """Link an artifact's files beside an edited manifest."""
    root.mkdir()
    for item in path.iterdir():
        if item.name != "manifest.json":
            (shutil.copytree if item.is_dir() else shutil.copy)(item, root / item.name)
    tree = json.loads((path / "manifest.json").read_text())
    if edit is not None:
        edit(tree)
    (root / "manifest.json").write_text(json.dumps(tree))
    return root
