"""Measures hardware without a model: throughput of a device, the optimizer's update, collectives, and overlap.

All ranks of a launched world measure at the same moment and share cores, memory and links, as in training. For
collectives, all groups of one shape in the world run at once, and the slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from galvatron_lite.cluster.cluster import Cluster, Collective, RankGroup
from galvatron_lite.model.trace.meta import dtype_of
from galvatron_lite.parallelism.divisors import divisors
from galvatron_lite.parallelism.process_groups import all_gather, reduce_scatter
from galvatron_lite.profiler.memory import storage_bytes, track_peak
from galvatron_lite.profiler.schema import CollectivePoint, OptimizerCost, Overlap, Throughput
from galvatron_lite.profiler.timing import DEFAULT_RULE, Across, TimingRule, gather_ranks, launched, time_call

_SHAPES = {
    "cpu": ((128, 256, 1024), (256, 256, 256), (512, 512, 512), (1024, 512, 512)),
    "cuda": ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 4096, 11008), (8192, 8192, 8192)),
}
_ATTENTION = {"cpu": (2, 4, 256, 64), "cuda": (8, 16, 2048, 128)}
_STREAM = {"cpu": 2**23, "cuda": 2**28}
_LAUNCHES = 100


def measure_throughput(device: torch.device, precision: str = "fp32", rule: TimingRule = DEFAULT_RULE) -> Throughput:
    """Measure matmul, attention, memory and launches of this device at one precision."""

    def random(*sizes: int) -> Tensor:
        return torch.rand(*sizes, device=device).to(dtype_of(precision))

    def seconds(run: Callable[[], object]) -> float:
        return time_call(run, device, rule).seconds

    matmul = 0.0
    for rows, inner, columns in _SHAPES[device.type]:
        product = partial(torch.mm, random(rows, inner), random(inner, columns), out=random(rows, columns))
        matmul = max(matmul, 2.0 * rows * inner * columns / seconds(product))
    samples, heads, tokens, size = _ATTENTION[device.type]
    q, k, v = (random(samples, heads, tokens, size) for _ in range(3))
    attend = partial(F.scaled_dot_product_attention, q, k, v)
    attention = 4.0 * samples * heads * tokens * tokens * size / seconds(attend)
    left, right, out = (torch.ones(_STREAM[device.type], device=device) for _ in range(3))
    bandwidth = 3 * left.nbytes / seconds(lambda: torch.add(left, right, out=out))
    scalar = torch.ones(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            scalar.add_(1.0)

    return Throughput(matmul, attention, bandwidth, seconds(launch) / _LAUNCHES)


def with_throughput(cluster: Cluster, throughput: Throughput, precision: str) -> Cluster:
    """Return the cluster with measured figures; peaks of a data sheet stay, since utilisation refers to them."""
    bandwidth, launch, groups = throughput.bandwidth, throughput.launch, []
    for group in cluster.groups:
        device, measured = group.device, {precision: max(throughput.matmul, throughput.attention)}
        peak = device.peak | measured | (device.peak if device.source != "measured" else {})
        device = replace(device, peak=peak, memory_bandwidth=bandwidth, launch_overhead=launch)
        groups.append(replace(group, device=device))
    return replace(cluster, groups=tuple(groups))


_LARGE = {"cpu": 2**20, "cuda": 2**26}
_SMALL_TENSORS = 64


def measure_optimizer(device: torch.device, rule: TimingRule = DEFAULT_RULE) -> OptimizerCost:
    """Measure ``torch.optim.AdamW`` with its defaults on this device, with fp32 parameters and existing states.

    Many tiny tensors tell the seconds of a tensor, few large ones the seconds of an item. One large tensor against two
    tells whether temporaries grow with one tensor or with all.
    """
    items = _LARGE[device.type]
    small = _optimizer(_SMALL_TENSORS, 16, device)
    large = _optimizer(4, items, device)
    per_tensor = time_call(small.step, device, rule).seconds / _SMALL_TENSORS
    many = time_call(large.step, device, rule).seconds
    peaks = []
    for count in (1, 2):
        optimizer = _optimizer(count, items, device)
        with track_peak(device) as tracked:
            optimizer.step()
        peaks.append(tracked.peak)
    single, double = peaks
    states: list[object] = [value for state in large.state.values() for value in state.values()]
    # moments only, without step counters (scalars)
    moments = storage_bytes(value for value in states if isinstance(value, Tensor) and value.dim() > 0)
    return OptimizerCost(
        name="adamw",
        state_bytes=round(moments / (4 * items)),
        seconds_per_item=max(many - 4 * per_tensor, many / 2) / (4 * items),
        seconds_per_tensor=per_tensor,
        working_bytes=single / items,
        working_share=float(single > 0 and double > 1.5 * single),
    )


def _optimizer(tensors: int, items: int, device: torch.device) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(items, device=device)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    return optimizer


SIZES = tuple(4096 * 4**power for power in range(8))  # message sizes in bytes, 4 KiB to 64 MiB


def group_shapes(world: int) -> list[RankGroup]:
    """Return all shapes whose groups tile a world, small strides first."""
    shapes = []
    for size in divisors(world):
        if size > 1:
            shapes += [RankGroup(size, stride, world // size) for stride in divisors(world // size)]
    return shapes


def ranks_of(shape: RankGroup, world: int) -> list[list[int]]:
    """Return the ranks of each group of one shape in a world."""
    span = shape.size * shape.stride
    starts = [block + offset for block in range(0, world, span) for offset in range(shape.stride)]
    return [[start + index * shape.stride for index in range(shape.size)] for start in starts]


def make_group(shape: RankGroup) -> dist.ProcessGroup | None:
    """Create this rank's group of a shape; all ranks must call it. None stands for the full world."""
    world = dist.get_world_size()
    if shape.size == world:
        return None
    groups: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(ranks_of(shape, world))  # type: ignore[no-untyped-call]
    return groups[0]


def measure_collective(
    collective: Collective,
    shape: RankGroup,
    group: dist.ProcessGroup | None,
    device: torch.device,
    sizes: Sequence[int] = SIZES,
    rule: TimingRule = DEFAULT_RULE,
) -> list[CollectivePoint]:
    """Measure one kind of communication on one shape of group, smallest message first.

    Stops once a call takes a third of the time that the rule grants a point.
    """
    points = []
    for size in sizes:
        call = prepare(collective, size, group, device)
        seconds = time_call(call, device, rule, Across.MAX).seconds
        points.append(CollectivePoint(collective, shape.size, shape.stride, shape.siblings, size, seconds))
        if seconds > rule.seconds / 3:
            break
    return points


def prepare(
    collective: Collective, size: int, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], object]:
    """Return a call that communicates ``size`` bytes (see ``CollectivePoint.size``) of preallocated float32 zeros."""
    ranks = dist.get_world_size(group)
    items = max(size // 4 // ranks, 1)
    full, part = torch.zeros(items * ranks, device=device), torch.zeros(items, device=device)
    if collective is Collective.ALL_REDUCE:
        return lambda: dist.all_reduce(full, group=group)
    if collective is Collective.ALL_GATHER:
        return lambda: all_gather(full, part, group)
    if collective is Collective.REDUCE_SCATTER:
        return lambda: reduce_scatter(part, full, group)
    if collective is Collective.ALL_TO_ALL:
        out = torch.empty_like(full)
        return lambda: dist.all_to_all_single(out, full, group=group)
    if collective is Collective.BROADCAST:
        return lambda: dist.broadcast(full, group=group, group_src=0)
    return lambda: _send_or_receive(full, group)


def _send_or_receive(tensor: Tensor, group: dist.ProcessGroup | None) -> object:
    """Rank 0 of the group sends to rank 1; the others have nothing to do."""
    rank = dist.get_rank(group)
    if rank == 0:
        return dist.send(tensor, group=group, group_dst=1)
    return dist.recv(tensor, group=group, group_src=0) if rank == 1 else None


_MESSAGE = {"cpu": 2**23, "cuda": 2**28}
_WIDTH = {"cpu": 256, "cuda": 4096}
_ROUNDS = 5


def measure_overlap(device: torch.device, rule: TimingRule = DEFAULT_RULE) -> Overlap:
    """Measure how compute and communication slow one another down; both factors are 1 in a single process.

    An all-reduce of the full world runs beside matmuls. One factor is its time over that alone, the other the time of a
    matmul beside it over that alone. Mean over the ranks, median over rounds.
    """
    if not launched():
        return Overlap()
    message = torch.zeros(_MESSAGE[device.type] // 4, device=device)
    left = torch.rand(_WIDTH[device.type], _WIDTH[device.type], device=device)
    out = torch.empty_like(left)

    def piece() -> None:
        torch.mm(left, left, out=out)

    rounds = [_round(message, piece, device, rule) for _ in range(_ROUNDS)]
    slowdowns = tuple(median(column) for column in zip(*rounds, strict=True))
    means = map(fmean, zip(*gather_ranks(slowdowns), strict=True))
    return Overlap(*(max(1.0, slowdown) for slowdown in means))


def _round(
    message: torch.Tensor, piece: Callable[[], None], device: torch.device, rule: TimingRule
) -> tuple[float, float]:
    """Return the slow-down of compute and of communication, against each alone just before."""
    brief = replace(rule, warmup=1, most=rule.least, seconds=rule.seconds / _ROUNDS)
    alone = time_call(lambda: dist.all_reduce(message), device, brief, Across.MAX).seconds
    piece_alone = time_call(piece, device, brief).seconds
    on_cuda = device.type == "cuda"
    seconds, pieces = _cuda_round(message, piece, alone, piece_alone) if on_cuda else _cpu_round(message, piece)
    return seconds / (max(pieces, 0.5) * piece_alone), seconds / alone


def _cpu_round(message: torch.Tensor, piece: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of an all-reduce beside compute, and the pieces of compute done meanwhile."""
    dist.barrier()
    start, pieces = time.perf_counter(), 0
    work = dist.all_reduce(message, async_op=True)
    while not work.is_completed():
        piece()
        pieces += 1
    seconds = time.perf_counter() - start
    work.wait()
    return seconds, pieces


def _cuda_round(
    message: torch.Tensor, piece: Callable[[], None], alone: float, piece_alone: float
) -> tuple[float, int]:
    """Return the same from events: more compute is queued than the all-reduce can last."""
    dist.barrier()
    torch.cuda.synchronize(message.device)
    count = int(4 * alone / piece_alone) + 2
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]
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
    return seconds, sum(events[0].elapsed_time(event) / 1e3 <= seconds for event in events[1:])
