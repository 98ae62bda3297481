"""Moving all tensors from one plan to the other, in the memory that there is; verified, and undone on failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from galvatron_lite.errors import InputError, SwitchError
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.runtime.reshard.checksums import copies_agree, differing, sums_after, sums_before
from galvatron_lite.runtime.reshard.routes import (
    MESSAGE_BYTES,
    LocalTensors,
    MovedTensor,
    covers,
    first_only,
    loads_of,
    message_bytes,
    move,
)
from galvatron_lite.units import format_bytes

MEMORY, ALLOCATE, VERIFY = "carry: memory", "carry: allocate", "carry: verify"
SHARE = 4
"""The tensors of a load take this part of the free memory: they are in messages, too, sent and received."""
Result = TypeVar("Result")
Released = list[tuple[torch.UntypedStorage, int]]
"""Storages without memory, and how many bytes each had."""


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
    blank: dict[str, Released]  # memory of ``after`` that is to be allocated, by name
    lasting: Collection[str]  # names of tensors whose memory is not released (buffers)
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
        sums = sums_before(self.items, self.before, self.device)
        # copies that differ (running statistics, kernels that are not deterministic) become the first rank's
        items = [
            item if copies_agree(item, sums[item.name]) else replace(item, before=first_only(item.before))
            for item in self.items
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
            originals = {item.name: item for item in self.items}
            move([originals[item.name].reversed() for item in load], self.after, self.before, self.device)
        self.released = []

    def commit(self) -> None:
        """Release the old tensors."""
        self._release(self.items)

    def _loads(self, items: Sequence[MovedTensor], free: int | None) -> list[list[MovedTensor]]:
        """What is sent together: all at once if every rank has the memory, else smaller loads by turns."""
        loads = list(loads_of(items))
        most = self._blank_bytes(self.blank) + max((message_bytes(load) for load in loads), default=0)
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
            now -= nbytes(self.before.tensors(name for name in names if name not in self.lasting))
        return peak

    def _blank_bytes(self, names: Iterable[str]) -> int:
        return sum(size for name in names for _, size in self.blank.get(name, ()))

    def _allocate(self, items: Sequence[MovedTensor]) -> None:
        def work() -> None:
            self.observe(ALLOCATE)
            for item in items:
                allocate(self.blank.get(item.name, []))

        together(ALLOCATE, work)

    def _release(self, items: Sequence[MovedTensor]) -> Released:
        return release(self.before.tensors(item.name for item in items if item.name not in self.lasting))

    def _verify(self, items: Sequence[MovedTensor], sums: dict[str, tuple[int, int]]) -> None:
        def work() -> list[int]:
            self.observe(VERIFY)
            return sums_after(items, self.after)

        wrong = differing(items, sums, together(VERIFY, work), self.device)
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
