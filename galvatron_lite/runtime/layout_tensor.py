"""What a layer returned, as it lies: the next layer takes it so; it goes to the glue layout when code looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, locals_only, name_of
from galvatron_lite.runtime.border import RankPiece

Look = Callable[[RankPiece], Tensor]
"""Brings a piece to the glue layout; with communication, so all ranks of the stage do it together."""

_OF_PIECE = frozenset({"dtype", "device", "requires_grad", "is_floating_point", "is_complex", "layout"})
_OF_SHAPE = frozenset({"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"})


class LayoutTensor(ShardedTensor):
    """A tensor of the glue code that is brought to the glue layout when a torch function first gets it.

    It tells its shape, dtype and the like without that. (A subclass, so that among cut tensors it is asked first.)
    """

    piece: RankPiece
    look: Look
    rows: int
    looked: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function with what code is to see, or answer what is known."""
        name, first = name_of(func), args[0] if args else None
        if isinstance(first, LayoutTensor) and name in _OF_PIECE:
            with locals_only():
                return func(first.piece.tensor)
        if isinstance(first, LayoutTensor) and name in _OF_SHAPE:
            return func(torch.empty((first.rows, *first.piece.shape[1:]), device="meta"), *args[1:], **(kwargs or {}))
        return func(*map_tensors(args, seen), **map_tensors(kwargs or {}, seen))


def layout_tensor(piece: RankPiece, rows: int, look: Look) -> Tensor:
    """A piece as glue code may hold it.

    Args:
        piece: of a tensor whose samples lie along dim 0.
        rows: samples that this rank has of it in the glue layout.
        look: brings it there.
    """
    # without data: C++ code that does not ask __torch_function__ fails instead of working on something else
    shape = (rows, *piece.shape[1:])
    made: LayoutTensor = torch.empty(shape, dtype=piece.tensor.dtype, device="meta").as_subclass(LayoutTensor)
    made.piece, made.rows, made.look, made.looked = piece, rows, look, None
    return made


def seen(tensor: Tensor) -> Tensor:
    """What glue code sees of a tensor: brought to the glue layout if it was not there."""
    if not isinstance(tensor, LayoutTensor):
        return tensor
    if tensor.looked is None:
        tensor.looked = tensor.look(tensor.piece)
    return tensor.looked
