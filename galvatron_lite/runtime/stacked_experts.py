"""Experts in the precision of compute.

Experts that are stacked in one parameter are multiplied by ``grouped_mm``, which autocast does not know: their rows
would be widened to the fp32 of the parameters, with twice the bytes and a fraction of the speed of everything around
them. Their parameters are cast as autocast casts weights: once a step, or in every pass of layers computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.autocast import autocast_dtype
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.runtime.precision import copy_held


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
    own = module.named_parameters(recurse=False)
    wide = {name: one for name, one in own if one.is_floating_point() and one.dtype != dtype}
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
