"""Losses that balance the experts of a mixture, right for the global batch.

Such a loss multiplies two means over tokens, for each expert the share of tokens that chose it and its mean
probability (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6). The mean of ranks' products is another figure than
the product of the means over all tokens, so every rank is given the routers' logits of all tokens: transformers' models
return them from the module that holds the blocks, and make the loss of them outside. Tokens that an ``attention_mask``
leaves out are in neither mean: the module that makes the loss is called with the mask of all samples, the modules
inside it with that of this rank's own. With micro-batches the loss is the mean of theirs, as it is of one process that
adds up their gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.balancing import LOGITS, asks_balance
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.expert.find import find_mixtures
from galvatron_lite.parallelism.sharded.groups import pieces_of, take_pieces
from galvatron_lite.parallelism.sharded.tensor import specs_of, to_local
from galvatron_lite.parallelism.tensor.group import ProcessTensorGroup
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import LayerAssignment, glue_of
from galvatron_lite.runtime.mesh import Meshes

_GATHERED, _MASK = "_of_all_tokens", "attention_mask"


def check_router_losses(model: nn.Module, batch: Any, plan: Plan) -> None:
    """Raise InputError for a loss on routers' logits under a plan whose stages have those of their own blocks alone."""
    if len(plan.stages) > 1 and asks_balance(model, batch):
        remedy = (
            f"Its loss needs the routers' logits of all blocks, which no one of {len(plan.stages)} stages has. Plan it "
            f"with one stage (--fix pipeline=1), or set config.output_{LOGITS}=False."
        )
        raise InputError(f"output_{LOGITS}", True, remedy)


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the ranks of a stage have a block's tokens between them."""

    group: dist.ProcessGroup | None  # ranks with other tokens; None: each has all of them
    scale: float  # how many times too small the ranks' gradients of a loss of all tokens are together
    samples: tuple[int, int]  # this rank's share of the samples, of how many
    tokens: tuple[int, int]  # this rank's share of those tokens of its samples that a tensor group has, of how many


@dataclass(slots=True)
class _Masks:
    """The attention mask of a call: of all samples for the loss, of this rank's for everything else."""

    group: dist.ProcessGroup | None
    full: Tensor | None = None
    local: Tensor | None = None

    def widen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the module that makes the loss."""
        named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        self.local = self.full = named.get(_MASK)
        if self.local is not None and self.group is not None:
            sent = self.local.byte() if self.local.dtype is torch.bool else self.local
            self.full = named[_MASK] = ProcessTensorGroup(self.group).all_gather(sent, 0).to(self.local.dtype)
        return (), named

    def narrow(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the modules inside it."""
        if self.local is None:
            return None

        def narrowed(value: Any) -> Any:
            return self.local if value is self.full else value

        return tuple(map(narrowed, args)), {name: narrowed(one) for name, one in kwargs.items()}


def install_router_losses(
    model: nn.Module, stage: Sequence[LayerAssignment], meshes: Meshes, experts: Collection[str] = ()
) -> None:
    """Have the modules around the blocks return the routers' logits of all tokens, in place."""
    spread = {name.rpartition(".")[0] for name in experts}

    def is_mixed(path: str) -> bool:
        return bool(find_mixtures(model.get_submodule(path))) or any(name.startswith(f"{path}.") for name in spread)

    mixed = [one for one in stage if one.layer.role is Role.BLOCK and is_mixed(one.layer.modules[0])]
    glue = glue_of(stage)
    shares = [_shares(placed, glue, meshes) for placed in mixed]
    if all(share.group is None and share.scale == 1 for share in shares):
        return
    paths = {path.rpartition(".")[0] for placed in mixed for path in placed.layer.modules}
    around = {".".join(path.split(".")[:depth]) for path in paths for depth in range(len(path.split(".")) + 1)}
    # the outermost module whose calls say whether it makes the loss
    takes = {path: inspect.signature(model.get_submodule(path).forward).parameters for path in sorted(around)}
    maker = next((path for path, names in takes.items() if {f"output_{LOGITS}", _MASK} <= set(names)), None)
    masks = None if maker is None else _Masks(meshes.groups(glue.strategy).batch)
    if masks is not None and maker is not None:
        model.get_submodule(maker).register_forward_pre_hook(masks.widen, with_kwargs=True)
        for inner in model.get_submodule(maker).children():
            inner.register_forward_pre_hook(masks.narrow, with_kwargs=True)
    hook = _Hook(tuple(shares), masks)
    for path in sorted(around, reverse=True):
        model.get_submodule(path).register_forward_hook(hook, with_kwargs=True)


def _shares(placed: LayerAssignment, glue: LayerAssignment, meshes: Meshes) -> _Shares:
    strategy, groups = placed.strategy, meshes.groups(placed.strategy)
    splits_tokens = placed.layout.sequence > 1
    group = groups.everyone if splits_tokens else groups.states.gradients
    ranks = 1 if group is None else group.size()
    samples = (groups.batch_index, strategy.batch_degree)
    tokens = (groups.weights_index, placed.layout.sequence) if splits_tokens else (0, 1)
    return _Shares(group, glue.strategy.token_degree / ranks, samples, tokens)


@dataclass(frozen=True, slots=True)
class _Hook:
    shares: tuple[_Shares, ...]
    masks: _Masks | None

    def __call__(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        logits = getattr(output, LOGITS, None)
        if not isinstance(logits, tuple) or not logits or hasattr(logits[0], _GATHERED):
            return output
        if self.masks is None and kwargs.get(_MASK) is not None:
            remedy = "No module is seen to take both and make the loss of them: leave one of them out."
            raise InputError(f"output_{LOGITS}", True, remedy)
        if len(logits) != len(self.shares):
            remedy = (
                f"{len(self.shares)} were expected, one of each block with experts. Compiled blocks may run twice, "
                f"and return too many: train without compile=, or set config.output_{LOGITS}=False."
            )
            raise InputError(f"output_{LOGITS}", f"{len(logits)} {LOGITS}", remedy)
        mask = None if self.masks is None else self.masks.full
        every = (_of_all_tokens(one, shares, mask) for one, shares in zip(logits, self.shares, strict=True))
        output[LOGITS] = tuple(every)
        return output


def _of_all_tokens(logits: Tensor, shares: _Shares, mask: Tensor | None) -> Tensor:
    """The logits (tokens, experts) of all ranks of a group, in the order of a mask (samples, tokens) of them all."""
    for cut in specs_of(logits):
        if cut.extent % cut.group.size:
            remedy = f"A loss on the {LOGITS} needs tokens that {cut.group.size} ranks can share evenly: pad the batch."
            raise InputError("tokens", cut.extent, remedy)
    every: Tensor = _Gather.apply(to_local(logits), shares.group, shares.scale)  # type: ignore[no-untyped-call]
    if mask is not None:
        if mask.dim() != 2 or mask.numel() != every.shape[0]:
            remedy = f"With output_{LOGITS} give one of shape (samples, tokens), for {every.shape[0]} tokens in all."
            raise InputError(_MASK, tuple(mask.shape), remedy)
        every = every[_order(logits, shares, mask)] if shares.group is not None else every
    setattr(every, _GATHERED, True)
    return every


def _order(logits: Tensor, shares: _Shares, mask: Tensor) -> Tensor:
    """Where each token of the mask, read row by row, is among those gathered from the ranks of a group."""
    assert shares.group is not None
    samples, tokens = mask.shape
    (sample, of), (part, parts) = shares.samples, shares.tokens
    places = torch.arange(mask.numel(), device=mask.device).view(of, samples // of, tokens)[sample].flatten()
    for cut in specs_of(logits):  # whose extent is that of one of the parts
        places = take_pieces(places, 0, pieces_of(len(places), cut.group, cut.group.rank))
    places = places.view(samples // of, parts, -1)[:, part].flatten()
    return ProcessTensorGroup(shares.group).all_gather(places, 0).argsort()


class _Gather(torch.autograd.Function):
    """Every rank has the same loss of all tokens; their gradients together are ``scale`` times too small."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup | None, scale: float) -> Tensor:
        line = ctx.line = None if group is None else ProcessTensorGroup(group)
        ctx.scale = scale
        return logits.clone() if line is None else line.all_gather(logits, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scaled = gradient * ctx.scale
        return (scaled if ctx.line is None else ctx.line.reduce_scatter(scaled, 0)), None, None
