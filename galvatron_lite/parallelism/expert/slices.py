"""How the experts of a mixture are sliced by a tensor group: found by trying, on a small double of their module.

A slice of every expert is a slice of each of its weights along the inner width, one extent or two fused side by side
(gate and up). The double has few experts and narrow ones, all extents in their true proportion, random weights and the
module's own code; a way to slice counts where the outputs of two slices add up to those of all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
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


def find_slices(block: nn.Module, mixture: BlockMixture, hidden: int) -> ExpertSlices | str:
    """How a mixture's experts can be sliced, or why they cannot.

    Args:
        block: on any device; not changed and not run.
        mixture: one of its mixtures.
        hidden: width of its tokens.
    """
    module = block.get_submodule(mixture.path)
    extents = [extent for name in mixture.parameters for extent in module.get_parameter(name).shape[1:]]
    unit = math.gcd(hidden, *extents)
    if max(extents) // unit * UNIT > WIDEST:
        return f"{mixture.path}: a small copy cannot keep the proportions of its widths"
    try:
        return _try_all(_Double(module, mixture, hidden, unit), module, mixture)
    except Exception as error:  # the module is the user's code: any error means that it cannot run this way
        return f"{mixture.path}: a small copy of it does not run ({type(error).__name__}: {error})"


class _Double:
    """A small copy of a module of experts: ``unit`` items of an extent become ``UNIT``."""

    def __init__(self, module: nn.Module, mixture: BlockMixture, hidden: int, unit: int) -> None:
        self._unit, draw = unit, torch.Generator().manual_seed(0)
        shapes = {name: module.get_parameter(name).shape for name in mixture.parameters}
        self.values = {
            name: torch.randn((FEW, *map(self.scaled, shape[1:])), generator=draw) / 4 for name, shape in shapes.items()
        }
        memo: dict[int, Any] = {
            id(module.get_parameter(name)): nn.Parameter(value, requires_grad=False)
            for name, value in self.values.items()
        }
        self._module = copy.deepcopy(module, memo).eval()
        for name, value in vars(module).items():
            if type(value) is int and "expert" in name and value == mixture.experts:
                setattr(self._module, name, FEW)
            elif type(value) is int and any(value in shape[1:] for shape in shapes.values()):
                setattr(self._module, name, self.scaled(value))
        self._index = torch.rand(ROWS, FEW, generator=draw).topk(CHOICES).indices
        self._tokens = torch.randn(ROWS, self.scaled(hidden), generator=draw)
        self._weights = torch.rand(ROWS, CHOICES, generator=draw)

    def scaled(self, extent: int) -> int:
        return extent * UNIT // self._unit

    def run(self, values: Mapping[str, Tensor]) -> Tensor:
        """The module's output with these parameters."""
        for name, value in values.items():
            self._module.get_parameter(name).data = value
        with torch.no_grad():
            output: Tensor = self._module(self._tokens, self._index, self._weights)
        return output

    def half(self, parameter: SlicedParameter, rank: int) -> Tensor:
        value, pieces, start = self.values[parameter.name], [], 0
        for length in map(self.scaled, parameter.parts):
            pieces.append(value.narrow(parameter.dim, start + rank * (length // 2), length // 2))
            start += length
        return torch.cat(pieces, parameter.dim)


def _try_all(double: _Double, module: nn.Module, mixture: BlockMixture) -> ExpertSlices | str:
    expected = double.run(double.values)
    ways = product(*(list(_ways(name, module.get_parameter(name).shape)) for name in mixture.parameters))
    for way in islice(ways, TRIALS):
        halves = [{one.name: double.half(one, rank) for one in way} for rank in range(2)]
        if all(value.numel() for half in halves for value in half.values()) and _add_up(double, halves, expected):
            width = math.gcd(*(length for one in way for length in one.parts))
            degree = width // ALIGNED if width % ALIGNED == 0 else 1
            narrow = f"{mixture.path}: slices of a width of {width} would be no multiples of {ALIGNED}"
            return ExpertSlices(mixture.path, way, degree) if degree > 1 else narrow
    return f"{mixture.path}: no way to slice its experts gives outputs that add up"


def _ways(name: str, shape: tuple[int, ...]) -> Iterator[SlicedParameter]:
    """Along each dim but that of the experts, whole or as two fused parts."""
    for dim in range(1, len(shape)):
        yield SlicedParameter(name, dim, (shape[dim],))
        if shape[dim] % 2 == 0:
            yield SlicedParameter(name, dim, (shape[dim] // 2,) * 2)


def _add_up(double: _Double, halves: list[dict[str, Tensor]], expected: Tensor) -> bool:
    try:
        total = double.run(halves[0]) + double.run(halves[1])
    except Exception:  # extents that do not fit together
        return False
    return total.shape == expected.shape and bool((total - expected).abs().max() <= CLOSE)


def sum_slices(module: nn.Module, group: TensorGroup, sequence_parallel: bool) -> None:
    """Make a module whose experts are sliced return the sum over the tensor group, in place.

    ``sequence_parallel``: whether each device calls it with its own tokens, as many on each.
    """
    run = _shared if sequence_parallel else _replicated
    module.forward = partial(run, module.forward, group)


def _replicated(
    forward: Callable[..., Tensor], group: TensorGroup, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    output = forward(copy_to_group(hidden, group), index, copy_to_group(weights, group), **options)
    return reduce_from_group(output, group)


def _shared(
    forward: Callable[..., Tensor], group: TensorGroup, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    every, chosen, shares = (gather_rows(one, group) for one in (hidden, index, weights))
    return reduce_scatter_rows(forward(every, chosen, shares, **options), group)
