"""Split a layer over a tensor-parallel group: slice its weights in place, and hook in the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.expert.apply import sum_slices
from galvatron_lite.parallelism.precision import autocast_dtype
from galvatron_lite.parallelism.recompute.sums import row_product
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.functions import (
    GatheredInput,
    copy_to_group,
    enter_region,
    gather_last,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.regions import (
    ExpertSlices,
    Region,
    TensorPlan,
    TokenGather,
    bias_of,
    output_dim,
    weight_of,
)
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, slice_full
from galvatron_lite.parallelism.vocabulary.logits import full_logits, shared_logits

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
    """Split a layer over a tensor-parallel group, in place.

    Parameters stay the same objects and hold the local slice (their ``data`` is replaced). So weights stay tied to
    other layers: the layer that is split second, by the same degree, finds them split already. With dropout the devices
    of a group must have the same random state.

    Args:
        layer: a block, or the modules of a layer by their path in the model.
        plan: of ``infer_block`` or ``infer_edge`` for it.
        group: the devices that share it.
        sequence_parallel: whether hidden states enter and leave split along dim 1 (tokens).
        shares_logits: whether outputs of heads stay shares of the vocabulary until code reads full ones (see
            ``parallelism.vocabulary``); if not, they are gathered at once.
        regather: whether autograd saves only this device's tokens of inputs that sequence parallelism gathers, and
            gathers them again in backward; if not, it saves all tokens.

    Returns:
        The shard of each parameter by its name in ``layer`` (behind the module's path, if several); a parameter with
        several names is listed under each.

    Raises:
        InputError: the plan does not allow the degree or sequence parallelism.
    """
    modules = {"": layer} if isinstance(layer, nn.Module) else dict(layer)
    if plan.max_degree % group.size:
        raise InputError("tensor", group.size, f"Use a divisor of {plan.max_degree}. {plan.reason}".rstrip())
    if sequence_parallel and group.size > 1 and not plan.sequence_parallel:
        raise InputError("sequence_parallel", True, f"Switch it off for this layer. {plan.reason}".rstrip())
    sharding = _Sharding(modules, group, sequence_parallel)
    if group.size > 1:
        for region in plan.regions:
            sharding.shard_region(region, regather)
        for path in plan.embeddings:
            sharding.shard_embedding(path)
        for path in plan.heads:
            sharding.shard_head(path, shares_logits)
        for experts in plan.experts:
            sharding.shard_experts(experts)
    inner = {name for region in plan.regions for name in region.inner_parameters}
    return shards_by_name(
        named_parameters(modules), sharding.shards, group, lambda name: sequence_parallel or name in inner
    )


def shards_by_name(
    parameters: Iterable[tuple[str, nn.Parameter]], shards: Shards, group: TensorGroup, partial: Callable[[str], bool]
) -> dict[str, ParameterShard]:
    """Return the shard of each parameter; ``partial``: whether an unsplit parameter, by name, has partial gradients."""

    def unsplit(name: str, parameter: nn.Parameter) -> ParameterShard:
        placement = Placement.PARTIAL if group.size > 1 and partial(name) else Placement.REPLICATED
        return ParameterShard(placement, tuple(parameter.shape), group.size, group.rank)

    return {name: shards.get(id(parameter)) or unsplit(name, parameter) for name, parameter in parameters}


def named_parameters(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """List all names of all parameters of modules by path."""
    return [
        (f"{path}.{name}".lstrip("."), parameter)
        for path, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    ]


def find_module(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return the module at a path, in modules by path.

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


def slice_parameter(
    parameter: Tensor | None, dim: int, parts: tuple[int, ...], group: TensorGroup, shards: Shards
) -> None:
    """Replace a parameter's data by the local slice, unless a tied layer did so already."""
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


@dataclass
class _Sharding:
    """A layer while it is split, and the shards so far."""

    modules: Mapping[str, nn.Module]
    group: TensorGroup
    sequence_parallel: bool
    shards: Shards = field(default_factory=dict)

    def shard_region(self, region: Region, regather: bool) -> None:
        for column in region.columns:
            linear = find_module(self.modules, column.path)
            self._slice(weight_of(linear), output_dim(linear), column.parts)
            self._slice(bias_of(linear), 0, column.parts)
            local = sum(share(extent, self.group.size, self.group.rank)[1] for extent in column.parts)
            setattr(linear, "out_features" if isinstance(linear, nn.Linear) else "nf", local)
        entrances = self._enter(region, regather)
        for row in region.rows:
            self._make_row(find_module(self.modules, row), entrances)
        for patch in region.attributes:
            setattr(self.modules[""].get_submodule(patch.path), patch.name, patch.value // self.group.size)

    def _enter(self, region: Region, regather: bool) -> list[_Entrance]:
        """Add entrances at the columns, one for each of their input tensors, or one at a module around them."""
        if self.sequence_parallel and region.gather:
            inside = [*region.feeders, *(column.path for column in region.columns)]
            entrance = self._entrance(inside, regather)
            hook = partial(_gather_argument, region.gather, entrance)
            find_module(self.modules, region.gather.path).register_forward_pre_hook(hook, with_kwargs=True)
            return [entrance]
        entrances = []
        for source in sorted({column.source for column in region.columns}):
            paths = [column.path for column in region.columns if column.source == source]
            entrances.append(self._entrance(paths, regather))
            for path in paths:
                find_module(self.modules, path).register_forward_pre_hook(entrances[-1])
        return entrances

    def _entrance(self, paths: Sequence[str], regather: bool) -> _Entrance:
        """An entrance of linears with one input tensor, which autograd saves only if one of their weights trains."""
        linears = [find_module(self.modules, path) for path in paths]
        again = self.sequence_parallel and regather and any(weight_of(linear).requires_grad for linear in linears)
        entrance = _Entrance(self.group, self.sequence_parallel, len(linears), again)
        for linear in linears if again else ():
            linear.forward = partial(entrance.call, linear.forward)
        return entrance

    def _make_row(self, linear: nn.Module, entrances: Sequence[_Entrance]) -> None:
        weight, dim = weight_of(linear), 1 - output_dim(linear)
        extent = "in_features" if isinstance(linear, nn.Linear) else "nx"
        self._slice(weight, dim, (getattr(linear, extent),))  # a tied layer may have split the weight already
        setattr(linear, extent, weight.shape[dim])
        leave = reduce_scatter_tokens if self.sequence_parallel else reduce_from_group
        # An instance attribute, because a hook cannot keep the bias out of the sum over the group.
        linear.forward = partial(_row_forward, linear, entrances, partial(leave, group=self.group))

    def shard_embedding(self, path: str) -> None:
        """Each device looks up tokens in its rows of the vocabulary; the sum over the group has the rows of all."""
        embedding = find_module(self.modules, path)
        if not isinstance(embedding, nn.Embedding):
            raise InputError("embedding", type(embedding).__name__, "Use a plan that was inferred for these modules.")
        start, length = share(embedding.num_embeddings, self.group.size, self.group.rank)
        self._slice(embedding.weight, 0, (embedding.num_embeddings,))
        run = partial(_embedding_forward, embedding, self.group, start, length)
        embedding.forward = run  # type: ignore[method-assign]

    def shard_head(self, path: str, shares_logits: bool) -> None:
        """Each device computes its columns, which may be gathered. ``out_features`` stays that of the full head."""
        head = find_module(self.modules, path)
        extent: int = head.out_features if isinstance(head, nn.Linear) else head.nf  # type: ignore[assignment]
        self._slice(weight_of(head), output_dim(head), (extent,))
        self._slice(bias_of(head), 0, (extent,))
        forward, group = head.forward, self.group

        def run(tensor: Tensor) -> Tensor:
            columns = forward(copy_to_group(full_logits(tensor), group))
            return shared_logits(columns, group, extent) if shares_logits else gather_last(columns, group, extent)

        # no hooks: the head may be a layer, whose forward is replaced if it shares tokens
        head.forward = run

    def shard_experts(self, experts: ExpertSlices) -> None:
        module = find_module(self.modules, experts.path)
        for parameter in experts.parameters:
            self._slice(module.get_parameter(parameter.name), parameter.dim, parameter.parts)
        if experts.summed:
            sum_slices(module, self.group, self.sequence_parallel)

    def _slice(self, parameter: Tensor | None, dim: int, parts: tuple[int, ...]) -> None:
        slice_parameter(parameter, dim, parts, self.group, self.shards)


class _Entrance:
    """Pre-hook of the columns of a region with one input: the first communicates, and the others reuse the result.

    It holds the tensors until the last column, or the region's row, has run.
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
        """Release the tensors when the row runs."""
        self._kept = self._gathered = None


def _gather_argument(
    gather: TokenGather, entrance: _Entrance, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook of a module that holds a region: gathers its hidden-state argument along the tokens."""
    if isinstance(gather.argument, str):
        return args, {**kwargs, gather.argument: entrance.enter(kwargs[gather.argument])}
    index = gather.argument
    return (*args[:index], entrance.enter(args[index]), *args[index + 1 :]), kwargs


def _row_forward(
    linear: nn.Module, entrances: Sequence[_Entrance], leave: Callable[[Tensor], Tensor], tensor: Tensor
) -> Tensor:
    """Row linear: the local product, summed over the group; then the bias, once."""
    for entrance in entrances:
        entrance.forget()
    weight, bias = weight_of(linear), bias_of(linear)
    with row_product():
        result = leave(functional.linear(tensor, weight if output_dim(linear) == 0 else weight.t()))
    return result if bias is None else result + bias.to(result.dtype)


def _embedding_forward(embedding: nn.Embedding, group: TensorGroup, start: int, length: int, ids: Tensor) -> Tensor:
    local = ids - start
    elsewhere = (local < 0) | (local >= length)
    padding = None if embedding.padding_idx is None else embedding.padding_idx - start
    if padding is not None and not 0 <= padding < length:
        padding = None
    rows = functional.embedding(local.masked_fill(elsewhere, 0), embedding.weight, padding)
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    # in the dtype of the layers' inputs, where autocast keeps fp32: a sum of one value and zeros stays exact
    dtype = autocast_dtype(rows)
    return reduce_from_group(rows if dtype is None else rows.to(dtype), group)
