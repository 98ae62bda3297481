"""Sums over a tensor group, which selective recomputation keeps instead of their partial products.

The product of a row-split matmul is a partial sum, as large on each device as without tensor parallelism. Later code
uses only the sum over the group, and under sequence parallelism only the device's tokens of it. So the sum is kept, and
backward runs neither the matmul nor the collective again.
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
"""Part of the message that torch raises if a kept tensor was changed in place (``torch.utils.checkpoint``)."""


class KeptSums:
    """Sums of one forward pass of a layer, in order."""

    def __init__(self) -> None:
        self.in_row = False  # whether a row-split matmul and its collective run
        self._again = False
        self._sums = deque[tuple[Tensor, int]]()

    def keep(self, make: Callable[[], Tensor]) -> Tensor:
        """Compute and keep a sum in forward; return it in backward."""
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
        """Use these sums while the layer runs on this thread; ``again``: in backward."""
        outer = current()
        _ACTIVE.sums, self._again = self, again
        try:
            yield
        finally:
            _ACTIVE.sums, self._again = outer, False

    @contextmanager
    def row(self) -> Iterator[None]:
        """Run a row-split matmul and its collective inside."""
        self.in_row = True
        try:
            with _RowMode(run=not self._again):
                yield
        finally:
            self.in_row = False


_ACTIVE = threading.local()
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default: _aten.mm.out, _aten.bmm.default: _aten.bmm.out}
"""Matmuls, and the operators that replace them, whose outputs selective recomputation does not keep."""


class _RowMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replace matmuls by operators whose outputs are not kept; in backward, by an allocation without compute."""

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
    """Return the sums of the layer that runs on this thread under selective recomputation; None outside of one."""
    return None if torch.compiler.is_compiling() else getattr(_ACTIVE, "sums", None)


@contextmanager
def row_product() -> Iterator[None]:
    """Run a row-split matmul and its collective inside."""
    sums = current()
    if sums is None:
        yield
        return
    with sums.row():
        yield


def kept_sum(make: Callable[[], Tensor]) -> Tensor:
    """Compute a sum over the group, or return it if it is that of a row-split matmul and was kept."""
    sums = current()
    return make() if sums is None or not sums.in_row else sums.keep(make)
