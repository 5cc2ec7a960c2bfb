"""`generate`, `chat` and `logits`: what they print, line by line, and what they refuse."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright import runtime
from tilewright.tools.commands.generate import run_all
from tilewright.tools.commands.notes import origin_note
from tilewright.tools.commands.prompts import Asked, read_lines

from .conftest import CONTEXT, VOCAB, Call, start

pytestmark = pytest.mark.cpu

KEYS = ["prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "numerics_digest"]
SHORT = ("--max-tokens", "6", "--temperature", "0", "--ignore-eos")


def test_json_is_one_object_per_prompt(call: Call, artifact: Path) -> None:
    done = call("generate", artifact, "--prompt", "ab", "--tokens", "7,8", *SHORT, "--json")
    assert (done.code, done.err) == (0, "")
    with runtime.load(artifact) as engine:
        params = runtime.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        wanted = engine.generate(["ab", [7, 8]], params)
    for line, want in zip(done.lines, wanted, strict=True):
        assert list(line) == KEYS
        assert line["prompt_token_ids"] == list(want.prompt_token_ids)
        assert line["token_ids"] == list(want.token_ids) and len(want.token_ids) == 6
        assert (line["text"], line["finish_reason"]) == (want.text, "length")
        assert line["numerics_digest"] == want.numerics_digest


def test_every_option_reaches_the_sampler(call: Call, artifact: Path) -> None:
    options: dict[str, Any] = {
        "--max-tokens": 5, "--temperature": 0.7, "--top-k": 9, "--top-p": 0.9, "--min-p": 0.01,
        "--repetition-penalty": 1.1, "--presence-penalty": 0.2, "--frequency-penalty": 0.1,
        "--logit-bias": "9:2.5", "--allowed-token-ids": "8,9,10,11", "--bad-words": "zz",
        "--seed": 2**64 - 1, "--stop": "never this", "--stop-token-ids": "11", "--logprobs": 2,
        "--prompt-logprobs": 1, "--n": 2, "--min-tokens": 5,
    }  # fmt: skip
    pairs = [text for pair in options.items() for text in pair]
    done = call("generate", artifact, "--prompt", "abc", *pairs, "--ignore-eos", "--json")
    assert done.code == 0, done.err
    params = runtime.SamplingParams(
        max_tokens=5, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.1, logit_bias={9: 2.5},
        allowed_token_ids=[8, 9, 10, 11], bad_words=["zz"], seed=2**64 - 1, stop=["never this"],
        stop_token_ids=[11], logprobs=2, prompt_logprobs=1, n=2, min_tokens=5, ignore_eos=True,
    )  # fmt: skip
    (want,) = runtime.generate(artifact, "abc", params)
    assert len(done.lines) == 2
    for index, (line, sample) in enumerate(zip(done.lines, want.samples, strict=True)):
        assert list(line) == [*KEYS, "index", "logprobs", "prompt_logprobs"]
        assert (line["index"], line["seed"]) == (index, 2**64 - 1)
        assert line["token_ids"] == list(sample.token_ids)
        scores: Any = line["logprobs"]
        assert [s["token_id"] for s in scores] == line["token_ids"]
        assert all(len(s["top"]) == 2 and s["logprob"] <= 0 for s in scores)
        prompt: Any = line["prompt_logprobs"]
        assert prompt[0] is None and len(prompt) == 3 and len(prompt[1]["top"]) == 1


def test_text_of_one_prompt_is_streamed(call: Call, artifact: Path) -> None:
    done = call("generate", artifact, "--prompt", "ab", *SHORT)
    (line,) = call("generate", artifact, "--prompt", "ab", *SHORT, "--json").lines
    assert done.out == f"{line['text']}\n"
    lead = r"6 tokens, [\d.]+ tokens/s, finish reason: length"
    told = re.fullmatch(rf"{lead}, seed (\d+), numerics (\w{{12}})\n", done.err)
    assert told and str(line["numerics_digest"]).startswith(told[2])


def test_a_seed_that_was_drawn_is_told_and_gives_the_text_again(call: Call, artifact: Path) -> None:
    hot = ("--prompt", "ab", "--max-tokens", "12", "--temperature", "3", "--ignore-eos")
    texts, seeds = [], []
    for _ in range(2):
        done = call("generate", artifact, *hot)
        texts.append(done.out)
        seeds += re.findall(r"seed (\d+)", done.err)
        assert call("generate", artifact, *hot, "--seed", seeds[-1]).out == done.out
    assert len(set(seeds)) == len(set(texts)) == 2
    done = call("generate", artifact, *hot, "--prompt", "c")
    told = re.fullmatch(r"seeds (\d+), (\d+), numerics \w{12}\n", done.err)
    assert told and told[1] != told[2]
    again = [
        call("generate", artifact, *hot[2:], "--prompt", prompt, "--seed", seed, "--json").lines[0]
        for prompt, seed in zip(("ab", "c"), told.groups(), strict=True)
    ]
    assert done.out == f"[1] {again[0]['text']}\n[2] {again[1]['text']}\n"


def test_many_seeds_are_not_all_listed() -> None:
    assert origin_note(range(10), "abcdef0123456789") == (
        "seeds 0, 1, 2, 3, 4, 5, 6, 7 and 2 more (--json gives all), numerics abcdef012345"
    )


def test_texts_of_several_prompts_are_numbered(call: Call, artifact: Path) -> None:
    done = call("generate", artifact, "--tokens", "7", "--tokens", "8", *SHORT)
    lines = call("generate", artifact, "--tokens", "7", "--tokens", "8", *SHORT, "--json").lines
    assert done.out == "".join(f"[{i}] {x['text']}\n" for i, x in enumerate(lines, start=1))


def test_chat_template(call: Call, artifact: Path) -> None:
    done = call("generate", artifact, "--chat", "--system", "s", "--prompt", "u", *SHORT, "--json")
    text = "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    (plain,) = call("generate", artifact, "--prompt", text, *SHORT, "--json").lines
    (line,) = done.lines
    assert line["prompt_token_ids"] == plain["prompt_token_ids"]
    assert line["token_ids"] == plain["token_ids"]


def test_a_template_gets_the_tokens_that_the_tokenizer_names(
    call: Call, model: Path, artifact: Path, tmp_path: Path
) -> None:
    """The one that ends a turn is often not the first of those that end generation."""
    copy = shutil.copytree(model, tmp_path / "model")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings |= {"eos_token": {"content": "<|spare|>"}, "pad_token": "<|start|>",
                 "chat_template": "{{ pad_token + messages[0].content + eos_token }}"}  # fmt: skip
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    few = ("--max-tokens-per-step", "4")
    assert call("compile", copy, "-o", tmp_path / "out", *few).code == 0
    done = call("generate", tmp_path / "out", "--chat", "--prompt", "u", *SHORT, "--json")
    (plain,) = call("generate", artifact, "--prompt", "<|start|>u<|spare|>", *SHORT, "--json").lines
    assert done.lines[0]["prompt_token_ids"] == plain["prompt_token_ids"]


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_bad_lines_end_alone(call: Call, artifact: Path, tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "ab", "params": {"max_tokens": 2, "logit_bias": {"9": 100}}},
        "{",
        "",
        {"prompt": "x", "tokens": [1]},
        {"tokens": [VOCAB]},
        {"prompt": "x", "params": {"heat": 1}},
        {"prompt": "x" * CONTEXT},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"messages": [{"role": "user", "content": "a\ud800"}]},
        [1],
        '{"prompt": "x", "params": {}, "params": {"seed": 1}}',
        {"tokens": [7, 8]},
    )
    done = call("generate", artifact, "--prompt-file", file, *SHORT, "--json")
    assert (done.code, done.err) == (1, "")
    first, *bad, last = done.lines
    assert first["token_ids"] == [9, 9]
    (alone,) = call("generate", artifact, "--tokens", "7,8", *SHORT, "--json").lines
    assert last["token_ids"] == alone["token_ids"]
    assert [list(each) for each in bad] == [["line", "error"]] * 9
    assert [each["line"] for each in bad] == [2, 4, 5, 6, 7, 8, 9, 10, 11]
    errors = [str(each["error"]).removeprefix(f"line {each['line']}: ") for each in bad]
    assert errors[0].startswith("not JSON: ")
    assert errors[1:3] == [
        "got prompt and tokens, want one of prompt, tokens, messages",
        f"prompt: token 0: got {VOCAB}, want 0 to {VOCAB - 1}",
    ]
    assert errors[3].startswith("sampling parameter 'heat': unknown name: got 1, want one of ")
    assert errors[4] == (
        f"prompt: is longer than the context: got {CONTEXT} tokens, want at most {CONTEXT - 1} "
        f"(context of {CONTEXT} tokens)"
    )
    assert errors[5:] == [
        "got prompt and messages, want one of prompt, tokens, messages",
        "chat: message 0: 'content': is not valid Unicode: got a lone surrogate at character 1, "
        "want text",
        "got list, want an object",
        "key 'params': is given twice",
    ]  # fmt: skip


def test_messages_are_a_chat_without_being_told(
    call: Call, artifact: Path, tmp_path: Path
) -> None:
    """What the README shows works as it stands there; --chat makes a text the user's message."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (shown,) = re.findall(r'^\{"messages".*$', readme, re.MULTILINE)
    file = write_lines(tmp_path / "p.jsonl", shown, {"prompt": "What is a tile?"})
    done = call("generate", artifact, "--prompt-file", file, "--json", *SHORT)
    assert (done.code, done.err) == (0, "")
    text = "<|user|>What is a tile?<|end|><|assistant|>"
    (plain,) = call("generate", artifact, "--prompt", text, *SHORT, "--json").lines
    chat, alone = done.lines
    assert chat["prompt_token_ids"] == plain["prompt_token_ids"] != alone["prompt_token_ids"]
    both = call("generate", artifact, "--chat", "--prompt-file", file, "--json", *SHORT).lines
    assert [line["prompt_token_ids"] for line in both] == [plain["prompt_token_ids"]] * 2


def test_token_ids_are_no_chat(call: Call, artifact: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"tokens": [7]}, {"prompt": "a"})
    done = call("generate", artifact, "--chat", "--prompt-file", file, "--json", *SHORT)
    refused, _ = done.lines
    assert (done.code, refused["error"]) == (1, (
        "line 1: key 'tokens': got --chat too, and no chat template takes token ids: "
        "want prompt or messages"
    ))  # fmt: skip


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert list(read_lines(tmp_path / "p.jsonl", chat=False)) == [Asked(prompt="a", line=1)]


def test_bad_lines_go_to_stderr_as_text(call: Call, artifact: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": 3}, {"tokens": [7]})
    done = call("generate", artifact, "--prompt-file", file, *SHORT)
    assert done.code == 1
    first, last = done.err.splitlines()
    assert first == "error: line 1: key 'prompt': got int, want a text"
    assert last.startswith("seed ") and ", numerics " in last
    assert done.out.startswith("[2] ")


def test_prompts_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        buffer = io.BytesIO(b'{"prompt": "a"}\n\n{"messages": [], "params": {}}\n')

    monkeypatch.setattr("sys.stdin", Pipe())
    first, second = read_lines(Path("-"), chat=True)
    assert first == Asked(prompt="a", params={}, line=1)
    assert second.problem == (
        "line 3: key 'messages': want a list of objects with role and content"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperature", "nan"],
         "sampling parameter 'temperature': out of range: got nan, "
         "want a finite number of at least 0"),
        (["--seed", str(2**64)],
         f"sampling parameter 'seed': out of range: got {2**64}, "
         f"want an integer from 0 to {2**64 - 1}"),
        (["--max-tokens", "200"],
         "sampling parameter 'max_tokens': beyond the context: got 200 after a prompt of 1 tokens, "
         f"want at most {CONTEXT - 1} (context of {CONTEXT} tokens)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_refused_settings(
    call: Call, artifact: Path, options: list[str], sentence: str, form: list[str]
) -> None:
    done = call("generate", artifact, "--prompt", "x", "--max-tokens", "4", *options, *form)
    out = json.dumps({"error": sentence}) + "\n" if form else ""
    assert (done.code, done.out, done.err) == (1, out, f"error: {sentence}\n")


def test_missing_prompt_file(call: Call, artifact: Path, tmp_path: Path) -> None:
    done = call("generate", artifact, "--prompt-file", tmp_path / "no")
    assert (done.code, done.out) == (1, "")
    assert done.err == f"error: '{tmp_path / 'no'}': No such file or directory\n"


def test_results_come_in_order_while_others_run(artifact: Path) -> None:
    lengths = {7: 20, 8: 1}
    asked = [Asked(prompt=[i], params={"max_tokens": n}) for i, n in lengths.items()]
    with runtime.load(artifact) as engine:
        found: Any = list(run_all(engine, asked, {"ignore_eos": True}))
    assert [len(each.token_ids) for each in found] == [20, 1]


def test_a_reader_that_leaves_is_no_error(artifact: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", *[{"tokens": [7]}] * 50)
    process = start("generate", artifact, "--prompt-file", file, "--json", *SHORT)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=60), err) == (1, "")


def test_chat_reads_lines(call: Call, artifact: Path) -> None:
    lines = "a\n\n/what\n/reset\na\n/exit\nnever\n"
    done = call("chat", artifact, "--max-tokens", "4", "--temperature", "0", given=lines)
    assert done.code == 0
    notes = [n for n in done.err.splitlines() if "tokens/s" not in n]
    assert notes == ["command '/what': unknown: have /reset, /exit", "the conversation starts anew"]
    assert len(re.findall(r"tokens/s, seed \d+, numerics \w{12}\n", done.err)) == 2
    half = len(done.out) // 2
    assert done.out[:half] == done.out[half:] != ""


def test_chat_goes_on_after_the_context_is_full(call: Call, artifact: Path) -> None:
    done = call("chat", artifact, "--max-tokens", "4", given="a" * CONTEXT + "\nb\n")
    assert done.code == 1
    lines = done.err.splitlines()
    assert lines[0] == (
        f"error: prompt: is longer than the context: got {CONTEXT + 3} tokens, "
        f"want at most {CONTEXT - 1} (context of {CONTEXT} tokens)"
    )
    assert "tokens/s" in lines[1]


def test_logits(call: Call, artifact: Path, tmp_path: Path) -> None:
    done = call("logits", artifact, "--tokens", "5,6,7,8,9", "-o", tmp_path / "out.npy")
    assert (done.code, done.out) == (0, f"{tmp_path / 'out.npy'}: float32 [5, {VOCAB}]\n")
    values = np.load(tmp_path / "out.npy")
    assert values.dtype == np.float32
    with runtime.load(artifact) as engine:
        assert np.array_equal(values, engine.logits([5, 6, 7, 8, 9]))
    assert [p.name for p in tmp_path.iterdir()] == ["out.npy"]


def test_logits_as_json(call: Call, artifact: Path, tmp_path: Path) -> None:
    done = call("logits", artifact, "--tokens", "5,6", "-o", tmp_path / "out.npy", "--json")
    values = np.load(tmp_path / "out.npy")
    want = {"file": str(tmp_path / "out.npy"), "dtype": "float32", "shape": list(values.shape)}
    assert json.loads(done.out) == want and values.shape[0] == 2


def test_logits_into_a_missing_folder(call: Call, artifact: Path, tmp_path: Path) -> None:
    done = call("logits", artifact, "--tokens", "5", "-o", tmp_path / "no" / "out.npy")
    assert done.code == 1
    assert done.err == f"error: '{tmp_path / 'no' / 'out.npy'}': No such file or directory\n"
    done = call("logits", artifact, "--tokens", "5", "-o", tmp_path)
    assert (done.code, done.err) == (1, f"error: '{tmp_path}': Is a directory\n")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_artifact(call: Call, artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(artifact), str(copy)], check=True)
    (copy / "tokenizer.json").write_text("{}")
    done = call("generate", copy, "--prompt", "x")
    assert done.code == 1 and done.out == ""
    assert done.err.startswith(
        f"error: artifact '{copy}': file 'tokenizer.json' was edited or damaged: got SHA-256 "
    )


def test_a_manifest_that_does_not_fit_a_kernel_is_one_sentence(
    call: Call, artifact: Path, tmp_path: Path
) -> None:
    edited = shutil.copytree(artifact, tmp_path / "edited")
    manifest = json.loads((edited / "manifest.json").read_text())
    for bucket in manifest["buckets"]:
        bucket["launches"][0]["ints"].append("tokens")
    (edited / "manifest.json").write_text(json.dumps(manifest))
    done = call("generate", edited, "--tokens", "7,8", *SHORT, "--json")
    assert done.code == 1
    (line,) = done.lines
    assert re.fullmatch(
        r"launch 0 '\S+' of bucket '\w+' failed: kernel '\w+': number of arguments: "
        r"got \d+, want \d+",
        line["error"],
    )
