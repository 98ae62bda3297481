"""Activations in host memory: what a layer keeps for backward goes down beside forward, and comes up before its use.

What autograd saves while a layer's forward runs is copied to page-locked host memory on a stream of its own, storage by
storage, so that views of one tensor travel once. In backward the first use of a layer's tensors brings up all of them,
and those of the layer before it beside the layer's own compute. Weights stay: they are on the device anyway. Without an
accelerator host and device are the same memory; what is done is the same, at once.
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

# Optimizer states in host memory: the optimizer updates a copy of what the device holds, on the host.
#
# Once a step the reduced gradients go down, and the updated values come up. The device keeps its parameters and, until
# the step ends, its gradients. On a machine without an accelerator host and device are the same memory; what is done is
# the same.


def local_of_rank(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(slots=True)
class HostCopy:
    """A parameter's copy in host memory, over which the optimizer runs."""

    source: nn.Parameter  # the parameter on the device; a DTensor under ZeRO
    copy: nn.Parameter = field(init=False)  # of what this rank holds of it; page-locked beside an accelerator
    buffer: Tensor | None = None  # where its gradient arrives; made for the first one
    # of the gradient when it was brought down, so that what was done to it since can be told; there, and on the device
    version: int = -1
    lowered: tuple[int, int] = (0, -1)

    def __post_init__(self) -> None:
        local = local_of_rank(self.source.detach())
        self.copy = nn.Parameter(host_like(local).copy_(local), self.source.requires_grad)

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
        self.buffer = host_like(gradient) if self.buffer is None else self.buffer
        self.buffer.copy_(gradient, non_blocking=True)
        self.copy.grad = self.buffer

    def noted(self) -> None:
        """Both gradients are equal now."""
        self.version = -1 if self.copy.grad is None else self.copy.grad._version
        self.lowered = self._state_of_gradient()

    def _state_of_gradient(self) -> tuple[int, int]:
        gradient = self.source.grad
        return (0, -1) if gradient is None else (id(gradient), gradient._version)

    def lower_again(self) -> None:
        """What was done to the device's gradient since it came down holds on the host, too.

        Raises:
            InputError: the host's was changed as well.
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
        for copy in self._copies:
            if id(copy) not in self._under_way:
                self._lower(copy)
        self._under_way.clear()
        if self._stream is not None:
            self._stream.synchronize()
        for copy in self._copies:
            copy.noted()

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


def host_like(tensor: Tensor) -> Tensor:
    """Room for a tensor in host memory, page-locked beside an accelerator."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


Forward = Callable[..., Any]
_SAME_VALUES = ("ToCopy", "TBackward", "Transpose", "Permute", "View", "UnsafeView", "Reshape", "Alias", "Unsqueeze")
"""How the names of autograd's nodes begin that cast or turn a tensor."""
SMALLEST = 1024
"""Bytes of a storage below which a copy is not worth its start."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class HostStorage:
    """A storage that waits on the host."""

    host: Tensor  # its bytes there
    device: torch.device  # where it came from, and is brought back to
    back: Tensor | None = None  # its bytes on the device again
    arrived: torch.cuda.Event | None = None  # when they are there; None without an accelerator


@dataclass(slots=True, eq=False)
class Kept:
    """What one pass through a layer keeps."""

    before: Kept | None  # the pass before it; brought up next in backward
    weights: frozenset[int]  # places of storages that stay on the device
    # by place, bytes, version and part (``_part``) of their storages; the graph holds them
    items: WeakValueDictionary[tuple[int, int, int, int], HostStorage] = field(default_factory=WeakValueDictionary)
    # the tensors themselves while forward runs, so that no place is used twice
    alive: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedTensor:
    """A tensor that autograd saved: a view of a storage on the host."""

    kept: Kept
    item: HostStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class ActivationOffloader:
    """Carries what a model's layers keep; one for all layers of a rank.

    Attributes:
        bytes_down: copied so far.
    """

    def __init__(self) -> None:
        self.bytes_down = 0
        self._last: Kept | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def carrying(self, module: nn.Module) -> Forward:
        """The module's forward, whose saved tensors wait on the host."""
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = self._last = Kept(self._last, _places(module))
            with torch.autograd.graph.saved_tensors_hooks(functools.partial(self._pack, kept), self._unpack):
                output = forward(*args, **kwargs)
            kept.alive.clear()
            return output

        return run

    def _pack(self, kept: Kept, tensor: Tensor) -> Tensor | OffloadedTensor:
        storage = tensor.untyped_storage()
        # a tensor of a dry run has no data, and travels all the same
        strided = type(tensor) in (Tensor, FakeTensor) and tensor.layout is torch.strided
        # an activation of some size is worth it
        if not strided or storage.nbytes() < SMALLEST or id(storage) in kept.weights or _is_weight(tensor):
            return tensor
        place = (id(storage), storage.nbytes(), tensor._version, _part(tensor))
        item = kept.items.get(place)
        if item is None:
            item = self._down(_bytes_of(tensor))
            kept.items[place] = item
            kept.alive.append(tensor)
        return OffloadedTensor(
            kept, item, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
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
        self._bring(saved.kept)
        if saved.kept.before is not None:
            self._bring(saved.kept.before)
            saved.kept.before = None
        item = saved.item
        assert item.back is not None  # brought just now, or before
        if item.arrived is not None:
            torch.cuda.current_stream(item.device).wait_event(item.arrived)
            item.back.record_stream(torch.cuda.current_stream(item.device))
        plain = item.back.view(saved.dtype)
        return torch.as_strided(plain, saved.shape, saved.stride, saved.offset)

    def _bring(self, kept: Kept) -> None:
        """Start bringing up what a pass kept, unless that was done."""
        for item in reversed(list(kept.items.values())):
            if item.back is None:
                self._up(item)
        kept.items.clear()
        if self._last is kept:
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


def _places(module: nn.Module) -> frozenset[int]:
    """Storages of the module's own tensors as they are now: torch keeps one Python object for a storage as long as it
    lives. (Pointers to data would do; tensors without data, of dry runs, have none.)"""
    return frozenset(id(one.untyped_storage()) for one in [*module.parameters(), *module.buffers()])


def _part(tensor: Tensor) -> int:
    """Which part of a storage counts its versions by itself; -1: all of it. Gates of a recurrent cell are pieces of one
    storage (``unsafe_chunk``) that are written to one after another, each with a version of its own."""
    base = tensor._base if tensor._base is not None else tensor
    apart = base.numel() * base.element_size() < base.untyped_storage().nbytes()
    return int(base.storage_offset()) if apart else -1


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is made of one parameter alone (cast, transposed), which is there again in every pass."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SAME_VALUES) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    if isinstance(tensor, FakeTensor):  # its storage cannot be given to another tensor
        return tensor.new_empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
