"""Optimizer states in host memory: the optimizer updates a copy of what the device holds, on the host.

Once a step the reduced gradients go down, and the updated values come up. The device keeps its parameters and, until
the step ends, its gradients. On a machine without an accelerator host and device are the same memory; what is done is
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_of_rank(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class HostCopy:
    """A parameter's copy in host memory, over which the optimizer runs."""

    source: nn.Parameter  # the parameter on the device; a DTensor under ZeRO
    copy: nn.Parameter = field(init=False)  # of what this rank holds of it; page-locked beside an accelerator
    buffer: Tensor | None = None  # where its gradient arrives; made for the first one
    version: int = -1  # of the gradient when it was brought down, so that what was done to it since can be told

    def __post_init__(self) -> None:
        local = local_of_rank(self.source.detach())
        self.copy = nn.Parameter(_host_like(local).copy_(local), self.source.requires_grad)

    @torch.no_grad()
    def take(self) -> None:
        """The device's values are the right ones: copy them down."""
        self.copy.copy_(local_of_rank(self.source.detach()))

    @torch.no_grad()
    def lift(self) -> None:
        """Copy updated values up; the host does not wait for it."""
        local_of_rank(self.source.detach()).copy_(self.copy, non_blocking=True)

    @torch.no_grad()
    def lower(self) -> None:
        """Start copying the reduced gradient down, on the current stream; ``noted`` once it has arrived."""
        if self.source.grad is None:
            self.copy.grad = None
            return
        gradient = local_of_rank(self.source.grad)
        self.buffer = _host_like(gradient) if self.buffer is None else self.buffer
        self.buffer.copy_(gradient, non_blocking=True)
        self.copy.grad = self.buffer

    def noted(self) -> None:
        """Both gradients are equal now."""
        self.version = -1 if self.copy.grad is None else self.copy.grad._version

    @torch.no_grad()
    def follow(self) -> None:
        """What was done to the host's gradient since it came down (zeroed, changed) holds on the device, too."""
        if self.version < 0:
            return
        if self.copy.grad is None:
            self.source.grad, self.version = None, -1
        elif self.copy.grad._version != self.version and self.source.grad is not None:
            local_of_rank(self.source.grad).copy_(self.copy.grad)
            self.noted()


class Lowering:
    """Brings a rank's gradients down: those that nobody adds to any more beside backward, the others behind it.

    Args:
        copies: in host memory.
        final: those whose gradients are whole as soon as autograd (or FSDP) has made them.
        is_last: whether a backward pass is the last of a step.

    Attributes:
        late: parameters whose gradients are summed once more behind backward.
    """

    def __init__(self, copies: Sequence[HostCopy], final: Sequence[HostCopy], is_last: Callable[[], bool]) -> None:
        self._copies, self._is_last = copies, is_last
        self.late: frozenset[nn.Parameter] = frozenset()
        self._under_way: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        for one in final:
            one.source.register_post_accumulate_grad_hook(partial(self._early, one))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Bring down what is left, and wait until all have arrived."""
        for one in self._copies:
            if id(one) not in self._under_way:
                self._lower(one)
        self._under_way.clear()
        if self._stream is not None:
            self._stream.synchronize()
        for one in self._copies:
            one.noted()

    def _early(self, one: HostCopy, _parameter: Tensor) -> None:
        if self._is_last() and one.source not in self.late:
            self._under_way.add(id(one))
            self._lower(one)

    def _lower(self, one: HostCopy) -> None:
        """On a stream of its own, which follows the one that made the gradient (under FSDP that of its reductions)."""
        device = one.source.device
        if device.type != "cuda":
            one.lower()
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            one.lower()
        if one.source.grad is not None:
            local_of_rank(one.source.grad).record_stream(self._stream)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
