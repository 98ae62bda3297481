"""The global batch of a step: compared between ranks, or gathered from the ranks' shares."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import ITEMS, batch_size, map_places, places
from galvatron_lite.parallelism.process_groups import all_gather
from galvatron_lite.runtime.peers import everyone
from galvatron_lite.world import messages_carry_data

COMPARED = 3
"""Number of batches whose contents are compared; shapes are compared for all."""
_REMEDY = (
    "Every rank gives the same global batch: seed samplers and augmentation alike, and take no DistributedSampler. "
    "Where each rank is to load a share of its own, of equal shapes, call auto_parallelize(..., local_batch=True)."
)
_LOCAL = (
    "With local_batch=True the shares of all ranks have equal shapes: pad samples to one length, and set "
    "drop_last=True where the last batch is smaller."
)


class GlobalBatches:
    """Returns the global batch of a step from what each rank passes. All ranks call it together.

    Args:
        device: of this rank.
        example: a batch as the model takes it, if there is one.
        local: whether each rank passes a share; the batch is their concatenation in the order of ranks.
        timeout: seconds that a rank waits for the others; default: torch's.
        trained: returns which parameters of this rank require gradients.

    Attributes:
        trained_by_rank: a checksum of ``trained`` of each rank, when it passed its last batch.
    """

    def __init__(
        self,
        device: torch.device,
        example: Any = None,
        local: bool = False,
        timeout: float | None = None,
        trained: Callable[[], Any] = tuple,
    ) -> None:
        self._device, self._local, self._count, self._trained = device, local, 0, trained
        self.trained_by_rank: tuple[int, ...] = ()
        self._patience = None if timeout is None else timedelta(seconds=timeout)
        self._places = None if example is None else _shape_of(example)
        self._cpu_group: dist.ProcessGroup | None = None

    def of_step(self, one_or_several: Any, group: dist.ProcessGroup | None = None) -> tuple[Any, int]:
        """The global batch of a step, and the number of batches in it: ``train_step`` takes one, or a list of them."""
        batches = one_or_several if self._is_several(one_or_several) else [one_or_several]
        global_batches = [self(batch, group) for batch in batches]
        return (global_batches[0] if len(batches) == 1 else _concatenated(global_batches)), len(batches)

    def __call__(self, batch: Any, group: dist.ProcessGroup | None = None) -> Any:
        """The global batch, from a batch that is the same on every rank, or this rank's share."""
        if dist.get_world_size() == 1 or not messages_carry_data():
            return batch
        self._compare(batch, group)
        self._count += 1
        return self._gathered(batch, group) if self._local else batch

    def _compare(self, batch: Any, group: dist.ProcessGroup | None) -> None:
        shapes = [(place, tuple(one.shape), str(one.dtype)) for place, one in places(batch)]
        sums = _checksum(batch) if self._count < COMPARED and not self._local else 0
        checksum = torch.tensor([*(zlib.crc32(repr(part).encode()) for part in (self._trained(), shapes)), sums])
        if self._cpu_group is None:
            # a separate group, so that other messages of a rank are no answer; on the CPU, as the device may still be
            # busy with the last step
            self._cpu_group = dist.new_group(backend="gloo", timeout=self._patience, group_desc="batches")
        gathered = checksum.new_empty(dist.get_world_size() * len(checksum))
        all_gather(gathered, checksum, self._cpu_group)
        rows = gathered.view(-1, len(checksum)).tolist()
        self.trained_by_rank = tuple(row[0] for row in rows)
        checksums = [tuple(row[1:]) for row in rows]
        if len(set(checksums)) == 1:
            return
        usual = Counter(checksums).most_common(1)[0][0]
        like = checksums.index(usual)
        ranks = [rank for rank, other in enumerate(checksums) if other != usual]
        shapes_by_rank = everyone([*shapes], group)
        what = _difference(shapes_by_rank[ranks[0]], shapes_by_rank[like])
        value = f"of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise InputError("batch", value, f"{what} rank {like}'s. {_LOCAL if self._local else _REMEDY}")

    def _gathered(self, batch: Any, group: dist.ProcessGroup | None) -> Any:
        samples, world = batch_size(batch), dist.get_world_size()

        def gather(place: str, tensor: Tensor) -> Tensor:
            has_samples = tensor.dim() > 0 and tensor.shape[0] == samples
            if not has_samples and place != f".{ITEMS}":
                return tensor
            local = tensor.to(self._device).contiguous().reshape(-1).view(torch.uint8)
            received = local.new_empty(world * local.numel())
            all_gather(received, local, group)
            gathered = received.view(tensor.dtype).view(world, *tensor.shape)
            return gathered.flatten(0, 1) if has_samples else gathered.sum(0)

        return map_places(batch, gather)

    def _is_several(self, batch: Any) -> bool:
        """Whether this is a list of batches, each like the example; without one, a list of tensors is one batch."""
        if not isinstance(batch, list) or not batch:
            return False
        if self._places is not None:
            return all(_shape_of(one) == self._places for one in batch)
        return all(isinstance(one, (Mapping, tuple, list)) for one in batch)


def _shape_of(batch: Any) -> tuple[str, ...]:
    return tuple(place for place, _ in places(batch))


def _checksum(batch: Any) -> int:
    total = 0
    for _, tensor in places(batch):
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            items = tensor.detach().cpu().contiguous().reshape(-1)
            total = zlib.crc32(items.view(torch.uint8).numpy().data, total)
    return total


def _difference(entries: Sequence[Any], other: Sequence[Any]) -> str:
    """The first difference between place, shape and dtype of the tensors of two batches."""
    if entries == other:
        return "Its values differ from"
    names = [place for place, _, _ in entries]
    if names != [place for place, _, _ in other]:
        return f"It has the entries {', '.join(place[1:] for place in names)}, others than"
    (place, shape, dtype), (_, shape_2, dtype_2) = next((a, b) for a, b in zip(entries, other, strict=True) if a != b)
    entry = f"Its {place[1:]}" if place else "It"
    return f"{entry} is {dtype} {shape}, not {dtype_2} {shape_2} like"


def _concatenated(batches: Sequence[Any]) -> Any:
    sizes = [batch_size(batch) for batch in batches]
    by_place = [dict(places(batch)) for batch in batches]

    def join(place: str, first: Tensor) -> Tensor:
        tensors = [tensors_of_batch.get(place) for tensors_of_batch in by_place]
        if first.dim() == 0 or first.shape[0] != sizes[0]:
            return torch.stack([t for t in tensors if t is not None]).sum(0) if place == f".{ITEMS}" else first
        shapes = [None if tensor is None else tuple(tensor.shape[1:]) for tensor in tensors]
        if len(set(shapes)) > 1:
            odd = next(number for number, shape in enumerate(shapes) if shape != shapes[0])
            remedy = f"Batches of one step have equal shapes: batch {odd} has {shapes[odd]} a sample. Pad them alike."
            raise InputError(f"batch, {place[1:] or 'shape'}", shapes[0], remedy)
        return torch.cat([tensor for tensor in tensors if tensor is not None])

    return map_places(batches[0], join)
