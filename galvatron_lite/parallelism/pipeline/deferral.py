"""Backward in two passes: matmuls and convolutions compute the gradient of their input at once, that of weights later.

Products with a parameter, or with a cast or transposed parameter, run as functions whose backward keeps the operands of
the parameter's gradient (Qi et al. 2023, section 2.1); so do experts of a mixture. Other gradients (of norms, biases,
embeddings, and parameters that other operators change before use) are computed in the first pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import grad
from torch.overrides import TorchFunctionMode

from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, to_local

Later = Callable[[], None]
"""Computes the gradient of a parameter and accumulates it."""
_FAKE = ("torch._subclasses.fake_tensor", "FakeTensor")


class Deferral:
    """The gradients that backward passes of a stage deferred."""

    def __init__(self) -> None:
        self._tasks: list[Later] = []

    def add(self, task: Later) -> None:
        """Defer a gradient."""
        self._tasks.append(task)

    def take(self) -> list[Later]:
        """Return and remove all deferred gradients, in order."""
        tasks, self._tasks = self._tasks, []
        return tasks


def defer_weights(module: nn.Module, deferral: Deferral) -> None:
    """Make a module's backward defer the gradients of its weights, in place. Apply recomputation after this."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with _Deferring(deferral):
            return forward(*args, **kwargs)

    module.forward = run


class _Deferring(TorchFunctionMode):
    """Replaces products with parameters by functions that defer gradients."""

    def __init__(self, deferral: Deferral) -> None:
        super().__init__()
        self._deferral = deferral

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(func)
        operands = None if product is None else product.operands(args, kwargs)
        if product is None or operands is None or not _is_trained(operands.weight):
            return func(*args, **kwargs)
        if isinstance(operands.input, ShardedTensor) and not torch._C._is_torch_function_enabled():
            operands = replace(operands, input=to_local(operands.input))  # called by a rule of such tensors
        elif isinstance(operands.input, ShardedTensor):
            with self:  # the tensor's rules call the product of local tokens, which comes here again
                return type(operands.input).__torch_function__(func, types, args, kwargs)
        plain = all(_is_plain(tensor) for tensor in (operands.input, operands.bias) if tensor is not None)
        if not plain or operands.input is operands.weight:
            return func(*args, **kwargs)
        tensors = operands.input, operands.weight, operands.bias
        edge, options = get_gradient_edge(operands.weight), operands.options
        weight = _WeightGradient(product, edge, operands.weight.shape, operands.weight.dtype, options)
        return _Product.apply(*tensors, weight, self._deferral)  # type: ignore[no-untyped-call]


def _is_trained(weight: Tensor) -> bool:
    """Whether a weight is a parameter, or a cast or transposed one through which a separate backward can run."""
    if not _is_plain(weight) or not weight.requires_grad:
        return False
    node = weight.grad_fn
    while node is not None and type(node).__name__ in _PASSING:
        node = node.next_functions[0][0]
    return isinstance(weight, nn.Parameter) or type(node).__name__ == "AccumulateGrad"


_PASSING = frozenset({"ToCopyBackward0", "TransposeBackward0", "PermuteBackward0", "TBackward0"})
"""Autograd nodes that save no tensors, so that several backward passes can run through them."""


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no wrapper of shards. Tensors of dry runs are plain."""
    kind = type(tensor)
    return kind in (Tensor, nn.Parameter) or (kind.__module__, kind.__name__) == _FAKE


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of a product."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    options: tuple[Any, ...] = ()  # of a convolution: stride, padding, dilation, groups; of groups: their ends


@dataclass(frozen=True, slots=True)
class _Matmul:
    """``input @ weight``, or with the weight's transpose (``linear``); batched if the weight is."""

    autocasts: ClassVar = True
    signature: tuple[str, ...] = ("input", "weight")  # its arguments in order
    transposed: bool = False  # whether the weight is [outputs, inputs]

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of a call; None if the call is not replaced."""
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

    def weight_gradient(self, value: Tensor, gradient: Tensor, shape: torch.Size, _: tuple[Any, ...]) -> Tensor:
        if len(shape) == 2:
            value, gradient = value.flatten(0, -2), gradient.flatten(0, -2)
        left, right = (gradient, value) if self.transposed else (value, gradient)
        return left.transpose(-1, -2) @ right

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.flatten(0, -2).sum(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _GroupedMatmul:
    """``input [rows, inner] @ weight [groups, inner, outputs]``: each group of rows with its weight."""

    autocasts: ClassVar = False

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Operands | None:
        """The operands of a call; None if the call is not replaced."""
        names = ("input", "weight", "offs", "bias", "out_dtype")
        named: dict[str, Any] = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
        value, weight, ends = named["input"], named["weight"], named["offs"]
        plain = set(named) == set(names) and named["bias"] is None and named["out_dtype"] is None
        if not plain or ends is None or (value.dim(), weight.dim()) != (2, 3):
            return None
        # the gradient of a transposed weight is computed transposed, in the parameter's layout
        return Operands(value, weight, None, (ends, weight.stride(-2) == 1))

    def forward(self, operands: Operands) -> Tensor:
        return nn.functional.grouped_mm(operands.input, operands.weight, offs=operands.options[0])

    def input_gradient(self, operands: Operands, gradient: Tensor) -> Tensor:
        return nn.functional.grouped_mm(gradient, operands.weight.transpose(-2, -1), offs=operands.options[0])

    def weight_gradient(self, value: Tensor, gradient: Tensor, _: torch.Size, options: tuple[Any, ...]) -> Tensor:
        ends, transposed = options
        left, right = (gradient, value) if transposed else (value, gradient)
        product = nn.functional.grouped_mm(left.transpose(-2, -1), right, offs=ends)
        return product.transpose(-2, -1) if transposed else product

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Convolution:
    autocasts: ClassVar = True
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

    def weight_gradient(self, value: Tensor, gradient: Tensor, shape: torch.Size, options: tuple[Any, ...]) -> Tensor:
        convolve: Callable[..., Tensor] = getattr(grad, f"conv{self.dims}d_weight")
        return convolve(value, shape, gradient, *options)

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1], dtype=dtype)


_Kernels: TypeAlias = _Matmul | _GroupedMatmul | _Convolution
_MATMULS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__)
_PRODUCTS: dict[Callable[..., Any], _Kernels] = {
    nn.functional.linear: _Matmul(("input", "weight", "bias"), transposed=True),
    **dict.fromkeys(_MATMULS, _Matmul()),
    torch.addmm: _Matmul(("bias", "input", "weight")),
    torch._grouped_mm: _GroupedMatmul(),  # private: what the public ``grouped_mm`` and older code call
    **{getattr(torch, f"conv{dims}d"): _Convolution(dims) for dims in (1, 2, 3)},
}


@dataclass(frozen=True, slots=True)
class _WeightGradient:
    """Computes the gradient of a product's weight, without the weight's data."""

    product: _Kernels
    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    options: tuple[Any, ...]

    def make(self, value: Tensor, gradient: Tensor) -> None:
        """Compute and accumulate it as backward would, with hooks."""
        with torch.no_grad():
            computed = self.product.weight_gradient(value, gradient, self.shape, self.options).to(self.dtype)
        torch.autograd.backward(self.edge, computed)


class _Product(torch.autograd.Function):
    """A product whose backward defers the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, later: _WeightGradient, deferral: Deferral
    ) -> Tensor:
        ctx.later, ctx.deferral, ctx.dtype = later, deferral, value.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        device = value.device.type
        if torch.is_autocast_enabled(device) and later.product.autocasts:
            value = value.to(torch.get_autocast_dtype(device))
        # a parameter is not saved for backward, where recomputation would detach it; a cast of it is, and is recomputed
        ctx.parameter = weight if isinstance(weight, nn.Parameter) else None
        ctx.save_for_backward(value, None if isinstance(weight, nn.Parameter) else weight)
        result = later.product.forward(Operands(value, weight, bias, later.options))
        # the layer's code could not write to a view
        return result if result._base is None else result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        value, copied = ctx.saved_tensors
        weight = ctx.parameter.detach() if copied is None else copied
        product, needs = ctx.later.product, ctx.needs_input_grad
        operands = Operands(value, weight.to(gradient.dtype), None, ctx.later.options)
        first = product.input_gradient(operands, gradient).to(ctx.dtype) if needs[0] else None
        bias = product.bias_gradient(gradient, ctx.bias_dtype) if needs[2] else None
        ctx.deferral.add(functools.partial(ctx.later.make, value, gradient))
        return first, None, bias, None, None
