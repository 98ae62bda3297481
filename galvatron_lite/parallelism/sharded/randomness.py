"""Random functions: what belongs to one item each rank draws for its shard, the rest all ranks draw alike.

Ranks of an image have the same random state: they work on the same samples, and code that draws for a sample or a
channel (stochastic depth, ``dropout2d``) must draw the same on all of them. Draws for single items must differ between
shards and still leave the state the same on all ranks, whatever the length of their shards. So every rank draws one
number from torch's CPU generator; with the rank's index it seeds a generator from which the shard is drawn.
Checkpointing restores the CPU's state, hence the same pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import argument, handled_by, input_first, wrap_like
from galvatron_lite.parallelism.sharded.tensor import Call, Handler, ShardedTensor, ShardSpecs, locals_only

_SEEDS = 2**62
_PRIME = 1_000_003


def _rank_generator(device: torch.device, specs: ShardSpecs) -> Generator:
    """A generator that no other rank of the tensor has; torch's own advances by one number on all of them."""
    seed = int(torch.randint(_SEEDS, (), device="cpu").item())
    for spec in specs:
        seed = (seed * _PRIME + spec.group.rank) % _SEEDS
    return Generator(device if device.type != "meta" else "cpu").manual_seed(seed)


def _dropout(call: Call) -> Any:
    """Items are dropped by themselves; the mask takes a byte an item until the backward pass, as torch's own."""
    call = input_first(call)
    with locals_only():
        shape = call.args[0].shape
    return _dropped(call, shape, call.args[0].specs, argument(call, 2, "training", call.name == "dropout"))


def _channel_dropout(call: Call) -> Any:
    """Channels of samples (dims 0 and 1) are dropped: the same ones on all ranks that hold pixels of them."""
    call = input_first(call)
    tensor, training = call.args[0], argument(call, 2, "training", True)
    specs = tuple(spec for spec in tensor.specs if spec.dim <= 1)
    with locals_only():
        if specs:
            return _dropped(call, (*tensor.shape[:2], *[1] * (tensor.dim() - 2)), specs, training)
        result = call.function(*call.args, **call.kwargs)
        result = result.view_as(result) if result is tensor and not call.kwargs.get("inplace") else result
    return wrap_like(call, result, tensor)


def _dropped(call: Call, shape: tuple[int, ...], specs: ShardSpecs, training: bool) -> Any:
    """What is left of the input after drops by a mask of that local shape."""
    tensor, rate = call.args[0], argument(call, 1, "p", 0.5)
    writes = argument(call, 3, "inplace", False) or call.name == "dropout_"
    if not 0 <= rate <= 1:
        raise InputError("dropout probability", rate, "It lies between 0 and 1.")
    with locals_only():
        if not (training and rate):
            return wrap_like(call, tensor if writes else tensor.view_as(tensor), tensor)
        kept = torch.empty(shape, dtype=torch.bool, device=tensor.device)
        if not kept.is_meta:
            kept.bernoulli_(1 - rate, generator=_rank_generator(tensor.device, specs))
        scale = 1 / (1 - rate) if rate < 1 else 0.0
        return wrap_like(call, tensor.mul_(kept).mul_(scale) if writes else tensor * kept * scale, tensor)


def _fill(call: Call) -> Any:
    """``normal_``, ``uniform_`` and their kind."""
    tensor = call.args[0]
    if not isinstance(tensor, ShardedTensor):
        raise InputError(call.name, "a split picture as parameter", "Draw first, then use the parameters.")
    with locals_only():
        generator = _rank_generator(tensor.device, tensor.specs)
        return call.function(*call.args, **{"generator": generator, **call.kwargs})


def _like(fill: Callable[[Tensor, Generator], Tensor]) -> Handler:
    """``rand_like`` and ``randn_like``."""

    def draw(call: Call) -> Any:
        call = input_first(call)
        tensor = call.args[0]
        options = {name: one for name, one in call.kwargs.items() if name != "generator"}
        with locals_only():
            result = fill(torch.empty_like(tensor, **options), _rank_generator(tensor.device, tensor.specs))
        return wrap_like(call, result, tensor)

    return draw


def _bernoulli(call: Call) -> Any:
    """``bernoulli(probabilities)``."""
    tensor = input_first(call).args[0]
    with locals_only():
        result = torch.bernoulli(tensor, generator=_rank_generator(tensor.device, tensor.specs))
    return wrap_like(call, result, tensor)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_dropout, "dropout dropout_"),
    **handled_by(_channel_dropout, "dropout1d dropout2d dropout3d feature_dropout"),
    **handled_by(_fill, "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_"),
    "rand_like": _like(lambda tensor, generator: tensor.uniform_(generator=generator)),
    "randn_like": _like(lambda tensor, generator: tensor.normal_(generator=generator)),
    "bernoulli": _bernoulli,
}
