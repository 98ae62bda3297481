"""What a module of a branch will return: shapes, types, and which tensors hold samples, told without its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_places, map_tensors, places
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.runtime.branches.pending import bare, signature

Like = Callable[[Tensor, int], Tensor]
"""Gives an argument's stand-in on the meta device for so many samples."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a call returns."""

    nest: Any  # tensors on the meta device, for all samples of the micro-batch
    sampled: frozenset[str]  # places of those that hold the samples along dim 0
    rows: int  # the samples

    def resized(self, rows: int) -> Any:
        """The nest for another number of samples."""
        if rows == self.rows:
            return self.nest
        return map_places(self.nest, lambda place, one: with_rows(one, rows) if place in self.sampled else one)


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Like a tensor on the meta device, with so many items along dim 0."""
    shape = (rows, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


class Foreseen:
    """Templates of what one module returns.

    Args:
        path: of the module, for errors.
        module: any; copied without storages.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self._path, self._twin = path, meta_copy(module)
        self._dtype = next((one.dtype for one in self._twin.parameters() if one.is_floating_point()), None)
        self._known: dict[object, Template] = {}

    def __call__(self, args: Any, kwargs: Mapping[str, Any], rows: int, like: Like, training: bool) -> Template:
        """The template of a call.

        Args:
            args: of the call.
            kwargs: the same.
            rows: samples of the micro-batch.
            like: gives stand-ins of the arguments' tensors.
            training: whether the module is in training mode.

        Raises:
            InputError: the module looks at values, so that its output cannot be foreseen.
        """
        given = map_tensors((args, dict(kwargs)), lambda tensor: self._cast(like(tensor, rows)))
        key = (signature(given), rows, training, torch.is_grad_enabled())
        if key not in self._known:
            self._twin.train(training)
            one = self._run(given)
            many = {place for place, tensor in places(one) if tensor.dim() and tensor.shape[0] == rows}
            self._known[key] = Template(one, frozenset(many & self._growing(args, kwargs, 2 * rows, like, many)), rows)
        return self._known[key]

    def _growing(self, args: Any, kwargs: Any, rows: int, like: Like, among: set[str]) -> set[str]:
        """Which outputs hold more samples where there are more; all where code cannot be run with other numbers."""
        try:
            given = map_tensors((args, dict(kwargs)), lambda tensor: self._cast(like(tensor, rows)))
            found = dict(places(self._run(given)))
        except Exception:
            return among
        return {place for place in among if place in found and found[place].shape[0] == rows}

    def _run(self, inputs: Any) -> Any:
        args, kwargs = inputs
        try:
            # an autocast of the caller would not reach the meta device
            with torch.device("meta"):
                return map_tensors(self._twin(*args, **kwargs), bare)
        except Exception as cause:
            remedy = f"Other ranks must know the shapes of what it returns without its values: {cause}"
            raise InputError("branch", self._path, remedy) from cause

    def _cast(self, tensor: Tensor) -> Tensor:
        """In the precision of the parameters, whatever that of compute."""
        if self._dtype is None or not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        cast = torch.empty(tensor.shape, dtype=self._dtype, device="meta")
        return cast.requires_grad_(tensor.requires_grad)
