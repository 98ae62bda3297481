"""Bytes held over time, by what they are for: a ledger of the storages of tensors that have no data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.plans.schema import MemoryBreakdown
from galvatron_lite.verify.dry.world import RankPlace
from galvatron_lite.verify.schema import During, Sample

_NEXT = "next"
"""The layer of what is made between two layers in forward, until the later one begins."""
MOST_SAMPLES = 2048
"""Samples that are kept of one run; where there would be more, of two neighbours the greater."""


class Use(IntEnum):
    """What a storage is for; the order of ``MemoryBreakdown``. ``HOST`` is not on the device."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    TEMPORARY = 4
    COMMUNICATION = 5
    HOST = 6


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage that is alive."""

    size: int  # bytes
    use: Use  # what it is for
    phase: During  # phase, microbatch, layer: when it was made
    microbatch: int
    layer: str
    weak: Any = None  # to the storage, telling when it is gone


@dataclass(slots=True)
class Ledger:
    """All storages of one rank."""

    place: RankPlace  # where the rank is
    totals: list[int] = field(default_factory=lambda: [0] * len(Use))  # bytes by use, now
    total: int = 0  # bytes on the device, now
    peak: int = 0  # the greatest total since ``watch``; ``at_peak``: by use, then
    at_peak: tuple[int, ...] = (0,) * len(Use)
    peak_host: int = 0  # the most bytes on the host
    operations: int = 0  # that made a tensor, so far
    samples: list[Sample] = field(default_factory=list)  # since ``watch``
    _entries: dict[int, LiveStorage] = field(default_factory=dict)
    # made since a layer's forward, or a backward pass, began
    _allocated: dict[During, list[LiveStorage]] = field(
        default_factory=lambda: {During.FORWARD: [], During.BACKWARD: []}
    )
    _high: int = 0
    _at_high: tuple[int, ...] = (0,) * len(Use)
    _stride: int = 1
    _skipped: int = 0

    def see(self, tensor: Tensor) -> None:
        """An operation returned a tensor; its storage is entered where it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        place = self.place
        layer = _NEXT if place.between else place.layer
        entry = LiveStorage(storage.nbytes(), Use.TEMPORARY, place.phase, place.microbatch, layer)
        # torch keeps one Python object for a storage as long as the storage lives
        entry.weak = weakref.ref(storage, partial(self._gone, key))
        self._entries[key] = entry
        self.operations += 1
        if place.phase in self._allocated:
            self._allocated[place.phase].append(entry)
        self._add(Use.TEMPORARY, entry.size)

    def _gone(self, key: int, _weak: Any) -> None:
        entry = self._entries.pop(key)
        self._add(entry.use, -entry.size)
        entry.size = 0

    def _add(self, use: Use, size: int) -> None:
        self.totals[use] += size
        if use is Use.HOST:
            self.peak_host = max(self.peak_host, self.totals[use])
            return
        self.total += size
        if self.total > self._high:
            self._high, self._at_high = self.total, tuple(self.totals)

    def _entry(self, tensor: Tensor) -> LiveStorage | None:
        return self._entries.get(id(tensor.untyped_storage()))

    def use(self, tensors: Iterable[Tensor], use: Use, only: frozenset[Use] | None = None) -> None:
        """From now on the storages of these tensors count as this."""
        for tensor in tensors:
            entry = self._entry(tensor)
            if entry is not None and entry.use is not use and (only is None or entry.use in only):
                self._move(entry, use)

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """These do not lie on the device."""
        for tensor in tensors:
            entry = self._entry(tensor)
            if entry is not None:
                self._add(entry.use, -entry.size)
                entry.size = 0

    def copied(self, tensor: Tensor, copy: Tensor) -> None:
        """A tensor was cast: the copy of a parameter in the precision of compute is for the same."""
        entry = self._entry(tensor)
        if entry is not None and entry.use is Use.PARAMETERS:
            self.use([copy], Use.PARAMETERS)

    def _move(self, entry: LiveStorage, use: Use) -> None:
        high = self._high
        self._add(entry.use, -entry.size)
        entry.use = use
        self._add(use, entry.size)
        if self._high == high == self.total:
            self._rise()

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is given room, or loses it: those are parameters that ZeRO gathers."""
        entry = self._entries.get(id(storage))
        if entry is None:
            return
        self._add(entry.use, -entry.size)
        entry.size, entry.use = size, Use.PARAMETERS if entry.use is not Use.HOST else Use.HOST
        self._add(entry.use, size)

    def end(self, phase: During, use: Use = Use.ACTIVATIONS, following: str = "") -> None:
        """A layer's forward, or a backward pass, is over: what it made and is still there waits for a later one.

        Args:
            phase: which of both.
            use: that it counts as from now on.
            following: the layer that begins, with which what was made behind the last one counts.
        """
        for entry in self._allocated[phase]:
            if entry.layer == _NEXT:
                entry.layer = following
            if entry.size and entry.use is Use.TEMPORARY:
                self._move(entry, use)
        self._allocated[phase].clear()

    def kept(self, microbatch: int) -> dict[str, int]:
        """Bytes by layer that the forward passes of a micro-batch made, and that are still there."""
        kept_bytes: dict[str, int] = {}
        for entry in self._entries.values():
            if entry.phase is During.FORWARD and entry.microbatch == microbatch and entry.use in _KEPT:
                kept_bytes[entry.layer] = kept_bytes.get(entry.layer, 0) + entry.size
        return kept_bytes

    def watch(self) -> None:
        """Peaks and samples count from now on."""
        self.samples.clear()
        self.peak, self._stride, self._skipped = 0, 1, 0
        self.peak_host = self.totals[Use.HOST]
        self._rise()

    def _rise(self) -> None:
        self._high, self._at_high = self.total, tuple(self.totals)

    def sample(self) -> None:
        """Note the worst moment since the last sample."""
        place = self.place
        if self._high > self.peak:
            self.peak, self.at_peak = self._high, self._at_high
        made = Sample(self.operations, place.phase, place.microbatch, place.layer, breakdown(self._at_high))
        self._rise()
        self._skipped += 1
        if self._skipped < self._stride and self.samples:
            if made.memory.total > self.samples[-1].memory.total:
                self.samples[-1] = made
            return
        self._skipped = 0
        self.samples.append(made)
        if len(self.samples) >= MOST_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=False)
            self.samples[:] = [max(pair, key=lambda one: one.memory.total) for pair in pairs]
            self._stride *= 2

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Storages that change their size, which no operation tells of (FSDP2 frees gathered parameters so)."""
        resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self.resized(storage, size)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


_KEPT = frozenset({Use.TEMPORARY, Use.ACTIVATIONS})


def breakdown(totals: Iterable[int]) -> MemoryBreakdown:
    """Bytes by use, as predictions have them."""
    return MemoryBreakdown(*list(totals)[: Use.HOST])
