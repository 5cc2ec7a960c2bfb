"""Many requests of one engine: cancelled, dropped, interrupted; the others keep their bits."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from support.tiny import build, tiny
from tilewright import runtime
from tilewright.runtime import Engine, RequestError, SamplingParams
from tilewright.runtime.devices.memory import allocate

pytestmark = pytest.mark.cpu
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG = SamplingParams(max_tokens=60, temperature=0.0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("serving") / "artifact"
    build(tiny(), folder, kernel_cache)
    return folder


@pytest.fixture
def engine(artifact: Path) -> Iterator[Engine]:
    with runtime.load(artifact, num_threads=2) as engine:
        yield engine


def todo(count: int) -> list[tuple[list[int], SamplingParams]]:
    r = random.Random(11)
    return [
        (
            [r.randrange(67) for _ in range(r.choice((1, 3, 20, 45)))],
            SamplingParams(max_tokens=r.randint(2, 20), temperature=float(i % 2), seed=i,
                           logprobs=1, prompt_logprobs=0 if i % 3 else None),
        )
        for i in range(count)
    ]  # fmt: skip


def outcome(output: runtime.RequestOutput) -> Any:
    return output.token_ids, output.logprobs, output.prompt_logprobs


def alone(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    return [outcome(engine.generate(prompt, params)[0]) for prompt, params in asked]


def interrupt_at(line: int, files: tuple[str, ...]) -> Callable[..., Any]:
    """Return a trace function that raises KeyboardInterrupt at the n-th line run in these files."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_an_interrupted_step_takes_nothing_and_is_computed_again(engine: Engine) -> None:
    """Ctrl-C may come at any line; until a sample takes something, none has lost anything."""
    asked = todo(4)
    wanted = alone(engine, asked)
    files = ("step_inputs.py", "decide.py", "choose.py", "sampler.py", "executor.py")
    interrupted = 0
    for line in range(1, 400, 9):
        submitted = [engine.submit(prompt, params) for prompt, params in asked]
        for _ in range(line % 4):
            engine.step()
        sys.settrace(interrupt_at(line, files))
        try:
            engine.step()
        except KeyboardInterrupt as stopped:
            interrupted += 1
            names = []
            trace = stopped.__traceback__
            while trace is not None:
                names.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            allowed = "take" in names
        else:
            allowed = False
        finally:
            sys.settrace(None)
        while engine.step():
            pass
        for each, want in zip(submitted, wanted, strict=True):
            output = engine.output(each)
            if output.finish_reason == "error":
                assert allowed, line
                assert "its step failed: KeyboardInterrupt" in str(output.samples[0].error)
            else:
                assert outcome(output) == want, line
    assert interrupted > 20
    assert alone(engine, asked) == wanted


def test_a_failed_step_names_its_failure_in_every_request_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = [5, 6, 7], GREEDY
    usual = engine.generate(prompt, params)[0].token_ids
    first = engine.submit(prompt, params)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_execute", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt, params)
    output = engine.output(first)
    assert output.finish_reason == "error" and output.token_ids == ()
    assert output.samples[0].error == (
        "request 'request-2': its step failed: ZeroDivisionError: division by zero"
    )
    assert engine.generate(prompt, params)[0].token_ids == usual


def test_logits_of_a_failing_prompt_row_are_an_error_of_that_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=1)
    wanted = engine.generate([5, 6, 7], params)[0]
    execute = engine._execute

    def poisoned(batch: Any) -> dict[str, Any]:
        outputs = execute(batch)
        logits = np.array(outputs["logits"])
        for row, owner in enumerate(batch.logit_requests):
            if batch.requests[owner].id == "bad" and batch.positions[batch.logit_rows[row]] == 1:
                logits[row, 13] = np.nan
        return {**outputs, "logits": logits}

    monkeypatch.setattr(engine, "_execute", poisoned)
    bad = engine.submit([1, 2, 3, 4], params, request_id="bad")
    good = engine.submit([5, 6, 7], params)
    while engine.step():
        pass
    assert outcome(engine.output(good)) == outcome(wanted)
    output = engine.output(bad)
    assert (output.finish_reason, output.token_ids) == ("error", ())
    assert output.samples[0].error == (
        "request 'bad': logits 'position 2': not finite: got no log-probability for the prompt's "
        "token, want numbers or -inf"
    )


def test_a_stream_that_was_aborted_spares_the_next_request_of_its_id(engine: Engine) -> None:
    usual = engine.generate([5, 6, 7], LONG)[0].token_ids
    for end in ("close", "del"):
        old = engine.stream([1, 2], LONG, request_id="mine")
        next(old)
        engine.abort("mine")
        again = engine.stream([5, 6, 7], LONG, request_id="mine")
        if end == "close":
            old.close()
        del old
        gc.collect()
        assert tuple(t for event in again for t in event.token_ids) == usual


def test_an_id_of_ours_that_is_in_use_is_skipped(engine: Engine) -> None:
    kept = engine.stream([1, 2], LONG, request_id="request-2")
    first = engine.submit([1], GREEDY)
    second = engine.submit([1], GREEDY)
    assert (first.id, second.id) == ("request-1", "request-3")
    assert sum(len(event.token_ids) for event in kept) == 60


def test_an_output_is_refused_before_the_end(engine: Engine) -> None:
    submitted = engine.submit([5, 6, 7], LONG)
    engine.step()
    with pytest.raises(RequestError) as caught:
        engine.output(submitted)
    assert str(caught.value) == (
        "request 'request-1': is not finished: step the engine until its samples are"
    )
    while engine.step():
        pass
    assert engine.output(submitted).finish_reason == "length"


def test_closing_ends_all_requests_and_takes_no_other(artifact: Path) -> None:
    engine = runtime.load(artifact, num_threads=2)
    stream = engine.stream([5, 6, 7], LONG)
    waiting = engine.submit([1], GREEDY)
    first = next(stream)
    engine.close()
    engine.close()
    assert first.finish_reason is None
    assert [event.finish_reason for event in stream] == ["abort"]
    assert engine.output(waiting).finish_reason == "abort"
    assert not engine.step()
    calls: list[Callable[[], object]] = [
        lambda: engine.submit([1], GREEDY), lambda: engine.stream([1], GREEDY),
        lambda: engine.generate([1], GREEDY), lambda: engine.logits([1]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RequestError) as caught:
            call()
        assert str(caught.value) == "engine: is closed: want one that is open; load it again"


def test_closing_in_the_middle_of_streams_of_other_threads(artifact: Path) -> None:
    engine = runtime.load(artifact, num_threads=2)
    started = threading.Barrier(4)
    reasons: list[str | None] = []

    def consume() -> None:
        stream = engine.stream([5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0))
        next(stream)
        started.wait()
        reasons.append([event.finish_reason for event in stream][-1])

    threads = [threading.Thread(target=consume) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert len(reasons) == 3 and set(reasons) <= {"abort", "length"}


def consume_oddly(engine: Engine, prompt: list[int], params: SamplingParams, kind: int) -> None:
    """Use a stream as bad clients do: drop it, close it, raise in the loop, abort by its id."""
    stream = engine.stream(prompt, params)
    try:
        for count, _ in enumerate(stream):
            if count < kind % 3:
                continue
            if kind % 4 == 0:
                raise KeyError(count)
            if kind % 4 == 1:
                stream.close()
            elif kind % 4 == 2:
                engine.abort(stream.submitted.id)
            else:
                return
    except KeyError:
        return


def test_bad_clients_of_many_threads_leave_the_others_their_bits(engine: Engine) -> None:
    asked = todo(10)
    wanted = alone(engine, asked)
    found: dict[tuple[int, int], Any] = {}
    problems: list[str] = []

    def serve(thread: int) -> None:
        r = random.Random(thread)
        try:
            for turn in range(12):
                index = r.randrange(len(asked))
                prompt, params = asked[index]
                if r.random() < 0.5:
                    consume_oddly(engine, prompt, params, r.randrange(12))
                    continue
                events = list(engine.stream(prompt, params))
                tokens = tuple(t for event in events for t in event.token_ids)
                scores = tuple(s for event in events for s in event.logprobs or ())
                assert (tokens, scores) == wanted[index][:2], (thread, turn)
                with pytest.raises(RequestError):
                    engine.submit([67], params)
                found[thread, turn] = outcome(engine.generate(prompt, params)[0]), wanted[index]
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not problems and found
    assert all(got == want for got, want in found.values())
    gc.collect()
    while engine.step():
        pass
    pool = engine._cache.blocks
    assert engine._scheduler.num_running == 0 and pool.num_free == pool.num_blocks


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda e: e.generate(np.array(5)),
         "prompts: wrong type: got a 0-d array, want a text, token ids or a list"),
        (lambda e: e.submit(np.array(5)),
         "prompt: wrong type: got ndarray, want a text or a list of token ids"),
        (lambda e: e.generate([10**5000]),
         "prompt: token 0: got a 16610-bit integer, want 0 to 66"),
        (lambda e: e.generate([1], 5),
         "sampling parameters: wrong type: got int, want SamplingParams"),
        (lambda e: e.generate([1], {}),
         "sampling parameters: wrong type: got dict, want SamplingParams"),
        (lambda e: e.submit([1], {}),
         "sampling parameters: wrong type: got dict, want SamplingParams"),
        (lambda e: e.submit([1], GREEDY, request_id="x" * 257),
         "request id: is too long: got 257 characters, want at most 256"),
        (lambda e: e.submit([1], GREEDY, request_id=10**5000),
         "request id: got a 16610-bit integer, want a non-empty text"),
        (lambda e: e.submit([1], replace(GREEDY, temperature=np.float64("nan"))),
         "sampling parameter 'temperature': out of range: got nan, want a finite number of at "
         "least 0"),
    ],
)  # fmt: skip
def test_calls_of_wrong_types_get_one_sentence(
    engine: Engine, call: Callable[[Engine], object], sentence: str
) -> None:
    with pytest.raises(RequestError) as caught:
        call(engine)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_threads": 0}, "engine 'num_threads': got 0, want an int in 1..1024"),
        ({"num_threads": True}, "engine 'num_threads': got True, want an int in 1..1024"),
        ({"num_threads": 2.0}, "engine 'num_threads': got 2.0, want an int in 1..1024"),
        ({"device": 5}, "device: got 5, want cpu, cuda, ascend950-model, cuda:N"),
    ],
)
def test_settings_of_an_engine_are_checked(
    artifact: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError) as caught:
        runtime.load(artifact, **settings)
    assert str(caught.value) == sentence


def test_memory_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(RequestError) as caught:
        allocate(1 << 50)
    assert str(caught.value) == (
        "engine 'memory': cannot be had: got a request for 1125899906842624 bytes, want less "
        "([Errno 12] Cannot allocate memory); give a smaller cache_tokens, or compile for a "
        "smaller context"
    )


def test_a_forked_process_is_told_so_and_does_not_wait(engine: Engine) -> None:
    """The lock may be held by a thread that a fork does not copy."""
    with engine._lock:
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: engine.generate([1], GREEDY), engine.step, engine.close):
                try:
                    call()
                except RequestError as error:
                    refused += str(error).startswith("engine: the process was forked after it was")
            os._exit(refused)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert len(engine.generate([5, 6, 7], GREEDY)[0].token_ids) == 6
