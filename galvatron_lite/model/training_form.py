"""How a model runs while it trains: no cache of keys and values, and nothing recomputed but by the plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from galvatron_lite.saying import say


def prepare_for_training(model: nn.Module) -> None:
    """Change a model in place so that it trains in the same way under every plan.

    - While gradients are wanted, every module whose forward takes ``use_cache`` is called with ``use_cache=False``,
      whatever its config, its caller or the batch says: a cache of keys and values has no use in training, and a layer
      that is recomputed would append to it twice. In evaluation mode and without gradients nothing changes.
    - The gradient checkpointing of transformers is switched off: the plan chooses what is recomputed.
    """
    for module in model.modules():
        if _cache_place(type(module).forward) is not None and not _is_prepared(module):
            module.register_forward_pre_hook(_without_cache, with_kwargs=True)
        if vars(module).get("gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
            note("gradient checkpointing of the model is switched off: the plan chooses what is recomputed")


def _is_prepared(module: nn.Module) -> bool:
    return _without_cache in module._forward_pre_hooks.values()


@cache
def _cache_place(forward: Callable[..., Any]) -> int | None:
    """The position of ``use_cache`` among the arguments of a class's forward, ``self`` left out."""
    names = list(inspect.signature(forward).parameters)[1:]
    return names.index("use_cache") if "use_cache" in names else None


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    place = _cache_place(type(module).forward)
    if place is None or not (module.training and torch.is_grad_enabled()):
        return None
    if len(args) > place:
        return (*args[:place], False, *args[place + 1 :]), kwargs
    return args, {**kwargs, "use_cache": False}


@cache
def note(line: str) -> None:
    """Tell rank 0's user once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(f"note: {line}")
