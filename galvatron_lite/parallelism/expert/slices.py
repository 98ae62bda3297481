"""How the experts of a mixture are sliced by a tensor group: found by trying, on a small double of their module.

A slice of every expert is a slice of each of its weights along the inner width, one extent or two fused side by side
(gate and up). The double has few experts and narrow ones, all extents in their true proportion, random weights and the
module's own code; a way to slice counts where the outputs of two slices add up to the whole one's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.expert.find import BlockMixture
from galvatron_lite.parallelism.tensor.functions import (
    copy_to_group,
    gather_rows,
    reduce_from_group,
    reduce_scatter_rows,
)
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.regions import ExpertSlices, SlicedParameter

FEW, UNIT, ROWS, CHOICES = 3, 8, 12, 2
"""Experts of the double, items of the greatest common divisor of all extents, tokens, and experts a token visits."""
WIDEST = 4096
"""Widest extent of a double that is run."""
ALIGNED = 8
"""Items by which a slice's width is divided: grouped matmuls take rows of a multiple of 16 bytes, in bf16 as well."""
TRIALS = 512
"""Most ways to slice that are tried."""
CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class _Double:
    module: nn.Module
    values: Mapping[str, Tensor]
    hidden: Tensor
    index: Tensor
    weights: Tensor

    def run(self, values: Mapping[str, Tensor]) -> Tensor:
        """What the module makes with these parameters."""
        for name, value in values.items():
            self.module.get_parameter(name).data = value
        with torch.no_grad():
            made: Tensor = self.module(self.hidden, self.index, self.weights)
        return made


def find_slices(block: nn.Module, mixture: BlockMixture, hidden: int) -> ExpertSlices | str:
    """How a mixture's experts can be sliced, or why they cannot.

    Args:
        block: on any device; not changed and not run.
        mixture: one of its mixtures.
        hidden: width of its tokens.
    """
    module = block.get_submodule(mixture.path)
    shapes = {name: tuple(module.get_parameter(name).shape) for name in mixture.parameters}
    unit = math.gcd(hidden, *(extent for shape in shapes.values() for extent in shape[1:]))
    widest = max(extent for shape in shapes.values() for extent in shape[1:])
    if widest // unit * UNIT > WIDEST:
        return f"{mixture.path}: a small copy cannot keep the proportions of its widths"
    try:
        return _try_all(_double(module, mixture, shapes, (hidden, unit)), mixture, shapes, unit)
    except Exception as error:  # the module is the user's code: any error means that it cannot run this way
        return f"{mixture.path}: a small copy of it does not run ({type(error).__name__}: {error})"


def _try_all(
    double: _Double, mixture: BlockMixture, shapes: Mapping[str, tuple[int, ...]], unit: int
) -> ExpertSlices | str:
    whole = double.run(double.values)
    ways = product(*(list(_ways(name, shape)) for name, shape in shapes.items()))
    for way in islice(ways, TRIALS):
        parts = [{one.name: _half(double.values, one, unit, rank) for one in way} for rank in range(2)]
        if any(value.numel() == 0 for part in parts for value in part.values()):
            continue
        if _adds_up(double, parts, whole):
            width = math.gcd(*(length for one in way for length in one.parts))
            degree = width // ALIGNED if width % ALIGNED == 0 else 1
            narrow = f"{mixture.path}: slices of a width of {width} would be no multiples of {ALIGNED}"
            return ExpertSlices(mixture.path, way, degree) if degree > 1 else narrow
    return f"{mixture.path}: no way to slice its experts gives outputs that add up"


def _adds_up(double: _Double, parts: Sequence[Mapping[str, Tensor]], tensor: Tensor) -> bool:
    try:
        made = sum(double.run(part) for part in parts)
    except Exception:  # extents that do not fit together
        return False
    return isinstance(made, Tensor) and made.shape == tensor.shape and bool((made - tensor).abs().max() <= CLOSE)


def _ways(name: str, shape: tuple[int, ...]) -> Iterator[SlicedParameter]:
    """Along each dim but that of the experts, whole or as two fused parts."""
    for dim in range(1, len(shape)):
        yield SlicedParameter(name, dim, (shape[dim],))
        if shape[dim] % 2 == 0:
            yield SlicedParameter(name, dim, (shape[dim] // 2,) * 2)


def _half(values: Mapping[str, Tensor], one: SlicedParameter, unit: int, rank: int) -> Tensor:
    value, starts = values[one.name], [0, *one.parts]
    pieces = []
    for start, length in zip(starts, one.parts, strict=False):
        half = length * UNIT // unit // 2
        pieces.append(value.narrow(one.dim, start * UNIT // unit + rank * half, half))
    return torch.cat(pieces, one.dim)


def _double(
    module: nn.Module, mixture: BlockMixture, shapes: Mapping[str, tuple[int, ...]], extents: tuple[int, int]
) -> _Double:
    hidden, unit = extents
    draw = torch.Generator().manual_seed(0)
    small = {shape: (FEW, *(extent // unit * UNIT for extent in shape[1:])) for shape in shapes.values()}
    values = {name: torch.randn(small[shape], generator=draw) / 4 for name, shape in shapes.items()}
    memo: dict[int, Any] = {
        id(module.get_parameter(name)): nn.Parameter(value, requires_grad=False) for name, value in values.items()
    }
    copied = copy.deepcopy(module, memo).eval()
    for name, value in vars(module).items():
        if type(value) is int and "expert" in name and value == mixture.experts:
            setattr(copied, name, FEW)
        elif type(value) is int and any(value in shape[1:] for shape in shapes.values()):
            setattr(copied, name, value // unit * UNIT)
    index = torch.rand(ROWS, FEW, generator=draw).topk(CHOICES).indices
    tokens = torch.randn(ROWS, hidden // unit * UNIT, generator=draw)
    return _Double(copied, values, tokens, index, torch.rand(ROWS, CHOICES, generator=draw))


def sum_slices(module: nn.Module, group: TensorGroup, sequence_parallel: bool) -> None:
    """Make a module whose experts are sliced return the sum over the tensor group, in place.

    Args:
        module: called with hidden states, chosen experts and weights.
        group: that holds the slices.
        sequence_parallel: whether each of its devices calls it with its own tokens, as many on each.
    """
    run = _shared if sequence_parallel else _replicated
    module.forward = partial(run, module.forward, group)


def _replicated(
    forward: Callable[..., Tensor], group: TensorGroup, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    made = forward(copy_to_group(hidden, group), index, copy_to_group(weights, group), **options)
    return reduce_from_group(made, group)


def _shared(
    forward: Callable[..., Tensor], group: TensorGroup, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    every, chosen, shares = (gather_rows(one, group) for one in (hidden, index, weights))
    return reduce_scatter_rows(forward(every, chosen, shares, **options), group)
