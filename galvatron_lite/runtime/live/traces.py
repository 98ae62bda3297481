"""Traces of some steps by ``torch.profiler``, with ranges of ours around steps, their parts, and layers.

Ranges are there only while a trace is made: layers get their hooks when it begins, and lose them when it ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from galvatron_lite.runs.read import TRACES
from galvatron_lite.runs.schema import LAYER, METADATA, PART, STEP
from galvatron_lite.runtime.live.clock import StepClock


class Ranges:
    """Ranges of ours, in a profile that is being made.

    Args:
        layers: modules of this rank's layers, each with the layer's name.
        clock: of the steps.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]], clock: StepClock) -> None:
        self._clock = clock
        self._now: list[Any] = []
        self._handles = [handle for name, module in layers for handle in self._watch(name, module)]
        clock.told = self._tell

    def close(self) -> None:
        """Take the hooks off."""
        self._tell("")
        self._clock.told = None
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        open_ranges: list[Any] = []

        def start(*_: Any) -> None:
            open_ranges.append(_begin(LAYER + name))

        def stop(*_: Any) -> None:
            if open_ranges:
                _end(open_ranges.pop())

        return [
            module.register_forward_pre_hook(start, prepend=True),
            # first: behind the last layer of a stage a hook leaves the model, and later hooks are not called
            module.register_forward_hook(stop, prepend=True, always_call=True),
        ]

    def _tell(self, part: str) -> None:
        """A part of the step begins, or with an empty name the step ends."""
        while self._now:
            _end(self._now.pop())
        if part:
            self._now.append(_begin(PART + part))


def _begin(name: str) -> Any:
    one = record_function(name)
    one.__enter__()  # type: ignore[no-untyped-call]
    return one


def _end(one: Any) -> None:
    one.__exit__(None, None, None)


class Tracer:
    """Makes a trace of some steps.

    Args:
        folder: of the run.
        steps: that are traced together.
        rank: of this process.
        layers: the modules of this rank's layers, as they are when the trace begins.
        clock: of the steps.
        about: what else a reader of the trace needs.
    """

    def __init__(
        self,
        folder: Path,
        steps: range,
        rank: int,
        layers: Callable[[], Sequence[tuple[str, nn.Module]]],
        clock: StepClock,
        about: dict[str, Any],
    ) -> None:
        self._folder, self._steps, self._rank, self._layers = folder / TRACES, steps, rank, layers
        self._clock, self._about = clock, about
        self._profile: profile | None = None
        self._ranges: Ranges | None = None
        self._step: Any = None

    @property
    def runs(self) -> bool:
        """Whether the profiler runs."""
        return self._profile is not None

    def begin(self, step: int) -> None:
        """A step begins."""
        if step in self._steps and self._profile is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile, self._first = started(), step
            self._ranges = Ranges(self._layers(), self._clock)
        if self._profile is not None:
            self._step = _begin(f"{STEP}{step}")

    def end(self, step: int) -> None:
        """It is done."""
        if self._profile is None:
            return
        _end(self._step)
        if step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Write the trace, where one is being made."""
        found, self._profile = self._profile, None
        if found is None:
            return
        if self._ranges is not None:
            self._ranges.close()
        path = self._folder / f"rank-{self._rank:05d}-step-{self._first:05d}.json.gz"
        finished(found, path, {**self._about, "rank": self._rank})


def started() -> profile:
    """A profiler that runs; on CUDA it traces kernels as well."""
    # in a launched world the tracer logs two lines a run to standard error, unless its log level is above all
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    found = profile(activities=kinds)
    found.start()
    return found


def finished(profiler: profile, path: Path, about: dict[str, Any]) -> None:
    """Stop a profiler and write its trace, whole or not at all."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler.add_metadata_json(METADATA, json.dumps(about))
    profiler.stop()
    part = path.with_name(f".{path.name}.part.json.gz")
    profiler.export_chrome_trace(str(part))
    part.replace(path)
