"""Gives a layer its share of a tensor-parallel group: slices its weights in place and hooks in the collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.expert.slices import sum_slices
from galvatron_lite.parallelism.precision import autocast_dtype
from galvatron_lite.parallelism.recompute.sums import row_product
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.functions import (
    copy_to_group,
    gather_last,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.regather import GatheredInput, enter_region
from galvatron_lite.parallelism.tensor.regions import (
    ExpertSlices,
    Region,
    TensorPlan,
    TokenGather,
    bias_of,
    output_dim,
    weight_of,
)
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, gather_full, slice_full
from galvatron_lite.parallelism.vocabulary.logits import whole_logits
from galvatron_lite.parallelism.vocabulary.losses import shared_logits

__all__ = ["ParameterShard", "Placement", "gather_full", "shard_layer", "slice_full"]

Shards = dict[int, ParameterShard]
"""Shards by the identity of the parameter."""


def shard_layer(
    layer: nn.Module | Mapping[str, nn.Module],
    plan: TensorPlan,
    group: TensorGroup,
    sequence_parallel: bool = False,
    *,
    shares_logits: bool = True,
    regather: bool = True,
) -> dict[str, ParameterShard]:
    """Splits a layer over a tensor-parallel group, in place.

    Parameters stay the same objects and hold the local slice (their ``data`` is replaced), so weights tied to another
    layer stay tied: the second layer to be split, by the same degree, finds them split already.
    Under dropout the devices of a group must have the same random state.

    Args:
        layer: a block, or the modules of a layer by their path in the model.
        plan: what ``infer_block`` or ``infer_edge`` found for it.
        group: the devices that share it.
        sequence_parallel: whether hidden states enter and leave split along dim 1 (tokens).
        shares_logits: whether outputs of heads stay shares of the vocabulary until code asks for whole ones (see
            ``parallelism.vocabulary``); else they are gathered at once.
        regather: whether autograd keeps this device's tokens of what sequence parallelism gathers, and gathers them
            again in backward; else all tokens.

    Returns:
        How each parameter lies in the whole one, by its name in ``layer`` (behind the module's path, if several);
        a parameter with several names is listed under each.

    Raises:
        InputError: the plan does not allow the degree or sequence parallelism.
    """
    modules = {"": layer} if isinstance(layer, nn.Module) else dict(layer)
    _check_allowed(plan, group.size, sequence_parallel)
    shards: Shards = {}
    if group.size > 1:
        for region in plan.regions:
            _shard_region(modules, region, group, sequence_parallel, shards, regather)
        for path in plan.embeddings:
            _shard_embedding(find_module(modules, path), group, shards)
        for path in plan.heads:
            _shard_head(find_module(modules, path), group, shards, shares_logits)
        for experts in plan.experts:
            _shard_experts(find_module(modules, experts.path), experts, group, sequence_parallel, shards)
    inner = {name for region in plan.regions for name in region.inner_parameters}
    return {
        name: shards.get(id(parameter)) or _unsplit(parameter, group, sequence_parallel or name in inner)
        for name, parameter in named_parameters(modules)
    }


def named_parameters(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Every name of every parameter of modules given by path."""
    return [
        (f"{path}.{name}".lstrip("."), parameter)
        for path, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def find_module(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """The module at a path, in modules given by path.

    Raises:
        InputError: no module has that path.
    """
    for prefix, module in modules.items():
        if path == prefix:
            return module
        inside = path.removeprefix(f"{prefix}.") if prefix else path
        if inside != path or not prefix:
            return module.get_submodule(inside)
    raise InputError("tensor plan", path, "Use a plan that was inferred for these modules.")


def divide_attributes(layer: nn.Module, region: Region, degree: int) -> None:
    """Divides the region's integer attributes by the degree."""
    for patch in region.attributes:
        setattr(layer.get_submodule(patch.path), patch.name, patch.value // degree)


def _check_allowed(plan: TensorPlan, degree: int, sequence_parallel: bool) -> None:
    if plan.max_degree % degree:
        raise InputError("tensor", degree, f"Use a divisor of {plan.max_degree}. {plan.reason}".rstrip())
    if sequence_parallel and degree > 1 and not plan.sequence_parallel:
        raise InputError("sequence_parallel", True, f"Switch it off for this layer. {plan.reason}".rstrip())


def _unsplit(parameter: nn.Parameter, group: TensorGroup, is_partial: bool) -> ParameterShard:
    placement = Placement.PARTIAL if is_partial and group.size > 1 else Placement.REPLICATED
    return ParameterShard(placement, tuple(parameter.shape), group.size, group.rank)


def _shard_region(
    modules: Mapping[str, nn.Module],
    region: Region,
    group: TensorGroup,
    sequence_parallel: bool,
    shards: Shards,
    regather: bool,
) -> None:
    entrance = _Entrance(group, sequence_parallel, len(region.columns), regather)
    for column in region.columns:
        linear = find_module(modules, column.path)
        _slice_columns(linear, column.parts, group, shards)
        if sequence_parallel and regather:
            linear.forward = partial(entrance.call, linear.forward)
        if not (sequence_parallel and region.gather):
            linear.register_forward_pre_hook(entrance)
    if sequence_parallel and region.gather:
        hook = partial(_gather_argument, region.gather, entrance)
        find_module(modules, region.gather.path).register_forward_pre_hook(hook, with_kwargs=True)
    _make_row(find_module(modules, region.row), entrance, group, sequence_parallel, shards)
    if region.attributes:
        divide_attributes(modules[""], region, group.size)


class _Entrance:
    """Pre-hook of a region's column linears: the first one communicates, the others reuse what it got.

    It keeps the tensors only until the region's last column, or its row, has run.
    """

    def __init__(self, group: TensorGroup, sequence_parallel: bool, columns: int, regather: bool) -> None:
        self._group, self._columns = group, columns
        self._sequence_parallel, self._regather = sequence_parallel, regather
        self._uses = 0
        self._kept: tuple[Tensor, Tensor] | None = None
        self._gathered: GatheredInput | None = None

    def __call__(self, _linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        outside, *rest = args
        if self._kept is None or self._kept[0] is not outside:
            self._kept, self._uses = (outside, self.enter(outside)), 0
        inside = self._kept[1]
        self._uses += 1
        if self._uses == self._columns:
            self._kept = None
        return inside, *rest

    def enter(self, outside: Tensor) -> Tensor:
        """Bring a tensor into the region."""
        if not self._sequence_parallel:
            return copy_to_group(outside, self._group)
        if not self._regather:
            return gather_tokens(outside, self._group)
        inside, self._gathered = enter_region(outside, self._group)
        return inside

    def call(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Call a column linear."""
        return forward(*args, **kwargs) if self._gathered is None else self._gathered.call(forward, *args, **kwargs)

    def forget(self) -> None:
        """Let go of the tensors: the row runs."""
        self._kept = self._gathered = None


def _gather_argument(
    gather: TokenGather, entrance: _Entrance, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook of a module that holds a region: gathers its hidden-state argument along the tokens."""
    if isinstance(gather.argument, str):
        return args, {**kwargs, gather.argument: entrance.enter(kwargs[gather.argument])}
    index = gather.argument
    return (*args[:index], entrance.enter(args[index]), *args[index + 1 :]), kwargs


def slice_parameter(
    parameter: Tensor | None, dim: int, parts: tuple[int, ...], group: TensorGroup, shards: Shards
) -> None:
    """Replaces a parameter's data by the local slice, unless a tied layer has done so already."""
    if parameter is None:
        return
    full = list(parameter.shape)
    full[dim] = sum(parts)
    shard = ParameterShard(Placement.SHARDED, tuple(full), group.size, group.rank, dim, parts)
    shards[id(parameter)] = shard
    if tuple(parameter.shape) == shard.shape:
        parameter.data = slice_full(parameter.data, shard).contiguous()
        parameter.grad = None
    elif tuple(parameter.shape) != shard.local_shape:
        remedy = f"Split layers that share it alike, by {group.size} ways."
        raise InputError("shared parameter of shape", tuple(parameter.shape), remedy)


def _slice_columns(linear: nn.Module, parts: tuple[int, ...], group: TensorGroup, shards: Shards) -> None:
    slice_parameter(weight_of(linear), output_dim(linear), parts, group, shards)
    slice_parameter(bias_of(linear), 0, parts, group, shards)
    local = sum(share(extent, group.size, group.rank)[1] for extent in parts)
    setattr(linear, "out_features" if isinstance(linear, nn.Linear) else "nf", local)


def _make_row(
    linear: nn.Module, entrance: _Entrance, group: TensorGroup, sequence_parallel: bool, shards: Shards
) -> None:
    weight, dim = weight_of(linear), 1 - output_dim(linear)
    slice_parameter(weight, dim, (weight.shape[dim],), group, shards)
    setattr(linear, "in_features" if isinstance(linear, nn.Linear) else "nx", weight.shape[dim])
    leave = reduce_scatter_tokens if sequence_parallel else reduce_from_group
    # An instance attribute, because a hook cannot keep the bias out of the sum over the group.
    linear.forward = partial(_row_forward, linear, entrance, partial(leave, group=group))


def _row_forward(linear: nn.Module, entrance: _Entrance, leave: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Row linear: the local product, summed over the group; then the bias, once."""
    entrance.forget()
    weight, bias = weight_of(linear), bias_of(linear)
    with row_product():
        result = leave(functional.linear(tensor, weight if output_dim(linear) == 0 else weight.t()))
    return result if bias is None else result + bias.to(result.dtype)


def _shard_embedding(embedding: nn.Module, group: TensorGroup, shards: Shards) -> None:
    """Each device looks up its own rows of the vocabulary; the sum over the group has them all."""
    if not isinstance(embedding, nn.Embedding):
        raise InputError("embedding", type(embedding).__name__, "Use a plan that was inferred for these modules.")
    start, length = share(embedding.num_embeddings, group.size, group.rank)
    slice_parameter(embedding.weight, 0, (embedding.num_embeddings,), group, shards)
    embedding.forward = partial(_embedding_forward, embedding, group, start, length)  # type: ignore[method-assign]


def _embedding_forward(embedding: nn.Embedding, group: TensorGroup, start: int, length: int, ids: Tensor) -> Tensor:
    local = ids - start
    elsewhere = (local < 0) | (local >= length)
    padding = None if embedding.padding_idx is None else embedding.padding_idx - start
    if padding is not None and not 0 <= padding < length:
        padding = None
    found = functional.embedding(local.masked_fill(elsewhere, 0), embedding.weight, padding)
    own = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    return reduce_from_group(_in_compute_precision(own), group)


def _in_compute_precision(tensor: Tensor) -> Tensor:
    """As narrow as layers take what autocast leaves in fp32: a sum of one value and zeros loses nothing by it."""
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def _shard_head(head: nn.Module, group: TensorGroup, shards: Shards, shares_logits: bool) -> None:
    """Each device computes its own columns; they stay so, or are gathered. ``out_features`` keeps saying the whole."""
    extent: int = head.out_features if isinstance(head, nn.Linear) else head.nf  # type: ignore[assignment]
    slice_parameter(weight_of(head), output_dim(head), (extent,), group, shards)
    slice_parameter(bias_of(head), 0, (extent,), group, shards)
    give = shared_logits if shares_logits else gather_last
    # no hooks: the head may be a layer, whose forward is replaced where it shares tokens
    head.forward = partial(_head_forward, head.forward, give, group, extent)


def _head_forward(
    forward: Callable[[Tensor], Tensor],
    give: Callable[[Tensor, TensorGroup, int], Tensor],
    group: TensorGroup,
    extent: int,
    tensor: Tensor,
) -> Tensor:
    return give(forward(copy_to_group(whole_logits(tensor), group)), group, extent)


def _shard_experts(
    module: nn.Module, experts: ExpertSlices, group: TensorGroup, sequence_parallel: bool, shards: Shards
) -> None:
    for one in experts.parameters:
        slice_parameter(module.get_parameter(one.name), one.dim, one.parts, group, shards)
    if experts.summed:
        sum_slices(module, group, sequence_parallel)
