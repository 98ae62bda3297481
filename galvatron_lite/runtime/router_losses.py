"""Losses that balance the experts of a mixture, right for the global batch.

Such a loss multiplies two means over tokens, for each expert the share of tokens that chose it and its mean
probability (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6). The mean of ranks' products is another figure than
the product of the means over all tokens, so every rank is given the routers' logits of all tokens: transformers' models
return them from the module that holds the blocks, and make the loss of them outside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.mesh import Meshes
from galvatron_lite.runtime.placement import Placed, glue_of

LOGITS = "router_logits"
"""Where transformers' models return what their routers computed."""
_GATHERED = "_of_all_tokens"


def check_router_losses(model: nn.Module, batch: Any, plan: Plan) -> None:
    """See that a loss on routers' logits, where the model is asked for one, can be right under a plan.

    Raises:
        InputError: it cannot, as a stage has the logits of its own blocks alone, or a micro-batch those of its tokens.
    """
    asked = batch.get(f"output_{LOGITS}") if isinstance(batch, Mapping) else None
    asked = getattr(getattr(model, "config", None), f"output_{LOGITS}", False) if asked is None else asked
    parts = len(plan.stages) * plan.microbatches
    if asked is True and parts > 1:
        remedy = (
            f"Its loss needs the routers' logits of the whole batch and all blocks, which {len(plan.stages)} stage(s) "
            f"and {plan.microbatches} micro-batch(es) do not have together. Plan it with one of each, or set "
            f"config.output_{LOGITS}=False."
        )
        raise InputError(f"output_{LOGITS}", asked, remedy)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Ranks that have a block's tokens between them, and the ways in which a gradient of all of them is too large."""

    group: dist.ProcessGroup | None
    scale: float


def install_router_losses(
    model: nn.Module, stage: Sequence[Placed], meshes: Meshes, experts: Collection[str] = ()
) -> None:
    """Have the modules around the blocks return the routers' logits of all tokens, in place.

    Args:
        model: split already.
        stage: its layers.
        meshes: process groups.
        experts: names of the parameters of experts that are spread.
    """
    spread = {name.rpartition(".")[0] for name in experts}
    blocks = [placed for placed in stage if placed.layer.role is Role.BLOCK]
    mixed = [one for one in blocks if _is_mixed(model, one.layer.modules[0], spread)]
    shares = [_shares(placed, glue_of(stage), meshes) for placed in mixed]
    if all(one.group is None for one in shares):
        return
    hook = _Hook(tuple(shares))
    paths = {path.rpartition(".")[0] for placed in mixed for path in placed.layer.modules}
    around = {".".join(path.split(".")[:depth]) for path in paths for depth in range(len(path.split(".")) + 1)}
    for path in sorted(around, reverse=True):
        model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)


def _is_mixed(model: nn.Module, path: str, spread: Collection[str]) -> bool:
    return bool(find_mixtures(model.get_submodule(path))) or any(name.startswith(f"{path}.") for name in spread)


def _shares(placed: Placed, glue: Placed, meshes: Meshes) -> _Shares:
    strategy, groups = placed.strategy, meshes.groups(placed.strategy)
    group = groups.everyone if strategy.sequence_parallel and strategy.tensor > 1 else groups.gradients
    ranks = 1 if group is None else group.size()
    return _Shares(group, glue.strategy.batch_degree / ranks)


@dataclass(frozen=True, slots=True)
class _Hook:
    shares: tuple[_Shares, ...]

    def __call__(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        found = getattr(output, LOGITS, None)
        if not isinstance(found, tuple) or not found or hasattr(found[0], _GATHERED):
            return output
        if len(found) != len(self.shares) or kwargs.get("attention_mask") is not None:
            remedy = "A loss on them is not right for shares of a batch with an attention_mask; leave one of both out."
            raise InputError(f"output_{LOGITS}", f"{len(found)} layers", remedy)
        output[LOGITS] = tuple(_of_all_tokens(one, shares) for one, shares in zip(found, self.shares, strict=True))
        return output


def _of_all_tokens(logits: Tensor, shares: _Shares) -> Tensor:
    """The logits (tokens, experts) of all ranks of a group, one after the other."""
    if shares.group is None:
        return logits
    every: Tensor = _Gather.apply(logits, shares.group, shares.scale)  # type: ignore[no-untyped-call]
    setattr(every, _GATHERED, True)
    return every


class _Gather(torch.autograd.Function):
    """Every rank has the same loss of all tokens; their gradients together are ``scale`` times too small."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        line = ctx.line = ProcessTensorGroup(group)
        ctx.scale = scale
        return line.all_gather(logits, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.line.reduce_scatter(gradient * ctx.scale, 0), None, None
