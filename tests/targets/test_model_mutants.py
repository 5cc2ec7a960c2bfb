"""Mutants of correct kernels, made from their text: the model catches each, or proves it harmless.

A mutant drops or redirects a synchronisation, shifts an address or moves a buffer. It is caught
when the model reports it, in normal or in adversarial order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from support.ascend import Variants
from support.ascend_kernels import PRINTED, TEXTS, Case, case
from support.ascend_mutants import (
    attend_case,
    attend_text,
    coded_case,
    coded_text,
    headers,
    latent_case,
    latent_text,
    mx_case,
    mx_text,
    select_case,
    select_text,
)

pytestmark = pytest.mark.cpu

# Clean in both orders: the model proves these edges redundant.
REDUNDANT = {
    "reduce:24 moves __ubuf__ float* y_ub = (__ubuf__ float*)16416;": (
        "y then stands where row 4 of x stood, which was read before the barrier"
    )
}


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text), one change each, on a line of its own so that line numbers stay."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        for name, changed in _changes(line):
            if changed != line:
                whole = [*lines[:number], changed, *lines[number + 1 :]]
                yield f"{number + 1} {name}", "".join(whole)


def _changes(line: str) -> Iterator[tuple[str, str]]:
    sync = re.match(r"\s*asc_(sync\w*|lock|unlock)\(", line)
    if sync:
        yield f"drops {line.strip()}", "\n"
        yield f"redirects {line.strip()}", _redirected(line)
    if re.match(r"\s*asc_(copy|mmad|vf_call)", line):
        shifted = re.sub(r"(\b\w+_(?:ub|l1|l0)\b)", r"(\1 + 16)", line, count=1)
        yield f"shifts {line.strip()}", shifted
    buffer = re.match(r"(.*\*\))(\d+);", line)
    if buffer and int(buffer.group(2)):
        yield f"moves {line.strip()}", f"{buffer.group(1)}{int(buffer.group(2)) // 64 * 32};\n"


def _redirected(line: str) -> str:
    """Another id, so that the pair no longer meets."""
    if "slot" in line:
        return line.replace("slot)", "(slot ^ 1))")
    if "& 1)" in line:
        return line.replace("& 1)", "& 1 ^ 1)")
    if "asc_sync_pipe" in line:
        return line  # it has no id
    if "stage)" in line:
        return re.sub(r"(\w*stage)\)", r"(\1 ^ 1))", line, count=1)
    if "EVENT_ID0" in line:
        return line.replace("EVENT_ID0", "EVENT_ID5")
    return re.sub(r"(\d+)(\)+);", lambda m: f"{int(m.group(1)) ^ 2}{m.group(2)};", line)


Found = dict[str, tuple[str, bool]]


def outcomes(
    texts: dict[str, str],
    cache: Path,
    work: Path,
    *,
    headers: str = "",
    draw: Callable[[str, np.random.Generator], Case] = case,
) -> Found:
    """What the model said about each mutant in both orders, and if its values, in normal order,
    were right."""
    variants = Variants(texts, cache, work, headers=headers)
    found = {}
    for name in texts:
        normal, late = (draw(name.split(":")[0], np.random.default_rng()) for _ in range(2))
        said = variants.run(name, normal), variants.run(name, late, adversarial=True)
        found[name] = " / ".join(filter(None, said)), normal.right
    return found


@pytest.fixture(scope="module")
def found(kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    texts = {f"{k}:{name}": text for k, base in TEXTS.items() for name, text in mutants(base)}
    return outcomes(texts, kernel_cache, tmp_path_factory.mktemp("mutants"))


def test_every_mutant_is_caught_or_harmless(found: Found) -> None:
    assert len(found) >= 20
    clean = {name for name, (said, _) in found.items() if not said}
    assert clean == set(REDUNDANT)


def test_harmless_mutants_give_right_values(found: Found) -> None:
    assert all(found[name][1] for name in REDUNDANT)


def test_values_alone_would_not_do(found: Found) -> None:
    """Many mutants give right values: tests of values alone would have passed them."""
    assert sum(bool(said) and right for said, right in found.values()) >= 10


@pytest.mark.slow
def test_mutants_of_what_tilelang_printed(kernel_cache: Path, tmp_path: Path) -> None:
    """A whole contraction: both kinds of core, flags that TileLang inferred."""
    texts = {f"contract:{name}": text for name, text in mutants(PRINTED)}
    found = outcomes({"contract": PRINTED, **texts}, kernel_cache, tmp_path)
    assert found.pop("contract") == ("", True)
    assert len(found) >= 60
    assert [name for name, (said, _) in found.items() if not said] == []


EMITTED = {
    "coded": (coded_text, coded_case, 80),
    "mx": (mx_text, mx_case, 80),
    "latent": (latent_text, latent_case, 100),
    "attend": (attend_text, attend_case, 100),
    "blocks": (partial(select_text, "blocks"), select_case, 100),
    "within": (partial(select_text, "within"), select_case, 100),
}
SHARES = 3  # of the mutants, compiled together


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", EMITTED)
def test_mutants_of_emitted_kernels(
    name: str, share: int, kernel_cache: Path, tmp_path: Path
) -> None:
    """Both kinds of core, buffers in two stages, arrivals between cores: every flag. An address
    that moves to where other numbers lie in time is seen in the values."""
    made, draw, least = EMITTED[name]
    base = made()
    every = [(f"{name}:{mutant}", text) for mutant, text in mutants(base)]
    assert len(every) >= least
    texts = {name: base, **dict(every[share::SHARES])}
    found = outcomes(texts, kernel_cache, tmp_path, headers=headers(), draw=draw)
    assert found.pop(name) == ("", True)
    silent = {mutant: right for mutant, (said, right) in found.items() if not said}
    flags = [m for m in silent if not re.search("shifts|moves", m)]
    assert flags == [] and not any(silent.values())
