"""Tables of hash layers, whose numbers name experts: checked where they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.deepseek_tiny import V4, drawn_tensors
from tilewright.codegen.config import CompileConfig
from tilewright.graph.errors import VerifyError
from tilewright.graph.types import F32, I32
from tilewright.models import deepseek_v4
from tilewright.models.layers import Formats, Limits
from tilewright.tools.prepare import prepare

TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    graph = deepseek_v4.build("g", deepseek_v4.read_config(V4), Formats({}, F32), Limits())
    return drawn_tensors(graph, 3, ids_below=V4["n_routed_experts"])


def write(folder: Path, tensors: dict[str, torch.Tensor], table: torch.Tensor) -> None:
    stored = {name: t.contiguous() for name, t in {**tensors, TABLE: table}.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**V4, "torch_dtype": "float32"}))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_reads_as_it_is_stored(
    tensors: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    write(tmp_path, tensors, tensors[TABLE].to(dtype))
    found = prepare(str(tmp_path), CompileConfig()).weights.unpacked(TABLE, I32).values
    assert found is not None
    assert found.tolist() == tensors[TABLE].tolist()


@pytest.mark.parametrize("wrong", [-1, 5, 1 << 30])
def test_an_expert_that_does_not_exist_is_named(
    tensors: dict[str, torch.Tensor], tmp_path: Path, wrong: int
) -> None:
    table = tensors[TABLE].clone()
    table[66, 1] = wrong
    write(tmp_path, tensors, table)
    prepared = prepare(str(tmp_path), CompileConfig())
    with pytest.raises(VerifyError) as caught:
        prepared.weights.unpacked(TABLE, I32)
    assert str(caught.value) == (
        f"tensor '{TABLE}' ({tmp_path}/model.safetensors): holds numbers out of range: got "
        f"{min(wrong, 0)} to {max(wrong, 4)}, want 0 to 4"
    )


def test_a_table_of_fractions_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write(tmp_path, tensors, tensors[TABLE].half())
    with pytest.raises(VerifyError) as caught:
        prepare(str(tmp_path), CompileConfig())
    assert str(caught.value) == (
        f"tensor '{TABLE}' ({tmp_path}/model.safetensors): holds numbers of experts: got f16, "
        "want i32 or i64"
    )
