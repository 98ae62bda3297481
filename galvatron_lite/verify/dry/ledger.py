"""Memory of one rank over time, by use: a ledger of the storages of tensors that have no data."""

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
"""Layer of storages allocated between two layers in forward, until the later layer begins."""
MOST_SAMPLES = 2048
"""Samples kept of a run; beyond that, the greater of each two neighbours is kept."""


class Use(IntEnum):
    """What a storage is for, in the order of ``MemoryBreakdown``. ``HOST`` is not on the device."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    TEMPORARY = 4
    COMMUNICATION = 5
    HOST = 6


PASSING = frozenset({Use.TEMPORARY, Use.ACTIVATIONS})
"""Uses of storages that a pass allocates."""


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage that is alive, and when it was allocated."""

    size: int  # bytes
    use: Use
    phase: During
    microbatch: int
    layer: str
    weak: Any = None  # reference to the storage, whose callback removes the entry
    # of what a layer takes and code between layers allocated: what the layer before returned
    replaces: tuple[LiveStorage, ...] = ()


@dataclass(slots=True)
class Ledger:
    """All storages of one rank; sizes are in bytes."""

    place: RankPlace  # kept up to date by whoever runs the rank
    totals: list[int] = field(default_factory=lambda: [0] * len(Use))  # by use
    total: int = 0  # on the device
    peak: int = 0  # the greatest total since ``reset_peak``
    at_peak: tuple[int, ...] = (0,) * len(Use)  # by use
    peak_host: int = 0  # the greatest total on the host
    operations: int = 0  # that allocated a storage
    samples: list[Sample] = field(default_factory=list)  # since ``reset_peak``
    _entries: dict[int, LiveStorage] = field(default_factory=dict)
    # allocated since a layer's forward, or a backward pass, began
    _allocated: dict[During, list[LiveStorage]] = field(
        default_factory=lambda: {During.FORWARD: [], During.BACKWARD: []}
    )
    # the greatest total since the last sample, and its uses
    _high: int = 0
    _at_high: tuple[int, ...] = (0,) * len(Use)
    _stride: int = 1
    _skipped: int = 0
    _passed: tuple[LiveStorage, ...] = ()  # what the last layer returned

    def record(self, tensor: Tensor) -> None:
        """Enter the storage of a tensor that an operation returned, if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._entries:
            return
        place = self.place
        layer = _NEXT if place.between else place.layer
        entry = LiveStorage(storage.nbytes(), Use.TEMPORARY, place.phase, place.microbatch, layer)
        # torch keeps one Python object for a storage as long as the storage lives
        entry.weak = weakref.ref(storage, partial(self._remove, key))
        self._entries[key] = entry
        self.operations += 1
        if place.phase in self._allocated:
            self._allocated[place.phase].append(entry)
        self._add(Use.TEMPORARY, entry.size)

    def _remove(self, key: int, _weak: Any) -> None:
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

    def classify(self, tensors: Iterable[Tensor], use: Use, only: frozenset[Use] | None = None) -> None:
        """Count the storages of these tensors under another use, if their present use is one of ``only``."""
        for tensor in tensors:
            entry = self._entry(tensor)
            if entry is not None and entry.use is not use and (only is None or entry.use in only):
                self._move(entry, use)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that do not lie on the device."""
        for tensor in tensors:
            entry = self._entry(tensor)
            if entry is not None:
                self._add(entry.use, -entry.size)
                entry.size = 0

    def record_cast(self, tensor: Tensor, copy: Tensor) -> None:
        """Count the copy of a parameter in the precision of compute as a parameter."""
        entry = self._entry(tensor)
        if entry is not None and entry.use is Use.PARAMETERS:
            self.classify([copy], Use.PARAMETERS)

    def _move(self, entry: LiveStorage, use: Use) -> None:
        high = self._high
        self._add(entry.use, -entry.size)
        entry.use = use
        self._add(use, entry.size)
        if self._high == high == self.total:
            self._reset_high()

    def _record_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        entry = self._entries.get(id(storage))
        if entry is None:
            return
        self._add(entry.use, -entry.size)
        entry.size, entry.use = size, Use.PARAMETERS if entry.use is not Use.HOST else Use.HOST
        self._add(entry.use, size)

    def end(
        self, phase: During, use: Use = Use.ACTIVATIONS, following: str = "", passed: Iterable[Tensor] = ()
    ) -> None:
        """End a layer's forward, or a backward pass: what it allocated and did not free waits for a later pass.

        Args:
            phase: ``FORWARD`` or ``BACKWARD``.
            use: of what waits.
            following: the layer that begins, to which storages allocated since the last layer are attributed.
            passed: what that layer takes, or the one that ends returns.
        """
        entries = tuple(entry for tensor in passed if (entry := self._entry(tensor)) is not None)
        for entry in self._allocated[phase]:
            if entry.layer == _NEXT:
                entry.layer = following
                entry.replaces = self._passed if any(entry is other for other in entries) else ()
            if entry.size and entry.use is Use.TEMPORARY:
                self._move(entry, use)
        self._allocated[phase].clear()
        self._passed = entries

    def saved_by_layer(self, microbatch: int) -> dict[str, int]:
        """Return the bytes, by layer, that the forward passes of a micro-batch allocated and did not free.

        What code between two layers made in place of the first one's output, which is gone, counts as that output.
        """
        saved: dict[str, int] = {}
        for entry in self._entries.values():
            if entry.phase is During.FORWARD and entry.microbatch == microbatch and entry.use in PASSING:
                gone = entry.replaces and not any(output.size for output in entry.replaces)
                layer = entry.replaces[0].layer if gone else entry.layer
                saved[layer] = saved.get(layer, 0) + entry.size
        return saved

    def reset_peak(self) -> None:
        """Begin to measure peaks and to collect samples."""
        self.samples.clear()
        self.peak, self._stride, self._skipped = 0, 1, 0
        self.peak_host = self.totals[Use.HOST]
        self._reset_high()

    def _reset_high(self) -> None:
        self._high, self._at_high = self.total, tuple(self.totals)

    def sample(self) -> None:
        """Add a sample of the greatest total since the last one."""
        place = self.place
        if self._high > self.peak:
            self.peak, self.at_peak = self._high, self._at_high
        sample = Sample(self.operations, place.phase, place.microbatch, place.layer, breakdown(self._at_high))
        self._reset_high()
        self._skipped += 1
        if self._skipped < self._stride and self.samples:
            if sample.memory.total > self.samples[-1].memory.total:
                self.samples[-1] = sample
            return
        self._skipped = 0
        self.samples.append(sample)
        if len(self.samples) >= MOST_SAMPLES:
            pairs = zip(self.samples[::2], self.samples[1::2], strict=False)
            self.samples[:] = [max(pair, key=lambda each: each.memory.total) for pair in pairs]
            self._stride *= 2

    @contextmanager
    def tracking_resizes(self) -> Iterator[None]:
        """Record storages that change their size, as FSDP2's do when it gathers and frees parameters.

        No operation shows it.
        """
        resize: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self._record_resize(storage, size)
            return resized

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def breakdown(totals: Iterable[int]) -> MemoryBreakdown:
    """Convert bytes by use to the form of predictions."""
    return MemoryBreakdown(*list(totals)[: Use.HOST])
