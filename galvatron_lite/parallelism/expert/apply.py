"""Gives a rank its share of a mixture's experts, in place, and has tokens exchanged around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.expert.dispatch import ExpertSpread, RowExchange, mixed
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, specs_of, to_local, wrap_locals
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, slice_full

Forward = Callable[..., Tensor]


def spread_experts(
    block: nn.Module, line: RowExchange | None, slices: RowExchange | None = None, capacity: float | None = None
) -> dict[str, ParameterShard]:
    """Spread the experts of every mixture of a block over ranks, in place.

    Each rank keeps as many, in order. Their module is called as before, with this rank's tokens, and returns what all
    experts make of them.

    Args:
        block: with values; not split in another way yet.
        line: ranks over which experts are spread; None: every rank has all, and ``capacity`` alone is to be kept to.
        slices: ranks with other tokens that share each expert's matmuls; see ``ExpertSpread``.
        capacity: see ``ExpertSpread``.

    Returns:
        How each parameter of an expert lies in the whole one, by its name in the block.

    Raises:
        InputError: experts that cannot be spread so many ways.
    """
    found = find_mixtures(block)
    ways = 1 if line is None else line.size
    shards: dict[str, ParameterShard] = {}
    for mixture in found:
        _check(mixture, ways)
        module = block.get_submodule(mixture.path)
        own = _keep_share(module, mixture, line)
        shards |= {f"{mixture.path}.{name}".lstrip("."): shard for name, shard in own.items()}
        spread = ExpertSpread(mixture.experts, line, slices, capacity)
        module.forward = partial(_routed, module.forward, spread)
    return shards


def work_on_shares(block: nn.Module, mixtures: Iterable[BlockMixture]) -> None:
    """Have the experts of a block work on this rank's share of tokens that ranks share, in place.

    Args:
        block: split already: what is outermost sees the cut tensors.
        mixtures: found in it before.
    """
    for mixture in mixtures:
        if not mixture.reason:
            module = block.get_submodule(mixture.path)
            module.forward = partial(_on_shares, module.forward)


def _on_shares(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any) -> Tensor:
    cuts = specs_of(hidden)
    alike = all([cut.dim for cut in specs_of(one)] == [0] for one in (hidden, index, weights))
    if not isinstance(hidden, ShardedTensor) or not alike:
        return forward(hidden, index, weights, **options)
    made: Tensor = wrap_locals(forward(*map(to_local, (hidden, index, weights)), **options), cuts, hidden.rules)
    return made


def _check(mixture: BlockMixture, ways: int) -> None:
    if mixture.reason:
        raise InputError("expert", ways, f"{mixture.reason}. Plan it with expert=1.")
    if mixture.experts % ways:
        raise InputError("expert", ways, f"Use a divisor of {mixture.experts}, the experts of {mixture.path}.")


def _keep_share(module: nn.Module, mixture: BlockMixture, line: RowExchange | None) -> dict[str, ParameterShard]:
    """Parameters stay the same objects and hold this rank's experts; whole numbers that count experts are divided."""
    if line is None:
        return {}
    shards: dict[str, ParameterShard] = {}
    for name in mixture.parameters:
        parameter = module.get_parameter(name)
        whole = tuple(parameter.shape)
        shard = ParameterShard(Placement.SHARDED, whole, line.size, line.rank, 0, (mixture.experts,))
        parameter.data = slice_full(parameter.data, shard).clone()
        parameter.grad = None
        shards[name] = shard
    for name, value in vars(module).items():
        if "expert" in name and type(value) is int and value == mixture.experts:
            setattr(module, name, mixture.experts // line.size)
    return shards


def _routed(
    forward: Forward, spread: ExpertSpread, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    """The module's forward for any tokens; its own forward then works on rows that each visit one expert."""

    def run(rows: Tensor, numbers: Tensor) -> Tensor:
        ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
        return forward(rows, numbers.unsqueeze(1), ones, **options)

    if hidden.dim() != 2 or index.shape != weights.shape or index.shape[:1] != hidden.shape[:1]:
        shapes = [tuple(one.shape) for one in (hidden, index, weights)]
        remedy = "Experts that are spread take (tokens, hidden), and (tokens, choices) twice. Plan it with expert=1."
        raise InputError("call of experts", shapes, remedy)
    return mixed(hidden, index, weights, spread, run)
