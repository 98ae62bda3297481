"""Step time and peak memory of real training steps, for the quickstart and the benchmarks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed as dist

from galvatron_lite.profiler.memory import track_peak
from galvatron_lite.world import pick_device


@dataclass(frozen=True)
class Measured:
    """What was measured of a training step: the slowest and the fullest rank count."""

    seconds: float  # median over steps
    spread: float  # interquartile range / median
    steps: int  # how many were timed
    peak: int  # bytes


def highest(value: float) -> float:
    """The largest of a value over all ranks."""
    box = torch.tensor([value], dtype=torch.float64, device=pick_device())
    if dist.is_initialized():
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def step_seconds(step: Callable[[], object], repetitions: int) -> list[float]:
    """Seconds of each of so many steps, started together on all ranks, the slowest rank's time."""
    seconds = []
    for _ in range(repetitions):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(highest(time.perf_counter() - start))
    return seconds


def spread_of(seconds: list[float]) -> float:
    """Interquartile range over median."""
    first, _, third = statistics.quantiles(seconds, n=4)
    return (third - first) / statistics.median(seconds)


def peak_of(make: Callable[[], Callable[[], object]]) -> int:
    """Peak bytes of one training step in steady state on the fullest rank.

    The tracking starts before ``make`` builds the model, so that parameters and states count; the third step is read.
    """
    gc.collect()
    with track_peak(pick_device()) as peak:
        step = make()
        step()
        step()
        peak.mark(between_steps=True)
        step()
        del step
    return int(highest(peak.phases[-1].peak))


def measure(step: Callable[[], object], warm_up: int, repetitions: int, peak: int) -> Measured:
    """Time a step; the peak is measured apart, because tracking slows a step down."""
    for _ in range(warm_up):
        step()
    seconds = step_seconds(step, repetitions)
    return Measured(statistics.median(seconds), spread_of(seconds), repetitions, peak)
