"""What collectives took on this rank, while a trace is made: bytes and seconds by kind and group.

Functions of ``torch.distributed`` are replaced meanwhile by ones that take the time from the call until the collective
has completed; on CUDA events do so, on the streams. What compute hides counts, too. Messages between stages do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.runs.schema import CollectiveRecord

_NAMES = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
"""Functions that are timed, and the kinds of their collectives."""
Key = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    bytes: int = 0
    spans: list[Callable[[], float]] = field(default_factory=list)


class CollectiveTimer:
    """Times collectives between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._plain: dict[str, Any] = {}
        self._sums: dict[Key, _Sum] = {}
        self._inside = False

    def start(self) -> None:
        """Replace the functions."""
        for name, kind in _NAMES.items():
            plain = getattr(dist, name, None)
            if plain is not None:
                self._plain[name] = plain
                setattr(dist, name, wraps(plain)(partial(self._timed, plain, kind)))

    def stop(self) -> None:
        """Put them back."""
        for name, plain in self._plain.items():
            setattr(dist, name, plain)
        self._plain = {}

    def take(self, rank: int, step: int, steps: int) -> Iterable[CollectiveRecord]:
        """Records of so many steps up to this one; the device has to have done all of it."""
        sums, self._sums = self._sums, {}
        for (kind, ranks), one in sums.items():
            seconds = sum(max(span(), 0.0) for span in one.spans)
            yield CollectiveRecord(rank, step, steps, kind, ranks, one.calls, one.bytes, round(seconds, 7))

    def _timed(self, plain: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # one calls another
            return plain(*args, **kwargs)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        sized = [one.nbytes for one in tensors]
        group = kwargs.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        begin = _moment(tensors[0].device)
        self._inside = True
        try:
            work = plain(*args, **kwargs)
        finally:
            self._inside = False
        span = _span(work, begin, tensors[0].device) if len(ranks) > 1 else None
        if span is not None:
            one = self._sums.setdefault((kind, ranks), _Sum())
            one.calls += 1
            one.bytes += max(sized)  # the tensor that all ranks have together
            one.spans.append(span)
        return work


def _span(work: Any, begin: Any, device: torch.device) -> Callable[[], float] | None:
    """Gives the seconds until a collective has completed; None where its backend does not tell when."""
    if work is None:  # it has completed, or the stream waits for it
        end = _moment(device)
        return lambda: _between(begin, end)
    ends: list[Any] = []
    try:
        work.get_future().add_done_callback(lambda _: ends.append(_moment(device)))
    except RuntimeError:
        return None
    return lambda: _between(begin, ends[0]) if ends else 0.0


def _moment(device: torch.device) -> Any:
    """Now, on the host; on CUDA in the present stream."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3
