"""A cheap double of a block whose every matmul can be watched and replaced, to find and check tensor parallelism.

The double has the block's structure and code. Each linear layer computes with a random weight of low rank instead of
its own, so a block of any size runs on a handful of tokens in milliseconds and without memory for its weights; a wrong
way to split it still gives wrong numbers. All other parameters are random, in float64, on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.regions import is_linear, output_dim, weight_of

RANK = 16
"""Rank of the random weights."""
TOKENS_KEPT = 8
"""Tokens of a sample the double is run on, where the block allows it."""
SAMPLES_KEPT = 2
"""Samples the double is run on."""
MAX_OTHER_ITEMS = 50_000_000
"""Most parameter items outside linear layers that are made for a check."""

Handler = Callable[["LowRank", Tensor], Tensor]
"""What a linear of the double computes: (its weight, its input) → output."""


class ProbeError(TraceError):
    """A block that cannot be run on its own."""

    def __init__(self, why: str) -> None:
        super().__init__("block", why, "Give arguments with which the block runs on its own.")
        self.why = why


@dataclass(frozen=True, slots=True)
class LowRank:
    """Stand-in for a linear layer: x → (x @ into) @ out + bias, with into [inputs, RANK] and out [RANK, outputs]."""

    into: Tensor
    out: Tensor
    bias: Tensor | None

    def __call__(self, tensor: Tensor) -> Tensor:
        """The layer's output [..., outputs]."""
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
        """A rank's columns, each fused part split by itself."""
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
    hidden: Tensor  # the hidden state
    weights: dict[str, LowRank]  # stand-in weights of its linear layers by path
    # what a linear does instead of its stand-in, by path; changed from run to run
    handlers: dict[str, Handler] = field(default_factory=dict)

    def run(self, handlers: Mapping[str, Handler], hidden: Tensor | None = None) -> list[Tensor]:
        """Output tensors of the block, some of its linears replaced, perhaps on another hidden state."""
        self.handlers = dict(handlers)

        def swap(tensor: Tensor) -> Tensor:
            return hidden if hidden is not None and tensor is self.hidden else tensor

        with torch.enable_grad():
            output = self.block(*map_tensors(self.args, swap), **map_tensors(self.kwargs, swap))
        return list(tensors_of(output))

    def call(self, path: str, tensor: Tensor) -> Tensor:
        """What the linear at ``path`` returns in this run."""
        handler = self.handlers.get(path)
        return handler(self.weights[path], tensor) if handler else self.weights[path](tensor)


def make_probe(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], small: bool) -> Probe:
    """The double of a block.

    Args:
        block: on any device, meta included; not changed.
        args: its positional inputs, on any device.
        kwargs: its keyword inputs. Key-value caches are left out.
        small: whether to cut samples and tokens down.

    Raises:
        ProbeError: the block cannot be copied, has no hidden state, or too much beside its linear layers.
    """
    hidden = find_hidden(args, kwargs)
    generator = torch.Generator().manual_seed(0)
    linears = callable_linears(block)
    double = _copy_block(block, linears, generator)
    cut = _Cut(hidden, small)
    real = partial(_real_input, cut=cut, generator=generator)
    new_args = map_tensors(without_caches(tuple(args)), real)
    new_kwargs = map_tensors(without_caches(dict(kwargs)), real)
    new_hidden = find_hidden(new_args, new_kwargs)
    new_hidden.data = torch.randn(new_hidden.shape, generator=generator, dtype=torch.float64)
    new_hidden.requires_grad_()
    weights = {path: _low_rank(linear, generator) for path, linear in linears.items()}
    probe = Probe(double, new_args, new_kwargs, new_hidden, weights)
    for path in linears:
        double.get_submodule(path).forward = partial(probe.call, path)
    for mixture in routed_experts(block):
        double.get_submodule(mixture.path).forward = _experts_stand_in(mixture, new_hidden.shape[-1], generator)
    return probe


def routed_experts(block: nn.Module) -> list[BlockMixture]:
    """The mixtures of a block whose experts are called with tokens and what a router chose for them."""
    return [mixture for mixture in find_mixtures(block) if not mixture.reason]


def _experts_stand_in(mixture: BlockMixture, hidden: int, generator: torch.Generator) -> Callable[..., Tensor]:
    """Stand-in for the experts of a mixture: one low-rank product, scaled by what is drawn for each expert."""
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    into, out, scales = normal(hidden, RANK) / math.sqrt(hidden), normal(RANK, hidden) / 4, normal(mixture.experts)

    def experts(tensor: Tensor, index: Tensor, weights: Tensor, **_: Any) -> Tensor:
        shares = (weights * scales[index]).sum(-1, keepdim=True)
        return (tensor @ into) @ out * shares

    return experts


def callable_linears(block: nn.Module) -> dict[str, nn.Module]:
    """Plain linear layers by path; not those whose weight ``nn.MultiheadAttention`` uses directly."""
    fused = {id(module.out_proj) for module in block.modules() if isinstance(module, nn.MultiheadAttention)}
    return {path: m for path, m in block.named_modules() if path and is_linear(m) and id(m) not in fused}


def find_hidden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden state among a block's inputs: ``hidden_states``, or the first float tensor with a feature dim.

    Raises:
        ProbeError: there is none.
    """
    named = kwargs.get("hidden_states")
    candidates = chain([named] if isinstance(named, Tensor) else [], tensors_of(args), tensors_of(kwargs))
    for tensor in candidates:
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor
    raise ProbeError("no floating-point tensor is among its inputs")


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with every tensor in it (in tuples, lists and dicts) changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in a value, also in tuples, lists and mappings (the outputs of transformers' models are some)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(tensors_of, value.values()))
    elif isinstance(value, (tuple, list)):
        yield from chain.from_iterable(map(tensors_of, value))


def without_caches(value: Any) -> Any:
    """The value with key-value caches replaced by None: training has no use for them, and they grow with each run."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(without_caches, value))
    if isinstance(value, dict):
        return {key: without_caches(item) for key, item in value.items()}
    return None if type(value).__name__.endswith("Cache") else value


class _Cut:
    """Cuts a block's inputs down to a few samples and tokens, told by the extents of its hidden state."""

    def __init__(self, hidden: Tensor, small: bool) -> None:
        self._samples = hidden.shape[0]
        self._tokens = hidden.shape[1] if hidden.dim() == 3 else None
        self._hidden = hidden.shape
        self._small = small

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape a tensor is cut to. Features of what is shaped like the hidden state stay, however many tokens."""
        cut = tuple(self._extent(dim, extent) for dim, extent in enumerate(tensor.shape))
        return (*cut[:2], *tensor.shape[2:]) if tensor.shape == self._hidden else cut

    def _extent(self, dim: int, extent: int) -> int:
        """Tokens may come first, too: tables of rotary positions are (tokens, head size)."""
        if not self._small:
            return extent
        if dim == 0 and extent == self._samples:
            return min(extent, SAMPLES_KEPT)
        return min(extent, TOKENS_KEPT) if extent == self._tokens else extent


def _real_input(tensor: Tensor, cut: _Cut, generator: torch.Generator) -> Tensor:
    shape = cut.shape(tensor)
    if not _has_values(tensor):
        return _made_up(shape, tensor.dtype, generator).requires_grad_(tensor.requires_grad)
    corner = tensor.detach()[tuple(slice(extent) for extent in shape)].cpu()
    corner = corner.double() if tensor.is_floating_point() else corner.clone()
    return corner.requires_grad_(tensor.requires_grad)


def _has_values(tensor: Tensor) -> bool:
    """Whether it is a plain tensor with data, not a meta or fake one."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def _made_up(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values for a tensor that has none: random floats, places 0, 1, 2, ... along the last dim.

    Masks alternate: no row is all true or all false, whatever true means.
    """
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype == torch.bool:
        return (torch.arange(math.prod(shape)) % 2 == 0).reshape(shape)
    return torch.arange(shape[-1] if shape else 1).expand(shape or (1,)).reshape(shape).to(dtype).clone()


def _low_rank(linear: nn.Module, generator: torch.Generator) -> LowRank:
    """Random weights with which unit-variance inputs give unit-variance outputs."""
    weight, dim = weight_of(linear), output_dim(linear)
    inputs, outputs = weight.shape[1 - dim], weight.shape[dim]
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    bias = None if linear.bias is None else normal(outputs)
    return LowRank(normal(inputs, RANK) / math.sqrt(inputs), normal(RANK, outputs) / math.sqrt(RANK), bias)


def _copy_block(block: nn.Module, linears: Mapping[str, nn.Module], generator: torch.Generator) -> nn.Module:
    """A copy in which linear weights are on meta and all other parameters and buffers are real, in evaluation mode."""
    bare = {id(parameter) for linear in linears.values() for parameter in linear.parameters()}
    for mixture in routed_experts(block):
        bare |= {id(block.get_submodule(mixture.path).get_parameter(name)) for name in mixture.parameters}
    others = sum(parameter.numel() for parameter in block.parameters() if id(parameter) not in bare)
    if others > MAX_OTHER_ITEMS:
        raise ProbeError(f"it holds {others:,} parameter items outside linear layers, too many to check a split of")
    memo: dict[int, Any] = {}
    for parameter in block.parameters():
        memo[id(parameter)] = _stand_in(parameter, id(parameter) in bare, generator)
    for tensor in chain(block.buffers(), *(tensors_of(vars(module)) for module in block.modules())):
        if id(tensor) not in memo:
            memo[id(tensor)] = _real_buffer(tensor, generator)
    try:
        double = copy.deepcopy(block, memo)
    except Exception as error:
        raise ProbeError(f"it cannot be copied ({describe(error)})") from error
    for module in double.modules():
        _forget_hooks(module)
    return double.eval()


def _forget_hooks(module: nn.Module) -> None:
    """Drops hooks that came along with the copy: they belong to whoever watches the original.

    torch has no public way to list hooks; these two names are what ``register_forward_*`` has filled since 1.x.
    """
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def _stand_in(parameter: nn.Parameter, is_bare: bool, generator: torch.Generator) -> nn.Parameter:
    if is_bare:
        return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float64, device="meta"), requires_grad=False)
    if not parameter.is_floating_point():
        return nn.Parameter(_real_buffer(parameter, generator), requires_grad=False)
    low = 0.5 if parameter.dim() < 2 else -0.5
    return nn.Parameter(low + torch.rand(parameter.shape, generator=generator, dtype=torch.float64))


def _real_buffer(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not _has_values(tensor):
        return _made_up(tensor.shape, tensor.dtype, generator)
    values = tensor.detach().cpu()
    return values.double() if tensor.is_floating_point() else values.clone()


def describe(error: Exception) -> str:
    """An error in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
