"""How the model calls its blocks, seen by running a copy of it without storages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import places, resize_batch
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import BlockCall, observe

_FEW, _MORE = 2, 3


def block_calls(model: nn.Module, names: Collection[str], batch: Any, samples: int = _FEW) -> dict[str, BlockCall]:
    """The first call of each named block, on the meta device, with so many samples.

    Raises:
        TraceError: the model does not run on the batch.
    """
    seen = observe(meta_copy(model), resize_batch(batch, samples), list(names))
    return {call.path: call for call in reversed(seen.calls)}


def sample_arguments(model: nn.Module, names: Collection[str], batch: Any) -> dict[str, dict[str, bool]]:
    """Which tensors that each named block is given have the samples along dim 0.

    Two runs with unlike numbers of samples tell. A size that equals the number of samples by chance does not mislead.

    Returns:
        By block, then by the argument's place (see ``map_places``). Empty where the model cannot be run this way.
    """
    try:
        few, more = (block_calls(model, names, batch, samples) for samples in (_FEW, _MORE))
    except TraceError:
        return {}
    found: dict[str, dict[str, bool]] = {}
    for name in few.keys() & more.keys():
        one, other = (dict(places((call.args, call.kwargs))) for call in (few[name], more[name]))
        found[name] = {place: _grows(one[place], other[place]) for place in one.keys() & other.keys()}
    return found


def _grows(few: Tensor, more: Tensor) -> bool:
    return few.dim() > 0 and more.dim() > 0 and (few.shape[0], more.shape[0]) == (_FEW, _MORE)
