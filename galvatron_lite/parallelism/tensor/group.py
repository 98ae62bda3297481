"""Tensor-parallel groups and their three collectives, without autograd."""

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
        """Sum the group's tensors, with the result on all devices."""
        ...

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the group's tensors, all of one shape, along ``dim``."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Sum the group's tensors, with an even share along ``dim`` on each device.

        Raises:
            InputError: the extent does not divide by the size.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessTensorGroup(Processes):
    """Processes of ``torch.distributed``.

    Compiled code calls functional collectives, which torch does not document: torch 2.11 loses what other collectives
    write in backward passes that it traces. ``tests/runtime/test_compiled.py`` trains with them.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See ``TensorGroup``."""
        if torch.compiler.is_compiling():
            summed: Tensor = funcol.all_reduce(tensor, "sum", self._traced)
            return summed
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.process_group)
        return result

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
        dim %= tensor.dim()
        if torch.compiler.is_compiling():
            gathered: Tensor = funcol.all_gather_tensor(tensor.contiguous(), dim, self._traced)
            return gathered
        result = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        all_gather(result, tensor.contiguous(), self.process_group)
        return result.view(self.size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1) if dim else result

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """See ``TensorGroup``."""
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
    """A group without communication, whose results have the right shapes and wrong values.

    With it the share of one device runs alone, on any device including meta, to be captured or timed.
    """

    size: int  # the tensor-parallel degree
    rank: int = 0  # the device whose share runs

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
    """A group without communication that records the collectives it is called for."""

    outputs: list[int] = field(
        default_factory=list
    )  # bytes of full tensors gathered along the last dim: layers' outputs
    figures: list[int] = field(default_factory=list)  # the same along other dims: figures of tokens for a loss
    # the field of ``TensorBoundary`` that counts each collective, and the bytes of the full tensor
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
    """Return the name of the autograd node that runs; empty in forward. PyTorch has no public function for this."""
    node = torch._C._current_autograd_node()
    return str(node.name()) if node is not None else ""


def _share_extent(tensor: Tensor, dim: int, size: int) -> int:
    """Return the extent along ``dim`` of each of ``size`` even shares."""
    extent = tensor.shape[dim]
    if extent % size:
        remedy = f"Choose a length divisible by the tensor-parallel degree {size}, or switch sequence parallelism off."
        raise InputError("sequence length", extent, remedy)
    return extent // size
