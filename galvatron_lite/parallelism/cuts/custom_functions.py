"""Custom autograd functions that are given cut tensors go to the rules, as torch functions do.

``torch.autograd.Function.apply`` is no torch function: it takes a tensor's memory as it is. Of a share that is a part
of what code means, and of what lies in another layout nothing. Torch has no public extension point for it. So this
module puts a method between ``Function`` and its base in C++, once; code may have taken ``MyFunction.apply`` before.
Without cut tensors among the arguments it calls torch's own.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.function import _SingleLevelFunction
from torch.overrides import handle_torch_function, has_torch_function

from galvatron_lite.parallelism.cuts.tensor import cut_tensors

_INTERNAL = ("galvatron_lite.", "torch.")
"""Packages whose functions mean shares where they are given them."""


def intercept_custom_functions() -> None:
    """From now on custom functions ask cut tensors; call it as often as you like."""
    _SingleLevelFunction.apply = classmethod(_apply_to_cuts)  # type: ignore[attr-defined]


def _apply_to_cuts(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    cuts = () if cls.__module__.startswith(_INTERNAL) else tuple(cut_tensors((args, kwargs)))
    if not cuts or not has_torch_function(cuts):
        return apply(*args, **kwargs)

    def call_with_gathered(*args: Any, **kwargs: Any) -> Any:
        return apply(*args, **kwargs)

    call_with_gathered.__name__ = f"{cls.__name__}.apply"
    return handle_torch_function(call_with_gathered, cuts, *args, **kwargs)
