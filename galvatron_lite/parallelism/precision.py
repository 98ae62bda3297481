"""The precision of compute. Gradients, the optimizer's states and the values that it updates stay float32.

Under bf16 and fp16 the model runs inside autocast, and floating-point inputs of every block are cast, so that
activations are of that precision whichever way a layer is split: ZeRO gathers parameters in it (stage 1 once a step),
and all else is cast where autocast casts it: weights once a step (``holding_copies``). Under fp16 the loss is scaled
(``runtime.scaling``).

Norms compute in it, too (``narrow_norms``). On accelerators autocast runs ``layer_norm`` and ``rms_norm`` in float32
(``AT_FORALL_FP32`` in ATen's autocast_mode.h): it keeps a wide copy of their input, returns a wide output, and each
matmul behind them keeps a copy of that of its own. Where tokens are shared, twice the bytes are gathered. Their kernels
take half precision as it is and compute in float32 inside, which is how other frameworks run them; so do CPUs under
autocast. A model's own module that computes what ``rms_norm`` does is run as that: in steps of its own it would keep
its input and the normalised input in float32, and hand on a product with a float32 weight, which is float32, too.

So do experts that are stacked in one parameter (``narrow_experts``). They are multiplied by ``grouped_mm``, which
autocast does not know: their rows would be widened to the fp32 of the parameters, with twice the bytes and a fraction
of the speed of everything around them. Their parameters are cast as autocast casts weights: once a step, or in every
pass of layers computed again.

Weights that do not train are cast once a step, too (``hold_frozen``): autocast keeps copies of those alone that do, and
each micro-batch in flight would hold one more of all others.
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
    """The dtype that compute is cast to; None where it runs in the parameters' own (fp32).

    Raises:
        InputError: a precision that training does not offer.
    """
    if precision not in _DTYPES:
        raise InputError("precision", precision, f"Choose one of {', '.join(_DTYPES)}.")
    return _DTYPES[precision]


def compute_context(compute: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """What forward passes run inside."""
    return nullcontext() if compute is None else torch.autocast(device.type, dtype=compute)


@contextmanager
def holding_copies(compute: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """What all forward and backward passes of a step run inside, for weights to be cast once.

    Autocast keeps the copies that it makes until the outermost of its contexts is left. Were that of one forward pass
    the outermost, each micro-batch in flight would hold copies of its own. This one casts nothing by itself.
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
    """A copy of a parameter in another dtype, made once a step where autocast would make one of a weight only once."""
    held = _HELD.get()
    if held is None or not torch.is_autocast_cache_enabled() or not torch.is_grad_enabled():
        return parameter.to(dtype)
    key = id(parameter)
    if key not in held:
        held[key] = parameter, parameter.to(dtype)
    return held[key][1]


_HELD: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("galvatron_held_copies", default=None)
"""Parameters and their copies, of the step that runs."""


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast casts matmuls to where a tensor lies; None outside of it and on the meta device, which has none."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def narrow_norms(model: nn.Module) -> None:
    """Let norms compute in the dtype of what they are given, in place; those with a forward of their own stay as are,
    unless that is RMSNorm (as in Llama of transformers).

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
    """What a module adds to mean squares, if it computes RMSNorm; None if not. Told by running it."""
    forward: Any = type(module).forward
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    # private: modes of a run without data, which has no values to compare
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
    # without data (shapes alone are asked for) there is no autocast
    with nullcontext() if value.is_meta else torch.autocast(value.device.type, enabled=False):
        if isinstance(norm, nn.RMSNorm):
            return functional.rms_norm(value, norm.normalized_shape, weight, norm.eps)
        bias = None if norm.bias is None else norm.bias.to(value.dtype)
        return functional.layer_norm(value, norm.normalized_shape, weight, bias, norm.eps)


def narrow_experts(model: nn.Module) -> None:
    """Let stacked experts compute in the precision of the autocast that they run inside, in place.

    Args:
        model: whole; it may be split afterwards.
    """
    copied = torch.compiler.disable(copy_held)  # type: ignore[no-untyped-call]  # what is kept between calls is nothing to compile
    stacked = {mixture.path for mixture in find_mixtures(model) if mixture.parameters}
    for path in stacked:
        module = model.get_submodule(path)
        # whoever looks at the signature finds the experts' own
        module.forward = update_wrapper(partial(_narrowed, module, module.forward, copied), module.forward)


def hold_frozen(model: nn.Module) -> None:
    """Let matmuls and convolutions whose weights are frozen share a copy of them over a step, in place."""
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
    frozen = [(name, one) for name, one in module.named_parameters(recurse=False) if not one.requires_grad]
    dtype = autocast_dtype(frozen[0][1]) if frozen else None
    copies = {name: nn.Parameter(copy_held(one, dtype), False) for name, one in frozen if dtype and one.dtype != dtype}
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
    parameters = module.named_parameters(recurse=False)
    wide = {name: one for name, one in parameters if one.is_floating_point() and one.dtype != dtype}
    with _standing_in(module, {name: copied(one, dtype) for name, one in wide.items()}):
        return forward(hidden.to(dtype), *args, **options)


@contextmanager
def _standing_in(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Have a module find these tensors under the names of its parameters."""
    # torch.func.functional_call would call the module, and with it its hooks, a second time
    held: dict[str, Any] = module._parameters
    before = {name: held[name] for name in tensors}
    held.update(tensors)
    try:
        yield
    finally:
        held.update(before)
