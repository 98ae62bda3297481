"""A copy of a user's model that is small enough to be run a few times in seconds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.balancing import LOGITS
from galvatron_lite.model.batch import ITEMS, call_model, map_tensors, places, resize_batch
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace_meta import BATCH_NORMS, meta_copy
from galvatron_lite.model.trace_record import ValuesReadError
from galvatron_lite.runtime.materialize import Materializer
from galvatron_lite.units import format_count
from galvatron_lite.verify.numbers.shrink import cut_for
from galvatron_lite.verify.numbers.shrink_model import calmed, can_drop, dropped, narrowed, with_samples

SAMPLES = 4
KEPT = 2
"""Blocks of each kind."""
LARGEST = 50_000_000
"""Parameters that are tried, at most."""
MOST_WORK = 3e10
"""FLOPs of a forward and backward pass of all samples, at most: about a second on one core."""
NARROW = 2
"""What sizes of a narrow model can be divided by."""


class SkippedError(GalvatronError):
    """The model cannot be tried; the message says why."""


@dataclass(frozen=True, slots=True)
class Double:
    """A small copy on the CPU, in training mode, without dropout; batch norms use their running statistics."""

    model: nn.Module  # in float32, or in float64 as it was
    batch: Any  # of ``SAMPLES`` samples, no two alike
    layers: tuple[Layer, ...]  # of the copy


def make_double(
    model: nn.Module, batch: Any, layers: Sequence[Layer], init_fn: Callable[[nn.Module], None] | None
) -> Double:
    """Copy a model without most of its equal blocks; narrower, too, where it is large and made of a configuration.

    A model that does not run without some of its blocks is copied with all of them.
    """
    gone = _left_out(model, layers)
    try:
        return _double(model, batch, gone, init_fn)
    except SkippedError:
        if not gone:
            raise
        return _double(model, batch, [], init_fn)


def _double(model: nn.Module, batch: Any, gone: Sequence[str], init_fn: Callable[[nn.Module], None] | None) -> Double:
    rest = [one for name, one in model.named_parameters() if not any(name.startswith(f"{path}.") for path in gone)]
    small = dict(batch) if isinstance(batch, dict) else batch
    if isinstance(small, dict):
        for name in (ITEMS, f"output_{LOGITS}"):
            small.pop(name, None)
    if sum(one.numel() for one in rest) > LARGEST or _work(model, small, gone) > MOST_WORK:
        double, small = _narrow(model, small, rest)
    else:
        double = _copy(model, gone)
    small = map_tensors(with_samples(map_tensors(small, _on_cpu), SAMPLES), _as_float)
    double = calmed(dropped(double, gone)).train()
    for module in double.modules():
        if isinstance(module, BATCH_NORMS):
            module.eval()
        config: Any = getattr(module, "config", None)
        if getattr(config, f"output_{LOGITS}", False):  # a loss of all tokens together, right under every plan
            setattr(config, f"output_{LOGITS}", False)
    try:
        try:
            found = discover_layers(double, small)
        except ValuesReadError:
            found = discover_layers(double)
        if any(one.is_meta for one in (*double.parameters(), *double.buffers())):
            materializer = Materializer(double, found, torch.device("cpu"), 0, init_fn)
            for layer in found:
                materializer.place(layer)
        return Double(_widened(double.to("cpu")), small, found)
    except (GalvatronError, RuntimeError, ValueError, TypeError, IndexError) as error:
        blocks = f" with {KEPT} blocks of each kind" if gone else ""
        raise SkippedError(f"a copy{blocks} does not run ({error})") from error


def _left_out(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """Paths of the blocks that the copy does without."""
    seen, gone = Counter[str](), []
    for layer in layers:
        if layer.role is not Role.BLOCK or len(layer.modules) != 1 or not can_drop(model, layer.modules[0]):
            continue
        seen[layer.kind] += 1
        if seen[layer.kind] > KEPT:
            gone.append(layer.modules[0])
    return gone


def _copy(model: nn.Module, gone: Sequence[str]) -> nn.Module:
    """A deep copy; blocks that will be dropped are copied without values."""
    memo: dict[int, Any] = {}
    for path in gone:
        for tensor in (*model.get_submodule(path).parameters(), *model.get_submodule(path).buffers()):
            memo[id(tensor)] = _empty(tensor)
    kept = {id(one) for name, one in model.named_parameters() if not any(name.startswith(f"{path}.") for path in gone)}
    try:
        return copy.deepcopy(model, {key: value for key, value in memo.items() if key not in kept})
    except Exception as error:  # whatever a user's object does
        raise SkippedError(f"copy.deepcopy of the model fails ({error})") from error


def _empty(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def _work(model: nn.Module, batch: Any, gone: Sequence[str]) -> float:
    """FLOPs of a forward and backward pass of the copy; 0 where it does not run without values."""
    with FlopCounterMode(display=False) as counter, suppress(Exception):
        call_model(dropped(meta_copy(model), gone), resize_batch(batch, SAMPLES))
    return 3.0 * float(counter.get_total_flops())


def _narrow(model: nn.Module, batch: Any, rest: Sequence[Tensor]) -> tuple[nn.Module, Any]:
    """A narrower model with values of its own, and its batch."""
    with torch.device("meta"):
        found = narrowed(model, NARROW)
    if found is None:
        items = format_count(sum(one.numel() for one in rest))
        raise SkippedError(f"{items} parameters, equal blocks left out, are too many or take too long on the CPU")
    double, _ = found
    return double, cut_for(batch, double)


def _on_cpu(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise SkippedError("the example batch has no values")
    return tensor.detach().cpu()


def _as_float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _widened(model: nn.Module) -> nn.Module:
    """In float32, or in float64 where it has such parameters."""
    double = any(one.dtype in (torch.float64, torch.complex128) for one in model.parameters())
    return model if double else model.float()


def masks_of(batch: Any, besides: Sequence[str]) -> list[str]:
    """Places of tensors of the samples that are truth values, or zeros and ones alone."""
    return [
        place
        for place, one in places(batch)
        if place not in besides and one.dim() > 0 and one.shape[0] == SAMPLES and prod(one.shape) > SAMPLES - 1
        and (one.dtype is torch.bool or bool(((one == 0) | (one == 1)).all()))
    ]  # fmt: skip
