"""Models that are only run forward and give no loss: what is profiled in its place."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import loss_of, resize_batch, tensors_of
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import observe


def mean_of_outputs(output: Any, _: Any = None) -> Tensor:
    """A scalar made of every floating tensor that a model gives; a ``loss_fn`` that stands in for a loss.

    Raises:
        InputError: it gives no floating tensor.
    """
    means = [tensor.float().mean() for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not means:
        remedy = "Profile the model up to the last tensor of floating numbers, or pass loss_fn."
        raise InputError("output", type(output).__name__, remedy)
    return sum(means[1:], means[0])


def gives_loss(model: nn.Module, batch: Any) -> bool:
    """Whether a model gives its loss itself, seen on a copy without storages.

    Raises:
        TraceError: it does not run on the batch.
    """
    shapes = resize_batch(batch, 2)
    output = observe(meta_copy(model), shapes, []).output
    try:
        loss_of(output, shapes)
    except InputError:
        return False
    return True
