"""The matmuls of a mixture's experts as one operator, as grouped kernels run them: rows of each expert by its weight.

On the meta device PyTorch's ``grouped_mm`` takes bf16 alone. How many rows an expert gets is told by data, which there
is none of; an operator of shapes counts them as spread evenly, as a router's auxiliary loss makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SHAPES_ONLY = "This operator has shapes only; it is for tensors on the meta device."


@torch.library.custom_op("galvatron_lite::grouped", mutates_args=())
def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """(rows, inner) by (experts, inner, columns): (rows, columns). Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@grouped.register_fake
def _grouped_shapes(rows: Tensor, weight: Tensor, _ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[-1])


@torch.library.custom_op("galvatron_lite::grouped_weight", mutates_args=())
def grouped_weight(rows: Tensor, gradient: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight. Shapes only."""
    raise NotImplementedError(_SHAPES_ONLY)


@grouped_weight.register_fake
def _weight_shapes(_rows: Tensor, _gradient: Tensor, _ends: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    return grouped(gradient, weight.transpose(-2, -1), ends), grouped_weight(rows, gradient, ends, weight), None


grouped.register_autograd(_backward, setup_context=_keep)


class GroupedExperts(TorchFunctionMode):
    """While it is entered, ``grouped_mm`` on meta tensors is the operator above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the one call, pass every other on."""
        # what torch.nn.functional.grouped_mm calls; modes are not asked about that one itself
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _shaped(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _shaped(func: Any, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:
    if offs is None or not mat_a.is_meta or mat_a.dim() != 2 or mat_b.dim() != 3:
        plain: Tensor = func(mat_a, mat_b, offs=offs, **options)
        return plain
    made: Tensor = grouped(mat_a, mat_b, offs)
    return made
