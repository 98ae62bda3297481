"""A small double of a block, whose linear layers can be recorded and replaced, to infer how the block can be split.

The double runs the block's code on the CPU in float64. Each linear layer has a random weight of low rank, so that a
block of any size runs on a few tokens in milliseconds and without memory for its weights, while a wrong split still
gives wrong numbers. All other parameters are random.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.regions import is_linear, output_dim, weight_of

RANK = 16
"""Rank of the random weights."""
TOKENS_KEPT, SAMPLES_KEPT = 8, 2
"""Tokens and samples of the hidden state that the double runs on, if the block allows it."""
MAX_OTHER_ITEMS = 50_000_000
"""Most parameter items outside linear layers that are created for a check."""

Handler = Callable[["LowRank", Tensor], Tensor]
"""Replaces a linear layer of the double: (weight, input) → output."""


class ProbeError(TraceError):
    """A block that cannot be run separately."""

    def __init__(self, reason: str) -> None:
        super().__init__("block", reason, "Give arguments with which the block runs on its own.")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LowRank:
    """A stand-in for a linear layer: x → (x @ into) @ out + bias, with into [inputs, RANK] and out [RANK, outputs]."""

    into: Tensor
    out: Tensor
    bias: Tensor | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the output [..., outputs]."""
        result = (tensor @ self.into) @ self.out
        return result if self.bias is None else result + self.bias

    @property
    def inputs(self) -> int:
        """Input features."""
        return self.into.shape[0]

    @property
    def outputs(self) -> int:
        """Output features."""
        return self.out.shape[1]

    def columns(self, parts: Sequence[int], degree: int, rank: int) -> LowRank:
        """Return the columns of a rank; each fused part is split separately."""
        starts = [sum(parts[:index]) for index in range(len(parts))]
        shares = [share(part, degree, rank) for part in parts]
        index = torch.cat([torch.arange(s + o, s + o + n) for s, (o, n) in zip(starts, shares, strict=True)])
        return LowRank(self.into, self.out[:, index], None if self.bias is None else self.bias[index])


@dataclass
class Probe:
    """The double of a block, with small inputs."""

    block: nn.Module  # the double
    args: tuple[Any, ...]  # positional inputs, the hidden state among them
    kwargs: dict[str, Any]  # keyword inputs
    hidden: Tensor  # hidden state
    weights: dict[str, LowRank]  # stand-in weights of its linear layers by path
    handlers: dict[str, Handler] = field(default_factory=dict)  # replacements in the current run, by path

    def run(self, handlers: Mapping[str, Handler], hidden: Tensor | None = None) -> list[Tensor]:
        """Run the double with some linears replaced, and maybe another hidden state; return the output tensors."""
        self.handlers = dict(handlers)

        def swap(tensor: Tensor) -> Tensor:
            return hidden if hidden is not None and tensor is self.hidden else tensor

        with torch.enable_grad():
            output = self.block(*map_tensors(self.args, swap), **map_tensors(self.kwargs, swap))
        return list(tensors_of(output))

    def call(self, path: str, tensor: Tensor) -> Tensor:
        """Run the linear at ``path``."""
        handler = self.handlers.get(path)
        return handler(self.weights[path], tensor) if handler else self.weights[path](tensor)


def make_probe(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], small: bool) -> Probe:
    """Make the double of a block.

    Args:
        block: on any device, also meta; does not change.
        args: its positional inputs, on any device.
        kwargs: its keyword inputs. Key-value caches are left out.
        small: whether to reduce samples and tokens.

    Raises:
        ProbeError: the block cannot be copied, has no hidden state, or too many parameters outside linear layers.
    """
    shape = find_hidden(args, kwargs).shape
    generator = torch.Generator().manual_seed(0)
    fused = {id(module.out_proj) for module in block.modules() if isinstance(module, nn.MultiheadAttention)}
    linears = {
        path: module for path, module in block.named_modules() if path and is_linear(module) and id(module) not in fused
    }
    double = _copy_block(block, linears, generator)

    def real(tensor: Tensor) -> Tensor:
        kept = _small_shape(tensor.shape, shape) if small else tuple(tensor.shape)
        if not _has_values(tensor):
            return _example(kept, tensor.dtype, generator).requires_grad_(tensor.requires_grad)
        corner = tensor.detach()[tuple(slice(extent) for extent in kept)].cpu()
        corner = corner.double() if tensor.is_floating_point() else corner.clone()
        return corner.requires_grad_(tensor.requires_grad)

    new_args = map_tensors(_without_caches(tuple(args)), real)
    new_kwargs = map_tensors(_without_caches(dict(kwargs)), real)
    hidden = find_hidden(new_args, new_kwargs)
    hidden.data = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    hidden.requires_grad_()
    weights = {path: _low_rank(linear, generator) for path, linear in linears.items()}
    probe = Probe(double, new_args, new_kwargs, hidden, weights)
    for path in linears:
        double.get_submodule(path).forward = partial(probe.call, path)
    for mixture in routed_experts(block):
        double.get_submodule(mixture.path).forward = _experts_stand_in(mixture, hidden.shape[-1], generator)
    return probe


def routed_experts(block: nn.Module) -> list[BlockMixture]:
    """Return the mixtures of a block whose experts are called with tokens and the choices of a router."""
    return [mixture for mixture in find_mixtures(block) if not mixture.reason]


def find_hidden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden state among a block's inputs: ``hidden_states``, or the first float tensor of two dims or more.

    Raises:
        ProbeError: there is none.
    """
    named = kwargs.get("hidden_states")
    for tensor in chain([named] if isinstance(named, Tensor) else [], tensors_of(args), tensors_of(kwargs)):
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor
    raise ProbeError("no floating-point tensor is among its inputs")


def describe(error: Exception) -> str:
    """Return an error as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _experts_stand_in(mixture: BlockMixture, hidden: int, generator: torch.Generator) -> Callable[..., Tensor]:
    """A low-rank product, scaled by a random number for each expert."""
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    into, out, scales = normal(hidden, RANK) / math.sqrt(hidden), normal(RANK, hidden) / 4, normal(mixture.experts)

    def experts(tensor: Tensor, index: Tensor, weights: Tensor, **_: Any) -> Tensor:
        return (tensor @ into) @ out * (weights * scales[index]).sum(-1, keepdim=True)

    return experts


def _without_caches(value: Any) -> Any:
    """Replace key-value caches by None: training does not use them, and they grow with each run."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(_without_caches, value))
    if isinstance(value, dict):
        return {key: _without_caches(item) for key, item in value.items()}
    return None if type(value).__name__.endswith("Cache") else value


def _small_shape(shape: torch.Size, hidden: torch.Size) -> tuple[int, ...]:
    """The shape with fewer samples and tokens, whose dims have the extents of the hidden state's.

    Tokens may also be the first dim: tables of rotary positions are (tokens, head size). In tensors with the shape of
    the hidden state [samples, tokens, hidden], features stay even if there are as many tokens.
    """
    tokens = hidden[1] if len(hidden) == 3 else None
    kept = list(shape)
    for dim, extent in enumerate(shape):
        if dim == 0 and extent == hidden[0]:
            kept[dim] = min(extent, SAMPLES_KEPT)
        elif extent == tokens and not (dim > 1 and shape == hidden):
            kept[dim] = min(extent, TOKENS_KEPT)
    return tuple(kept)


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _example(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random floats, alternating masks without rows of one value, or integers 0, 0, 1, 1, ... along the last dim.

    If all integers differed, numbers of documents would let each token attend to itself alone, whatever the scores.
    """
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bool:
        return (torch.arange(math.prod(shape)) % 2 == 0).reshape(shape)
    return (torch.arange(shape[-1] if shape else 1) // 2).expand(shape or (1,)).reshape(shape).to(dtype).clone()


def _low_rank(linear: nn.Module, generator: torch.Generator) -> LowRank:
    """A random weight that keeps the variance of unit-variance inputs."""
    weight, dim = weight_of(linear), output_dim(linear)
    inputs, outputs = weight.shape[1 - dim], weight.shape[dim]
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    bias = None if linear.bias is None else normal(outputs)
    return LowRank(normal(inputs, RANK) / math.sqrt(inputs), normal(RANK, outputs) / math.sqrt(RANK), bias)


def _copy_block(block: nn.Module, linears: Mapping[str, nn.Module], generator: torch.Generator) -> nn.Module:
    """Copy a block in evaluation mode, with linear weights on meta and values for all other parameters and buffers."""
    bare = {id(parameter) for linear in linears.values() for parameter in linear.parameters()}
    for mixture in routed_experts(block):
        bare |= {id(block.get_submodule(mixture.path).get_parameter(name)) for name in mixture.parameters}
    others = sum(parameter.numel() for parameter in block.parameters() if id(parameter) not in bare)
    if others > MAX_OTHER_ITEMS:
        raise ProbeError(f"it holds {others:,} parameter items outside linear layers, too many to check a split of")
    memo: dict[int, Any] = {
        id(parameter): _random_parameter(parameter, id(parameter) in bare, generator)
        for parameter in block.parameters()
    }
    for tensor in chain(block.buffers(), *(tensors_of(vars(module)) for module in block.modules())):
        if id(tensor) not in memo:
            memo[id(tensor)] = _real_buffer(tensor, generator)
    try:
        double = copy.deepcopy(block, memo)
    except Exception as error:
        raise ProbeError(f"it cannot be copied ({describe(error)})") from error
    for hooks in (double._forward_hooks, double._forward_pre_hooks):
        hooks.clear()  # they see what the block takes and returns, which is complete; those inside may see shards
    return double.eval()


def _random_parameter(parameter: nn.Parameter, is_bare: bool, generator: torch.Generator) -> nn.Parameter:
    if is_bare:
        return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float64, device="meta"), requires_grad=False)
    if not parameter.is_floating_point():
        return nn.Parameter(_real_buffer(parameter, generator), requires_grad=False)
    low = 0.5 if parameter.dim() < 2 else -0.5
    return nn.Parameter(low + torch.rand(parameter.shape, generator=generator, dtype=torch.float64))


def _real_buffer(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not _has_values(tensor):
        return _example(tensor.shape, tensor.dtype, generator)
    values = tensor.detach().cpu()
    return values.double() if tensor.is_floating_point() else values.clone()
