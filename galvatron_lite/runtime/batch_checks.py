"""The global batch of a step: compared between ranks, or made of the shares that each of them gives."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
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
"""Batches whose contents are compared; shapes always are."""
_REMEDY = (
    "Every rank gives the same global batch: seed samplers and augmentation alike, and take no DistributedSampler. "
    "Where each rank is to load a share of its own, of equal shapes, call auto_parallelize(..., local_batch=True)."
)
_LOCAL = (
    "With local_batch=True the shares of all ranks have equal shapes: pad samples to one length, and set "
    "drop_last=True where the last batch is smaller."
)


class GlobalBatches:
    """The global batch of a step from what each rank gives. All ranks call it together.

    Args:
        device: of this rank.
        example: a batch, as the model takes it, if known.
        local: whether each rank gives its own share: the batch is theirs in the order of ranks.
        timeout: seconds that a rank waits for the others; torch's if not given.
    """

    def __init__(
        self, device: torch.device, example: Any = None, local: bool = False, timeout: float | None = None
    ) -> None:
        self._device, self._local, self._count = device, local, 0
        self._patience = None if timeout is None else timedelta(seconds=timeout)
        self._places = None if example is None else _shape_of(example)
        self._cpu_group: dist.ProcessGroup | None = None

    def of_step(self, one_or_several: Any, group: dist.ProcessGroup | None = None) -> tuple[Any, int]:
        """The global batch of a step, and of how many batches it is made: ``train_step`` takes a list of them."""
        batches = one_or_several if self._is_several(one_or_several) else [one_or_several]
        every = [self(batch, group) for batch in batches]
        return (every[0] if len(every) == 1 else _concatenated(every)), len(every)

    def __call__(self, batch: Any, group: dist.ProcessGroup | None = None) -> Any:
        """The global batch of one that is the same on every rank, or this rank's share."""
        if dist.get_world_size() == 1 or not messages_carry_data():
            return batch
        self._compare(batch, group)
        self._count += 1
        return self._gathered(batch, group) if self._local else batch

    def _compare(self, batch: Any, group: dist.ProcessGroup | None) -> None:
        shapes = [(place, tuple(one.shape), str(one.dtype)) for place, one in places(batch)]
        sums = _checksum(batch) if self._count < COMPARED and not self._local else 0
        checksum = torch.tensor([zlib.crc32(repr(shapes).encode()), sums])
        if self._cpu_group is None:
            # of its own, so that a rank that does something else meanwhile does not answer; and through the CPU: the
            # device is still busy with the last step, which need not be waited for
            self._cpu_group = dist.new_group(backend="gloo", timeout=self._patience, group_desc="batches")
        every = checksum.new_empty(dist.get_world_size() * len(checksum))
        all_gather(every, checksum, self._cpu_group)
        signs = [tuple(row) for row in every.view(-1, len(checksum)).tolist()]
        if len(set(signs)) == 1:
            return
        usual = Counter(signs).most_common(1)[0][0]
        like = signs.index(usual)
        ranks = [rank for rank, sign in enumerate(signs) if sign != usual]
        held = everyone([*shapes], group)
        what = _difference(held[ranks[0]], held[like])
        named = f"of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        raise InputError("batch", named, f"{what} rank {like}'s. {_LOCAL if self._local else _REMEDY}")

    def _gathered(self, batch: Any, group: dist.ProcessGroup | None) -> Any:
        samples, world = batch_size(batch), dist.get_world_size()

        def gather(place: str, tensor: Tensor) -> Tensor:
            shared = tensor.dim() > 0 and tensor.shape[0] == samples
            if not shared and place != f".{ITEMS}":
                return tensor
            sent = tensor.to(self._device).contiguous().reshape(-1).view(torch.uint8)
            every = sent.new_empty(world * sent.numel())
            all_gather(every, sent, group)
            gathered = every.view(tensor.dtype).view(world, *tensor.shape)
            return gathered.flatten(0, 1) if shared else gathered.sum(0)

        return map_places(batch, gather)

    def _is_several(self, batch: Any) -> bool:
        """Whether this is a list of batches: each is like the example; a list of tensors is one batch."""
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
            held = tensor.detach().cpu().contiguous().reshape(-1)
            total = zlib.crc32(held.view(torch.uint8).numpy().data, total)
    return total


def _difference(batches: Sequence[Any], other: Sequence[Any]) -> str:
    if batches == other:
        return "Its values differ from"
    names = [[place for place, _, _ in one] for one in (batches, other)]
    if names[0] != names[1]:
        return f"It has the entries {', '.join(p[1:] for p in names[0])}, others than"
    (place, shape, dtype), (_, wanted, kind) = next((a, b) for a, b in zip(batches, other, strict=True) if a != b)
    entry = f"Its {place[1:]}" if place else "It"
    return f"{entry} is {dtype} {shape}, not {kind} {wanted} like"


def _concatenated(batches: Sequence[Any]) -> Any:
    sizes = [batch_size(batch) for batch in batches]
    held = [dict(places(batch)) for batch in batches]

    def join(place: str, first: Tensor) -> Tensor:
        every = [one.get(place) for one in held]
        if first.dim() == 0 or first.shape[0] != sizes[0]:
            return torch.stack([t for t in every if t is not None]).sum(0) if place == f".{ITEMS}" else first
        shapes = [None if one is None else tuple(one.shape[1:]) for one in every]
        if len(set(shapes)) > 1:
            odd = next(number for number, shape in enumerate(shapes) if shape != shapes[0])
            remedy = f"Batches of one step have equal shapes: batch {odd} has {shapes[odd]} a sample. Pad them alike."
            raise InputError(f"batch, {place[1:] or 'shape'}", shapes[0], remedy)
        return torch.cat([one for one in every if one is not None])

    return map_places(batches[0], join)
