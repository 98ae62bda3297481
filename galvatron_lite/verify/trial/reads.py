"""Values of tensors that a pass reads of its samples, and whether what runs depends on how a batch is shared by them.

Shares of a batch read values of their own. Where the example's shares read alike, another batch may not: so each read
is answered otherwise in a pass of its own. What then gives the same loss and gradients, or an error (an assertion),
may be read. The others are told apart by what is asked: a number made of all samples that is compared with another
(``loss.mean() > 2``) is one of the batch as a whole; whether any or all entries are so (``mask.any()``), or how many,
mostly asks for nothing but a shorter course to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.frames import TORCH, callers
from galvatron_lite.model.trace.flow import READ, DataFlow

Site = tuple[tuple[str, int], ...]
"""Where a value is read: file and line of the calls of code that is not torch's, innermost first."""
Answer = Callable[[Any], Any]  # the value that is read instead of one

_ATEN = torch.ops.aten
_COMPARISONS: dict[Any, int] = {
    op: beside
    for kind, beside in (("eq", 0), ("ne", 0), ("gt", 0), ("lt", 0), ("ge", -1), ("le", 1))
    for op in (getattr(_ATEN, kind).Scalar, getattr(_ATEN, kind).Tensor)
}
"""How far from the number compared with is one that turns the answer for most others round."""
_BENDING = frozenset(
    getattr(_ATEN, name)
    for name in ("abs", "clamp", "clamp_min", "clamp_max", "relu", "leaky_relu", "hardtanh", "threshold", "maximum",
                 "minimum", "huber_loss", "smooth_l1_loss")
)  # fmt: skip
"""Functions whose slope depends on the side of a number that their argument is on."""
_HIDDEN = TORCH, str(Path(__file__).parent)
_START = "run_pass"  # of this folder: what calls the model
_FAR = 1e4
_LISTED = 1024  # items of a list whose values are seen, at most: nobody decides by more, and all are slow to read


@dataclass(slots=True)
class SiteReads:
    """What a pass read at a site."""

    values: list[Any]  # in order
    compared: bool  # whether they are of floating numbers, or of a comparison of one with another


@dataclass(frozen=True, slots=True)
class ChangedReads:
    """What is read at a site instead of its first values."""

    site: Site
    count: int  # of these values; later ones stay, so that loops end
    answer: Answer


class ValueReads(DataFlow):  # type: ignore[no-untyped-call]
    """Notes values that are read of what is made of the samples, while it is entered.

    Attributes:
        reads: by site.
        bends: the numbers made of the samples on whose size a slope depends: how many, and their sum, by site.
        constants: numbers that whole numbers made of the samples are compared with, as padding is.
    """

    def __init__(self, model: nn.Module, batch: Any, answers: ChangedReads | None = None) -> None:
        super().__init__(model, batch)
        self.reads: dict[Site, SiteReads] = {}
        self.bends: dict[Site, tuple[int, float]] = {}
        self.constants = set[int]()
        self._answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; note what it reads, and what its outputs are made of."""
        taken = [*tensors_of(args), *tensors_of(kwargs or {})]
        if any(tensor.layout is not torch.strided for tensor in taken):
            return func(*args, **(kwargs or {}))
        if func.overloadpacket in _BENDING:
            followed = [one for one in taken if one.requires_grad]
            if self.sources_of_tensors(followed) & self.batch:
                site, items = tuple(callers(_HIDDEN, until=_START)), followed[0].detach()
                count, total = self.bends.get(site, (0, 0.0))
                self.bends[site] = count + items.numel(), total + float(items.sum())
        if func in _COMPARISONS and self.sources_of_tensors(taken[:1]) & self.batch:
            self._note_constant(taken[0], args[1], _COMPARISONS[func])
        if func is READ and self.sources_of_tensors(taken) & self.batch:
            return self._read(taken[0], func(*args))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note_constant(self, tensor: Tensor, other: Any, beside: int) -> None:
        if isinstance(other, Tensor) and other.dim() == 0 and not self.sources_of_tensors([other]) & self.batch:
            other = other.item()
        if not tensor.is_floating_point() and isinstance(other, (int, float)) and float(other).is_integer():
            self.constants.add(int(other) + beside)

    def _read(self, tensor: Tensor, value: Any) -> Any:
        site = tuple(callers(_HIDDEN, until=_START))
        read = self.reads.setdefault(site, SiteReads([], False))
        read.compared |= tensor.is_floating_point() or self.compares(tensor)
        read.values.append(value)
        if self._answers is None or site != self._answers.site or len(read.values) > self._answers.count:
            return value
        return self._answers.answer(value)


class ListedValues(TorchFunctionMode):
    """Reads tensors that are made lists or arrays of value by value, as ``ValueReads`` sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function; torch copies the values of small tensors unseen."""
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__") and args[0].numel() <= _LISTED and not args[0].is_complex():
            values = _listed(args[0].detach())
            return values if name == "tolist" else torch.tensor(values, dtype=args[0].dtype).numpy()
        return func(*args, **(kwargs or {}))


def _listed(tensor: Tensor) -> Any:
    return [_listed(one) for one in tensor.unbind()] if tensor.dim() else tensor.item()


def name_of_site(site: Site) -> str:
    """File and line, for people."""
    return f"{Path(site[0][0]).name}:{site[0][1]}" if site else "the model"


def decides(values: Sequence[Any], changes: Callable[[Answer], bool]) -> bool:
    """Whether code chooses what it runs by values that it reads.

    A number is used as an amount, too (a length, a divisor): then a value near to it makes a difference. Only where it
    makes none, and one far away does, the number is compared.

    Args:
        values: that were read.
        changes: whether a pass gives something else if other values are read.
    """
    if isinstance(values[0], bool):
        return changes(lambda value: not value)
    if isinstance(values[0], int):
        amount = changes(lambda value: value + 1) or changes(lambda value: value - 1)
        return not amount and (changes(lambda _: 0) or changes(lambda value: 2 * value + 1))
    near = [changes(lambda value: 0.9 * value), changes(lambda value: 1.1 * value)]
    return not all(near) and (any(near) or changes(lambda _: -_FAR) or changes(lambda _: _FAR))
