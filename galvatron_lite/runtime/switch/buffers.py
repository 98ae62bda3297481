"""Which buffers of a split model are live on a rank, and which ones a new split must be given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from galvatron_lite.model.graph import Layer
from galvatron_lite.runtime.pieces import Held, ItemRun, Parallel, all_of, held_buffers


def live_buffers(parallel: Parallel, layers: Sequence[Layer]) -> list[Held]:
    """The buffers of this rank's own layers, and those that no layer has; the ones outside ``state_dict()`` too."""
    return [*held_buffers(parallel), *_others(parallel, layers)]


def wanted_buffers(parallel: Parallel, blanks: Sequence[tuple[str, Tensor]]) -> list[Held]:
    """The buffers without values of a new split: what it works on, whole but for the channels of other ranks."""
    held = {id(one.tensor): one for one in held_buffers(parallel)}
    return [_renamed(parallel, held.get(id(blank)) or _held_buffer(name, blank)) for name, blank in blanks]


def _others(parallel: Parallel, layers: Sequence[Layer]) -> Iterator[Held]:
    """Buffers that are not saved, of this rank's layers or none."""
    for place, (runtime, tree) in enumerate(zip(parallel.runtimes, parallel.structures, strict=True)):
        own = {placed.layer.name for placed in runtime.stage} | ({""} if place == 0 else set())
        for name, buffer in tree.named_buffers():
            if name not in parallel.entries.names and _home(name, layers) in own:
                yield _held_buffer(name, buffer)


def _home(name: str, layers: Sequence[Layer]) -> str:
    found = [(len(path), one.name) for one in layers for path in one.modules if name.startswith(f"{path}.")]
    return max(found, default=(0, ""))[1]


def _held_buffer(name: str, buffer: Tensor) -> Held:
    box = all_of(buffer.shape)
    return Held(name, tuple(buffer.shape), buffer, (ItemRun(box, box),) if box.items else ())


def _renamed(parallel: Parallel, held: Held) -> Held:
    return Held(parallel.entries.names.get(held.name, held.name), held.shape, held.tensor, held.chunks)
