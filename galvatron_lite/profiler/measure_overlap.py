"""How much compute and communication slow one another down while both run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median

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

    alone = time_call(lambda: dist.all_reduce(message), device, rule, Across.MAX).seconds
    each = time_call(piece, device, rule).seconds
    together = _cuda_round if device.type == "cuda" else _cpu_round
    rounds = [together(message, piece, alone, each) for _ in range(_ROUNDS)]
    return _factors(rounds, alone, each)


def _factors(rounds: list[_Together], alone: float, each: float) -> Overlap:
    own = (
        median(one.seconds / (max(one.pieces, 0.5) * each) for one in rounds),
        median(one.seconds / alone for one in rounds),
    )
    everyone: list[tuple[float, float]] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    compute, communication = (mean(column) for column in zip(*everyone, strict=True))
    return Overlap(max(1.0, compute), max(1.0, communication))


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
