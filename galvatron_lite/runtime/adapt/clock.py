"""Clocks of training: steps on the host, the forward passes of blocks by host time, or by events on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from galvatron_lite.model.graph import Role

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from galvatron_lite.runtime.engine import ParallelModel


class LayerClock:
    """Seconds of the forward passes of this rank's blocks; what is computed again in backward counts as a pass too.

    Only passes while ``running`` are timed: events and their hooks cost some microseconds each.

    Args:
        parallel: holds the blocks.

    Attributes:
        running: whether passes are timed.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        self.running = False
        self._mark = _event if parallel.device.type == "cuda" else perf_counter
        self._since: dict[str, list[Any]] = {}
        self._passes: dict[str, list[tuple[Any, Any]]] = {}
        self._handles: list[RemovableHandle] = []
        for runtime, structure in zip(parallel.runtimes, parallel.structures, strict=True):
            for placed in runtime.stage:
                if placed.layer.role is Role.BLOCK:
                    self._watch(placed.layer.name, structure.get_submodule(placed.layer.name))

    def _watch(self, name: str, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(self._starter(name), prepend=True),
            module.register_forward_hook(self._stopper(name)),
        ]

    def _starter(self, name: str) -> Callable[..., None]:
        def start(*_: Any) -> None:
            if self.running:
                self._since.setdefault(name, []).append(self._mark())

        return start

    def _stopper(self, name: str) -> Callable[..., None]:
        def stop(*_: Any) -> None:
            if self.running and self._since.get(name):
                self._passes.setdefault(name, []).append((self._since[name].pop(), self._mark()))

        return stop

    def take(self) -> dict[str, float]:
        """The median seconds of a pass of every block since the last call; waits for the GPU."""
        passes, self._passes = self._passes, {}
        self._since.clear()
        return {name: median(_seconds(*one) for one in found) for name, found in passes.items()}

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def by_run(passes: dict[str, float], names: list[str], runs: list[tuple[str, int]]) -> dict[str, float]:
    """Seconds of runs of layers, by the name of the first, where all of a run are there.

    Args:
        passes: seconds by layer.
        names: of all layers of the model, in order.
        runs: first layer and number of layers.
    """
    found = {}
    for first, count in runs:
        start = names.index(first)
        own = [passes.get(name) for name in names[start : start + count]]
        known = [seconds for seconds in own if seconds is not None]
        if len(known) == count:
            found[first] = sum(known)
    return found


def held_bytes(device: torch.device) -> int:
    """Peak bytes that the allocator held since the last call; 0 where it does not tell."""
    if device.type != "cuda":
        return 0
    held = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return held
