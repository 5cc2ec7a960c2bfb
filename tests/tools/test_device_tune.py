"""Tuning for a GPU in two halves: what goes out, what comes back, and what compiles use of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilewright import models
from tilewright.codegen.cache import Built, KernelCache
from tilewright.codegen.tune import TuningRecords
from tilewright.graph.errors import LowerError
from tilewright.targets.nvidia.toolchain import NvidiaToolchain
from tilewright.targets.registry import resolve
from tilewright.tools import device_measure
from tilewright.tools.commands import job

from .conftest import Call

ASKED = ("--target", "sm90", "--max-tokens-per-step", "4")


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Committed records in a file of the test's own."""
    path = tmp_path / "committed" / "tuned.json"
    monkeypatch.setattr(job, "records_path", lambda target, flags: path)
    return path


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled; the names of the sources that would be."""
    names: list[str] = []

    def build(self: object, sources: Any, **_: object) -> Built:
        names.extend(s.name for s in sources)
        return Built((), len(names))

    monkeypatch.setattr(KernelCache, "build", build)
    monkeypatch.setattr(NvidiaToolchain, "link", lambda self, objects, path: path.write_text(""))
    return names


def export(call: Call, model: Path, folder: Path, *options: str) -> dict[str, Any]:
    done = call("tune", str(model), *ASKED, "--export", str(folder), *options)
    assert done.code == 0, done.err
    found = json.loads((folder / "cases.json").read_text())
    assert isinstance(found, dict)
    return found


def of_configuration(templates: str, budget: int) -> tuple[str, ...]:
    """Options that tune the small model's configuration in place of a model."""
    path = Path(models.__file__).parent / "small" / "config.json"
    return ("--config", str(path), "--templates", templates, "--budget", str(budget))


def measured(
    cases: dict[str, Any], path: Path, change: Callable[[dict[str, Any]], None] = lambda row: None
) -> Path:
    """What measure.py would write on a GPU that likes the last candidate best."""
    rows = [
        {
            "key": c["key"], "group": c["group"], "bucket": c["bucket"], "different": [],
            "symbols": [k["symbol"] for k in c["kernels"]],
            "seconds": [1e-5 / (1 + i) for i in range(len(c["kernels"]))],
        }
        for c in cases["cases"]
    ]  # fmt: skip
    for row in rows:
        change(row)
    result = {
        "schema": device_measure.SCHEMA, "target": "sm90", "device": "card", "driver": "1.2",
        "torch": "2", "date": "2026-01-02", "cases": rows, "failed": [],
    }  # fmt: skip
    path.write_text(json.dumps(result))
    return path


def test_what_goes_out(call: Call, model: Path, tmp_path: Path, records: Path,
                       unbuilt: list[str]) -> None:  # fmt: skip
    folder = tmp_path / "out"
    cases = export(call, model, folder, "--budget", "3")
    assert {p.name for p in folder.iterdir()} == {
        "candidates.so", "cases.json", "ints.npz", "measure.py"
    }  # fmt: skip
    assert (folder / "measure.py").read_text() == Path(device_measure.__file__).read_text()
    kernels = [k["symbol"] for c in cases["cases"] for k in c["kernels"]]
    assert sorted(set(kernels)) == sorted(unbuilt)
    assert max(len(c["kernels"]) for c in cases["cases"]) == 3
    assert len({c["key"] for c in cases["cases"]}) == len(cases["cases"])
    ints = np.load(folder / "ints.npz", allow_pickle=False)
    for case in cases["cases"]:
        for argument in case["arguments"]:
            if argument["dtype"] == "i32":
                assert ints[argument["ints"]].dtype == np.int32
            else:
                assert all(type(d) is int and d > 0 for d in argument["shape"]), argument


def test_kernels_of_some_templates_alone(
    call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    cases = export(call, model, tmp_path / "out", "--templates", "row,attend")
    names = {k["symbol"].rpartition("_")[0] for c in cases["cases"] for k in c["kernels"]}
    assert names == {"row", "attend"}
    done = call("tune", str(model), *ASKED, "--export", "o", "--templates", "row,rows")
    assert done.code == 1
    assert done.err.startswith("error: target 'sm90': kernel template 'rows': unknown: have thin,")
    done = call("tune", str(model), *ASKED, "--export", "o", "--templates", "latent,select")
    assert (done.code, done.err) == (1, (
        "error: option '--templates': no kernel of this model can be measured: got latent, select, "
        "want some of attend, contract, row\n"
    ))  # fmt: skip


def test_a_configuration_in_place_of_a_model(
    call: Call, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    asked = of_configuration("latent", 2)
    done = call("tune", *ASKED, *asked, "--export", str(tmp_path / "out"))
    assert done.code == 0, done.err
    assert unbuilt and all(name.startswith("latent_") for name in unbuilt)
    refused = call("tune", *asked[:2])
    assert (refused.code, refused.err) == (
        2, "error: target 'cpu': is measured where it runs, with a model's weights: got --config, "
        "want none of the options of GPU targets\n"
    )  # fmt: skip
    assert "got both, want a model or --config" in call("tune", "x", *asked[:2]).err
    assert "got neither, want a model or --config" in call("tune").err


@pytest.mark.parametrize("field", ["key", "kernel"])
def test_records_of_other_kernels_are_left_alone(
    field: str, call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    """A record holds for its key, which names the body, its rows and its candidates."""
    cases = export(call, model, tmp_path / "out")
    file = measured(cases, tmp_path / "measured.json")
    assert call("tune", str(model), *ASKED, "--import", str(file)).code == 0
    rows = json.loads(records.read_text())
    for row in rows:
        if field == "key":
            row["key"] = "0" + row["key"][1:] if row["key"][0] != "0" else "1" + row["key"][1:]
        else:
            row["kernel"] = "row_of_yesterday"
    records.write_text(json.dumps(rows))
    asked = job.Asked(model=str(model), target="sm90", max_tokens_per_step=4)
    found = job.resolve_asked(asked)
    made = job.make_job(job.open_model(asked), found, None)
    from tilewright.codegen.pipeline import lower
    from tilewright.codegen.plan import plan_groups

    graph = lower(made.graph, made.flags, beside=True).graph
    plans = plan_groups(graph, found.target, made.config, made.choose)
    by_symbol = {s.symbol for plan in plans for s in plan.specs.values()}
    first = {c["kernels"][0]["symbol"] for c in cases["cases"]}
    last = {c["kernels"][-1]["symbol"] for c in cases["cases"]}
    assert by_symbol == (last if field == "kernel" else first)


def test_what_comes_back_is_kept_and_used(
    call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    cases = export(call, model, tmp_path / "out")
    file = measured(cases, tmp_path / "measured.json")
    done = call("tune", str(model), *ASKED, "--import", str(file), "--json")
    assert done.code == 0, done.err
    (report,) = done.lines
    assert report["path"] == str(records)
    kept = TuningRecords(records)
    assert len(kept) == len(cases["cases"])
    assert {(r.machine, r.driver, r.date) for r in kept.all()} == {("card", "1.2", "2026-01-02")}
    # Nothing is left to export, and a second run measures nothing.
    again = call("tune", str(model), *ASKED)
    assert f"measured nothing: all {len(kept)} records were there" in again.out

    asked = job.Asked(model=str(model), target="sm90", max_tokens_per_step=4)
    found = job.resolve_asked(asked)
    made = job.make_job(job.open_model(asked), found, None)
    from tilewright.codegen.pipeline import lower
    from tilewright.codegen.plan import plan_groups

    graph = lower(made.graph, made.flags, beside=True).graph
    plans = plan_groups(graph, found.target, made.config, made.choose)
    by_kernel = {r.kernel: r for r in kept.all()}
    chosen = [spec for plan in plans for spec in plan.specs.values()]
    assert all(spec.schedule.to_json() == by_kernel[spec.symbol].schedule for spec in chosen)
    assert made.schedules.startswith("measured on sm90")


def test_the_other_chip_takes_the_order_of_the_measured_one(
    call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    cases = export(call, model, tmp_path / "out")
    file = measured(cases, tmp_path / "measured.json")
    assert call("tune", str(model), *ASKED, "--import", str(file)).code == 0
    done = call("tune", str(model), "--target", "sm100", "--max-tokens-per-step", "4")
    assert f"measured nothing: all {len(cases['cases'])} records" in done.out
    assert job.schedule_source(resolve("sm100")[0]).endswith("; sm100 was not measured")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "other kernels": (lambda row: row["symbols"].__setitem__(0, "row_0"), "are others than this"),
    "other bits": (lambda row: row.update(different=["row_1"]), "gave different bits: row_1"),
    "other models": (lambda row: row.update(key="none"), "holds no case of this model"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_refused_measurements(
    name: str, call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    change, message = CHANGES[name]
    file = measured(export(call, model, tmp_path / "out"), tmp_path / "measured.json", change)
    done = call("tune", str(model), *ASKED, "--import", str(file))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: measurement '{file}': ") and message in done.err
    assert not records.exists()


def test_rows_that_find_pages_are_not_measured(
    call: Call, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    """Random tables would point outside of random states."""
    asked = of_configuration("row", 1)
    done = call("tune", *ASKED, *asked, "--export", str(tmp_path / "out"))
    assert done.code == 0, done.err
    cases = json.loads((tmp_path / "out" / "cases.json").read_text())["cases"]
    groups = {c["group"] for c in cases}
    assert "layers.2.append_entries_1" not in groups and "layers.0.hyper_mix" in groups


def test_other_numerics_may_have_other_bits(
    call: Call, model: Path, tmp_path: Path, records: Path, unbuilt: list[str]
) -> None:
    """In fast mode: attention in other chunks. Schedules of one numerics may not."""
    cases = export(call, model, tmp_path / "out", "--mode", "fast", "--templates", "attend")
    for wrong in (False, True):

        def change(row: dict[str, Any], wrong: bool = wrong) -> None:
            row["different"] = row["symbols"][1 if wrong else -1 :][:1]

        file = measured(cases, tmp_path / "measured.json", change)
        done = call("tune", str(model), *ASKED, "--mode", "fast", "--import", str(file))
        assert done.code == int(wrong), done.err


def test_refused_arguments(call: Call, model: Path, tmp_path: Path, records: Path) -> None:
    missing = tmp_path / "missing.json"
    assert call("tune", str(model), *ASKED, "--import", str(missing)).err.startswith(
        f"error: measurement '{missing}': not readable: "
    )
    both = call("tune", str(model), *ASKED, "--import", "a", "--export", "b")
    assert (both.code, both.err) == (
        2, "error: option '--export': got --import too, want one of them\n"
    )  # fmt: skip
    for given in (
        ("--export", tmp_path / "out"), ("--import", "a"), ("--budget", 16), ("--templates", "row"),
        ("--budget", 2, "--templates", "row"),
    ):  # fmt: skip
        cpu = call("tune", str(model), *given)
        named = ", ".join(str(option) for option in given[::2])
        assert (cpu.code, cpu.err) == (
            2, "error: target 'cpu': is measured where it runs, with a model's weights: got "
            f"{named}, want none of the options of GPU targets\n",
        )  # fmt: skip
    done = call("tune", str(model), *ASKED, "--export", "o", "--templates", "")
    assert done.err.startswith("error: target 'sm90': kernel template '': unknown: have ")
    if not torch.cuda.is_available():
        done = call("tune", str(model), *ASKED)
        assert done.code == 1 and "got GPU none, want sm90; use --export DIR" in done.err


def test_errors_of_a_measurement_name_the_file(tmp_path: Path) -> None:
    from tilewright.tools.device_candidates import adopt

    path = tmp_path / "m.json"
    path.write_text('{"schema": "other"}')
    with pytest.raises(LowerError, match="not readable: want a file that measure.py wrote"):
        adopt(path, {})
