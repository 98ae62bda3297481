"""A short chain of equal blocks, timed as training runs them: what the runtime's machinery is measured around."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import map_tensors
from galvatron_lite.profiler.measure_layers import differentiable, seeded
from galvatron_lite.profiler.segments import BlockCall, entering, hidden_state, leaf_of
from galvatron_lite.profiler.timing import Lap, TimingRule, time_laps

CHAIN_LAYERS = 3


class Chain(nn.Module):
    """Equal blocks that run one after another, each on its own copy of the input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(CHAIN_LAYERS))

    def forward(self, call: BlockCall, leaves: list[Tensor]) -> Tensor:
        """A scalar whose backward runs through every block."""
        outputs = [_run(block, call, leaf) for block, leaf in zip(self.blocks, leaves, strict=True)]
        return seeded([tensor for output in outputs for tensor in output], leaves[0].device)


def _run(block: nn.Module, call: BlockCall, leaf: Tensor) -> list[Tensor]:
    whole = hidden_state(call.args, call.kwargs)

    def fill(tensor: Tensor) -> Tensor:
        return leaf if tensor is whole else tensor

    return differentiable(block(*map_tensors(call.args, fill), **map_tensors(call.kwargs, fill)))


def _leave(_: Tensor) -> None:
    return None


def chain_seconds(
    chain: nn.Module, call: BlockCall, device: torch.device, rule: TimingRule, watch: Callable[[Tensor], None] = _leave
) -> float:
    """Seconds of forward and backward of one block of a chain; see ``chain_run``."""
    return time_laps(chain_run(chain, call, watch), device, rule).laps[1] / CHAIN_LAYERS


def chain_run(chain: nn.Module, call: BlockCall, watch: Callable[[Tensor], None] = _leave) -> Callable[[Lap], object]:
    """Forward and backward of a chain, as the second of two parts; gradients begin as None, as after ``zero_grad``.

    ``watch`` sees the chain's scalar before backward.
    """
    leaf = leaf_of(call)

    def once(lap: Lap) -> None:
        chain.zero_grad(set_to_none=True)
        leaves = [entering(leaf) for _ in range(CHAIN_LAYERS)]
        lap()
        seed = chain(call, leaves)
        watch(seed)
        seed.backward()
        lap()

    return once
