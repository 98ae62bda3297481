"""Losses that balance the experts of a mixture, for the global batch.

Such a loss multiplies two means over tokens: for each expert the share of tokens that chose it, and its mean
probability (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6). The mean of the ranks' products is not the product
of the means over all tokens, so every rank gathers the routers' logits of all tokens: transformers' models return them
from the module that contains the blocks, and compute the loss outside of it. Tokens that an ``attention_mask`` masks
are in neither mean: the module that computes the loss is called with the mask of all samples, the modules inside it
with the mask of this rank's samples. With micro-batches the loss is the mean of theirs, as in one process that
accumulates their gradients.
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
    """Raise InputError for a loss of routers' logits under a pipeline, whose stages have only those of their blocks."""
    if len(plan.stages) > 1 and asks_balance(model, batch):
        remedy = (
            f"Its loss needs the routers' logits of all blocks, which no one of {len(plan.stages)} stages has. Plan it "
            f"with one stage (--fix pipeline=1), or set config.output_{LOGITS}=False."
        )
        raise InputError(f"output_{LOGITS}", True, remedy)


@dataclass(frozen=True, slots=True)
class _Shares:
    """How the ranks of a stage share a block's tokens."""

    group: dist.ProcessGroup | None  # ranks with other tokens; None: each has all tokens
    scale: float  # factor of the sum of the ranks' gradients of a loss of all tokens
    samples: tuple[int, int]  # index of this rank's share of the samples, and number of shares
    tokens: tuple[int, int]  # index of its share of the tokens that its tensor group has, and number of shares


@dataclass(slots=True)
class _Masks:
    """The attention mask of a call: that of all samples for the loss, that of this rank's samples for the rest."""

    group: dist.ProcessGroup | None
    full: Tensor | None = None
    local: Tensor | None = None

    def widen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the module that computes the loss."""
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
    """Let the modules around the blocks return the routers' logits of all tokens, in place."""
    spread = {name.rpartition(".")[0] for name in experts}

    def is_mixed(path: str) -> bool:
        return bool(find_mixtures(model.get_submodule(path))) or any(name.startswith(f"{path}.") for name in spread)

    mixed = [placed for placed in stage if placed.layer.role is Role.BLOCK and is_mixed(placed.layer.modules[0])]
    glue = glue_of(stage)
    shares = [_shares(placed, glue, meshes) for placed in mixed]
    if all(share.group is None and share.scale == 1 for share in shares):
        return
    paths = {path.rpartition(".")[0] for placed in mixed for path in placed.layer.modules}
    around = {".".join(path.split(".")[:depth]) for path in paths for depth in range(len(path.split(".")) + 1)}
    # the outermost module whose arguments say whether it computes the loss
    arguments = {path: inspect.signature(model.get_submodule(path).forward).parameters for path in sorted(around)}
    computing = next((path for path, names in arguments.items() if {f"output_{LOGITS}", _MASK} <= set(names)), None)
    masks = None
    if computing is not None:
        masks = _Masks(meshes.groups(glue.strategy).batch)
        model.get_submodule(computing).register_forward_pre_hook(masks.widen, with_kwargs=True)
        for child in model.get_submodule(computing).children():
            child.register_forward_pre_hook(masks.narrow, with_kwargs=True)
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
    """Hook of a module around the blocks, which gathers the logits that it returns."""

    shares: tuple[_Shares, ...]  # by block with experts
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
        pairs = zip(logits, self.shares, strict=True)
        output[LOGITS] = tuple(_gathered(local, shares, mask) for local, shares in pairs)
        return output


def _gathered(logits: Tensor, shares: _Shares, mask: Tensor | None) -> Tensor:
    """The logits (tokens, experts) of all ranks of a group, in the order of the full mask (samples, tokens)."""
    for cut in specs_of(logits):
        if cut.extent % cut.group.size:
            remedy = f"A loss on the {LOGITS} needs tokens that {cut.group.size} ranks can share evenly: pad the batch."
            raise InputError("tokens", cut.extent, remedy)
    full: Tensor = _Gather.apply(to_local(logits), shares.group, shares.scale)  # type: ignore[no-untyped-call]
    if mask is not None:
        if mask.dim() != 2 or mask.numel() != full.shape[0]:
            remedy = f"With output_{LOGITS} give one of shape (samples, tokens), for {full.shape[0]} tokens in all."
            raise InputError(_MASK, tuple(mask.shape), remedy)
        full = full[_order(logits, shares, mask)] if shares.group is not None else full
    setattr(full, _GATHERED, True)
    return full


def _order(logits: Tensor, shares: _Shares, mask: Tensor) -> Tensor:
    """The index of each token of the mask, row by row, among those gathered from the ranks of a group."""
    assert shares.group is not None
    samples, tokens = mask.shape
    (sample_share, sample_shares), (token_share, token_shares) = shares.samples, shares.tokens
    rows = samples // sample_shares
    places = torch.arange(mask.numel(), device=mask.device).view(sample_shares, rows, tokens)[sample_share].flatten()
    for cut in specs_of(logits):  # whose extent is that of one of the parts
        places = take_pieces(places, 0, pieces_of(len(places), cut.group, cut.group.rank))
    places = places.view(rows, token_shares, -1)[:, token_share].flatten()
    return ProcessTensorGroup(shares.group).all_gather(places, 0).argsort()


class _Gather(torch.autograd.Function):
    """Gathers logits. All ranks compute the same loss of them; the sum of their gradients is multiplied by a scale."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup | None, scale: float) -> Tensor:
        line = ctx.line = None if group is None else ProcessTensorGroup(group)
        ctx.scale = scale
        return logits.clone() if line is None else line.all_gather(logits, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scaled = gradient * ctx.scale
        return (scaled if ctx.line is None else ctx.line.reduce_scatter(scaled, 0)), None, None
