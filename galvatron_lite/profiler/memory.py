"""How many bytes a piece of code holds at its worst moment, as the allocator itself saw it.

On CPU every allocation and release is read from ``torch.profiler(profile_memory=True)``, so temporaries inside
operators and inside backward count exactly. On CUDA the caching allocator's own statistics are used (it rounds each
block up to 512 bytes).

What lived before tracking began is not known to the CPU allocator's reporter: its release inside the tracked region
goes unseen. Code that releases old tensors should be tracked from before it makes them; see ``PeakMemory.mark``.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from galvatron_lite.model.trace.run import garbage_waits

_MARK = "galvatron_lite.memory.mark"


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """Memory between two marks, in bytes above what lived when tracking began."""

    start: int  # live when the phase began
    peak: int  # live at its worst moment
    end: int  # live when it ended


@dataclass(slots=True)
class PeakMemory:
    """What ``track_peak`` found; filled in when its ``with`` block ends."""

    device: torch.device
    phases: tuple[MemoryPhase, ...] = ()  # one between the entry, each ``mark``, and the exit
    _measured: list[MemoryPhase] = field(default_factory=list)
    _held: list[Collection[int] | None] = field(default_factory=list)  # by mark: addresses of blocks that count on

    @property
    def peak(self) -> int:
        """Bytes live at the worst moment, above what lived at entry."""
        return max(phase.peak for phase in self.phases)

    @property
    def end(self) -> int:
        """Bytes live at the end, above what lived at entry."""
        return self.phases[-1].end

    def mark(self, *, between_steps: bool = False) -> None:
        """End a phase here and begin the next one.

        For a step's peak in steady state: enter before the model is made, run two steps,
        ``mark(between_steps=True)``, run one more, and read ``phases[-1].peak``.

        Args:
            between_steps: on CPU, what no tensor of Python holds counts no longer (between steps autograd holds
                nothing): a thread of the backend released it unseen.
        """
        if self.device.type == "cuda":
            self._measured.append(_cuda_phase(self.device, self._measured))
        else:
            self._held.append(_held_addresses() if between_steps else None)
            with record_function(_MARK):
                pass


@contextmanager
def track_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Track what torch allocates on ``device`` while the ``with`` block runs (not nested on CPU).

    Only allocations of the calling thread, and of the threads autograd runs backward on, are seen on CPU.
    """
    peak = PeakMemory(torch.device(device))
    if peak.device.type == "cuda":
        yield from _track_cuda(peak)
    else:
        yield from _track_cpu(peak)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors, each storage counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _track_cpu(peak: PeakMemory) -> Iterator[PeakMemory]:
    # In a launched world the tracer logs two lines a run to standard error, unless its log level is above all.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Garbage of earlier code that is released inside makes the allocator's reporter warn of unknown blocks.
    with garbage_waits(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        yield peak
    peak.phases = _phases(_read_trace(trace), peak._held)


def _held_addresses() -> Collection[int]:
    """Where the storages of all tensors lie that Python holds."""
    gc.collect()
    # exactly tensors: subclasses hold theirs in attributes
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    # gradients that no code has asked for are no objects of Python yet
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return {one.untyped_storage().data_ptr() for one in tensors if one.device.type == "cpu" and not one.is_sparse}


def _read_trace(trace: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    kept = [
        event
        for event in events
        if _is_mark(event) or (event.get("name") == "[memory]" and event["args"]["Device Type"] == 0)
    ]
    return sorted(kept, key=lambda event: event["ts"])


def _is_mark(event: dict[str, Any]) -> bool:
    return bool(event.get("name") == _MARK and event.get("ph") == "X")


def _phases(events: list[dict[str, Any]], held: Sequence[Collection[int] | None]) -> tuple[MemoryPhase, ...]:
    blocks: dict[int, int] = {}
    live = start = peak = 0
    phases = []
    for event in events:
        if _is_mark(event):
            phases.append(MemoryPhase(start, peak, live))
            counted = held[len(phases) - 1]
            blocks = {place: size for place, size in blocks.items() if counted is None or place in counted}
            start = peak = live = sum(blocks.values())
            continue
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        live -= blocks.pop(address, 0)  # a block that another thread released shows when its address is used again
        if size >= 0:
            blocks[address] = size
            live += size
        peak = max(peak, live)
    return (*phases, MemoryPhase(start, peak, live))


def _track_cuda(peak: PeakMemory) -> Iterator[PeakMemory]:
    torch.cuda.synchronize(peak.device)
    torch.cuda.reset_peak_memory_stats(peak.device)
    entry = torch.cuda.memory_allocated(peak.device)
    yield peak
    peak.mark()
    peak.phases = tuple(MemoryPhase(max(p.start, entry) - entry, p.peak - entry, p.end - entry) for p in peak._measured)


def _cuda_phase(device: torch.device, earlier: list[MemoryPhase]) -> MemoryPhase:
    torch.cuda.synchronize(device)
    end, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return MemoryPhase(earlier[-1].end if earlier else 0, peak, end)
