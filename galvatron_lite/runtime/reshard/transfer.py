"""Moving tensors from one plan's boxes to the other's in the memory that there is; verified, and undone on failure.

Each rank reports the boxes of every tensor that it holds before, and those that it is to hold after; all ranks compute
the same messages from the reports (``layout.route_boxes``).
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
"""Bytes of tensors that are sent together: few messages, and little memory for them."""
MEMORY, ALLOCATE, VERIFY = "carry: memory", "carry: allocate", "carry: verify"
SHARE = 4
"""The tensors of a load take this part of the free memory: they are in messages, too, sent and received."""
Result = TypeVar("Result")
Released = list[tuple[torch.UntypedStorage, int]]
"""Storages without memory, and how many bytes each had."""


def covers(everyone: Everyone, shape: tuple[int, ...]) -> bool:
    """Whether the ranks together hold all items of a tensor."""
    return sum(box.items for box in holders_of(everyone)) == all_of(shape).items


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What a rank tells the others of a tensor."""

    shape: tuple[int, ...]  # of the complete tensor
    dtype: torch.dtype
    boxes: tuple[Box, ...]  # that the rank has


class LocalTensors:
    """The tensors of this rank in one of the two plans; several of one name where stages of the rank share it."""

    def __init__(self, held: Iterable[LocalShard] = (), buffers: Sequence[LocalShard] = ()) -> None:
        self.lasting = {buffer.name for buffer in buffers}  # tensors whose memory is not released
        self.blank: dict[str, Released] = {}  # memory that is to be allocated, by name
        self.parts: dict[str, list[LocalShard]] = {}
        self.reports: dict[str, TensorReport] = {}
        for shard in (*held, *buffers):
            self.parts.setdefault(shard.name, []).extend([shard] if shard.box.items else [])
            boxes = tuple(part.box for part in self.parts[shard.name])
            self.reports[shard.name] = TensorReport(shard.shape, shard.tensor.dtype, boxes)

    def views(self, name: str, box: Box) -> list[Tensor]:
        """The items of a box, in every part that has it."""
        return [cut_box(part.items, box.within(part.box)) for part in self.parts[name] if part.box.meet(box) == box]

    def tensors(self, names: Iterable[str]) -> list[Tensor]:
        """The tensors of some names."""
        return [part.tensor for name in names for part in self.parts.get(name, ())]


@dataclass(frozen=True, slots=True)
class MovedTensor:
    """A tensor that is cut anew."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    before: Everyone
    after: Everyone

    @property
    def nbytes(self) -> int:
        """Of the complete tensor."""
        return all_of(self.shape).items * self.dtype.itemsize

    def repeated(self, total: int, everyone: Everyone) -> int:
        """The checksum of all copies that ranks hold, from that of one."""
        copies = sum(box.items for boxes in everyone for box in boxes) // max(1, all_of(self.shape).items)
        return copies * total % MODULUS


def moved_tensors(
    before: Sequence[Mapping[str, TensorReport]], after: Sequence[Mapping[str, TensorReport]]
) -> list[MovedTensor]:
    """Every tensor that a rank wants after, from the reports of all ranks; equal on every rank."""
    first: dict[str, TensorReport] = {}
    for reports in (*before, *after):
        for name, report in reports.items():
            first.setdefault(name, report)
    return [
        MovedTensor(name, report.shape, report.dtype, _boxes(name, before), _boxes(name, after))
        for name, report in first.items()
        if any(name in reports for reports in after)
    ]


def _boxes(name: str, everyone: Sequence[Mapping[str, TensorReport]]) -> Everyone:
    return tuple(reports[name].boxes if name in reports else () for reports in everyone)


def loads_of(items: Sequence[MovedTensor], largest: int = MESSAGE_BYTES) -> Iterator[list[MovedTensor]]:
    """Items of one dtype that are sent together: at most ``largest`` bytes, or a single item."""
    for dtype in dict.fromkeys(item.dtype for item in items):
        yield from batched((item for item in items if item.dtype == dtype), lambda item: item.nbytes, largest)


def message_bytes(items: Sequence[MovedTensor]) -> int:
    """Bytes that this rank sends to others and receives from them for one load."""
    rank, total = dist.get_rank(), 0
    for item in items:
        route = route_boxes(item.before, item.after, rank)
        for peer in range(len(item.before)):
            boxes = (*route.sends[peer], *route.receives[peer]) if peer != rank else ()
            total += sum(box.items for box in boxes) * item.dtype.itemsize
    return total


def move(items: Sequence[MovedTensor], source: LocalTensors, target: LocalTensors, device: torch.device) -> int:
    """Copy a load from one plan's tensors to the other's; all ranks call it.

    Returns:
        Bytes that this rank sent to others.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    incoming: list[list[list[Tensor]]] = [[] for _ in range(world)]
    for item in items:
        route = route_boxes(item.before, item.after, rank)
        for peer in range(world):
            outgoing[peer] += [source.views(item.name, box)[0] for box in route.sends[peer]]
            incoming[peer] += [target.views(item.name, box) for box in route.receives[peer]]
    for here, everywhere in zip(outgoing[rank], incoming[rank], strict=True):
        for there in everywhere:
            there.copy_(here)
    outgoing[rank], incoming[rank] = [], []
    if world == 1 or all(item.before == item.after for item in items):
        return 0
    counts = [sum(views[0].numel() for views in arriving) for arriving in incoming]
    received = torch.empty(sum(counts), dtype=items[0].dtype, device=device)
    sent_bytes = all_to_all(outgoing, received, counts)
    targets = [views for arriving in incoming for views in arriving]
    for views, values in zip(targets, torch.split(received, [views[0].numel() for views in targets]), strict=True):
        for view in views:
            view.copy_(values.view(view.shape))
    return sent_bytes


def together(phase: str, work: Callable[[], Result]) -> Result:
    """Do this rank's work of a phase; all ranks call it, and none continues unless all succeed.

    Args:
        phase: for messages.
        work: without communication, or such that either all ranks fail in it or none.

    Raises:
        InputError: this rank's work raised it.
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
    """Tensors that are cut anew."""

    items: Sequence[MovedTensor]  # equal on every rank
    before: LocalTensors
    after: LocalTensors
    device: torch.device
    observe: Callable[[str], None]  # called with every phase
    moved: int = 0  # bytes this rank sent to others
    worst: int = 0  # bytes of tensors and messages at the worst moment (computed from their sizes)
    by_turns: bool = False  # whether old tensors are released as new ones arrive, because both do not fit
    released: list[tuple[list[MovedTensor], Released]] = field(default_factory=list)  # load by load

    def run(self, free: int | None) -> None:
        """Move everything; all ranks call it.

        Args:
            free: bytes that this rank may still take; None: any.
        """
        for item in self.items:
            if not covers(item.before, item.shape):
                raise SwitchError("carry", 0, f"the ranks do not hold all of {item.name}")
        sums, agreeing = self._sums_before()
        # copies that differ (running statistics, kernels that are not deterministic) become the first rank's
        items = [
            item if item.name in agreeing else replace(item, before=first_only(item.before)) for item in self.items
        ]
        loads = self._loads(items, free)
        if not self.by_turns:
            self._allocate(items)
        for load in loads:
            if self.by_turns:
                self._allocate(load)
            held = [*self.before.tensors(self.before.parts), *self.after.tensors(self.after.parts)]
            self.worst = max(self.worst, nbytes(held) + message_bytes(load))
            self.moved += move(load, self.before, self.after, self.device)
            if self.by_turns:
                self._verify(load, sums)
                self.released.append((load, self._release(load)))
        if not self.by_turns:
            self._verify(items, sums)

    def undo(self) -> None:
        """Bring back what was released; all ranks call it."""
        for load, storages in reversed(self.released):
            allocate(storages)
            names = {item.name for item in load}
            back = [replace(one, before=one.after, after=one.before) for one in self.items if one.name in names]
            move(back, self.after, self.before, self.device)
        self.released = []

    def commit(self) -> None:
        """Release the old tensors."""
        self._release(self.items)

    def _loads(self, items: Sequence[MovedTensor], free: int | None) -> list[list[MovedTensor]]:
        """What is sent together: all at once if every rank has the memory, else smaller loads by turns."""
        loads = list(loads_of(items))
        most = self._blank_bytes(self.after.blank) + max((message_bytes(load) for load in loads), default=0)
        spare = [one for one in everyone(None if free is None else (free, free - most)) if one is not None]
        self.by_turns = any(left < 0 for _, left in spare)
        if self.by_turns:
            loads = list(loads_of(items, min(MESSAGE_BYTES, *(available // SHARE for available, _ in spare))))
            together(MEMORY, lambda: check_fits(free, self._peak_by_turns(loads)))
        return loads

    def _peak_by_turns(self, loads: Sequence[Sequence[MovedTensor]]) -> int:
        """Bytes needed at once where each load's old tensors are released after it."""
        now = peak = 0
        for load in loads:
            names = [item.name for item in load]
            now += self._blank_bytes(names)
            peak = max(peak, now + message_bytes(load))
            now -= nbytes(self.before.tensors(name for name in names if name not in self.after.lasting))
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
        """The checksum of each tensor as its first holders have it, and the names of those whose copies are equal."""
        firsts, copies = [], []
        for item in self.items:
            sums = [(part.box, checksum([part])) for part in self.before.parts.get(item.name, ())]
            firsts.append(sum(dict(sums)[box] for box in first_only(item.before)[dist.get_rank()]))
            copies.append(sum(one for _, one in sums))
        totals = sum_over_ranks([*firsts, *copies], self.device)
        pairs = zip(self.items, totals[: len(firsts)], totals[len(firsts) :], strict=True)
        agreeing = {item.name for item, first, total in pairs if item.repeated(first, item.before) == total}
        return dict(zip((item.name for item in self.items), totals, strict=False)), agreeing

    def _verify(self, items: Sequence[MovedTensor], sums: Mapping[str, int]) -> None:
        def work() -> list[int]:
            self.observe(VERIFY)
            return [checksum(self.after.parts.get(item.name, ())) for item in items]

        pairs = zip(items, sum_over_ranks(together(VERIFY, work), self.device), strict=True)
        wrong = [item.name for item, total in pairs if total != item.repeated(sums[item.name], item.after)]
        if wrong:
            raise SwitchError(VERIFY, 0, f"{', '.join(wrong[:5])} arrived other than sent ({len(wrong)} tensors)")


def release(tensors: Iterable[Tensor]) -> Released:
    """Free the memory of tensors that others may still hold (hooks, a roll-back); that of mapped files stays."""
    released: Released = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.resizable():
            released.append((storage, storage.nbytes()))
            storage.resize_(0)
    return released


def allocate(released: Released) -> None:
    """Allocate the memory again, filled with zeros."""
    for storage, size in released:
        if storage.nbytes() == 0:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device) -> int | None:
    """Bytes that this process may still take, as far as the system says; of the host, its share of the free memory."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_fits(free: int | None, needed: int) -> None:
    """Raise ``InputError`` if more bytes are needed for a moment than may be taken; None: any."""
    if free is not None and needed > free:
        remedy = (
            f"Changing the plan takes {format_bytes(needed)} more for a moment. Save, start anew under the plan and "
            "load, or choose a plan with smaller states."
        )
        raise InputError("memory", format_bytes(free), remedy)
