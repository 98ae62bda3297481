"""Activation checkpoints of the model's own code, which plans decide instead: what they hold simply runs.

A checkpoint runs layers again in backward, where a pipeline stage has let go of what it was sent, and the reentrant one
gives no gradient to what a layer is handed otherwise than by its arguments. Torch has no extension point for it, so two
functions behind ``torch.utils.checkpoint.checkpoint`` are wrapped, once; outside of ``left_to_the_plan`` they do what
they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils import checkpoint

from galvatron_lite.model.trace_meta import note

_LEFT_TO_PLAN: ContextVar[bool] = ContextVar("left_to_plan", default=False)
_reentrant = checkpoint.CheckpointFunction.apply
_without_reentry = checkpoint._checkpoint_without_reentrant_generator


@contextmanager
def left_to_the_plan(decides: bool = True) -> Iterator[None]:
    """Inside, checkpoints of the model's code only run what they hold; with False they are what they say."""
    token = _LEFT_TO_PLAN.set(decides)
    try:
        yield
    finally:
        _LEFT_TO_PLAN.reset(token)


def _apply(function: Any, preserve: bool, *args: Any) -> Any:
    if not _LEFT_TO_PLAN.get():
        return _reentrant(function, preserve, *args)  # type: ignore[no-untyped-call]
    note("the model's own torch.utils.checkpoint is left out: the plan chooses what is recomputed")
    return function(*args)


def _generator(*args: Any, **kwargs: Any) -> Iterator[None]:
    if not _LEFT_TO_PLAN.get():
        yield from _without_reentry(*args, **kwargs)
        return
    note("the model's own torch.utils.checkpoint is left out: the plan chooses what is recomputed")
    yield


checkpoint.CheckpointFunction.apply = _apply  # type: ignore[method-assign]
checkpoint._checkpoint_without_reentrant_generator = _generator
