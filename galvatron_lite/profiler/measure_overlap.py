"""How much compute and communication slow one another down while both run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeAlias

import torch
import torch.distributed as dist

from galvatron_lite.profiler.schema import Overlap
from galvatron_lite.profiler.timing import DEFAULT_RULE, Across, TimingRule, launched, time_call

_MESSAGE = {"cpu": 2**23, "cuda": 2**28}
_WIDTH = {"cpu": 256, "cuda": 4096}
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class _Together:
    """One all-reduce under compute: how long it took, and how many pieces of compute were done meanwhile."""

    seconds: float
    pieces: float


_Run: TypeAlias = Callable[[torch.Tensor, Callable[[], None], float, float], _Together]


def measure_overlap(device: torch.device, rule: TimingRule = DEFAULT_RULE) -> Overlap:
    """Measure it on the whole world; both factors are 1 where there is nobody to communicate with.

    An all-reduce runs while matmuls run; how much longer it takes than alone is the one factor, how many fewer
    matmuls are done in that time than alone is the other. Mean over the ranks, median over rounds.
    """
    if not launched():
        return Overlap()
    message = torch.zeros(_MESSAGE[device.type] // 4, device=device)
    left = torch.rand(_WIDTH[device.type], _WIDTH[device.type], device=device)
    out = torch.empty_like(left)

    def piece() -> None:
        torch.mm(left, left, out=out)

    together = _cuda_round if device.type == "cuda" else _cpu_round
    rounds = [_round(message, piece, together, device, rule) for _ in range(_ROUNDS)]
    compute, communication = (median(column) for column in zip(*rounds, strict=True))
    return _agreed(compute, communication)


def _round(
    message: torch.Tensor, piece: Callable[[], None], together: _Run, device: torch.device, rule: TimingRule
) -> tuple[float, float]:
    """Slow-down of compute and of communication, each against itself alone just before."""
    brief = replace(rule, warmup=1, most=rule.least, seconds=rule.seconds / _ROUNDS)
    alone = time_call(lambda: dist.all_reduce(message), device, brief, Across.MAX).seconds
    each = time_call(piece, device, brief).seconds
    found = together(message, piece, alone, each)
    return found.seconds / (max(found.pieces, 0.5) * each), found.seconds / alone


def _agreed(compute: float, communication: float) -> Overlap:
    """The mean over the ranks; nothing runs faster for being disturbed."""
    everyone = [(compute, communication)] * dist.get_world_size()
    dist.all_gather_object(everyone, (compute, communication))
    means = [mean(column) for column in zip(*everyone, strict=True)]
    return Overlap(max(1.0, means[0]), max(1.0, means[1]))


def _cpu_round(message: torch.Tensor, piece: Callable[[], None], alone: float, each: float) -> _Together:  # noqa: ARG001
    """Compute until the communication thread is done."""
    dist.barrier()
    start, pieces = time.perf_counter(), 0
    work = dist.all_reduce(message, async_op=True)
    while not work.is_completed():
        piece()
        pieces += 1
    seconds = time.perf_counter() - start
    work.wait()
    return _Together(seconds, pieces)


def _cuda_round(message: torch.Tensor, piece: Callable[[], None], alone: float, each: float) -> _Together:
    """Queue more compute than the all-reduce can last, and see by events how much was done when it ended."""
    dist.barrier()
    torch.cuda.synchronize(message.device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(int(4 * alone / each) + 2)]  # type: ignore[no-untyped-call]
    done, side = torch.cuda.Event(enable_timing=True), torch.cuda.Stream(message.device)  # type: ignore[no-untyped-call]
    events[0].record()
    work = dist.all_reduce(message, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        done.record()
    for event in events[1:]:
        piece()
        event.record()
    torch.cuda.synchronize(message.device)
    seconds = events[0].elapsed_time(done) / 1e3
    pieces = sum(events[0].elapsed_time(event) / 1e3 <= seconds for event in events[1:])
    return _Together(seconds, pieces)
