"""Both DeepSeek families served: packed caches in two pools, company, preemption, rollback, and
prompts of which only the last tokens go through the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.deepseek_tiny import V4, V41, drawn_tensors
from support.paged_run import PagedRun, graph_weights
from support.tiny import SETTINGS, quick_target
from support.toolchain import QuickToolchain
from tilewright.codegen.compile import CompileJob, compile_graph
from tilewright.codegen.flags import Flags
from tilewright.codegen.pack_cpu import Unpacked
from tilewright.codegen.plan import first_candidate
from tilewright.graph import Graph, reference
from tilewright.graph.types import F32, ElementType
from tilewright.models.engram import TOKEN_MAP
from tilewright.models.layers import Formats, Limits
from tilewright.models.registry import family_of
from tilewright.runtime import Engine, SamplingParams
from tilewright.runtime.artifact import ModelRecord
from tilewright.runtime.cache import CacheSettings
from tilewright.runtime.request import Request

pytestmark = pytest.mark.slow
MOST, CONTEXT, PAGE, REPLAY = 24, 512, 128, 14
LIMITS = Limits(max_tokens=MOST, max_requests=6, max_logit_rows=MOST, max_context=CONTEXT,
                context_page=PAGE, window_page=16)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPT = [(7 * i * i + 3) % 64 + 3 for i in range(61)]


@dataclass(frozen=True)
class Plain:
    """Unquantised tensors by name."""

    tensors: dict[str, torch.Tensor]

    def unpacked(self, name: str, dtype: ElementType) -> Unpacked:
        return Unpacked(values=self.tensors[name].numpy())


@dataclass(frozen=True)
class Model:
    """A small model with its tensors; `replay`: tokens of a prompt's tail, if it has one."""

    config: dict[str, Any]
    replay: int | None = None

    @property
    def graph(self) -> Graph:
        family = family_of(self.config)
        read: Any = family.read_config(self.config)
        read = replace(read, replay_tokens=self.replay) if self.replay else read
        return family.build("tiny", read, Formats({}, F32), LIMITS)

    def compile(self, folder: Path, cache: Path) -> Path:
        chip = quick_target()
        record = ModelRecord(
            name="tiny", family="tiny", vocab_size=67, max_context=CONTEXT, block_size=PAGE,
            bos_id=None, eos_ids=(), add_bos=False, chat_template=None, tokenizer=None, config={},
        )  # fmt: skip
        settings = replace(SETTINGS, max_tokens_per_step=MOST, max_context=CONTEXT,
                           replay_tokens=self.replay)  # fmt: skip
        job = CompileJob(
            self.graph, record, Plain(self.tensors), chip, QuickToolchain(chip, cache), settings,
            first_candidate(chip), Flags(cache=cache), jobs=2,
        )  # fmt: skip
        compile_graph(job, folder / "artifact", lambda *_: None)
        return folder / "artifact"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return drawn_tensors(self.graph, 5, ids_below=50 if "kv_source_layer_ids" in self.config
                             else self.config["n_routed_experts"])  # fmt: skip


def v41() -> dict[str, Any]:
    """V4.1, with the compressed id of padding that its drawn token map gives."""
    drawn = Model(dict(V41)).tensors
    return {**V41, "engram_compressed_pad_id": int(drawn[TOKEN_MAP][2, 0])}


MODELS: dict[str, Callable[[], Model]] = {
    "v4": lambda: Model(dict(V4)), "v41": lambda: Model(v41()),
    "v41-replay": lambda: Model(v41(), REPLAY),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def artifact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> Path:
    return MODELS[request.param]().compile(tmp_path_factory.mktemp("deepseek"), kernel_cache)


def test_company_cuts_and_preemption_change_no_token(artifact: Path) -> None:
    """Requests of all lengths, in a cache of few blocks, have the tokens that each has alone."""
    prompts = [PROMPT[: n + 1] for n in (60, 47, 28, 0, 3, 12, 15)]
    params = replace(GREEDY, max_tokens=100)
    with Engine(artifact, num_threads=2) as engine:
        alone = [engine.generate(p, params)[0].samples[0].token_ids for p in prompts]
    with Engine(artifact, num_threads=1, cache_tokens=3 * PAGE) as engine:
        samples = [engine.submit(p, params).samples[0] for p in prompts]
        while engine.step():
            pass
        assert sum(s.request.num_preemptions for s in samples) > 0
        assert [list(s.request.output_ids) for s in samples] == [list(ids) for ids in alone]
        assert engine._cache.blocks.num_free == 3
        assert engine._cache.window is not None
        pool = engine._cache.window.pool
        assert pool.num_free == pool.num_blocks


def continued(engine: Engine, request: Request, count: int) -> list[int]:
    """The next `count` tokens."""
    known = request.num_tokens
    while request.num_tokens < known + count:
        assert engine.step()
    return request.token_ids(known, known + count)


@pytest.mark.parametrize("retained", [0, 40])
def test_set_back_and_resumed(artifact: Path, retained: int) -> None:
    """After other tokens, and as another request, the text goes on as it would have."""
    settings = CacheSettings(retained=retained, snapshot_interval=8)
    params = replace(GREEDY, max_tokens=200)
    with Engine(artifact, num_threads=2, cache_settings=settings) as engine:
        expected = list(engine.generate(PROMPT, params)[0].samples[0].token_ids)
        request = engine.submit(PROMPT, params).samples[0].request
        continued(engine, request, 5)
        for strays in (1, 2, 9, 17, 30):
            known = request.num_tokens
            request.output_ids[-1] = (request.output_ids[-1] + 1) % 67
            continued(engine, request, strays)
            del request.output_ids[known - len(PROMPT) :]
            request.output_ids[-1] = expected[known - len(PROMPT) - 1]
            engine._scheduler.rollback(request, known - 1)
            continued(engine, request, 3)
            assert request.output_ids == expected[: len(request.output_ids)]
        snapshot = engine._scheduler.snapshot(request)
        again = engine.submit(request.token_ids(0, request.num_tokens), GREEDY).samples[0].request
        again.resume = snapshot
        start = len(request.output_ids)
        if engine.layout.replay is None:  # a longer prompt has another tail
            assert continued(engine, again, 8) == expected[start : start + 8]
        engine.abort(request.id)
        engine.abort(again.id)


def test_a_tail_is_what_the_reference_gives(
    tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> None:
    """The decoder runs for the prompt's last tokens alone, however the prompt is cut."""
    model = MODELS["v41-replay"]()
    path = model.compile(tmp_path_factory.mktemp("tail"), kernel_cache)
    graph, start = model.graph, len(PROMPT) - REPLAY
    run = PagedRun(graph, graph_weights(graph, model.tensors), reference.HONOUR_CASTS,
                   context_page=PAGE, window_page=16, max_step=CONTEXT, window=12)
    rows = range(start, len(PROMPT))
    extra = {"tail_rows": list(rows), "tail_window_positions": [i - start for i in rows],
             "logit_rows": [len(rows) - 1]}
    given = {name: torch.tensor(v, dtype=torch.int32) for name, v in extra.items()}
    given["tail_window_tables"] = run.window_tables
    want = run.step({0: PROMPT}, extra=given)["logits"][-1]
    params = replace(GREEDY, max_tokens=1, logprobs=5)
    with Engine(path, num_threads=2) as engine:
        sample = engine.generate(PROMPT, params)[0].samples[0]
    assert sample.token_ids[0] == int(want.argmax())
    assert sample.logprobs is not None
    wanted = float(want.log_softmax(-1)[sample.token_ids[0]])
    np.testing.assert_allclose(sample.logprobs[0].logprob, wanted, atol=2e-2)
