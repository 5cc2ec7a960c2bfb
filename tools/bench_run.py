"""Measurements taken in turns (A B C A B C ...): a slow minute touches all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

PAUSE_SECONDS = 0.05  # worker threads of whoever ran before go to sleep


@dataclass(frozen=True)
class Measure:
    """One figure: whose it is, what it is called, its dtype and unit, and how to take a sample."""

    who: str
    name: str
    dtype: str
    unit: str
    sample: Callable[[], float]


@dataclass(frozen=True)
class Result:
    """All samples of one figure, in the order they were taken."""

    who: str
    name: str
    dtype: str
    unit: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(median(self.samples))

    def to_json(self) -> dict[str, Any]:
        """Return the figure with its median, its extremes and every sample."""
        return {
            "who": self.who,
            "name": self.name,
            "dtype": self.dtype,
            "unit": self.unit,
            "median": self.median,
            "low": min(self.samples),
            "high": max(self.samples),
            "samples": list(self.samples),
        }


def take_turns(
    measures: Sequence[Measure], *, repeat: int, progress: Callable[[int, int], None]
) -> list[Result]:
    """Sample every measure `repeat` times, in turns, after one round that is not counted."""
    samples: list[list[float]] = [[] for _ in measures]
    total = (repeat + 1) * len(measures)
    for turn in range(repeat + 1):
        for i, measure in enumerate(measures):
            time.sleep(PAUSE_SECONDS)
            value = measure.sample()
            if turn:
                samples[i].append(value)
            progress(turn * len(measures) + i + 1, total)
    return [
        Result(m.who, m.name, m.dtype, m.unit, tuple(values))
        for m, values in zip(measures, samples, strict=True)
    ]


def find(results: Sequence[Result], who: str, name: str) -> Result | None:
    """Return one figure, or None if it was not measured."""
    return next((r for r in results if r.who == who and r.name == name), None)
