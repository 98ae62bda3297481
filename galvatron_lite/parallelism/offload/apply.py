"""Offload: activations between forward and backward, and optimizer states, in host memory.

Activations: tensors that autograd saves in a layer's forward are copied to page-locked host memory on a separate
stream, storage by storage, so that views of one tensor are copied once. In backward the first use of a layer's tensors
copies all of them back, and those of the layer before it during the layer's compute. Weights stay on the device.

Optimizer states: the optimizer updates a copy of the rank's parameters in host memory. Once a step reduced gradients
are copied to the host, and updated values are copied back. The device keeps its parameters, and gradients until the end
of the step.

Without an accelerator, host and device are the same memory; the same copies run synchronously.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from galvatron_lite.errors import InputError


def local_of_rank(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class HostCopy:
    """The copy of a parameter in host memory, which the optimizer updates."""

    source: nn.Parameter  # the parameter on the device; a DTensor under ZeRO
    copy: nn.Parameter = field(init=False)  # of its part on this rank; page-locked with an accelerator
    buffer: Tensor | None = None  # of the copied gradient, from the first one on
    # versions of the gradients on the host and on the device when they were equal, to detect later changes
    version: int = -1
    lowered: tuple[int, int] = (0, -1)

    def __post_init__(self) -> None:
        local = local_of_rank(self.source.detach())
        self.copy = nn.Parameter(host_like(local).copy_(local), self.source.requires_grad)

    @torch.no_grad()
    def take(self) -> None:
        """Copy values from the device to the host."""
        self.copy.copy_(local_of_rank(self.source.detach()))

    @torch.no_grad()
    def lift(self) -> None:
        """Start copying updated values to the device; the host does not wait."""
        local_of_rank(self.source.detach()).copy_(self.copy, non_blocking=True)

    @torch.no_grad()
    def lower(self) -> None:
        """Start copying the reduced gradient to the host, on the current stream; call ``noted`` when it arrived."""
        if self.source.grad is None:
            self.copy.grad = None
            return
        gradient = local_of_rank(self.source.grad)
        self.buffer = host_like(gradient) if self.buffer is None else self.buffer
        self.buffer.copy_(gradient, non_blocking=True)
        self.copy.grad = self.buffer

    def noted(self) -> None:
        """Record that both gradients are equal now."""
        self.version = -1 if self.copy.grad is None else self.copy.grad._version
        self.lowered = self._state_of_gradient()

    def _state_of_gradient(self) -> tuple[int, int]:
        gradient = self.source.grad
        return (0, -1) if gradient is None else (id(gradient), gradient._version)

    def lower_again(self) -> None:
        """Copy the device's gradient again if it changed since it was copied.

        Raises:
            InputError: the gradient on the host changed too.
        """
        if self.version < 0 or self.lowered == self._state_of_gradient():
            return
        if self.copy.grad is not None and self.copy.grad._version != self.version:
            remedy = "Under this plan it is in host memory: change that of parallel.parameters() alone."
            raise InputError("gradient", "changed on the device and in host memory", remedy)
        self.lower()
        self.noted()

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the host's gradient to the device if it changed (or was zeroed) since it was copied."""
        if self.version < 0:
            return
        if self.copy.grad is None:
            self.source.grad, self.version = None, -1
        elif self.copy.grad._version != self.version and self.source.grad is not None:
            local_of_rank(self.source.grad).copy_(self.copy.grad)
            self.noted()


class Lowering:
    """Copies a rank's gradients to the host: final gradients during backward, the others after it.

    Args:
        copies: of the rank's parameters.
        final: the copies whose gradients are final when autograd (or FSDP) has computed them.
        is_last: returns whether a backward pass is the last of a step.

    Attributes:
        late: parameters whose gradients are summed again after backward.
    """

    def __init__(self, copies: Sequence[HostCopy], final: Sequence[HostCopy], is_last: Callable[[], bool]) -> None:
        self._copies, self._is_last = copies, is_last
        self.late: frozenset[nn.Parameter] = frozenset()
        self._in_flight: set[int] = set()
        self._stream: torch.cuda.Stream | None = None
        for copy in final:
            copy.source.register_post_accumulate_grad_hook(partial(self._early, copy))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Copy the remaining gradients, and wait for all copies."""
        for copy in self._copies:
            if id(copy) not in self._in_flight:
                self._lower(copy)
        self._in_flight.clear()
        if self._stream is not None:
            self._stream.synchronize()
        for copy in self._copies:
            copy.noted()

    def _early(self, copy: HostCopy, _parameter: Tensor) -> None:
        if self._is_last() and copy.source not in self.late:
            self._in_flight.add(id(copy))
            self._lower(copy)

    def _lower(self, copy: HostCopy) -> None:
        """Copy on a separate stream, after the stream that computed the gradient (under FSDP, that of reductions)."""
        device = copy.source.device
        if device.type != "cuda":
            copy.lower()
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            copy.lower()
        if copy.source.grad is not None:
            local_of_rank(copy.source.grad).record_stream(self._stream)


def host_like(tensor: Tensor) -> Tensor:
    """Allocate host memory for a tensor, page-locked with an accelerator."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


Forward = Callable[..., Any]
_SAME_VALUES = ("ToCopy", "TBackward", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "Alias", "Unsqueeze")
"""Prefixes of the names of autograd nodes that cast or transpose a tensor."""
SMALLEST = 1024
"""Bytes below which a storage is not copied."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostStorage:
    """A storage on the host."""

    host: Tensor  # its bytes
    device: torch.device  # that it was copied from, and is copied back to
    back: Tensor | None = None  # its bytes on the device, when copied back
    arrived: torch.cuda.Event | None = None  # of the copy back; None without an accelerator


@dataclass(slots=True, eq=False)
class SavedStorages:
    """The storages that a pass through a layer saves."""

    before: SavedStorages | None  # of the pass before, which backward reads next
    weights: frozenset[int]  # ids of storages that stay on the device
    # by id, bytes, version and part (``_part``) of the storage on the device; the autograd graph keeps them alive
    items: WeakValueDictionary[tuple[int, int, int, int], HostStorage] = field(default_factory=WeakValueDictionary)
    alive: list[Tensor] = field(default_factory=list)  # the tensors during forward, so that no id is used twice


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedTensor:
    """A tensor that autograd saved: a view of a storage on the host."""

    saved: SavedStorages
    item: HostStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ActivationOffloader:
    """Copies saved activations of all layers of a rank.

    Attributes:
        bytes_down: copied to the host so far.
    """

    def __init__(self) -> None:
        self.bytes_down = 0
        self._last: SavedStorages | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def carrying(self, module: nn.Module) -> Forward:
        """Return the module's forward, with saved tensors on the host."""
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            saved = self._last = SavedStorages(self._last, _storage_ids(module))
            with torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, saved), self._unpack):
                output = forward(*args, **kwargs)
            saved.alive.clear()
            return output

        return run

    def _pack(self, saved: SavedStorages, tensor: Tensor) -> Tensor | OffloadedTensor:
        storage = tensor.untyped_storage()
        # tensors of dry runs have no data, but are copied too
        strided = type(tensor) in (Tensor, FakeTensor) and tensor.layout is torch.strided
        if not strided or storage.nbytes() < SMALLEST or id(storage) in saved.weights or _is_weight(tensor):
            return tensor
        key = (id(storage), storage.nbytes(), tensor._version, _part(tensor))
        item = saved.items.get(key)
        if item is None:
            item = self._down(_bytes_of(tensor))
            saved.items[key] = item
            saved.alive.append(tensor)
        return OffloadedTensor(
            saved, item, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _down(self, data: Tensor) -> HostStorage:
        self.bytes_down += data.numel()
        host = host_like(data)
        if not data.is_cuda:
            return HostStorage(host.copy_(data), data.device)
        down, _ = self._streams_of(data.device)
        down.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(down):
            host.copy_(data, non_blocking=True)
        data.record_stream(down)
        return HostStorage(host, data.device)

    def _unpack(self, saved: Tensor | OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._fetch(saved.saved)
        if saved.saved.before is not None:
            self._fetch(saved.saved.before)
            saved.saved.before = None
        item = saved.item
        assert item.back is not None  # fetched now or before
        if item.arrived is not None:
            torch.cuda.current_stream(item.device).wait_event(item.arrived)
            item.back.record_stream(torch.cuda.current_stream(item.device))
        return torch.as_strided(item.back.view(saved.dtype), saved.shape, saved.stride, saved.offset)

    def _fetch(self, saved: SavedStorages) -> None:
        """Start copying the storages of a pass back, unless that was done."""
        for item in reversed(list(saved.items.values())):
            if item.back is None:
                self._up(item)
        saved.items.clear()
        if self._last is saved:
            self._last = None

    def _up(self, item: HostStorage) -> None:
        if item.device.type != "cuda":
            item.back = item.host.to(item.device)
            return
        down, up = self._streams_of(item.device)
        up.wait_stream(down)
        with torch.cuda.stream(up):
            item.back = item.host.to(item.device, non_blocking=True)
            item.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            item.arrived.record(up)

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def offload_activations(module: nn.Module, offloader: ActivationOffloader) -> None:
    """Keep on the host what a module saves for backward, in place. Its hooks stay outside."""
    module.forward = offloader.carrying(module)


def _storage_ids(module: nn.Module) -> frozenset[int]:
    """The ids of the current storages of a module's parameters and buffers.

    A storage has one Python object as long as it lives. Pointers to data would not do: tensors of dry runs have none.
    """
    return frozenset(id(tensor.untyped_storage()) for tensor in [*module.parameters(), *module.buffers()])


def _part(tensor: Tensor) -> int:
    """The offset of a part of a storage that has a version of its own; -1: the storage has one version.

    Gates of a recurrent cell are parts of one storage (``unsafe_chunk``) that are written one after another.
    """
    base = tensor._base if tensor._base is not None else tensor
    is_part = base.numel() * base.element_size() < base.untyped_storage().nbytes()
    return int(base.storage_offset()) if is_part else -1


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a cast or transposed parameter, which each pass computes again anyway."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SAME_VALUES) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    if isinstance(tensor, FakeTensor):  # other tensors cannot use its storage
        return tensor.new_empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
