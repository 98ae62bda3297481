"""A model taken apart for measuring: its blocks one by one, and everything around them without the blocks.

The skeleton of a model is a copy of it in which pass-through stubs stand where the blocks were. Running it runs the
user's own code before and after the blocks. A stub tells who listens that it was reached, with what arguments, and
returns what the block would return in shape. The user's own model is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import call_model, map_tensors, tensors_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.meta import meta_copy, normalise_alone, prepare_for_training
from galvatron_lite.parallelism.precision import compute_context


@dataclass(frozen=True, slots=True)
class SegmentCall:
    """What a block is called with, and the shapes of what it returns."""

    args: tuple[Any, ...]  # args, kwargs: detached arguments
    kwargs: dict[str, Any]
    result: Any  # what it returned, tensors on the meta device

    def with_arguments(self, change: Callable[[Any], Any]) -> SegmentCall:
        """The call with other arguments: what ``change`` makes of them."""
        return replace(self, args=change(self.args), kwargs=change(self.kwargs))


class PassThrough(nn.Module):
    """Stands for a block; hands its arguments to ``visit``, which gives the result.

    Attributes and submodules of the block stay readable, without values, since some models look at them while they run.
    """

    visit: Callable[[tuple[Any, ...], dict[str, Any]], Any]

    def __init__(self, block: nn.Module, path: str, kind: str) -> None:
        super().__init__()
        self.__dict__["block"] = meta_copy(block)  # not a submodule: it has no parameters to train
        self.path, self.kind = path, kind

    def __getattr__(self, name: str) -> Any:
        """An attribute of the block; how it is copied is not one of them (parametrized modules say it)."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the block would return, by the visitor."""
        return self.visit(args, kwargs)


@dataclass(slots=True)
class Skeleton:
    """A model without its blocks."""

    model: nn.Module  # a copy of the user's model with stubs for blocks, on the device
    stubs: dict[str, PassThrough] = field(default_factory=dict)  # by path, in running order

    def visit_with(self, visitor: Callable[[PassThrough, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Let every stub ask ``visitor(stub, args, kwargs)`` for its result."""
        for stub in self.stubs.values():
            stub.visit = partial(visitor, stub)

    def twin(self, model: nn.Module) -> Skeleton:
        """A skeleton of a copy of its model."""
        by_path = {stub.path: stub for stub in model.modules() if isinstance(stub, PassThrough)}
        return Skeleton(model, {path: by_path[path] for path in self.stubs})


def make_skeleton(model: nn.Module, layers: tuple[Layer, ...], device: torch.device) -> Skeleton:
    """A copy of the model on ``device`` with a stub for every block; parameters on meta get random values."""
    blocks = {layer.modules[0]: layer.kind for layer in layers if layer.role is Role.BLOCK}
    with _replaced(model, {path: PassThrough(model.get_submodule(path), path, kind) for path, kind in blocks.items()}):
        bare = copy.deepcopy(model)
    bare = materialise(bare, device).train()
    prepare_for_training(bare)
    bare.apply(normalise_alone)
    stubs = [module for module in bare.modules() if isinstance(module, PassThrough)]
    by_path = {stub.path: stub for stub in stubs}
    return Skeleton(bare, {path: by_path[path] for path in blocks})


def copy_block(model: nn.Module, path: str, device: torch.device) -> nn.Module:
    """A copy of one block on ``device``, in training mode; parameters on meta get random values."""
    block = materialise(copy.deepcopy(model.get_submodule(path)), device).train()
    prepare_for_training(block)
    block.apply(normalise_alone)
    return block


def materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """The module on ``device``, in place; what was on meta gets values that are safe to compute with.

    Floating parameters get small random values (or what ``reset_parameters`` gives), floating buffers zeros, integer
    buffers 0, 1, 2 ... along their last dim (position ids), Boolean ones True.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return module.to(device)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each parameter; ``to_empty`` makes each place its own
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((part, name))
    module.to_empty(device=device)
    for (owner, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02) if parameter.is_floating_point() else parameter.zero_()
        for buffer in module.buffers():
            if buffer.dtype == torch.bool:
                buffer.fill_(True)
            elif buffer.is_floating_point() or buffer.dim() == 0:
                buffer.zero_()
            else:
                buffer.copy_(torch.arange(buffer.shape[-1], device=buffer.device).expand_as(buffer))
        for part in module.modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
    return module


def record_calls(
    skeleton: Skeleton, blocks: Mapping[str, nn.Module], batch: Any, compute: torch.dtype | None = None
) -> dict[str, SegmentCall]:
    """What the first block of every kind is called with for a batch."""
    calls: dict[str, SegmentCall] = {}

    def visit(stub: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stub.kind not in calls:
            calls[stub.kind] = _call_once(blocks[stub.kind], args, kwargs, stub.path, compute)
        if len(calls) == len(blocks):
            raise StopRunError
        return passed_on(calls[stub.kind], hidden_state(args, kwargs))

    skeleton.visit_with(visit)
    device = next(tensors_of(batch)).device
    with torch.no_grad(), compute_context(compute, device):
        try:
            call_model(skeleton.model, batch)
        except StopRunError:
            return calls
    missing = sorted(set(blocks) - set(calls))
    raise TraceError("blocks", ", ".join(missing), "The model ran without calling them; name its blocks (blocks=...).")


def passed_on(call: SegmentCall, hidden: Tensor) -> Any:
    """What a stub returns: the hidden state where the block returned one, zeros of the right shape elsewhere."""
    place = next(tensors_of(call.result), None)

    def stand_in(tensor: Tensor) -> Tensor:
        if tensor is place and tensor.shape == hidden.shape:
            return hidden.to(tensor.dtype)
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=hidden.device)
        return zeros + 0 * hidden.mean() if tensor is place and hidden.is_floating_point() else zeros

    return map_tensors(call.result, stand_in)


def hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The boundary tensor among a block's arguments: the first floating tensor; the first tensor (an embedding's ids)
    where there is none.
    """
    tensors = list(tensors_of((args, kwargs)))
    hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), next(iter(tensors), None))
    if hidden is None:
        raise TraceError("block", "its arguments", "A block must be given a tensor; name other blocks (blocks=...).")
    return hidden


def run_on(run: Callable[..., Any], call: SegmentCall, hidden: Tensor) -> Any:
    """What ``run`` returns for a call whose boundary tensor is replaced by ``hidden``."""
    before = hidden_state(call.args, call.kwargs)
    args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: hidden if tensor is before else tensor)
    return run(*args, **kwargs)


def leaf_of(call: SegmentCall) -> Tensor:
    """A copy of the boundary tensor that takes a gradient where it can."""
    hidden = hidden_state(call.args, call.kwargs).detach().clone()
    return hidden.requires_grad_() if hidden.is_floating_point() else hidden


def entering(leaf: Tensor) -> Tensor:
    """A copy of a leaf, with a leaf of its own: no leaf itself, as a block may work in place on what it is given."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad).clone()


class Boundary(torch.autograd.Function):
    """A copy that tells when its gradient arrives: where one segment's backward ends and the other's begins."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reached: Callable[[], None]) -> Tensor:
        """A copy of the tensor."""
        ctx.reached = reached
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient itself."""
        ctx.reached()
        return grads[0], None


class Joined(torch.autograd.Function):
    """A tensor that depends on others as well: backward reaches whatever they were made of, with no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """The tensor itself."""
        ctx.others = len(others)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient, for the tensor alone."""
        return grads[0], *[None] * ctx.others


class StopRunError(Exception):
    """Raised by a stub once the rest of the model's forward is not needed."""


def _call_once(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str, compute: torch.dtype | None
) -> SegmentCall:
    if next(tensors_of((args, kwargs)), None) is None:
        raise TraceError(f"block {path}", "its arguments", "It is given no tensor; name other blocks (blocks=...).")
    args = tuple(_owned(value, compute) for value in args)
    kwargs = {name: _owned(value, compute) for name, value in kwargs.items()}
    try:
        result = block(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TraceError(path, str(error), "The block cannot be run on its own; name other blocks.") from error
    return SegmentCall(args, kwargs, map_tensors(result, lambda tensor: tensor.to("meta")))


def _owned(value: Any, compute: torch.dtype | None) -> Any:
    """An argument on its own. A key-value cache becomes None: it would grow with every repetition."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None

    def detach(tensor: Tensor) -> Tensor:
        cast = compute if tensor.is_floating_point() else None
        return tensor.detach().to(cast, copy=True) if cast is not None else tensor.detach().clone()

    return map_tensors(value, detach)


@contextmanager
def _replaced(model: nn.Module, stubs: Mapping[str, nn.Module]) -> Iterator[None]:
    """The model with other modules at some paths, for as long as the ``with`` block runs."""
    real = {path: model.get_submodule(path) for path in stubs}
    try:
        for path, stub in stubs.items():
            model.set_submodule(path, stub)
        yield
    finally:
        for path, module in real.items():
            model.set_submodule(path, module)
