"""Shared channels of real processes: the collectives of gloo, and what of their results may be written to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from galvatron_lite.parallelism.channel.apply import shard_channels
from galvatron_lite.parallelism.channel.infer import infer_channels
from galvatron_lite.parallelism.cuts.line import ProcessLine
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.shards import Placement, gather_full
from tests.parallelism import channel_blocks as blocks
from tests.parallelism.channel_runs import seeded
from tests.parallelism.running import gather_running
from tests.pool import WorkerPool

Trained = tuple[list[Tensor], dict[str, Tensor]]


def layer_and_picture() -> tuple[nn.Module, Tensor]:
    """One sample: its shares lie one after the other in memory, so that gathering them may be a view."""
    torch.manual_seed(0)
    layer = nn.Sequential(blocks.Bottleneck(6, 8, 14), blocks.SqueezeExcite(14), nn.Conv2d(14, 6, 1), nn.ReLU(True))
    return seeded(layer), torch.randn(1, 6, 6, 5, dtype=torch.float64)


def train(layer: nn.Module, picture: Tensor, partial: Sequence[nn.Parameter] = ()) -> list[Tensor]:
    """Two steps; the outputs."""
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    outputs = []
    for _ in range(2):
        output = layer(picture)
        optimizer.zero_grad()
        output.square().sum().backward()
        for parameter in partial:
            assert parameter.grad is not None
            parameter.grad = ProcessLine().all_reduce(parameter.grad)
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def one_rank(by: str) -> Trained:
    line = ProcessLine()
    layer, picture = layer_and_picture()
    plan = infer_channels(layer, (picture,), {}, by, line.size)
    shards = shard_channels(layer, plan, line)
    named = dict(layer.named_parameters())
    partial = [named[name] for name, one in shards.items() if one.placement is Placement.PARTIAL]
    mine = picture if by == "filters" else picture.narrow(1, *share(6, line.size, line.rank))
    outputs = train(layer, mine, partial)
    gather_running(layer, line)
    whole = {name: gather_full(one.detach(), shards[name], line) for name, one in named.items()}
    return outputs, {**whole, **dict(layer.named_buffers())}


@pytest.mark.parametrize("by", ["filters", "channels"])
def test_processes_share_channels(pool: WorkerPool, by: str) -> None:
    layer, picture = layer_and_picture()
    expected = train(layer, picture)
    state = layer.state_dict()
    everyone = pool.run(2, one_rank, by=by)
    near = {"rtol": 1e-9, "atol": 1e-9}
    for rank, (outputs, found) in enumerate(everyone):
        mine = [one if by == "filters" else one.narrow(1, *share(6, 2, rank)) for one in expected]
        torch.testing.assert_close(outputs, mine, **near)
        assert found.keys() == state.keys()
        for name, one in found.items():
            torch.testing.assert_close(one, state[name], **near)
