"""Moving tensors from the shards of one plan to those of another, within the free memory.

Each rank reports the boxes of every tensor that it holds before and after. From the reports, all ranks compute the same
messages (``layout.route_boxes``). Checksums verify the result; a failed transfer is undone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError, SwitchError
from galvatron_lite.runtime.activations.layout import (
    Box,
    Everyone,
    all_of,
    all_to_all,
    cut_box,
    first_only,
    holders_of,
    route_boxes,
)  # fmt: skip
from galvatron_lite.runtime.parameters.pieces import LocalShard
from galvatron_lite.runtime.peers import batched, everyone
from galvatron_lite.runtime.reshard.checksums import MODULUS, checksum, sum_over_ranks
from galvatron_lite.units import format_bytes

MESSAGE_BYTES = 64 * 2**20
"""Bytes of tensors that are sent together: large enough for few messages, small enough for little extra memory."""
MEMORY, ALLOCATE, VERIFY = "carry: memory", "carry: allocate", "carry: verify"
_LOADS_IN_MEMORY = 4
"""Loads that the free memory must hold, as the tensors of a load are also in the messages sent and received."""
Result = TypeVar("Result")
Released = list[tuple[torch.UntypedStorage, int]]
"""Storages whose memory was freed, and the bytes that each had."""


def covers(boxes: Everyone, shape: tuple[int, ...]) -> bool:
    """Whether the boxes of all ranks contain all items of a tensor."""
    return sum(box.items for box in holders_of(boxes)) == all_of(shape).items


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A tensor of a rank, as reported to the other ranks."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # that the rank holds


class LocalTensors:
    """The tensors of this rank under a plan; several have the same name if stages of this rank share it."""

    def __init__(self, shards: Iterable[LocalShard] = (), buffers: Sequence[LocalShard] = ()) -> None:
        self.lasting = {buffer.name for buffer in buffers}  # tensors whose memory is never freed
        self.blank: dict[str, Released] = {}  # memory to allocate before the tensors arrive, by name
        self.shards: dict[str, list[LocalShard]] = {}
        self.reports: dict[str, TensorReport] = {}
        for shard in (*shards, *buffers):
            self.shards.setdefault(shard.name, []).extend([shard] if shard.box.items else [])
            boxes = tuple(other.box for other in self.shards[shard.name])
            self.reports[shard.name] = TensorReport(shard.shape, shard.tensor.dtype, boxes)

    def views(self, name: str, box: Box) -> list[Tensor]:
        """Return the items of a box in each shard that contains it."""
        shards = (shard for shard in self.shards[name] if shard.box.meet(box) == box)
        return [cut_box(shard.items, box.within(shard.box)) for shard in shards]

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """Return the tensors with some names."""
        return [shard.tensor for name in names for shard in self.shards.get(name, ())]


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor and the boxes that each rank holds before and after."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    before: Everyone
    after: Everyone

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return all_of(self.shape).items * self.dtype.itemsize

    def sum_of_copies(self, checksum: int, boxes: Everyone) -> int:
        """Return the sum of the checksums of all copies in the boxes of all ranks, from that of one copy."""
        copies = sum(box.items for rank_boxes in boxes for box in rank_boxes) // max(1, all_of(self.shape).items)
        return copies * checksum % MODULUS


def moved_tensors(
    before: Sequence[Mapping[str, TensorReport]], after: Sequence[Mapping[str, TensorReport]]
) -> list[MovedTensor]:
    """Return every tensor that a rank holds after the change, from the reports of all ranks; equal on every rank."""
    first: dict[str, TensorReport] = {}
    for reports in (*before, *after):
        for name, report in reports.items():
            first.setdefault(name, report)

    def boxes(name: str, rank_reports: Sequence[Mapping[str, TensorReport]]) -> Everyone:
        return tuple(reports[name].boxes if name in reports else () for reports in rank_reports)

    return [
        MovedTensor(name, report.shape, report.dtype, boxes(name, before), boxes(name, after))
        for name, report in first.items()
        if any(name in reports for reports in after)
    ]


def _loads_of(items: Sequence[MovedTensor], largest: int = MESSAGE_BYTES) -> Iterator[list[MovedTensor]]:
    """Divide tensors into loads that are sent together: of one dtype, and at most ``largest`` bytes or one tensor."""
    for dtype in dict.fromkeys(item.dtype for item in items):
        yield from batched((item for item in items if item.dtype == dtype), lambda item: item.nbytes, largest)


def _message_bytes(load: Sequence[MovedTensor]) -> int:
    """The bytes that this rank sends to and receives from others for a load."""
    rank, total = dist.get_rank(), 0
    for item in load:
        route = route_boxes(item.before, item.after, rank)
        for peer in range(len(item.before)):
            boxes = (*route.sends[peer], *route.receives[peer]) if peer != rank else ()
            total += sum(box.items for box in boxes) * item.dtype.itemsize
    return total


def _move(load: Sequence[MovedTensor], source: LocalTensors, target: LocalTensors, device: torch.device) -> int:
    """Copy a load from the tensors of one plan to those of the other, and return the bytes that this rank sent.

    All ranks call it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    incoming: list[list[list[Tensor]]] = [[] for _ in range(world)]
    for item in load:
        route = route_boxes(item.before, item.after, rank)
        for peer in range(world):
            outgoing[peer] += [source.views(item.name, box)[0] for box in route.sends[peer]]
            incoming[peer] += [target.views(item.name, box) for box in route.receives[peer]]
    for values, views in zip(outgoing[rank], incoming[rank], strict=True):
        for view in views:
            view.copy_(values)
    outgoing[rank], incoming[rank] = [], []
    if world == 1 or all(item.before == item.after for item in load):
        return 0
    counts = [sum(views[0].numel() for views in from_peer) for from_peer in incoming]
    received = torch.empty(sum(counts), dtype=load[0].dtype, device=device)
    sent_bytes = all_to_all(outgoing, received, counts)
    targets = [views for from_peer in incoming for views in from_peer]
    for views, values in zip(targets, torch.split(received, [views[0].numel() for views in targets]), strict=True):
        for view in views:
            view.copy_(values.view(view.shape))
    return sent_bytes


def together(phase: str, work: Callable[[], Result]) -> Result:
    """Run this rank's work of a phase. All ranks call it, and none continues unless all succeed.

    Args:
        phase: name for error messages.
        work: does not communicate, or fails on all ranks or none.

    Raises:
        InputError: the work of this rank raised it.
        SwitchError: a rank failed.
    """
    result, error = list[Result](), None
    try:
        result.append(work())
    except Exception as failure:
        error = failure
    failures = everyone(None if error is None else f"{type(error).__name__}: {error}")
    rank = next((rank for rank, text in enumerate(failures) if text is not None), None)
    if rank is None:
        return result[0]
    if isinstance(error, InputError):
        raise error
    raise SwitchError(phase, rank, failures[rank]) from error


@dataclass(slots=True)
class TensorTransfer:
    """The transfer of all tensors from one plan to another."""

    items: Sequence[MovedTensor]  # equal on every rank
    before: LocalTensors
    after: LocalTensors
    device: torch.device
    observe: Callable[[str], None]  # called with the name of each phase
    moved: int = 0  # bytes that this rank sent to others
    worst: int = 0  # peak bytes of tensors and messages, computed from their sizes
    by_turns: bool = False  # whether old tensors are released as new ones arrive, because both do not fit
    released: list[tuple[list[MovedTensor], Released]] = field(default_factory=list)  # memory by load

    def run(self, free: int | None) -> None:
        """Move all tensors. All ranks call it.

        Args:
            free: bytes that this rank may use; None: any.

        Raises:
            InputError: the memory does not suffice.
            SwitchError: a rank failed, or tensors arrived with other values.
        """
        for item in self.items:
            if not covers(item.before, item.shape):
                raise SwitchError("carry", 0, f"the ranks do not hold all of {item.name}")
        sums, agreeing = self._sums_before()
        # copies that differ (running statistics, non-deterministic kernels) are replaced by that of the first rank
        items = [
            item if item.name in agreeing else replace(item, before=first_only(item.before)) for item in self.items
        ]
        loads = self._loads(items, free)
        if not self.by_turns:
            self._allocate(items)
        for load in loads:
            if self.by_turns:
                self._allocate(load)
            tensors = [*self.before.tensors(self.before.shards), *self.after.tensors(self.after.shards)]
            self.worst = max(self.worst, nbytes(tensors) + _message_bytes(load))
            self.moved += _move(load, self.before, self.after, self.device)
            if self.by_turns:
                self._verify(load, sums)
                self.released.append((load, self._release(load)))
        if not self.by_turns:
            self._verify(items, sums)

    def undo(self) -> None:
        """Restore the old tensors that were released. All ranks call it."""
        for load, storages in reversed(self.released):
            allocate(storages)
            names = {item.name for item in load}
            items = (item for item in self.items if item.name in names)
            reverse = [replace(item, before=item.after, after=item.before) for item in items]
            _move(reverse, self.after, self.before, self.device)
        self.released = []

    def commit(self) -> None:
        """Release the old tensors."""
        self._release(self.items)

    def _loads(self, items: Sequence[MovedTensor], free: int | None) -> list[list[MovedTensor]]:
        """Divide the tensors into loads, smaller ones if a rank must release old tensors to make room for new ones."""
        loads = list(_loads_of(items))
        peak = self._blank_bytes(self.after.blank) + max((_message_bytes(load) for load in loads), default=0)
        limits = [limit for limit in everyone(None if free is None else (free, free - peak)) if limit is not None]
        self.by_turns = any(left < 0 for _, left in limits)
        if self.by_turns:
            largest = min(MESSAGE_BYTES, *(available // _LOADS_IN_MEMORY for available, _ in limits))
            loads = list(_loads_of(items, largest))
            together(MEMORY, lambda: check_fits(free, self._peak_by_turns(loads)))
        return loads

    def _peak_by_turns(self, loads: Sequence[Sequence[MovedTensor]]) -> int:
        """The additional bytes at the peak, if the old tensors of each load are released after it."""
        current = peak = 0
        for load in loads:
            names = [item.name for item in load]
            current += self._blank_bytes(names)
            peak = max(peak, current + _message_bytes(load))
            current -= nbytes(self.before.tensors(name for name in names if name not in self.after.lasting))
        return peak

    def _blank_bytes(self, names: Iterable[str]) -> int:
        return sum(size for name in names for _, size in self.after.blank.get(name, ()))

    def _allocate(self, items: Sequence[MovedTensor]) -> None:
        def work() -> None:
            self.observe(ALLOCATE)
            for item in items:
                allocate(self.after.blank.get(item.name, []))

        together(ALLOCATE, work)

    def _release(self, items: Sequence[MovedTensor]) -> Released:
        return release(self.before.tensors(item.name for item in items if item.name not in self.after.lasting))

    def _sums_before(self) -> tuple[dict[str, int], set[str]]:
        """The checksum of the first copy of each tensor, and the names of the tensors whose copies are equal."""
        firsts, copies = [], []
        for item in self.items:
            sums = [(shard.box, checksum([shard])) for shard in self.before.shards.get(item.name, ())]
            firsts.append(sum(dict(sums)[box] for box in first_only(item.before)[dist.get_rank()]))
            copies.append(sum(shard_sum for _, shard_sum in sums))
        totals = sum_over_ranks([*firsts, *copies], self.device)
        totals, totals_of_copies = totals[: len(firsts)], totals[len(firsts) :]
        agreeing = {
            item.name
            for item, total, total_of_copies in zip(self.items, totals, totals_of_copies, strict=True)
            if item.sum_of_copies(total, item.before) == total_of_copies
        }
        return {item.name: total for item, total in zip(self.items, totals, strict=True)}, agreeing

    def _verify(self, items: Sequence[MovedTensor], sums: Mapping[str, int]) -> None:
        def work() -> list[int]:
            self.observe(VERIFY)
            return [checksum(self.after.shards.get(item.name, ())) for item in items]

        pairs = zip(items, sum_over_ranks(together(VERIFY, work), self.device), strict=True)
        wrong = [item.name for item, total in pairs if total != item.sum_of_copies(sums[item.name], item.after)]
        if wrong:
            raise SwitchError(VERIFY, 0, f"{', '.join(wrong[:5])} arrived other than sent ({len(wrong)} tensors)")


def release(tensors: Iterable[Tensor]) -> Released:
    """Free the memory of tensors to which references may remain; memory of mapped files is not freed."""
    released: Released = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            released.append((storage, storage.nbytes()))
            storage.resize_(0)
    return released


def allocate(released: Released) -> None:
    """Allocate released memory again, filled with zeros."""
    for storage, size in released:
        if storage.nbytes() == 0:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, counting each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device, of the host divided by the processes of this node; None: not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_fits(free: int | None, needed: int) -> None:
    """Raise ``InputError`` if ``needed`` bytes exceed the ``free`` ones; None: any number is free."""
    if free is not None and needed > free:
        remedy = (
            f"Changing the plan takes {format_bytes(needed)} more for a moment. Save, start anew under the plan and "
            "load, or choose a plan with smaller states."
        )
        raise InputError("memory", format_bytes(free), remedy)
