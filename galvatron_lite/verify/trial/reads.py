"""Values of tensors that a pass reads of its samples, and whether they decide what runs.

Shares of a batch read values of their own, and even if the example's shares read alike, those of another batch may not.
So each read is repeated with another answer. It is harmless if loss and gradients stay the same, or if an assertion
fails. The others are of two kinds. A number computed from all samples that is compared with another
(``loss.mean() > 2``) belongs to the full batch. Whether any or all entries fulfil a condition (``mask.any()``), or how
many do, mostly only selects a shorter course to the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
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
Answer = Callable[[Any], Any]  # from the value at a site to the one that is read instead

_ATEN = torch.ops.aten
_COMPARISONS: dict[Any, int] = {
    op: offset
    for kind, offset in (("eq", 0), ("ne", 0), ("gt", 0), ("lt", 0), ("ge", -1), ("le", 1))
    for op in (getattr(_ATEN, kind).Scalar, getattr(_ATEN, kind).Tensor)
}
"""From the number that integers are compared with to an integer for which the outcome is not that of most others."""
_KINKED = frozenset(
    getattr(_ATEN, name)
    for name in ("abs", "clamp", "clamp_min", "clamp_max", "relu", "leaky_relu", "hardtanh", "threshold", "maximum",
                 "minimum", "max", "min", "amax", "amin", "huber_loss", "smooth_l1_loss")
)  # fmt: skip
"""Functions whose slope depends on which side of a number their input is, or which of their inputs is the largest."""
_ORDERED = frozenset(getattr(_ATEN, name) for name in ("gt", "ge", "lt", "le"))
_BOUNDED = frozenset(getattr(_ATEN, name) for name in ("clamp", "clamp_min", "clamp_max", "maximum", "minimum"))
"""Functions whose result depends on which of two numbers is the larger one."""
_HIDDEN = TORCH, str(Path(__file__).parent)
_START = "run_pass"  # of this folder: what calls the model
_FAR = 1e4
_MAX_ITEMS = 1024  # of a list whose values are noted: nobody decides by more, and all are slow to read


@dataclass(slots=True)
class SiteReads:
    """What a pass read at a site."""

    values: list[Any]  # in order
    compared: bool  # whether they are real numbers, or come from a comparison of these


@dataclass(frozen=True, slots=True)
class ChangedReads:
    """What is read at a site instead of its first values, or computed there instead of an operator's output."""

    site: Site
    count: int  # of these values; later ones stay, so that loops end
    answer: Answer
    operator: Any = None  # whose outputs are changed; None: values that are read


class ValueReads(DataFlow):  # type: ignore[no-untyped-call]
    """While entered, notes values that are read of tensors computed from the samples.

    Args:
        model: with the parameters and buffers that are no samples.
        batch: the samples.
        answers: values to read instead.

    Attributes:
        reads: by site.
        kinks: count and sum of the inputs of functions with a kink that are computed from the samples, by site and
            function.
        orders: count and sum of an input of a function that compares it, without a slope of its own, by site,
            function and place of the input.
        constants: numbers that integers computed from the samples are compared with, as with padding; floats: those
            that real numbers of the samples are.
    """

    def __init__(self, model: nn.Module, batch: Any, answers: ChangedReads | None = None) -> None:
        super().__init__(model, batch)
        self.reads: dict[Site, SiteReads] = {}
        self.kinks: dict[tuple[Site, Any], tuple[int, float]] = {}
        self.orders: dict[tuple[Site, Any, int], tuple[int, float]] = {}
        self.constants = set[float]()
        self._answers, self._trained = answers, sum(self.parameters.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator; note what it reads, and the sources of its outputs."""
        inputs = [*tensors_of(args), *tensors_of(kwargs or {})]
        if any(tensor.layout is not torch.strided for tensor in inputs):
            return func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in _KINKED:
            differentiable = [tensor for tensor in inputs if tensor.requires_grad]
            if self.sources_of_tensors(differentiable) & self.batch:
                site, items = tuple(callers(_HIDDEN, until=_START)), differentiable[0].detach()
                count, total = self.kinks.get((site, operator), (0, 0.0))
                self.kinks[site, operator] = count + items.numel(), total + float(items.sum())
        if func in _COMPARISONS and self.sources_of_tensors(inputs[:1]) & self.batch:
            self._note_constant(inputs[0], args[1], _COMPARISONS[func])
        if func is _ATEN.isnan.default and self._are_samples(inputs[0]):
            self.constants.add(nan)
        if func is READ and self.sources_of_tensors(inputs) & self.batch:
            return self._read(inputs[0], func(*args))
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if operator in _ORDERED or (operator in _BOUNDED and not inputs[0].requires_grad):
            site = tuple(callers(_HIDDEN, until=_START))
            self._note_order(site, operator, inputs, args)
            if self._answers is not None and (self._answers.site, self._answers.operator) == (site, operator):
                return self._answers.answer(output)
        return output

    def _are_samples(self, tensor: Tensor) -> bool:
        """Whether a tensor has real numbers of the samples, which no parameter changed."""
        sources = self.sources_of_tensors([tensor])
        return tensor.is_floating_point() and bool(sources & self.batch) and not sources & self._trained

    def _note_order(self, site: Site, operator: Any, inputs: Sequence[Tensor], args: Sequence[Any]) -> None:
        if inputs[0].untyped_storage() in self._positive and tuple(args[1:]) == (0,):
            return  # whether any item is not zero
        for place, tensor in enumerate(inputs):
            sources = self.sources_of_tensors([tensor])
            if tensor.is_floating_point() and sources & self.batch and sources & self._trained:
                count, total = self.orders.get((site, operator, place), (0, 0.0))
                self.orders[site, operator, place] = count + tensor.numel(), total + float(tensor.detach().sum())

    def _note_constant(self, tensor: Tensor, constant: Any, offset: int) -> None:
        if (
            isinstance(constant, Tensor)
            and constant.dim() == 0
            and not self.sources_of_tensors([constant]) & self.batch
        ):
            constant = constant.item()
        if constant is tensor and self._are_samples(tensor):
            self.constants.add(nan)
        if not isinstance(constant, (int, float)):
            return
        if self._are_samples(tensor):
            self.constants.add(float(constant + offset))
        elif not tensor.is_floating_point() and float(constant).is_integer():
            self.constants.add(int(constant) + offset)

    def _read(self, tensor: Tensor, value: Any) -> Any:
        site = tuple(callers(_HIDDEN, until=_START))
        read = self.reads.setdefault(site, SiteReads([], False))
        read.compared |= tensor.is_floating_point() or self.compares(tensor)
        read.values.append(value)
        if (
            self._answers is None
            or self._answers.operator
            or site != self._answers.site
            or len(read.values) > self._answers.count
        ):
            return value
        return self._answers.answer(value)


class ItemReads(TorchFunctionMode):
    """While entered, makes lists and arrays of tensors item by item, so that ``ValueReads`` notes the values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function; torch itself would copy the values unnoticed."""
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__") and args[0].numel() <= _MAX_ITEMS and not args[0].is_complex():
            values = _nested_list(args[0].detach())
            return values if name == "tolist" else torch.tensor(values, dtype=args[0].dtype).numpy()
        return func(*args, **(kwargs or {}))


def _nested_list(tensor: Tensor) -> Any:
    return [_nested_list(row) for row in tensor.unbind()] if tensor.dim() else tensor.item()


def site_name(site: Site) -> str:
    """Return file and line of a site, for messages."""
    return f"{Path(site[0][0]).name}:{site[0][1]}" if site else "the model"


def values_decide(values: Sequence[Any], changes_result: Callable[[Answer], bool]) -> bool:
    """Whether code decides by values what it runs.

    A number may also be an amount (a length, a divisor): then a value near to it changes the result. Code compares the
    number if values near to it change nothing, and those far away do.

    Args:
        values: all that were read at a site, of one type.
        changes_result: whether a pass has another result with these answers.
    """
    if isinstance(values[0], bool):
        return changes_result(lambda value: not value)
    if isinstance(values[0], int):
        is_amount = changes_result(lambda value: value + 1) or changes_result(lambda value: value - 1)
        return not is_amount and (changes_result(lambda _: 0) or changes_result(lambda value: 2 * value + 1))
    near = [changes_result(lambda value: 0.9 * value), changes_result(lambda value: 1.1 * value)]
    if any(near):
        return not all(near)
    return changes_result(lambda _: -_FAR) or changes_result(lambda _: _FAR)
