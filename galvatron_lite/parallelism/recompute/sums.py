"""Sums over a tensor group that selective recomputation keeps in place of the products they are made of.

The product of a matmul that is split by rows is a partial sum, as large on each device as without tensor parallelism.
Only the sum over the group is used; under sequence parallelism each device has just its own tokens of it. So the sum
is kept, and in backward neither the matmul nor the collective runs again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MUTATED = "cached during selective activation checkpoint has been mutated"
"""Part of what torch raises where a kept tensor was changed in place (``torch.utils.checkpoint``)."""


class KeptSums:
    """Sums of one forward pass of a layer, in order."""

    def __init__(self) -> None:
        self.in_row = False  # whether a row-split matmul and its collective run
        self._again = False
        self._sums = deque[tuple[Tensor, int]]()

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """The sum: made and kept in forward, returned in backward."""
        if not self._again:
            total = make()
            self._sums.append((total.detach(), total._version))
            return total
        kept, version = self._sums.popleft()
        if kept._version != version:
            raise RuntimeError(f"A sum {MUTATED}.")
        return kept

    @contextmanager
    def active(self, *, again: bool) -> Iterator[None]:
        """While the layer runs on this thread; ``again``: in backward."""
        outer = current()
        _ACTIVE.sums, self._again = self, again
        try:
            yield
        finally:
            _ACTIVE.sums, self._again = outer, False

    @contextmanager
    def row(self) -> Iterator[None]:
        """While a row-split matmul and its collective run."""
        self.in_row = True
        try:
            with _RowMode(run=not self._again):
                yield
        finally:
            self.in_row = False


_ACTIVE = threading.local()
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default: _aten.mm.out, _aten.bmm.default: _aten.bmm.out}
"""Matmuls, and what runs in their place: an operator whose output selective recomputation does not keep."""


class _RowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Matmuls that selective recomputation does not keep; in backward only memory for what is kept already."""

    def __init__(self, *, run: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        left, right = args
        product = left.new_empty((*left.shape[:-1], right.shape[-1]))
        return _PRODUCTS[func](left, right, out=product) if self._run else product


def current() -> KeptSums | None:
    """The sums of the layer that runs on this thread under selective recomputation; None outside of one."""
    return None if torch.compiler.is_compiling() else getattr(_ACTIVE, "sums", None)


@contextmanager
def row_product() -> Iterator[None]:
    """Around a row-split matmul and its collective."""
    sums = current()
    if sums is None:
        yield
        return
    with sums.row():
        yield


def kept_sum(make: Callable[[], Tensor]) -> Tensor:
    """The sum of a row-split matmul's products, not made again where it is kept; any other sum is made."""
    sums = current()
    return make() if sums is None or not sums.in_row else sums.keep(make)
