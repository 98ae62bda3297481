"""A plan of where tensor parallelism splits a layer: ``infer`` makes it, and ``apply`` carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Column:
    """A linear whose output features are split."""

    path: str  # module path inside the layer
    parts: tuple[int, ...]  # output features of the projections fused in it (query, key, value), each split by itself
    source: int = 0  # index of its input among the tensors that enter the region


@dataclass(frozen=True, slots=True)
class AttributePatch:
    """An integer attribute that is divided by the degree (a number of heads, the size of a split)."""

    path: str  # of the module that has it; empty for the layer itself
    name: str
    value: int  # before the division


@dataclass(frozen=True, slots=True)
class TokenGather:
    """The argument of a module around the columns that is gathered along tokens under sequence parallelism."""

    path: str  # module path inside the layer
    argument: int | str  # position or keyword


@dataclass(frozen=True, slots=True)
class Region:
    """Column linears, code on their shares, and the row linears that sum up: one, or also that of an adapter."""

    columns: tuple[Column, ...]  # linears split over their output features
    rows: tuple[str, ...]  # paths of the linears that are split over their input features
    attributes: tuple[AttributePatch, ...] = ()
    inner_parameters: tuple[str, ...] = ()  # names of unsplit parameters between columns and rows (partial gradients)
    feeders: tuple[str, ...] = ()  # paths of unsplit linears whose output only columns read (an adapter's first one)
    gather: TokenGather | None = None  # where tokens are gathered under sequence parallelism; None: at the columns


@dataclass(frozen=True, slots=True)
class SlicedParameter:
    """A parameter of a mixture's experts, and how it is sliced."""

    name: str  # inside the module of the experts
    dim: int  # along which it is sliced
    parts: tuple[int, ...]  # lengths along ``dim`` of fused parts, each sliced by itself


@dataclass(frozen=True, slots=True)
class ExpertSlices:
    """The experts of a mixture, each of them sliced: columns, code on their shares, and rows, in one module."""

    path: str  # of the module of the experts
    parameters: tuple[SlicedParameter, ...]  # all of them
    max_degree: int  # its divisors are the legal degrees
    summed: bool = True  # whether the module's output is summed over the slices; False: expert parallelism does it


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a layer may be split over a tensor-parallel group."""

    regions: tuple[Region, ...] = ()
    embeddings: tuple[str, ...] = ()  # paths of embeddings split over the vocabulary
    heads: tuple[str, ...] = ()  # paths of linears split over columns whose outputs are gathered
    max_degree: int = 1  # its divisors are the legal degrees; 1: tensor parallelism is not offered
    sequence_parallel: bool = False  # whether all other code works on single tokens, so that the group may share tokens
    reason: str = ""  # why the plan is limited; empty for no limit
    experts: tuple[ExpertSlices, ...] = ()

    @property
    def collectives(self) -> int:
        """All-gathers plus reduce-scatters of the hidden state in one forward pass (an all-reduce counts as two)."""
        return 2 * (len(self.regions) + len(self.experts) + len(self.embeddings))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is ``nn.Linear`` or transformers' ``Conv1D``, with their forward.

    A linear whose weight is computed from other parameters (``weight_norm``, ``spectral_norm``) is not.
    """
    if not holds_weight(module):
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def holds_weight(module: nn.Module) -> bool:
    """Whether a module's weight is a parameter, not computed from others."""
    return any(name == "weight" for name, _ in module.named_parameters(recurse=False))


def output_dim(linear: nn.Module) -> int:
    """Return the weight's dim of output features: 0 for ``nn.Linear``, 1 for ``Conv1D`` (transposed)."""
    return 0 if isinstance(linear, nn.Linear) else 1


def weight_of(linear: nn.Module) -> nn.Parameter:
    """Return the weight of a linear layer or an embedding."""
    weight = linear.get_parameter("weight")
    if weight.dim() != 2:
        raise TypeError(f"weight of shape {tuple(weight.shape)} is not a matrix")
    return weight


def bias_of(linear: nn.Module) -> Tensor | None:
    """Return the bias of a linear layer; None without."""
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return bias
