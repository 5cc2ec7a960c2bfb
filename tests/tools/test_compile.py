"""Compiling: the summary, and that nothing is left behind where it fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tilewright.codegen.config import CompileConfig
from tilewright.runtime.artifact_files import load_artifact, read_manifest
from tilewright.tools.prepare import prepare

from .conftest import Call, start

pytestmark = pytest.mark.cpu

FEW = ("--max-tokens-per-step", "4")


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_json_summary(call: Call, model: Path, artifact: Path, tmp_path: Path) -> None:
    done = call("compile", model, "-o", tmp_path / "out", *FEW, "--json")
    assert done.code == 0, done.err
    (summary,) = done.lines
    assert summary.pop("seconds") > 0  # type: ignore[operator]
    assert summary.pop("tuning")["measured"] == 0  # type: ignore[index]
    manifest = read_manifest(artifact)
    assert summary == {
        "path": str(tmp_path / "out"),
        "has_weights": True,
        "has_tokenizer": True,
        "has_chat_template": True,
        "kernels": len(manifest.kernels),
        "kernels_compiled": 0,
        "launches_per_step": len(manifest.buckets[0].launches),
        "launches_per_layer": 6,
        "weights_bytes": manifest.weights_bytes,
        "dtype": "float32",
        "mode": "deterministic",
        "invariance": manifest.invariance,
        "target": manifest.target.variant,
        "numerics_digest": manifest.numerics_digest,
    }
    assert left(tmp_path) == ["out"]


def test_summary_as_text(call: Call, model: Path, artifact: Path, tmp_path: Path) -> None:
    done = call("compile", model, "-o", tmp_path / "out", *FEW)
    titles = [line[:11].strip() for line in done.out.splitlines()]
    assert titles == [
        "artifact", "kernels", "launches", "weights", "prompts", "computes in", "numerics", "time"
    ]  # fmt: skip
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("missing", "prompts", "has"),
    [
        ("tokenizer.json", "token ids alone: the model came without a tokenizer, so that no text "
         "can be read", (False, True)),
        ("tokenizer_config.json", "text and token ids; the model came without a chat template, so "
         "no chat", (True, False)),
    ],
)  # fmt: skip
def test_what_an_artifact_can_be_asked_is_told(
    call: Call, model: Path, artifact: Path, tmp_path: Path, missing: str, prompts: str,
    has: tuple[bool, bool],
) -> None:  # fmt: skip
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / missing).unlink()
    done = call("compile", copy, "-o", tmp_path / "out", *FEW)
    assert f"    prompts  {prompts}\n" in done.out
    (summary,) = call("compile", copy, "-o", tmp_path / "out", *FEW, "--json").lines
    assert (summary["has_tokenizer"], summary["has_chat_template"]) == has


def test_an_unusable_tokenizer_is_refused(call: Call, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={}, merges=[])).save(
        str(copy / "tokenizer.json")
    )
    done = call("compile", copy, "-o", tmp_path / "out", *FEW)
    assert (done.code, done.err) == (1, (
        f"error: tokenizer of 'model': its vocabulary is empty: got 0 tokens, want some ({copy})\n"
    ))  # fmt: skip
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}", r"is malformed in line 1: \"Unexpected end of template\. .*"),
        ("\n{% if %}", r"is malformed in line 2: .*"),
        ("{{ tools[0].name }}", r"cannot be rendered: UndefinedError: .*None has no element 0.*"),
        ("{{ 10 ** 9999999 }}", r"cannot be rendered: SecurityError: .*"),
    ],
)  # fmt: skip
def test_a_chat_template_that_always_fails_is_refused(
    call: Call, model: Path, tmp_path: Path, template: str, why: str
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "chat_template.jinja").write_text(template)
    done = call("compile", copy, "-o", tmp_path / "out", *FEW)
    assert done.code == 1
    assert re.fullmatch(
        rf"error: chat template of 'model': {why}: want one that works, or none \({copy}\)\n",
        done.err,
    )
    assert left(tmp_path) == ["model"]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role != 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}",  # refuses every conversation itself, which is its right
        "{{ messages[1].content }}",  # wants more than one message
        "{{ messages[0].content[0].text + '!' }}",  # wants its text in parts
        "{% if tools is not none %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}",
        "{{ messages[0] | tojson(indent=4, ensure_ascii=False) }}{{ bos_token + eos_token }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
        "{% endfor %}{{ strftime_now('%Y') }}",
    ],
)
def test_a_chat_template_that_may_work_is_taken(model: Path, tmp_path: Path, template: str) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "chat_template.jinja").write_text(template)
    assert prepare(str(copy), CompileConfig()).model.chat_template == template


def test_folders_that_are_no_models_are_told_apart(
    call: Call, artifact: Path, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("text")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_text("")
    for folder, why in (
        (artifact, "is an artifact, which is compiled already: want the model that it was made "
         "from"),
        (tmp_path / "docs", "is no model: got no config.json, want that and model.safetensors, or "
         "the path of a GGUF file"),
        (tmp_path / "ggufs", "no config.json: want a model; for the GGUF file in it, give its "
         "path: a.gguf"),
    ):  # fmt: skip
        done = call("compile", folder, "-o", tmp_path / "out")
        assert (done.code, done.err) == (1, f"error: directory '{folder}': {why}\n")
    done = call("generate", model, "--prompt", "x")
    assert done.err == (
        f"error: artifact '{model}': is the directory of a model: want an artifact, so compile it "
        "first\n"
    )


def test_a_dump_that_cannot_be_written_names_its_folder(
    call: Call, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = call("compile", model, "-o", tmp_path / "out", *FEW,
                environment={"TILEWRIGHT_DUMP": str(tmp_path / "file" / "dump")})  # fmt: skip
    assert (done.code, done.err) == (1, (
        f"error: dump folder '{tmp_path / 'file' / 'dump'}': cannot be written: Not a directory; "
        "name another folder in TILEWRIGHT_DUMP\n"
    ))  # fmt: skip


def test_unknown_model(call: Call, tmp_path: Path) -> None:
    done = call("compile", "no-such", "-o", tmp_path / "out")
    assert done.code == 1
    assert done.err == (
        "error: model 'no-such': not a file, a directory or a packaged name: got 'no-such', "
        "want one of smollm2-135m, or a path\n"
    )
    assert left(tmp_path) == []


def test_no_compiler(call: Call, model: Path, tmp_path: Path) -> None:
    missing = {"TILEWRIGHT_CXX": "/nonexistent"}
    done = call("compile", model, "-o", tmp_path / "out", "--target", "cpu:x86-64-v3",
                environment=missing)  # fmt: skip
    assert done.code == 1
    assert done.err == (
        "error: target 'x86-64-v3': no C++ compiler found: looked for /nonexistent; "
        "install g++ or name one in TILEWRIGHT_CXX\n"
    )
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--target", "gpu"], 2,
         "target 'gpu': unknown: have cpu, ascend950, sm90, sm100 (cpu:x86-64-v3, cpu:x86-64-v4, "
         "cpu:x86-64-v4-bf16, cpu:aarch64)"),
        (["--target", "cpu:z80"], 2,
         "cpu variant 'z80': unknown: have x86-64-v3, x86-64-v4, x86-64-v4-bf16, aarch64"),
        (["--max-tokens-per-step", "70000"], 2,
         "setting 'max_tokens_per_step': got 70000, want an int in 1..65536"),
        (["--max-context", "97"], 1,
         "setting 'max_context': longer than the model's own: got 97, want at most 96"),
    ],
)  # fmt: skip
def test_bad_settings(
    call: Call, model: Path, tmp_path: Path, options: list[str], code: int, sentence: str
) -> None:
    """A setting that no model could have is a usage error."""
    done = call("compile", model, "-o", tmp_path / "out", *options)
    assert (done.code, done.err) == (code, f"error: {sentence}\n")
    assert left(tmp_path) == []


def test_a_folder_of_other_files_is_refused(call: Call, model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    done = call("compile", model, "-o", tmp_path, *FEW)
    assert done.code == 1
    assert done.err == (
        f"error: output '{tmp_path}': holds other files and no manifest.json: "
        "want a new or empty directory\n"
    )
    assert left(tmp_path) == ["notes.txt"]


def test_a_full_disk_leaves_nothing(
    call: Call, model: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.codegen import compile as compiling

    def full(*arguments: Any, **settings: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiling, "weight_record", full)
    done = call("compile", model, "-o", tmp_path / "out", *FEW)
    assert done.code == 1
    assert done.err == (
        f"error: output '{tmp_path / 'out'}': the disk is full; nothing was left behind\n"
    )
    assert left(tmp_path) == []


def test_a_failed_compile_keeps_the_artifact_before(
    call: Call, model: Path, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.codegen import compile as compiling

    assert call("compile", model, "-o", tmp_path / "out", *FEW).code == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()

    def interrupt(*arguments: Any, **settings: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "weight_record", interrupt)
    done = call("compile", model, "-o", tmp_path / "out", *FEW)
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert left(tmp_path) == ["out"]


def test_an_interrupted_process_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """Interrupt the real process while compilers run, into a cache that is empty."""
    cache = tmp_path / "cache"
    process = start("compile", model, "-o", tmp_path / "out", *FEW,
                    environment={"TILEWRIGHT_CACHE": str(cache)})  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(cache.glob("objects/build-*/*.cpp")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert left(tmp_path) == ["cache"]
    assert not list(cache.glob("objects/build-*"))


def test_two_compiles_into_one_directory(
    model: Path, artifact: Path, cache: Path, tmp_path: Path
) -> None:
    both = [start("compile", model, "-o", tmp_path / "out", *FEW, "--json") for _ in range(2)]
    ends = [(p.communicate(timeout=120), p.returncode) for p in both]
    for (out, err), code in ends:
        assert (code, err) == (0, ""), err
        assert json.loads(out)["path"] == str(tmp_path / "out")
    assert load_artifact(tmp_path / "out").manifest.model.name == "tiny"
    assert left(tmp_path) == ["out"]
