"""Backward in two passes: matmuls and convolutions give the gradient of their input at once, that of weights later.

What a layer multiplies with a parameter of its own runs through functions whose backward keeps what the parameter's
gradient is made from (Qi et al. 2023, section 2.1). The gradients of all else (norms, biases, embeddings, parameters
that are changed before they are used) are made in the first pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad
from torch.overrides import TorchFunctionMode

from galvatron_lite.parallelism.precision import autocast_dtype
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor

Later = Callable[[], None]
"""Makes the gradient of a parameter, and adds it to what the parameter has."""
_FAKE = ("torch._subclasses.fake_tensor", "FakeTensor")


class Deferral:
    """The gradients that a stage's backward passes leave to be made."""

    def __init__(self) -> None:
        self._tasks: list[Later] = []

    def add(self, task: Later) -> None:
        """Leave a gradient to be made."""
        self._tasks.append(task)

    def take(self) -> list[Later]:
        """All that was left since the last call, in order."""
        tasks, self._tasks = self._tasks, []
        return tasks


def defer_weights(module: nn.Module, deferral: Deferral) -> None:
    """Make a module's backward leave the gradients of its weights, in place. Recomputation must be applied after."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _Deferring(deferral):
            return forward(*args, **kwargs)

    module.forward = run


class _Deferring(TorchFunctionMode):
    """Takes products with parameters to functions that defer."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        operands = None if product is None else product.operands(args, kwargs)
        weight = None if operands is None else operands.weight
        trained = isinstance(weight, nn.Parameter) and _is_plain(weight) and weight.requires_grad
        if product is None or operands is None or not trained:
            return func(*args, **kwargs)
        if isinstance(operands.input, ShardedTensor):
            with self:  # the product of this rank's tokens, which the tensor's rules call, comes here again
                return type(operands.input).__torch_function__(func, types, args, kwargs)
        plain = all(_is_plain(tensor) for tensor in (operands.input, operands.bias) if tensor is not None)
        if not plain or operands.input is operands.weight:
            return func(*args, **kwargs)
        tensors = operands.input, operands.weight, operands.bias
        return _Product.apply(*tensors, operands.options, product, self._deferral)  # type: ignore[no-untyped-call]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what it shows, not a wrapper of shares; those of dry runs lack nothing but data."""
    kind = type(tensor)
    return kind in (Tensor, nn.Parameter) or (kind.__module__, kind.__name__) == _FAKE


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of a product."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    options: tuple[Any, ...] = ()  # of a convolution: stride, padding, dilation, groups


@dataclass(frozen=True, slots=True)
class _Matmul:
    """``input @ weight``, or with the weight's transpose (``linear``); batched where the weight is."""

    signature: tuple[str, ...] = ("input", "weight")  # its arguments in order
    transposed: bool = False  # whether the weight is [outputs, inputs]

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        """None where it is called in a way that is left alone."""
        named: dict[str, Any] = {**dict(zip(self.signature, args, strict=False)), **kwargs}
        value, weight = named.get("input"), named.get("weight")
        if len(args) > len(self.signature) or set(named) - set(self.signature):
            return None
        if not isinstance(value, Tensor) or not isinstance(weight, Tensor):
            return None
        fits = value.dim() >= 2 and weight.dim() in (2, value.dim())
        return Operands(value, weight, named.get("bias")) if fits else None

    def forward(self, operands: Operands) -> Tensor:
        weight = operands.weight if self.transposed else operands.weight.transpose(-1, -2)
        if weight.dim() == 2:
            return nn.functional.linear(operands.input, weight, operands.bias)
        return operands.input @ operands.weight

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        return gradient @ (operands.weight if self.transposed else operands.weight.transpose(-1, -2))

    def weight_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        value = operands.input
        if operands.weight.dim() == 2:
            value, gradient = value.flatten(0, -2), gradient.flatten(0, -2)
        left, right = (gradient, value) if self.transposed else (value, gradient)
        return left.transpose(-1, -2) @ right

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.flatten(0, -2).sum(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Convolution:
    dims: int  # depth, height and width of its input, or fewer

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        plain: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        named = {**plain, **dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(named["padding"], str) or named["input"].dim() != self.dims + 2:
            return None
        return Operands(named["input"], named["weight"], named["bias"], tuple(named[name] for name in names[3:]))

    def forward(self, operands: Operands) -> Tensor:
        convolve: Callable[..., Tensor] = getattr(nn.functional, f"conv{self.dims}d")
        return convolve(operands.input, operands.weight, operands.bias, *operands.options)

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        convolve: Callable[..., Tensor] = getattr(grad, f"conv{self.dims}d_input")
        return convolve(operands.input.shape, operands.weight, gradient, *operands.options)

    def weight_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        convolve: Callable[..., Tensor] = getattr(grad, f"conv{self.dims}d_weight")
        return convolve(operands.input, operands.weight.shape, gradient, *operands.options)

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1], dtype=dtype)


_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
_PRODUCTS: dict[Callable[..., Any], _Matmul | _Convolution] = {
    nn.functional.linear: _Matmul(("input", "weight", "bias"), transposed=True),
    **dict.fromkeys(_MATMULS, _Matmul()),
    torch.addmm: _Matmul(("bias", "input", "weight")),
    **{getattr(torch, f"conv{dims}d"): _Convolution(dims) for dims in (1, 2, 3)},
}


class _Product(torch.autograd.Function):
    """A product whose backward leaves the gradient of the weight to be made later."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...],
        product: _Matmul | _Convolution, deferral: Deferral,
    ) -> Tensor:  # fmt: skip
        ctx.options, ctx.product, ctx.deferral, ctx.dtype = options, product, deferral, value.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if (dtype := autocast_dtype(value)) is not None:
            value = value.to(dtype)
        # the parameter itself: what recomputation saves is cut off from it
        ctx.weight = weight
        ctx.save_for_backward(value)
        result = product.forward(Operands(value, weight, bias, options))
        # a view made in here could not be written to by the layer's code
        return result if result._base is None else result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (value,), weight = ctx.saved_tensors, ctx.weight
        product, needs = ctx.product, ctx.needs_input_grad
        operands = Operands(value, weight.detach().to(gradient.dtype), None, ctx.options)
        first = product.input_gradient(operands, gradient).to(ctx.dtype) if needs[0] else None
        bias = product.bias_gradient(gradient, ctx.bias_dtype) if needs[2] else None

        def later() -> None:
            """As backward would: hooks behind it run."""
            with torch.no_grad():
                made = product.weight_gradient(Operands(value, weight, None, ctx.options), gradient).to(weight.dtype)
            torch.autograd.backward(weight, made)

        ctx.deferral.add(later)
        return first, None, bias, None, None, None
