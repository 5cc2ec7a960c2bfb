"""One step of DeepSeek-V4.1-Flash at its real dimensions on one GPU: eight layers that cover every
layer mode, random weights in their native formats.

python -m tilewright.tools.dev.device_step build out/step
python -m tilewright.tools.dev.device_step run out/step -o out/step.json

`build` compiles an artifact without weights; `run` needs the runtime's packages only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.tools.dev.halves import halves

CONFIG = "deepseek-v4.1-flash"
# Modes by layer: window, window with Engram, full (ratio 2), reuse, full (ratio 1, candidates),
# reuse, reindex, reuse. The Engram table is cut from 384 million rows to 3.9 million.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 8,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [1],
    "engram_vocab_size": 160_000,
    "engram_num_embeddings": [3_900_000],
}
MAX_CONTEXT, MAX_TOKENS, MAX_REQUESTS = 1 << 17, 8192, 256


def main() -> None:
    """Build or run, as the command line says."""
    parsers = halves(__doc__, "ends of the names of steps")
    parsers.build.add_argument("--jobs", type=int, default=2)
    asked = parsers.whole.parse_args()
    if asked.command == "build":
        build(asked.folder, asked.target, asked.jobs)
    else:
        from tilewright.tools.dev.device_step_run import run

        run(asked.folder, asked.output, asked.only)


def build(folder: Path, target: str, jobs: int) -> None:
    """Compile the eight layers without weights into `folder`/artifact."""
    from tilewright.codegen.compile import compile_graph
    from tilewright.codegen.config import CompileConfig
    from tilewright.models.known_config import open_config
    from tilewright.tools.commands.job import Asked, make_job, resolve_asked
    from tilewright.tools.prepare import prepare_config
    from tilewright.tools.progress import StageBars

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "deepseek-v4.1-flash-8-layers.json"
    path.write_text(json.dumps({**open_config(CONFIG)[1], **LAYERS}, indent=1))
    config = CompileConfig(max_tokens_per_step=MAX_TOKENS, max_requests=MAX_REQUESTS)
    found = resolve_asked(Asked(model_config=str(path), target=target, jobs=jobs))
    prepared = prepare_config(str(path), config, max_context=MAX_CONTEXT)
    with StageBars(visible=True) as bars:
        report = compile_graph(
            make_job(prepared, found, None), folder / "artifact", bars, weights=False
        )
    rates = {"bandwidth": found.target.peak_bandwidth, "flops": found.target.peak_flops}
    (folder / "rates.json").write_text(json.dumps(rates))
    reports: Any = getattr(found.toolchain, "reports", {})
    (folder / "reports.json").write_text(json.dumps(reports))
    print(f"{report.num_kernels} kernels, {report.num_launches} launches a step, "
          f"{report.weights_bytes / 1e9:.1f} GB of weights")  # fmt: skip


if __name__ == "__main__":
    main()
