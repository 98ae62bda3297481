"""The precision of compute. Gradients, optimizer states and the values that the optimizer updates stay float32.

Under bf16 and fp16 the model runs in autocast, and floating-point inputs of blocks are cast, so that activations have
this precision however a layer is split. ZeRO gathers parameters in it (stage 1 once a step); autocast casts the others,
weights once a step (``holding_copies``). Under fp16 the loss is scaled (``runtime.scaling``).

Norms compute in this precision (``narrow_norms``). On accelerators autocast runs ``layer_norm`` and ``rms_norm`` in
float32 (``AT_FORALL_FP32`` in ATen's autocast_mode.h): it saves a float32 copy of their input and returns a float32
output, of which each following matmul saves a copy, and of which sequence parallelism gathers twice the bytes. But
their kernels accept half precision and compute in float32 inside; other frameworks, and CPUs under autocast, run them
so. A module of the model that computes RMSNorm in several operators, and would save float32 tensors, is replaced by
``rms_norm``.

Experts that are stacked in one parameter compute in this precision (``narrow_experts``). Autocast does not support
their ``grouped_mm``, which would run in float32, with twice the bytes and a fraction of the speed. Their parameters are
cast like weights: once a step, or in each pass of recomputed layers.

Frozen weights are cast once a step (``hold_frozen``): autocast caches only casts of trained weights, and each
micro-batch in flight would hold a copy of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.expert.find import find_mixtures

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of compute; None for that of the parameters (fp32).

    Raises:
        InputError: training does not support the precision.
    """
    if precision not in _DTYPES:
        raise InputError("precision", precision, f"Choose one of {', '.join(_DTYPES)}.")
    return _DTYPES[precision]


def compute_context(compute: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward passes."""
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=compute)


@contextmanager
def holding_copies(compute: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Run all passes of a step inside, so that weights are cast once.

    Autocast keeps casts until its outermost context ends. If that were the context of a forward pass, each micro-batch
    in flight would hold casts of its own. This context does not cast anything itself.
    """
    if compute is None:
        yield
        return
    before = _HELD.set({})
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _HELD.reset(before)


def copy_held(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a parameter, once a step if autocast would cache the cast of a weight."""
    held = _HELD.get()
    if held is None or not torch.is_autocast_cache_enabled() or not torch.is_grad_enabled():
        return parameter.to(dtype)
    key = id(parameter)
    if key not in held:
        held[key] = parameter, parameter.to(dtype)
    return held[key][1]


_HELD: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("galvatron_held_copies", default=None)
"""Parameters and their casts, of the current step."""


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast for matmuls on a tensor's device; None outside autocast and on the meta device."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def narrow_norms(model: nn.Module) -> None:
    """Make norms compute in the dtype of their input, in place.

    Subclasses and modules with another forward are changed only if they compute RMSNorm (as in Llama of transformers).

    Args:
        model: that runs inside autocast.
    """
    eps_of: dict[Hashable, float | None] = {}
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            if _is_plain(module):
                module.forward = partial(_normed, module)  # type: ignore[method-assign]
        elif _may_be_rms(module):
            kind = (type(module), module.get_parameter("weight").shape, *_floats(module))
            if kind not in eps_of:
                eps_of[kind] = _eps_of(module)
            if (eps := eps_of[kind]) is not None:
                module.forward = partial(_root_normed, module, eps)


def _may_be_rms(module: nn.Module) -> bool:
    """Whether a module has one parameter, ``weight`` of one dim, and nothing else."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    inner = [*module.children(), *module.buffers(recurse=False)]
    flat = names == ["weight"] and module.get_parameter("weight").dim() == 1
    return flat and not inner and "forward" not in vars(module)


def _floats(module: nn.Module) -> tuple[float, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, float))


def _eps_of(module: nn.Module) -> float | None:
    """Run a module to find out whether it computes RMSNorm, and with which epsilon; None if it does not."""
    forward: Any = type(module).forward
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    # private: leaves the modes of dry runs, which have no values to compare
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():
        weight = 0.5 + draw(module.get_parameter("weight").shape)
        rows = (draw(2, len(weight)) - 0.5) * torch.tensor([[1.0], [1e-3]])
        try:
            with _standing_in(module, {"weight": weight}):
                output = forward(module, rows)
            with _standing_in(module, {"weight": weight.bfloat16()}):
                narrow = forward(module, rows.bfloat16())
        except Exception:  # whatever the user's code does
            return None
        if not isinstance(output, Tensor) or output.shape != rows.shape or narrow.dtype is not torch.bfloat16:
            return None
        squares = rows.double().square().mean(-1, keepdim=True)
        for eps in _floats(module):
            if torch.allclose(output.double(), rows * (squares + eps).rsqrt() * weight, rtol=1e-5, atol=1e-7):
                return eps
    return None


def _root_normed(norm: nn.Module, eps: float, value: Tensor) -> Tensor:
    weight = norm.get_parameter("weight").to(value.dtype)
    with nullcontext() if value.is_meta else torch.autocast(value.device.type, enabled=False):
        return functional.rms_norm(value, weight.shape, weight, eps)


def _is_plain(norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    return type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) and "forward" not in vars(norm)


def _normed(norm: nn.LayerNorm | nn.RMSNorm, value: Tensor) -> Tensor:
    weight = None if norm.weight is None else norm.weight.to(value.dtype)
    # there is no autocast on the meta device
    with nullcontext() if value.is_meta else torch.autocast(value.device.type, enabled=False):
        if isinstance(norm, nn.RMSNorm):
            return functional.rms_norm(value, norm.normalized_shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.to(value.dtype)
        return functional.layer_norm(value, norm.normalized_shape, weight, bias, norm.eps)


def narrow_experts(model: nn.Module) -> None:
    """Make stacked experts compute in the precision of autocast, in place.

    Args:
        model: unsplit; it may be split later.
    """
    copied = torch.compiler.disable(copy_held)  # type: ignore[no-untyped-call]  # a cache between calls cannot be compiled
    stacked = {mixture.path for mixture in find_mixtures(model) if mixture.parameters}
    for path in stacked:
        module = model.get_submodule(path)
        # keep the signature, which other code inspects
        module.forward = update_wrapper(partial(_narrowed, module, module.forward, copied), module.forward)


def hold_frozen(model: nn.Module) -> None:
    """Make matmuls and convolutions with frozen weights cast them once a step, in place."""
    for module in model.modules():
        parameters = module.parameters(recurse=False)
        if isinstance(module, _CAST) and any(not parameter.requires_grad for parameter in parameters):
            forward = partial(_with_held, module, module.forward)
            module.forward = forward  # type: ignore[method-assign]


_CAST = (nn.Linear, nn.modules.conv._ConvNd)
"""Modules whose parameters autocast casts."""


def _with_held(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    if _HELD.get() is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return forward(*args, **options)
    parameters = module.named_parameters(recurse=False)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    dtype = autocast_dtype(next(iter(frozen.values()))) if frozen else None
    copies = {
        name: nn.Parameter(copy_held(parameter, dtype), False)
        for name, parameter in frozen.items()
        if dtype and parameter.dtype != dtype
    }
    with _standing_in(module, copies):
        return forward(*args, **options)


def _narrowed(
    module: nn.Module,
    forward: Callable[..., Tensor],
    copied: Callable[[Tensor, torch.dtype], Tensor],
    hidden: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    dtype = autocast_dtype(hidden)
    if dtype is None:
        return forward(hidden, *args, **options)
    copies = {
        name: copied(parameter, dtype)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_floating_point() and parameter.dtype != dtype
    }
    with _standing_in(module, copies):
        return forward(hidden.to(dtype), *args, **options)


@contextmanager
def _standing_in(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters of a module by tensors inside."""
    # torch.func.functional_call would call the module, and with it its hooks, a second time
    parameters: dict[str, Any] = module._parameters
    before = {name: parameters[name] for name in tensors}
    parameters.update(tensors)
    try:
        yield
    finally:
        parameters.update(before)
