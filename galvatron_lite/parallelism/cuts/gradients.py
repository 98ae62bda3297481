"""Gradients of cut tensors: asking for them, starting from them, and hooks that see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.alignment import brought
from galvatron_lite.parallelism.cuts.calls import argument
from galvatron_lite.parallelism.cuts.fallback import keep_whole
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, Handler, cut_like, cut_tensors, cuts_of, shares_only


def _gradient(call: Call) -> Any:
    """``x.grad``: read as a cut tensor, written as one or as None. And ``torch.autograd.grad``."""
    if call.function is torch.autograd.grad:
        return _gradients(call)
    tensor = call.args[0]
    with shares_only():
        if len(call.args) > 1:
            tensor.grad = call.args[1]
            return None
        # an alias: autograd adds to the gradient itself
        return None if tensor.grad is None else cut_like(tensor.grad.view_as(tensor.grad), tensor.cuts, call.rules)


def _hook(call: Call) -> Any:
    """The hook is called with the gradient as a cut tensor, too."""
    tensor, hook = call.args[0], argument(call, 1, "hook")
    with shares_only():
        return call.function(tensor, _on_shares(hook, tensor))


def _on_shares(hook: Callable[[Tensor], Any], tensor: CutTensor) -> Callable[[Tensor], Any]:
    cuts, rules = tensor.cuts, tensor.rules

    def run(gradient: Tensor) -> Any:
        with shares_only():
            alias = cut_like(gradient.view_as(gradient), cuts, rules)
        result = hook(alias)
        with shares_only():
            return result.as_subclass(Tensor) if isinstance(result, CutTensor) else result

    return run


def _backward(call: Call) -> Any:
    """``torch.autograd.backward`` and ``x.backward``: from gradients that are cut, whole, or autograd's own shares."""
    _refuse_graph(call, 3)
    names = ("tensor", "gradient") if call.function is Tensor.backward else ("tensors", "grad_tensors")
    tensors, given = (argument(call, number, name) for number, name in enumerate(names))
    with shares_only():
        start, keep = _starts(tensors, given), argument(call, 2, "retain_graph")
        torch.autograd.backward(tensors, start, retain_graph=keep, inputs=call.kwargs.get("inputs"))


def _gradients(call: Call) -> Any:
    """``torch.autograd.grad``: of cut tensors cut, of whole ones a part on each rank."""
    _refuse_graph(call, 4)
    outputs, inputs, given = (argument(call, n, one) for n, one in enumerate(("outputs", "inputs", "grad_outputs")))
    more = {name: one for name, one in call.kwargs.items() if name not in ("outputs", "inputs", "grad_outputs")}
    with shares_only():
        found = torch.autograd.grad(outputs, inputs, _starts(outputs, given), *call.args[3:], **more)
        return tuple(cut_like(one, cuts_of(of), call.rules) for one, of in zip(found, _several(inputs), strict=True))


def _refuse_graph(call: Call, position: int) -> None:
    if argument(call, position, "create_graph"):
        remedy = keep_whole(next(cut_tensors((call.args, call.kwargs))))
        raise InputError(f"create_graph of {call.name}", True, f"Gradients of split pictures have none: {remedy}")


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _starts(tensors: Any, gradients: Any) -> Any:
    """The gradients that a backward pass starts from, as shares."""
    if gradients is None:
        return None
    return tuple(_start(one, start) for one, start in zip(_several(tensors), _several(gradients), strict=True))


def _start(tensor: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or (not isinstance(gradient, CutTensor) and gradient.shape == tensor.shape):
        return gradient
    return brought(gradient, cuts_of(tensor), tensor.dim())


HANDLERS: Mapping[str, Handler] = {"grad": _gradient, "register_hook": _hook, "backward": _backward}
