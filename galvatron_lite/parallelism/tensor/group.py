"""What a tensor-parallel group can do: three collectives, no autograd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.process_groups import Processes, all_gather, reduce_scatter


class TensorGroup(Protocol):
    """Devices that share the matmuls of each sample. No collective overwrites its argument."""

    @property
    def size(self) -> int:
        """Devices in the group (the tensor-parallel degree)."""
        ...

    @property
    def rank(self) -> int:
        """Index of this device in the group, from 0."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group, the same on every device; of the same shape as ``tensor``."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The group's tensors, all of one shape, one after the other along ``dim``."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This device's share along ``dim`` of the sum over the group; ``dim`` must be divisible by the size."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessTensorGroup(Processes):
    """Processes of ``torch.distributed``.

    Compiled code calls functional collectives: torch 2.11 loses writes of the others in backward passes that it traces.
    They have no public home; ``tests/runtime/test_compiled.py`` trains with them.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group."""
        if torch.compiler.is_compiling():
            summed: Tensor = funcol.all_reduce(tensor, "sum", self._traced)
            return summed
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.process_group)
        return result

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The group's tensors one after the other along ``dim``."""
        dim %= tensor.dim()
        if torch.compiler.is_compiling():
            gathered: Tensor = funcol.all_gather_tensor(tensor.contiguous(), dim, self._traced)
            return gathered
        result = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        all_gather(result, tensor.contiguous(), self.process_group)
        return result.view(self.size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1) if dim else result

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This process's share along ``dim`` of the sum over the group."""
        share = _share_extent(tensor, dim, self.size)
        if torch.compiler.is_compiling():
            scattered: Tensor = funcol.reduce_scatter_tensor(tensor, "sum", dim, self._traced)
            return scattered
        pieces = torch.cat(torch.split(tensor, share, dim))
        result = tensor.new_empty((tensor.shape[0], *pieces.shape[1:]) if dim else (share, *pieces.shape[1:]))
        reduce_scatter(result, pieces, self.process_group)
        return result

    @property
    def _traced(self) -> Any:
        return dist.group.WORLD if self.process_group is None else self.process_group


@dataclass(frozen=True, slots=True)
class ShapeOnlyGroup:
    """A group without communication: results have the right shapes and the wrong values.

    With it one device's share of a layer runs alone, on any device including meta, to be captured or timed.
    """

    size: int  # the tensor-parallel degree
    rank: int = 0  # whose share is run

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor."""
        return tensor.clone()

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor repeated along ``dim``."""
        return torch.cat([tensor] * self.size, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This device's share of the tensor along ``dim``."""
        share = _share_extent(tensor, dim, self.size)
        return tensor.narrow(dim, self.rank * share, share).contiguous()


@dataclass(frozen=True, slots=True)
class ListeningGroup(ShapeOnlyGroup):
    """A group without communication that writes down what is asked of it."""

    # bytes of all that was gathered along the last dim: outputs of layers
    outputs: list[int] = field(default_factory=list)
    # bytes of all else, of which each device gives its share: figures of tokens that a loss needs
    figures: list[int] = field(default_factory=list)
    # the field of ``TensorBoundary`` that counts each collective, and bytes of the whole tensor
    heard: list[tuple[str, int]] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor."""
        self.heard.append(("returns" if _backward_node() else "ends", tensor.nbytes))
        return ShapeOnlyGroup.all_reduce(self, tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor repeated along ``dim``."""
        (self.outputs if dim in (-1, tensor.dim() - 1) else self.figures).append(self.size * tensor.nbytes)
        node = _backward_node()
        again = "resumes" if node.startswith("_ReduceScatter") else "regathers"
        self.heard.append((again if node else "begins", self.size * tensor.nbytes))
        return ShapeOnlyGroup.all_gather(self, tensor, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This device's share of the tensor along ``dim``."""
        self.heard.append(("returns" if _backward_node() else "ends", tensor.nbytes))
        return ShapeOnlyGroup.reduce_scatter(self, tensor, dim)


def _backward_node() -> str:
    """Name of the autograd node that runs; empty in forward. PyTorch has no public way to tell."""
    node = torch._C._current_autograd_node()
    return str(node.name()) if node is not None else ""


def _share_extent(tensor: Tensor, dim: int, size: int) -> int:
    """How much of dim ``dim`` each of ``size`` devices gets."""
    extent = tensor.shape[dim]
    if extent % size:
        remedy = f"Choose a length divisible by the tensor-parallel degree {size}, or switch sequence parallelism off."
        raise InputError("sequence length", extent, remedy)
    return extent // size
