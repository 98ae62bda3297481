"""Tracks the peak memory of a piece of code by the allocator's events.

On CPU all allocations and releases come from ``torch.profiler(profile_memory=True)``, so that temporaries inside
operators and backward count exactly. On CUDA the statistics of the caching allocator are used, which rounds blocks up
to 512 bytes.

On CPU the release of a tensor that existed before tracking began goes unseen. To track code that releases old tensors,
begin before it creates them; see ``PeakMemory.mark``.
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
    """Memory between two marks, in bytes above those live when tracking began."""

    start: int  # live at the start of the phase
    peak: int  # the most that was live during the phase
    end: int  # live at the end of the phase


@dataclass(slots=True)
class PeakMemory:
    """The result of ``track_peak``, complete when its ``with`` block ends."""

    device: torch.device
    phases: tuple[MemoryPhase, ...] = ()  # between the entry, each ``mark``, and the exit
    _cuda_phases: list[MemoryPhase] = field(default_factory=list)
    # of each mark, the addresses of blocks that stay live; None: of all blocks
    _live: list[Collection[int] | None] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most bytes that were live, above those at entry."""
        return max(phase.peak for phase in self.phases)

    @property
    def end(self) -> int:
        """Bytes live at the end, above those at entry."""
        return self.phases[-1].end

    def mark(self, *, between_steps: bool = False) -> None:
        """End a phase and begin the next one.

        For the peak of a step in steady state: enter before the model is created, run two steps,
        ``mark(between_steps=True)``, run one more, and read ``phases[-1].peak``.

        Args:
            between_steps: on CPU, whether only memory of Python's tensors stays counted. Between steps autograd holds
                none, and threads of the backend release memory unseen.
        """
        if self.device.type == "cuda":
            self._cuda_phases.append(_cuda_phase(self.device, self._cuda_phases))
        else:
            self._live.append(_tensor_addresses() if between_steps else None)
            with record_function(_MARK):
                pass


@contextmanager
def track_peak(device: torch.device | str = "cpu") -> Iterator[PeakMemory]:
    """Track the memory that torch allocates on ``device`` inside the ``with`` block (not nested on CPU).

    On CPU only allocations of the calling thread and of autograd's threads are seen.
    """
    peak = PeakMemory(torch.device(device))
    if peak.device.type == "cuda":
        yield from _track_cuda(peak)
    else:
        yield from _track_cpu(peak)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages of some tensors, each storage counted once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def _track_cpu(peak: PeakMemory) -> Iterator[PeakMemory]:
    # In a launched world the tracer logs two lines a run to standard error, unless its log level is the highest.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # The profiler warns of unknown blocks if earlier garbage is released inside.
    with garbage_waits(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        yield peak
    peak.phases = _phases(_read_trace(trace), peak._live)


def _tensor_addresses() -> Collection[int]:
    """Return the addresses of the storages of all CPU tensors of Python."""
    gc.collect()
    # no subclasses, which hold tensors in attributes
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    # gradients become objects of Python only once they are read
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    dense = (tensor for tensor in tensors if tensor.device.type == "cpu" and not tensor.is_sparse)
    return {tensor.untyped_storage().data_ptr() for tensor in dense}


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


def _phases(events: list[dict[str, Any]], live_addresses: Sequence[Collection[int] | None]) -> tuple[MemoryPhase, ...]:
    blocks: dict[int, int] = {}  # sizes by address
    live = start = peak = 0
    phases = []
    for event in events:
        if _is_mark(event):
            phases.append(MemoryPhase(start, peak, live))
            counted = live_addresses[len(phases) - 1]
            blocks = {address: size for address, size in blocks.items() if counted is None or address in counted}
            start = peak = live = sum(blocks.values())
            continue
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        live -= blocks.pop(address, 0)  # if its address is used again, another thread has released the block
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
    peak.phases = tuple(
        MemoryPhase(max(phase.start, entry) - entry, phase.peak - entry, phase.end - entry)
        for phase in peak._cuda_phases
    )


def _cuda_phase(device: torch.device, earlier: list[MemoryPhase]) -> MemoryPhase:
    torch.cuda.synchronize(device)
    end, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return MemoryPhase(earlier[-1].end if earlier else 0, peak, end)
