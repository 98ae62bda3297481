"""That what arrived is what left: checksums of whole tensors, added up over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from galvatron_lite.runtime.layout import Box
from galvatron_lite.runtime.pieces import part_of
from galvatron_lite.runtime.switch.cargo import HeldItems, Hold, MovedTensor
from galvatron_lite.runtime.switch.checksums import MODULUS, checksum
from galvatron_lite.runtime.switch.routes import Everyone, first_only


def sums_before(items: Sequence[MovedTensor], hold: Hold, device: torch.device) -> dict[str, tuple[int, int]]:
    """Checksums of whole tensors; all ranks call it.

    Returns:
        By name: that of the copy that the first ranks hold, and the sum over all copies.
    """
    rank = dist.get_rank()
    firsts, everything = [], []
    for item in items:
        parts = hold.parts.get(item.name, [])
        own = {box: checksum([_items(part)]) for box, part in ((part.chunk.whole, part) for part in parts)}
        firsts.append(sum(own[box] for box in first_only(item.before)[rank]))
        everything.append(sum(own[part.chunk.whole] for part in parts))
    totals = _added([*firsts, *everything], device)
    return {item.name: (totals[place], totals[place + len(items)]) for place, item in enumerate(items)}


def sums_after(items: Sequence[MovedTensor], hold: Hold) -> list[int]:
    """Checksums of what this rank holds of each tensor."""
    return [checksum(_items(part) for part in hold.parts.get(item.name, ())) for item in items]


def differing(
    items: Sequence[MovedTensor], before: Mapping[str, tuple[int, int]], after: Sequence[int], device: torch.device
) -> list[str]:
    """Names of tensors of which some copy is not what it was; all ranks call it.

    Args:
        items: the tensors.
        before: from ``sums_before``.
        after: from ``sums_after``, of this rank.
        device: of messages.
    """
    totals = _added(after, device)
    return [
        item.name
        for item, total in zip(items, totals, strict=True)
        if total != copies(item.after, item.shape) * before[item.name][0] % MODULUS
    ]


def agree(item: MovedTensor, sums: tuple[int, int]) -> bool:
    """Whether all copies of a tensor are equal before it moves."""
    return copies(item.before, item.shape) * sums[0] % MODULUS == sums[1]


def copies(everyone: Everyone, shape: tuple[int, ...]) -> int:
    """How many times ranks hold a tensor."""
    whole = Box(tuple((0, extent) for extent in shape)).items
    return sum(box.items for boxes in everyone for box in boxes) // max(1, whole)


def _items(part: HeldItems) -> tuple[torch.Tensor, Box]:
    return part_of(part.tensor, part.chunk.local), part.chunk.whole


def _added(values: Sequence[int], device: torch.device) -> list[int]:
    """Sums over the ranks modulo 2^64, in one message."""
    signed = [value % MODULUS - (MODULUS if value % MODULUS >= MODULUS // 2 else 0) for value in values]
    total = torch.tensor(signed, dtype=torch.int64, device=device)
    if dist.get_world_size() > 1 and len(signed):
        dist.all_reduce(total)
    return [int(value) % MODULUS for value in total.tolist()]
