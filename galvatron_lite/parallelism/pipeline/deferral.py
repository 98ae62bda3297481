"""Backward in two passes: matmuls and convolutions give the gradient of their input at once, that of weights later.

What a layer multiplies with a parameter of its own runs through functions whose backward keeps what the parameter's
gradient is made from (Qi et al. 2023, section 2.1). The gradients of all else (norms, biases, embeddings, parameters
that are changed before they are used) are made in the first pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import grad
from torch.overrides import TorchFunctionMode

from galvatron_lite.parallelism.sharded.tensor import ShardedTensor

Later = Callable[[], None]
"""Makes the gradient of a parameter, and adds it to what the parameter has."""
_PAIR, _DIMS = 2, 4
_DRY = ("torch._subclasses.fake_tensor", "FakeTensor")


class Deferral:
    """What a stage's backward passes leave to be done."""

    def __init__(self) -> None:
        self._tasks: list[Later] = []

    def add(self, task: Later) -> None:
        """Leave something to be done."""
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
        """Run the function; deferring where it is a product with a parameter."""
        product = _PRODUCTS.get(func)
        operands = None if product is None else product.operands(args, kwargs or {})
        if product is None or operands is None or not _is_weight(operands.weight):
            return func(*args, **(kwargs or {}))
        if isinstance(operands.input, ShardedTensor):
            with self:  # the product of this rank's tokens, which the tensor's rules call, comes here again
                return type(operands.input).__torch_function__(func, types, args, kwargs)
        if not _is_plain(operands):
            return func(*args, **(kwargs or {}))
        return _Product.apply(*operands.tensors, operands.options, product, self._deferral)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Operands:
    """What a product is called with."""

    input: Tensor  # input, weight, bias: tensors; no bias: None
    weight: Tensor
    bias: Tensor | None = None
    options: tuple[Any, ...] = ()  # of a convolution: stride, padding, dilation, groups

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those that have gradients."""
        return self.input, self.weight, self.bias


class Product(Protocol):
    """A function that is linear in its input and in its weight."""

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        """What it is called with; None where it is called in a way that is left alone."""

    def forward(self, operands: Operands) -> Tensor:
        """Its result."""

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        """Of its input."""

    def weight_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        """Of its weight."""

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Of its bias."""


@dataclass(frozen=True, slots=True)
class _Matmul:
    """``input @ weight``, or with the weight's transpose (``linear``); batched where the weight is."""

    signature: tuple[str, ...] = ("input", "weight")  # its arguments in order
    transposed: bool = False  # whether the weight is [outputs, inputs]

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        named: dict[str, Any] = {**dict(zip(self.signature, args, strict=False)), **kwargs}
        own = [named.get(name) for name in ("input", "weight")]
        if len(args) > len(self.signature) or set(named) - set(self.signature):
            return None
        if not isinstance(own[0], Tensor) or not isinstance(own[1], Tensor):
            return None
        fits = own[0].dim() >= _PAIR and own[1].dim() in (_PAIR, own[0].dim())
        return Operands(own[0], own[1], named.get("bias")) if fits else None

    def forward(self, operands: Operands) -> Tensor:
        weight = operands.weight if self.transposed else operands.weight.transpose(-1, -2)
        if weight.dim() == _PAIR:
            return nn.functional.linear(operands.input, weight, operands.bias)
        return operands.input @ operands.weight

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        return gradient @ (operands.weight if self.transposed else operands.weight.transpose(-1, -2))

    def weight_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        value = operands.input
        if operands.weight.dim() == _PAIR:
            value, gradient = value.flatten(0, -2), gradient.flatten(0, -2)
        left, right = (gradient, value) if self.transposed else (value, gradient)
        return left.transpose(-1, -2) @ right

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.flatten(0, -2).sum(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution of pictures of so many dims."""

    dims: int

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        plain: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        given = {**plain, **dict(zip(names, args, strict=False)), **kwargs}
        if isinstance(given["padding"], str) or given["input"].dim() != self.dims + _PAIR:
            return None
        return Operands(given["input"], given["weight"], given["bias"], tuple(given[name] for name in names[3:]))

    def forward(self, operands: Operands) -> Tensor:
        return self._function("")(*operands.tensors, *operands.options)

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        return self._function("_input")(operands.input.shape, operands.weight, gradient, *operands.options)

    def weight_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        return self._function("_weight")(operands.input, operands.weight.shape, gradient, *operands.options)

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1], dtype=dtype)

    def _function(self, which: str) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(grad if which else nn.functional, f"conv{self.dims}d{which}")
        return found


_LINEAR = _Matmul(("input", "weight", "bias"), transposed=True)
_ADDED = _Matmul(("bias", "input", "weight"))
_PRODUCTS: dict[Callable[..., Any], Product] = {
    nn.functional.linear: _LINEAR,
    **dict.fromkeys((torch.matmul, torch.mm, torch.bmm), _Matmul()),
    **dict.fromkeys((Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), _Matmul()),
    torch.addmm: _ADDED,
    **{getattr(torch, f"conv{dims}d"): _Convolution(dims) for dims in (1, 2, 3)},
}


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and _is_whole(tensor) and tensor.requires_grad


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is what it shows, not a wrapper of shares; those of dry runs lack nothing but data."""
    kind = type(tensor)
    return kind in (Tensor, nn.Parameter) or (kind.__module__, kind.__name__) == _DRY


def _is_plain(operands: Operands) -> bool:
    known = all(_is_whole(tensor) for tensor in operands.tensors if tensor is not None)
    return known and operands.input is not operands.weight


class _Product(torch.autograd.Function):
    """A product whose backward leaves the gradient of the weight to be made later."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...], product: Product,
        deferral: Deferral,
    ) -> Tensor:  # fmt: skip
        ctx.options, ctx.product, ctx.deferral, ctx.dtype = options, product, deferral, value.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        device = value.device.type
        if torch.is_autocast_enabled(device):
            value = value.to(torch.get_autocast_dtype(device))
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
        ctx.deferral.add(functools.partial(_make, product, Operands(value, weight, None, ctx.options), gradient))
        return first, None, bias, None, None, None


def _make(product: Product, operands: Operands, gradient: Tensor) -> None:
    """Make a weight's gradient, as backward would: hooks behind it run."""
    with torch.no_grad():
        made = product.weight_gradient(operands, gradient).to(operands.weight.dtype)
    torch.autograd.backward(operands.weight, made)
