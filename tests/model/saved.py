"""What autograd keeps of a real run."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_storages(run: Callable[[], object], module: nn.Module) -> dict[int, Tensor]:
    """A tensor of every storage that autograd keeps of a run, by address; parameters and buffers left out."""
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    del output
    own = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    return {place: tensor for place, tensor in saved.items() if place not in own}


def saved_bytes(run: Callable[[], object], module: nn.Module) -> int:
    """Bytes of these storages."""
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_storages(run, module).values())
