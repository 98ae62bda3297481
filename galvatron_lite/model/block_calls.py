"""Runs of a model and of its blocks for their shapes: what a block is called with, and what a model returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.batch import loss_of, places, resize_batch, tensors_of
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import BlockCall, observe

_FEW, _MORE = 2, 3


def block_calls(model: nn.Module, names: Collection[str], batch: Any, samples: int = _FEW) -> dict[str, BlockCall]:
    """The first call of each named block, on the meta device, with so many samples."""
    seen = observe(meta_copy(model), resize_batch(batch, samples), list(names))
    return {call.path: call for call in reversed(seen.calls)}


def sample_arguments(model: nn.Module, names: Collection[str], batch: Any) -> dict[str, dict[str, int]]:
    """How many items of dim 0 each sample has of the tensors that each named block is given: 1 of those that have the
    samples there, 0 of those that do not grow with them, more where it is samples times heads.

    Two runs with unlike numbers of samples tell. A size that equals the number of samples by chance does not mislead.

    Returns:
        By block, then by the argument's place (see ``map_places``). Empty where the model cannot be run this way.
    """
    try:
        few, more = (block_calls(model, names, batch, samples) for samples in (_FEW, _MORE))
    except TraceError:
        return {}
    found: dict[str, dict[str, int]] = {}
    for name in few.keys() & more.keys():
        one, other = (dict(places((call.args, call.kwargs))) for call in (few[name], more[name]))
        found[name] = {place: _grows(one[place], other[place]) for place in one.keys() & other.keys()}
    return found


def _grows(few: Tensor, more: Tensor) -> int:
    if few.dim() == 0 or more.dim() == 0:
        return 0
    each = few.shape[0] // _FEW
    return each if (few.shape[0], more.shape[0]) == (each * _FEW, each * _MORE) else 0


def check_folded(sampled: Mapping[str, Mapping[str, int]]) -> None:
    """See that no argument has samples and something else folded into dim 0, of blocks that take other samples than
    the code around them: nothing tells which of the two comes first, so samples cannot be moved.
    """
    for name, arguments in sampled.items():
        for place, each in arguments.items():
            if each > 1:
                remedy = (
                    f"Argument {place.lstrip('.')} of {name} has {each} items a sample along dim 0 (samples times "
                    "heads), which cannot be moved: share samples alike in all layers, as with --fix data=1 "
                    "--fix zero=1, or with the same degrees for before, after and the blocks."
                )
                raise InputError("plan", f"other samples in {name} than around it", remedy)


def mean_of_outputs(output: Any, _: Any = None) -> Tensor:
    """A scalar made of every floating tensor that a model gives; a ``loss_fn`` that stands in for a loss."""
    means = [tensor.float().mean() for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not means:
        remedy = "Profile the model up to the last tensor of floating numbers, or pass loss_fn."
        raise InputError("output", type(output).__name__, remedy)
    return sum(means[1:], means[0])


def gives_loss(model: nn.Module, batch: Any) -> bool:
    """Whether a model gives its loss itself, seen on a copy without storages."""
    shapes = resize_batch(batch, 2)
    output = observe(meta_copy(model), shapes, []).output
    try:
        loss_of(output, shapes)
    except InputError:
        return False
    return True
