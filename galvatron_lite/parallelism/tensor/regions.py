"""Where tensor parallelism splits a layer, as a value: what ``infer`` finds and ``apply`` carries out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Column:
    """A linear whose output features are split.

    Attributes:
        path: module path inside the layer.
        parts: output features of the projections fused in it, each split by itself (GPT-2's query, key and value);
            one entry where nothing is fused.
    """

    path: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttributePatch:
    """An integer attribute that is divided by the degree (a number of heads, the size of a split).

    Attributes:
        path: path of the module that holds it; empty for the layer itself.
        name: attribute name.
        value: what it is before.
    """

    path: str
    name: str
    value: int


@dataclass(frozen=True, slots=True)
class TokenGather:
    """Where token shards become whole under sequence parallelism: an argument of a module that holds the columns.

    Attributes:
        path: module path inside the layer.
        argument: position or keyword of the argument.
    """

    path: str
    argument: int | str


@dataclass(frozen=True, slots=True)
class Region:
    """Column linears, what runs on their shares, and the row linear that sums up.

    Attributes:
        columns: linears split over their output features.
        row: path of the linear split over its input features.
        attributes: integers divided by the degree.
        inner_parameters: names of whole parameters used between columns and row: each device has part of their
            gradient.
        gather: where tokens are gathered under sequence parallelism; None: at the columns.
    """

    columns: tuple[Column, ...]
    row: str
    attributes: tuple[AttributePatch, ...] = ()
    inner_parameters: tuple[str, ...] = ()
    gather: TokenGather | None = None


@dataclass(frozen=True, slots=True)
class SlicedParameter:
    """A parameter of a mixture's experts, and how it is sliced.

    Attributes:
        name: inside the module that holds the experts.
        dim: along which it is sliced.
        parts: lengths along ``dim`` of the fused parts, each sliced by itself.
    """

    name: str
    dim: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertSlices:
    """A mixture's experts, each of which is sliced: columns, what runs on their shares, and rows, in one module.

    Attributes:
        path: of the module that holds the experts.
        parameters: all of them.
        max_degree: every divisor of it is a legal degree.
        summed: whether the slices' outputs are summed around the module; False: what spreads the experts does.
    """

    path: str
    parameters: tuple[SlicedParameter, ...]
    max_degree: int
    summed: bool = True


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a layer may be split over a tensor-parallel group.

    Attributes:
        regions: column/row regions of a block.
        embeddings: paths of embeddings split over the vocabulary.
        heads: paths of linears split over columns whose outputs are gathered.
        max_degree: every divisor of it is a legal degree; 1: tensor parallelism is not offered.
        sequence_parallel: whether all else works token by token, so that the group may share the tokens.
        reason: what is limited or not offered, and why; empty where nothing is to be said.
        experts: mixtures whose experts are sliced.
    """

    regions: tuple[Region, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    max_degree: int = 1
    sequence_parallel: bool = False
    reason: str = ""
    experts: tuple[ExpertSlices, ...] = ()

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
