"""How fast an artifact runs on its GPU, beside peers of the same run. Medians, with the spread."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilewright import runtime
from tilewright.runtime.choose import Question
from tilewright.runtime.executor import Executor
from tilewright.runtime.philox import Draw
from tilewright.runtime.sample_logits import SampleRules
from tilewright.tools.bench_engine import make_step, prompt_ids
from tilewright.tools.dev.device_peer import TorchLlama

BATCHES = (1, 8, 32)
CONTEXT, PROMPT = 128, 512
SAMPLINGS = {
    "greedy": runtime.SamplingParams(temperature=0.0),
    "temperature": runtime.SamplingParams(temperature=0.8),
    "top-p": runtime.SamplingParams(temperature=0.8, top_p=0.95, top_k=50),
    "penalty": runtime.SamplingParams(temperature=0.8, repetition_penalty=1.1),
}
Found = dict[str, Any]


def timed(run: Callable[[], object], *, repeat: int = 40, warm: int = 5) -> Found:
    """Wall-clock milliseconds of a call that ends with the GPU idle: median, least, most."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return {"ms": median(samples), "least": min(samples), "most": max(samples)}


def measure_limits() -> Found:
    """Bandwidth of a large copy (bytes read and written), and the time of an empty launch."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), repeat=10)
    one = torch.zeros(1, device="cuda")
    return {
        "copy_tb_per_s": 2 * source.numel() / copy["ms"] / 1e9,
        "empty_launch_ms": timed(lambda: one.add_(1))["ms"],
    }


def measure_steps(path: Path) -> Found:
    """Steps of the executor: inputs copied in, kernels run, outputs left on the GPU."""
    found: Found = {}
    for graphs in (True, False):
        with runtime.load(path, graphs=graphs) as engine:
            executor, manifest = engine.executor, engine.manifest
            way = "graphs" if graphs else "eager"
            for batch in BATCHES:
                step = make_step(manifest, requests=batch, start=CONTEXT, tokens=1)
                found[f"decode, batch {batch}, {way}"] = timed(
                    lambda: executor.launch(step.inputs, step.dims)
                )
                found[f"sampling, batch {batch}, {way}"] = _sampling(executor, batch)
            step = make_step(manifest, requests=1, start=0, tokens=PROMPT)
            found[f"prefill of {PROMPT}, {way}"] = timed(
                lambda: executor.launch(step.inputs, step.dims)
            )
    return found


def _sampling(executor: Executor, batch: int) -> Found:
    """Milliseconds to choose tokens of a step's logits, ids back on the host."""
    manifest = executor.artifact.manifest
    step = make_step(manifest, requests=batch, start=CONTEXT, tokens=1)
    outputs = executor.launch(step.inputs, step.dims)
    chooser = executor.chooser()
    found: Found = {}
    for name, params in SAMPLINGS.items():
        rules = SampleRules.build(params)
        history = prompt_ids(200, manifest.model.vocab_size)
        asked = [Question(i, rules, Draw(7, i), history, history[:50]) for i in range(batch)]
        found[name] = timed(lambda: chooser.choose(outputs, asked), repeat=20)["ms"]
    return found


def measure_engine(path: Path, *, num_tokens: int = 64) -> Found:
    """Tokens per second through the engine, decoding after a short prompt."""
    found: Found = {}
    with runtime.load(path) as engine:
        vocab = engine.model.vocab_size
        for batch in BATCHES:
            prompts = [prompt_ids(16, vocab, salt=i) for i in range(batch)]
            for name, params in SAMPLINGS.items():
                asked = runtime.SamplingParams(
                    temperature=params.temperature, top_p=params.top_p, top_k=params.top_k,
                    repetition_penalty=params.repetition_penalty, max_tokens=num_tokens,
                    ignore_eos=True, seed=1,
                )  # fmt: skip
                call = timed(lambda: engine.generate(list(prompts), asked), repeat=3, warm=1)
                rate = batch * num_tokens / call["ms"] * 1e3
                found[f"batch {batch}, {name}"] = {"tokens_per_s": rate, **call}
    return found


def measure_launches(path: Path) -> Found:
    """Microseconds of every kind of launch in a step, launch by launch between events."""
    found: Found = {}
    with runtime.load(path, graphs=False) as engine:
        executor, manifest = engine.executor, engine.manifest
        templates = {k.symbol: k.template for k in manifest.kernels}
        for name, shape in {
            "decode, batch 1": (1, CONTEXT, 1), "decode, batch 32": (32, CONTEXT, 1),
            f"prefill of {PROMPT}": (1, 0, PROMPT),
        }.items():  # fmt: skip
            step = make_step(manifest, requests=shape[0], start=shape[1], tokens=shape[2])
            runs = [executor.time_launches(step.inputs, step.dims) for _ in range(9)]
            sums: dict[str, list[float]] = defaultdict(list)
            for times in zip(*runs, strict=True):
                kernel = times[0].launch.kernel
                key = f"{templates[kernel]} {kernel}"
                sums[key].append(median(t.seconds for t in times) * 1e6)
            found[name] = {
                key: {"launches": len(each), "us_each": median(each), "us": sum(each)}
                for key, each in sorted(sums.items(), key=lambda item: -sum(item[1]))
            }
    return found


def measure_graph_memory(path: Path) -> Found:
    """Bytes of GPU memory that captured graphs take, per launch."""
    with runtime.load(path, cache_tokens=1 << 16) as engine:
        step = make_step(engine.manifest, requests=1, start=CONTEXT, tokens=1)
        engine.executor.launch(step.inputs, step.dims)
        torch.cuda.synchronize()
        before, captured, launches = torch.cuda.mem_get_info()[0], 0, 0
        for requests in (2, 5, 17, 60):
            for start in (0, 40, 100, 200):
                step = make_step(engine.manifest, requests=requests, start=start, tokens=1)
                engine.executor.launch(step.inputs, step.dims)
                captured += 1
                launches += len(engine.executor.bucket(step.dims).launches)
        torch.cuda.synchronize()
        used = before - torch.cuda.mem_get_info()[0]
    return {"graphs": captured, "launches": launches, "bytes": used, "per_launch": used / launches}


def measure_torch(config: Mapping[str, Any]) -> Found:
    """The peer in plain torch, bf16 weights, as CUDA graphs; and its prefill."""
    found: Found = {}
    for batch in BATCHES:
        peer = TorchLlama(config, batch, 2 * CONTEXT)
        found[f"decode, batch {batch}"] = timed(peer.decode(CONTEXT))
    found[f"prefill of {PROMPT}"] = timed(TorchLlama(config, 1, PROMPT).prefill(PROMPT))
    return found


def measure_transformers(config: Mapping[str, Any], *, num_tokens: int = 32) -> Found:
    """transformers, bf16, random weights of the same shapes, greedy with its cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads")  # fmt: skip
    made = LlamaConfig(**{k: config[k] for k in keys}, tie_word_embeddings=True)
    model = LlamaForCausalLM(made).to(device="cuda", dtype=torch.bfloat16).eval()
    found: Found = {}
    for batch in BATCHES:
        ids = torch.randint(0, 1000, (batch, 16), device="cuda")
        call = timed(
            lambda: model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                                   do_sample=False),
            repeat=3, warm=1,
        )  # fmt: skip
        found[f"generate, batch {batch}"] = {
            "tokens_per_s": batch * num_tokens / call["ms"] * 1e3, **call
        }
    ids = torch.randint(0, 1000, (1, PROMPT), device="cuda")
    with torch.no_grad():
        found[f"prefill of {PROMPT}"] = timed(lambda: model(ids, logits_to_keep=1), repeat=10)
    return found

