"""Layers with shared channels as threads, beside the same layer on one device."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.channel.apply import gather_running, shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.channel.plan import ChannelPlan
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.functions import gather_shares
from galvatron_lite.parallelism.tensor.shards import Placement, gather_full
from tests.parallelism.thread_group import ThreadGroup, run_threads


@dataclass
class Outcome:
    """Of a step: what one device and each rank have."""

    output: Tensor
    input_gradient: Tensor | None
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


def alone(layer: nn.Module, picture: Tensor, gradient: bool = True) -> Outcome:
    """One device."""
    layer, picture = copy.deepcopy(layer), picture.clone().requires_grad_(gradient)
    output = layer(picture)
    (output * weights_of(output)).sum().backward()
    return Outcome(
        output.detach(), picture.grad, _gradients(layer), dict(layer.named_parameters()), dict(layer.named_buffers())
    )


def weights_of(output: Tensor) -> Tensor:
    """A fixed gradient of the outcome."""
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)


def _gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


def shared(
    layer: nn.Module, picture: Tensor, by: str, degree: int, plan: ChannelPlan | None = None, gradient: bool = True
) -> list[Outcome]:
    """What each rank has, brought together as the runtime does."""
    plan = plan or infer_channels(layer, (picture,), {}, by, degree)
    layers = [copy.deepcopy(layer) for _ in range(degree)]

    def work(group: ThreadGroup) -> Outcome:
        return _step(layers[group.rank], picture, plan, Counted(group), gradient)

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


def _step(layer: nn.Module, picture: Tensor, plan: ChannelPlan, line: Counted, gradient: bool) -> Outcome:
    group = line.group
    shards = shard_channels(layer, plan, line)
    shares = plan.by == "channels"
    mine = picture.narrow(1, *share(picture.shape[1], line.size, line.rank)) if shares else picture
    mine = mine.clone().requires_grad_(gradient)
    output = layer(mine)
    assert type(output) is Tensor
    forward = (Counter(group.calls), Counter(line.bytes))
    whole = gather_shares(output.detach(), group, plan.outputs[0], 1) if shares else output.detach()
    group.calls, line.bytes = Counter(), Counter()
    weights = weights_of(whole)
    if shares:
        weights = weights.narrow(1, *share(plan.outputs[0], line.size, line.rank))
    (output * weights).sum().backward()
    backward = (Counter(group.calls), Counter(line.bytes))
    return Outcome(
        whole,
        gather_shares(mine.grad, group, picture.shape[1], 1) if shares and mine.grad is not None else mine.grad,
        {name: _whole(one, shards[name], group) for name, one in _gradients(layer).items()},
        {name: gather_full(one.detach(), shards[name], group) for name, one in layer.named_parameters()},
        _buffers(layer, group),
        (forward[0], backward[0]),
        (forward[1], backward[1]),
    )


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
    if expected.input_gradient is not None:
        assert found.input_gradient is not None
        close(found.input_gradient, expected.input_gradient)
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
