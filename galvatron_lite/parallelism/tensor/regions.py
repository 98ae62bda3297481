"""Where tensor parallelism splits a layer, as a value: what ``infer`` finds and ``apply`` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Column:
    """A linear whose output features are split."""

    path: str  # module path inside the layer
    # output features of the projections fused in it, each split by itself (GPT-2's query, key and value); one entry
    # where nothing is fused
    parts: tuple[int, ...]
    source: int = 0  # which of the tensors that enter the region it takes in


@dataclass(frozen=True, slots=True)
class AttributePatch:
    """An integer attribute that is divided by the degree (a number of heads, the size of a split)."""

    path: str  # path of the module that holds it; empty for the layer itself
    name: str  # attribute name
    value: int  # what it is before


@dataclass(frozen=True, slots=True)
class TokenGather:
    """Where token shards become whole under sequence parallelism: an argument of a module that holds the columns."""

    path: str  # module path inside the layer
    argument: int | str  # position or keyword of the argument


@dataclass(frozen=True, slots=True)
class Region:
    """Column linears, what runs on their shares, and the row linears that sum up: one, or an adapter's beside it."""

    columns: tuple[Column, ...]  # linears split over their output features
    rows: tuple[str, ...]  # paths of the linears split over their input features, which take in the same columns
    attributes: tuple[AttributePatch, ...] = ()  # integers divided by the degree
    # names of whole parameters used between columns and row: each device has part of their gradient
    inner_parameters: tuple[str, ...] = ()
    # paths of whole linears that columns alone take in (an adapter's first one)
    feeders: tuple[str, ...] = ()
    gather: TokenGather | None = None  # where tokens are gathered under sequence parallelism; None: at the columns


@dataclass(frozen=True, slots=True)
class SlicedParameter:
    """A parameter of a mixture's experts, and how it is sliced."""

    name: str  # inside the module that holds the experts
    dim: int  # along which it is sliced
    parts: tuple[int, ...]  # lengths along ``dim`` of the fused parts, each sliced by itself


@dataclass(frozen=True, slots=True)
class ExpertSlices:
    """A mixture's experts, each of which is sliced: columns, what runs on their shares, and rows, in one module."""

    path: str  # of the module that holds the experts
    parameters: tuple[SlicedParameter, ...]  # all of them
    max_degree: int  # every divisor of it is a legal degree
    # whether the slices' outputs are summed around the module; False: what spreads the experts does
    summed: bool = True


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a layer may be split over a tensor-parallel group."""

    regions: tuple[Region, ...] = ()  # column/row regions of a block
    embeddings: tuple[str, ...] = ()  # paths of embeddings split over the vocabulary
    heads: tuple[str, ...] = ()  # paths of linears split over columns whose outputs are gathered
    max_degree: int = 1  # every divisor of it is a legal degree; 1: tensor parallelism is not offered
    sequence_parallel: bool = False  # whether all else works token by token, so that the group may share the tokens
    reason: str = ""  # what is limited or not offered, and why; empty where nothing is to be said
    experts: tuple[ExpertSlices, ...] = ()  # mixtures whose experts are sliced

    @property
    def collectives(self) -> int:
        """All-gathers plus reduce-scatters of the hidden state in one forward pass (an all-reduce counts as two)."""
        return 2 * (len(self.regions) + len(self.experts) + len(self.embeddings))


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a plain linear layer: ``nn.Linear`` or transformers' ``Conv1D``, forward not overridden.

    One whose weight is computed from other parameters (``weight_norm``, ``spectral_norm``) is not.
    """
    if not holds_weight(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def holds_weight(module: nn.Module) -> bool:
    """Whether a module's weight is a parameter of its own, not computed from others."""
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False))


def output_dim(linear: nn.Module) -> int:
    """Dim of the weight that holds the output features: 0 for ``nn.Linear``, 1 for ``Conv1D`` (transposed)."""
    return 0 if isinstance(linear, nn.Linear) else 1


def weight_of(linear: nn.Module) -> nn.Parameter:
    """The weight of a linear layer or an embedding."""
    weight = linear.get_parameter("weight")
    if weight.dim() != 2:
        raise TypeError(f"weight of shape {tuple(weight.shape)} is not a matrix")
    return weight


def bias_of(linear: nn.Module) -> Tensor | None:
    """The bias of a linear layer, None where it has none."""
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return bias
