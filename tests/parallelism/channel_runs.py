"""Layers with shared channels as threads, beside the same layer on one device."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.parts import ChannelPlan
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.shards import Placement
from tests.parallelism.running import gather_full, gather_running, gather_shares
from tests.parallelism.thread_group import ThreadGroup, run_threads


@dataclass
class Outcome:
    """Of a step: what one device and each rank have."""

    output: Tensor
    input_gradients: list[Tensor | None]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    moved: tuple[Counter[str], Counter[str]] = (Counter(), Counter())


def seeded(layer: nn.Module) -> nn.Module:
    """The layer in double precision, every parameter drawn at random (also those that begin as 0 or 1)."""
    layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return layer


def alone(layer: nn.Module, *pictures: Tensor, gradient: bool = True) -> Outcome:
    """One device."""
    layer, own = copy.deepcopy(layer), [one.clone().requires_grad_(gradient) for one in pictures]
    output = layer(*own)
    (output * weights_of(output)).sum().backward()
    return Outcome(
        output.detach(),
        [one.grad for one in own],
        _gradients(layer),
        dict(layer.named_parameters()),
        dict(layer.named_buffers()),
    )


def weights_of(output: Tensor) -> Tensor:
    """A fixed gradient of the outcome."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def _gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


def shared(
    layer: nn.Module,
    *pictures: Tensor,
    by: str,
    degree: int,
    gradient: bool = True,
    recompute: Recompute = Recompute.NONE,
) -> list[Outcome]:
    """What each rank has, brought together as the runtime does."""
    plan = infer_channels(layer, pictures, {}, by, degree)
    layers = [copy.deepcopy(layer) for _ in range(degree)]

    def work(group: ThreadGroup) -> Outcome:
        return _step(layers[group.rank], pictures, plan, Counted(group), gradient, recompute)

    return run_threads(degree, work)


@dataclass
class Counted:
    """A line whose calls, and the bytes of what comes of them, are counted."""

    group: ThreadGroup

    def __post_init__(self) -> None:
        self.size, self.rank = self.group.size, self.group.rank
        self.bytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def run(*args: Any) -> Any:
            result = getattr(self.group, name)(*args)
            if name == "exchange":
                self.bytes[name] += sum(one.nbytes for _, one in args[0])
            else:
                self.bytes[name] += (args[0] if name == "reduce_scatter" else result).nbytes
            return result

        return run


def _step(
    layer: nn.Module,
    pictures: tuple[Tensor, ...],
    plan: ChannelPlan,
    line: Counted,
    gradient: bool,
    recompute: Recompute,
) -> Outcome:
    group, shares = line.group, plan.by == "channels"
    shards = shard_channels(layer, plan, line)
    apply_recompute(layer, recompute)
    mine = [(_share(one, group) if shares else one).detach().clone().requires_grad_(gradient) for one in pictures]
    output = layer(*mine)
    assert type(output) is Tensor
    forward = Counter(group.calls), Counter(line.bytes)
    whole = gather_shares(output.detach(), group, plan.outputs[0], 1) if shares else output.detach()
    group.calls, line.bytes = Counter(), Counter()
    weights = weights_of(whole)
    (output * (_share(weights, group) if shares else weights)).sum().backward()
    backward = Counter(group.calls), Counter(line.bytes)
    extents = plan.inputs if shares else [0] * len(mine)
    return Outcome(
        whole,
        [
            gather_shares(one.grad, group, extent, 1) if extent and one.grad is not None else one.grad
            for one, extent in zip(mine, extents, strict=True)
        ],
        {name: _whole(one, shards[name], group) for name, one in _gradients(layer).items()},
        {name: gather_full(one.detach(), shards[name], group) for name, one in layer.named_parameters()},
        _buffers(layer, group),
        (forward[0], backward[0]),
        (forward[1], backward[1]),
    )


def _share(tensor: Tensor, group: ThreadGroup) -> Tensor:
    return tensor.narrow(1, *share(tensor.shape[1], group.size, group.rank))


def _whole(gradient: Tensor, shard: Any, group: ThreadGroup) -> Tensor:
    if shard.placement is Placement.PARTIAL:
        return group.all_reduce(gradient)
    return gather_full(gradient, shard, group)


def _buffers(layer: nn.Module, group: ThreadGroup) -> dict[str, Tensor]:
    gather_running(layer, group)
    return dict(layer.named_buffers())


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To 1e-10 of what is compared."""
    close(found.output, expected.output)
    for mine, its in zip(found.input_gradients, expected.input_gradients, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            close(mine, its)
    for one, other in (
        (found.gradients, expected.gradients),
        (found.parameters, expected.parameters),
        (found.buffers, expected.buffers),
    ):
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            close(one[name], tensor)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)
