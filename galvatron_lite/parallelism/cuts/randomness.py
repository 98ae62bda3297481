"""Random functions: what belongs to one item is drawn by each rank for its share, the rest by all ranks alike.

Ranks of a picture are in the same random state: they work on the same samples, and code that draws for a sample or a
channel (stochastic depth, ``dropout2d``) must draw the same on all of them. What is drawn item by item must differ
between shares and still leave the state the same on all ranks, whatever the length of their shares. So one number is
drawn from torch's generator of the CPU, by every rank alike; with the rank's places it seeds a generator of its own,
from which the share is drawn. Checkpointing brings back the CPU's state, hence also the same pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by
from galvatron_lite.parallelism.cuts.tensor import Call, Cuts, CutTensor, Handler, cut_like, shares_only

_SEEDS = 2**62
_PRIME = 1_000_003


def own_generator(device: torch.device, cuts: Cuts) -> Generator:
    """A generator that no other rank of the picture has; torch's own moves on by one number, on all of them alike."""
    seed = int(torch.randint(_SEEDS, (), device="cpu").item())
    for cut in cuts:
        seed = (seed * _PRIME + cut.line.rank) % _SEEDS
    return Generator(device if device.type != "meta" else "cpu").manual_seed(seed)


def _dropout(call: Call) -> Any:
    """Items are dropped one by one; the mask takes a byte an item until the backward pass, as torch's own does."""
    call = fronted(call)
    tensor, rate = call.args[0], argument(call, 1, "p", 0.5)
    training, writes = argument(call, 2, "training", call.name == "dropout"), argument(call, 3, "inplace", False)
    if not 0 <= rate <= 1:
        raise InputError("dropout probability", rate, "It lies between 0 and 1.")
    with shares_only():
        if training and rate:
            kept = _mask(tensor, tensor.shape, 1 - rate, tensor.cuts)
            scale = 1 / (1 - rate) if rate < 1 else 0.0
            result = tensor.mul_(kept).mul_(scale) if writes or call.name == "dropout_" else tensor * kept * scale
        else:
            result = tensor if writes or call.name == "dropout_" else tensor.view_as(tensor)
    return cut_like(result, tensor.cuts, call.rules)


def _mask(tensor: Tensor, shape: tuple[int, ...], rate: float, cuts: Cuts) -> Tensor:
    """What is kept, True with the given probability."""
    mask = torch.empty(shape, dtype=torch.bool, device=tensor.device)
    return mask if mask.is_meta else mask.bernoulli_(rate, generator=own_generator(tensor.device, cuts))


def _channel_dropout(call: Call) -> Any:
    """Channels of samples (dims 0 and 1) are dropped: the same ones on all ranks that hold pixels of them."""
    call = fronted(call)
    tensor = call.args[0]
    own = tuple(cut for cut in tensor.cuts if cut.dim <= 1)
    if own:
        return _channels_of_shares(call, own)
    with shares_only():
        result = call.function(*call.args, **call.kwargs)
        result = result.view_as(result) if result is tensor and not call.kwargs.get("inplace") else result
    return cut_like(result, tensor.cuts, call.rules)


def _channels_of_shares(call: Call, cuts: Cuts) -> Any:
    """Where each rank holds channels of its own, it draws for them alone."""
    tensor, rate = call.args[0], argument(call, 1, "p", 0.5)
    training, writes = argument(call, 2, "training", True), argument(call, 3, "inplace", False)
    with shares_only():
        result = tensor if writes else tensor.view_as(tensor)
        if training and rate:
            kept = _mask(tensor, (*tensor.shape[:2], *[1] * (tensor.dim() - 2)), 1 - rate, cuts)
            scale = kept * (1 / (1 - rate) if rate < 1 else 0.0)
            result = tensor.mul_(scale) if writes else tensor * scale.to(tensor.dtype)
    return cut_like(result, tensor.cuts, call.rules)


def _filled(call: Call) -> Any:
    """``normal_``, ``uniform_`` and their kind: the share is filled from a generator of its own."""
    tensor = call.args[0]
    if not isinstance(tensor, CutTensor):
        raise InputError(call.name, "a split picture as parameter", "Draw first, then use the parameters.")
    with shares_only():
        given = {"generator": own_generator(tensor.device, tensor.cuts), **call.kwargs}
        return call.function(*call.args, **given)


def _like(fill: Callable[[Tensor, Generator], Tensor]) -> Handler:
    """``rand_like`` and ``randn_like``."""

    def draw(call: Call) -> Any:
        call = fronted(call)
        tensor = call.args[0]
        given = {name: one for name, one in call.kwargs.items() if name != "generator"}
        with shares_only():
            result = fill(torch.empty_like(tensor, **given), own_generator(tensor.device, tensor.cuts))
        return cut_like(result, tensor.cuts, call.rules)

    return draw


def _bernoulli(call: Call) -> Any:
    """``bernoulli(probabilities)``."""
    call = fronted(call)
    tensor = call.args[0]
    with shares_only():
        result = torch.bernoulli(tensor, generator=own_generator(tensor.device, tensor.cuts))
    return cut_like(result, tensor.cuts, call.rules)


HANDLERS: Mapping[str, Handler] = {
    **handled_by(_dropout, "dropout dropout_"),
    **handled_by(_channel_dropout, "dropout1d dropout2d dropout3d feature_dropout"),
    **handled_by(_filled, "normal_ uniform_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_ random_"),
    "rand_like": _like(lambda tensor, generator: tensor.uniform_(generator=generator)),
    "randn_like": _like(lambda tensor, generator: tensor.normal_(generator=generator)),
    "bernoulli": _bernoulli,
}
