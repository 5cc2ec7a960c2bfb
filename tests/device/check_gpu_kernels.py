"""Check and time GPU kernels on the machine that has the GPU: needs torch and tvm_ffi only.

    python tests/device/check_gpu_kernels.py DIR [RESULTS.json]

Every kernel in every schedule against the expected values, outputs poisoned; one row alone against
the same row among many, and schedule against schedule, bit for bit; then times.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tvm_ffi

DEVICE = "cuda"
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i32": torch.int32,
         "u8": torch.uint8}  # fmt: skip
WARM, REPEATS, LAUNCHES = 3, 15, 20
L2_BYTES = 160 << 20  # of weights in turn, so that a launch finds none of its own there


def extent(tree: Any, dims: Mapping[str, int]) -> int:
    """Return an extent with every dim bound."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return dims[tree]
    head, *rest = tree
    values = [extent(r, dims) for r in rest]
    if head == "ceildiv":
        return -(-values[0] // values[1])
    result = values[0]
    for value in values[1:]:
        result = result + value if head == "add" else result * value
    return result


def poison(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xFF)


def call(module: Any, case: Any, kernel: Any, tensors: Any, dims: Mapping[str, int]) -> None:
    """Launch one kernel; raises what its argument checks or the driver say."""
    arguments = [tensors[n] for n in case["names"]]
    if case["scratch"]:
        arguments.append(tensors["workspace"])
    module[kernel["symbol"]](*arguments, *(dims[n] for n in case["ints"]))


def rows_of(case: Any, chosen: list[int], tensors: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Take some rows of a case: arguments that have one entry per row are cut."""
    index = torch.tensor(chosen, device=DEVICE)
    found = {}
    for name in case["names"]:
        cut = case["leading"][name] == case["row_dim"]
        tensor = tensors[name]
        found[name] = tensor[index].contiguous() if cut else tensor.clone()
    for name in case["outputs"]:
        poison(found[name])
    if "workspace" in tensors:
        found["workspace"] = tensors["workspace"]
        poison(found["workspace"])
    return found, {**case["dims"], case["row_dim"]: len(chosen)}


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    have, want = got.reshape(want.shape), want.to(DEVICE)
    if not want.is_floating_point():
        return 0.0 if torch.equal(have.long(), want.long()) else float("inf")
    have, want = have.double(), want.double()
    scale = want.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    scale = scale.clamp(min=max(float(scale.max()) * 1e-3, 1e-30))
    same = (have == want) | (have.isnan() & want.isnan())
    error = torch.where(same, torch.zeros_like(have), (have - want).abs() / scale)
    return float(error.nan_to_num(float("inf")).max())


def check(module: Any, case: Any) -> dict[str, Any]:
    """Values of every schedule, and bitwise classes over rows and schedules."""
    total = case["dims"][case["row_dim"]]
    given = {n: t.to(DEVICE) for n, t in case["arguments"].items()}
    size = max(k["scratch"] for k in case["kernels"])
    given["workspace"] = torch.zeros(max(size, 256), dtype=torch.uint8, device=DEVICE)
    worst, classes, moved = 0.0, {}, []
    watched = list(case["expected"])
    for kernel in case["kernels"]:
        tensors, dims = rows_of(case, list(range(total)), given)
        call(module, case, kernel, tensors, dims)
        torch.cuda.synchronize()
        worst = max([worst, *(error_of(tensors[n], case["expected"][n]) for n in watched)])
        whole = {n: tensors[n].view(torch.uint8).reshape(-1).cpu().numpy().tobytes()
                 for n in watched}  # fmt: skip
        classes.setdefault(repr(hash(tuple(sorted(whole.items())))), []).append(
            json.dumps(kernel["schedule"])
        )
        for chosen in ([0], [total // 2], list(range(1, total, 2)), list(range(5))):
            part, part_dims = rows_of(case, chosen, given)
            call(module, case, kernel, part, part_dims)
            torch.cuda.synchronize()
            for name in case["outputs"]:
                index = torch.tensor(chosen, device=DEVICE)
                want = tensors[name][index].contiguous().view(torch.uint8)
                if not torch.equal(part[name].view(torch.uint8), want):
                    moved.append(f"{kernel['schedule']} rows {chosen[:3]}")
                    break
    return {"error": worst, "classes": len(classes), "moved": moved,
            "members": list(classes.values()) if len(classes) > 1 else []}  # fmt: skip


def timed(launch: Callable[[int], None]) -> float:
    """Median microseconds of one launch, from replays of a captured graph of several."""
    for i in range(WARM):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            launch(i)
    graph.replay()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(stop) * 1e3 / LAUNCHES)
    return median(seconds)


def random_arguments(case: Any, dims: Mapping[str, int], context: int) -> dict[str, Any]:
    """Plausible operands: a request for each token, each with `context` positions."""
    found = {}
    for name, (dtype, shape) in case["types"].items():
        sizes = [extent(e, dims) for e in shape]
        if dtype == "i32":
            count = 1
            for size in sizes:
                count *= size
            values = torch.arange(count, device=DEVICE, dtype=torch.int32).reshape(sizes)
            found[name] = values
        elif dtype == "u8":
            found[name] = torch.randint(0, 60, sizes, dtype=torch.uint8, device=DEVICE)
        else:
            found[name] = torch.randn(sizes, device=DEVICE).to(TORCH[dtype])
    for name, count in case.get("ids", {}).items():
        found[name] = (found[name] * 37) % count
    if case["kind"] == "attend":
        positions, rows, tables = [n for n, (t, _) in case["types"].items() if t == "i32"]
        found[positions].fill_(context - 1)
        found[tables] %= dims["cache_blocks"]
    return found


def paged_arguments(case: Any, rows: int, context: int) -> tuple[dict[str, Any], dict[str, int]]:
    """A request for each token, each with `context` positions and pages of its own."""
    p = case["paged"]
    entries = context // p["ratio"]
    pages, windows = -(-entries // p["per_page"]), 3
    dims = {"tokens": rows, "requests": rows, "window_blocks": windows, "cache_blocks": pages,
            "window_pages": rows * windows, "pages": rows * pages}  # fmt: skip
    found = random_arguments({**case, "kind": "row"}, dims, context)
    for name, role in case["roles"].items():
        shape = found[name].shape
        if role == "positions":
            found[name].fill_(context - 1)
        elif role == "selected":
            picked = torch.rand(rows, entries, device=DEVICE).topk(min(shape[1], entries)).indices
            found[name].fill_(-1)
            found[name][:, : picked.shape[1]] = picked.sort().values
        elif role == "candidates":
            blocks = entries // p["block_size"]
            count = min(shape[1], blocks)
            picked = torch.rand(rows, blocks, device=DEVICE).topk(count).indices
            found[name].fill_(-1)
            found[name][:, :count] = picked.sort().values
    return found, dims


def paged_bytes(case: Any, rows: int, context: int) -> float:
    """Bytes of states, queries and results that a step reads or writes once."""
    p, entries = case["paged"], context // case["paged"]["ratio"]
    listed = {"attend_window": 0, "attend_compressed": entries,
              "attend_selected": min(p["selected"], entries),
              "select_within": min(p["blocks"] * p["block_size"], entries)}  # fmt: skip
    read = listed.get(p["op"], entries) * p["entry_bytes"] + p["window"] * p["window_bytes"]
    both = 4 if p["op"].startswith("attend") else 2  # bf16 in and out
    return rows * (read + p["heads"] * p["width"] * both)


def timed_paged(
    module: Any, case: Any, kernel: Any, given: Any, dims: Mapping[str, int], num_bytes: float
) -> dict[str, Any]:
    us = timed(lambda _: call(module, case, kernel, given, dims))
    gbs = round(num_bytes / us / 1e3)
    return {"schedule": kernel["schedule"], "us": round(us, 2), "gbs": gbs}


def time_paged(module: Any, case: Any, label: str) -> dict[str, Any]:
    """Times of every schedule by rows and context."""
    found: dict[str, Any] = {}
    for context in case["contexts"]:
        for rows in case["rows"]:
            given, dims = paged_arguments(case, rows, context)
            size = max(k["scratch"] for k in case["kernels"])
            given["workspace"] = torch.zeros(max(size, 256), dtype=torch.uint8, device=DEVICE)
            num_bytes = paged_bytes(case, rows, context)
            times = [timed_paged(module, case, k, given, dims, num_bytes) for k in case["kernels"]]
            times.sort(key=lambda r: r["us"])
            found[f"{rows} x {context}"] = times
            best = times[0]
            print(f"{label} rows {rows:4} ctx {context:6} best {best['us']:9.2f} us "
                  f"{best['schedule']} worst {times[-1]['us']:.1f} {best['gbs']} GB/s",
                  flush=True)  # fmt: skip
            del given
    return found


def time_case(module: Any, case: Any, rows: int, context: int) -> list[dict[str, Any]]:
    blocks = -(-context // 32)
    dims = {"tokens": rows, "logit_rows": rows, "requests": rows, "request_blocks": blocks,
            "cache_blocks": rows * blocks, "request_window_blocks": 2,
            "window_blocks": rows * 2}  # fmt: skip
    given = random_arguments(case, dims, context)
    size = max(k["scratch"] for k in case["kernels"])
    given["workspace"] = torch.zeros(max(size, 256), dtype=torch.uint8, device=DEVICE)
    copies = copies_of(case, given)
    found = []
    for kernel in case["kernels"]:
        us = timed(
            lambda i, kernel=kernel: call(module, case, kernel, copies[i % len(copies)], dims)
        )
        found.append({"schedule": kernel["schedule"], "us": round(us, 2), **rates(case, us, rows)})
    return sorted(found, key=lambda r: r["us"])


def copies_of(case: Any, given: Any) -> list[Any]:
    """Operands with weights of their own for each launch, so many that none stays in the L2."""
    size = sum(given[n].numel() * given[n].element_size() for n in case.get("weights", ()))
    if size == 0 or size > L2_BYTES:
        return [given]
    count = min(LAUNCHES, -(-L2_BYTES // size))
    return [given] + [
        {**given, **{n: given[n].clone() for n in case["weights"]}} for _ in range(count - 1)
    ]


def rates(case: Any, us: float, rows: int) -> dict[str, float]:
    """Bytes of the weights that are read, and operations, a second."""
    if "bytes_per_row" in case:
        return {"gbs": round(case["bytes_per_row"] * rows / us / 1e3)}
    if "flops_per_row" not in case:
        return {}
    touched = case["weight_bytes"]
    for name, count in case.get("ids", {}).items():
        slots = extent(case["types"][name][1][1], {})
        touched = touched * min(rows * slots, count) / count
    tflops = case["flops_per_row"] * rows / us / 1e6
    return {"gbs": round(touched / us / 1e3), "tflops": round(tflops, 1)}


def peer_times(case: Any, rows: int) -> dict[str, float]:
    """Microseconds of torch's products of the same extents: bf16, and fp8 without block scales."""
    if "peer" not in case:
        return {}
    n, k = case["peer"]
    count = max(1, min(8, -(-L2_BYTES // (n * k))))
    x = torch.randn(rows, k, device=DEVICE)
    weights = [torch.randn(n, k, device=DEVICE) for _ in range(count)]
    wide, x16 = [w.bfloat16() for w in weights], x.bfloat16()
    found = {"bf16": timed(lambda i: torch.mm(x16, wide[i % count].T))}
    if rows % 16 == 0:
        codes, x8 = [w.to(torch.float8_e4m3fn) for w in weights], x.to(torch.float8_e4m3fn)
        one = torch.ones((), device=DEVICE)
        found["fp8"] = timed(
            lambda i: torch._scaled_mm(
                x8, codes[i % count].T, one, one, out_dtype=torch.bfloat16
            )
        )
    return {name: round(us, 2) for name, us in found.items()}


def main(folder: Path, results: Path | None) -> None:
    start = time.time()
    module = tvm_ffi.load_module(str(folder / "kernels.so"))
    loaded = torch.load(folder / "cases.pt")
    print(torch.cuda.get_device_name(), torch.__version__, f"loaded {time.time() - start:.1f} s")
    report: list[Any] = []
    for case in loaded["cases"]:
        label = f"{case['model']:10} {case['name']:24}"
        row: dict[str, Any] = {"model": case["model"], "name": case["name"]}
        try:
            if not case["timing"]:
                row |= check(module, case)
                print(f"{label} {len(case['kernels']):3} schedules  error {row['error']:.1e}  "
                      f"classes {row['classes']}  moved {len(row['moved'])} {row['moved'][:1]}",
                      flush=True)  # fmt: skip
            elif "paged" in case:
                row["times"] = time_paged(module, case, label)
            else:
                row["times"] = {}
                for rows in case.get("rows", (1, 16, 64, 128)):
                    context = 4096 if rows <= 64 else 256
                    times = time_case(module, case, rows, context)
                    row["times"][rows] = times
                    peers = peer_times(case, rows)
                    row.setdefault("peers", {})[rows] = peers
                    print(f"{label} rows {rows:4} ctx {context:5} best {times[0]['us']:9.2f} us "
                          f"{times[0]['schedule']} worst {times[-1]['us']:.1f} "
                          f"weights {case['weight_bytes'] / 1e6:.1f} MB "
                          f"{times[0].get('gbs', '')} GB/s {times[0].get('tflops', '')} TFLOP/s "
                          f"peers {peers}", flush=True)  # fmt: skip
        except Exception as error:  # a kernel that fails must not hide the others
            row["failed"] = str(error)[-400:]
            print(f"{label} FAILED: {row['failed']}", flush=True)
        report.append(row)
        if results is not None:
            facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                     "cases": report}  # fmt: skip
            results.write_text(json.dumps(facts, indent=1))
    print(f"total {time.time() - start:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
