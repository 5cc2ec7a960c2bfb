"""CPU variants: which one a machine gets, and which promise each artifact makes."""

from __future__ import annotations

import pytest

from tilewright.graph.errors import TargetError
from tilewright.targets.cpu import target
from tilewright.tools.plan_report import mode_text

V3, V4, BF16 = (frozenset(target.VARIANTS[f"x86-64-v{v}"].features) for v in ("3", "4", "4-bf16"))


@pytest.mark.parametrize(
    ("machine", "features", "wanted"),
    [
        ("x86_64", V3, "x86-64-v3"),
        ("x86_64", V4, "x86-64-v3"),
        ("x86_64", BF16 | {"amx_tile"}, "x86-64-v3"),
        ("aarch64", frozenset({"asimd"}), "aarch64"),
    ],
)
def test_a_machine_gets_a_variant_that_was_run(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: frozenset[str], wanted: str
) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: machine)
    monkeypatch.setattr(target, "host_features", lambda: features)
    assert target.cpu_target().variant == wanted


@pytest.mark.parametrize("machine", ["x86_64", "riscv64"])
def test_a_machine_without_a_variant(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(target.platform, "machine", lambda: machine)
    monkeypatch.setattr(target, "host_features", lambda: V3 - {"avx2"})
    with pytest.raises(TargetError) as caught:
        target.cpu_target()
    assert str(caught.value) == (
        f"cpu target: this machine ({machine}) has no known variant: "
        "want one of x86-64-v3, x86-64-v4, x86-64-v4-bf16, aarch64"
    )


def test_only_what_was_run_is_called_proven() -> None:
    said = {name: each.invariance for name, each in target.VARIANTS.items()}
    assert said == {"x86-64-v3": "proven", "x86-64-v4": "proven", "x86-64-v4-bf16": "proven",
                    "aarch64": "unproven"}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "invariance", "wanted"),
    [
        ("deterministic", "proven", "deterministic"),
        ("deterministic", "unproven", "deterministic (unproven on this target)"),
        ("fast", "unproven", "fast"),
    ],
)
def test_a_summary_says_what_is_not_proven(mode: str, invariance: str, wanted: str) -> None:
    assert mode_text({"mode": mode, "invariance": invariance}) == wanted
