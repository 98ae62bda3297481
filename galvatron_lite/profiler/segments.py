"""Takes a model apart for measuring: single blocks, and a skeleton of the model without its blocks.

The skeleton is a copy of the model with a pass-through stub in place of each block; running it runs the user's code
before and after the blocks. A stub hands its arguments to a visitor and returns a result in the shape of the block's.
The user's model is never changed.
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
    """A call of a block."""

    args: tuple[Any, ...]  # args, kwargs: detached arguments
    kwargs: dict[str, Any]
    result: Any  # the block's result, its tensors on the meta device

    def with_arguments(self, change: Callable[[Any], Any]) -> SegmentCall:
        """Return the call with ``change`` applied to its arguments."""
        return replace(self, args=change(self.args), kwargs=change(self.kwargs))


class PassThrough(nn.Module):
    """Stands in for a block: hands its arguments to ``visit``, which returns the result.

    Attributes and submodules of the block stay readable, on meta, since some models read them while they run.
    """

    visit: Callable[[tuple[Any, ...], dict[str, Any]], Any]

    def __init__(self, block: nn.Module, path: str, kind: str) -> None:
        super().__init__()
        self.__dict__["block"] = meta_copy(block)  # not a submodule: it has no parameters to train
        self.path, self.kind = path, kind

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the block, but no dunder, as parametrized modules define how they are copied."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the visitor's result."""
        return self.visit(args, kwargs)


@dataclass(slots=True)
class Skeleton:
    """A model without its blocks."""

    model: nn.Module  # a copy of the user's model with stubs for blocks, on the device
    stubs: dict[str, PassThrough] = field(default_factory=dict)  # by path, in running order

    def visit_with(self, visitor: Callable[[PassThrough, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Make every stub return ``visitor(stub, args, kwargs)``."""
        for stub in self.stubs.values():
            stub.visit = partial(visitor, stub)

    def twin(self, model: nn.Module) -> Skeleton:
        """Return the skeleton of a copy of its model."""
        by_path = {stub.path: stub for stub in model.modules() if isinstance(stub, PassThrough)}
        return Skeleton(model, {path: by_path[path] for path in self.stubs})


def make_skeleton(model: nn.Module, layers: tuple[Layer, ...], device: torch.device) -> Skeleton:
    """Return a copy of the model on ``device`` with stubs for blocks; parameters on meta get random values."""
    blocks = {layer.modules[0]: layer.kind for layer in layers if layer.role is Role.BLOCK}
    with _modules_replaced(
        model, {path: PassThrough(model.get_submodule(path), path, kind) for path, kind in blocks.items()}
    ):
        bare = copy.deepcopy(model)
    bare = materialise(bare, device).train()
    prepare_for_training(bare)
    bare.apply(normalise_alone)
    stubs = [module for module in bare.modules() if isinstance(module, PassThrough)]
    by_path = {stub.path: stub for stub in stubs}
    return Skeleton(bare, {path: by_path[path] for path in blocks})


def copy_block(model: nn.Module, path: str, device: torch.device) -> nn.Module:
    """Return a copy of a block on ``device``, in training mode; parameters on meta get random values."""
    block = materialise(copy.deepcopy(model.get_submodule(path)), device).train()
    prepare_for_training(block)
    block.apply(normalise_alone)
    return block


def materialise(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to ``device`` in place; tensors on meta get values that are safe to compute with.

    Floating parameters get small random values (or those of ``reset_parameters``), floating buffers zeros, integer
    buffers 0, 1, 2 ... along their last dim (position ids), Boolean ones True.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return module.to(device)
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # of each parameter, since ``to_empty`` unties parameters
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
    """Run a batch and return the call of the first block of each kind."""
    calls: dict[str, SegmentCall] = {}

    def visit(stub: PassThrough, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stub.kind not in calls:
            calls[stub.kind] = _call_once(blocks[stub.kind], args, kwargs, stub.path, compute)
        if len(calls) == len(blocks):
            raise StopRunError
        return stub_result(calls[stub.kind], hidden_state(args, kwargs))

    skeleton.visit_with(visit)
    device = next(tensors_of(batch)).device
    with torch.no_grad(), compute_context(compute, device):
        try:
            call_model(skeleton.model, batch)
        except StopRunError:
            return calls
    missing = sorted(set(blocks) - set(calls))
    raise TraceError("blocks", ", ".join(missing), "The model ran without calling them; name its blocks (blocks=...).")


def stub_result(call: SegmentCall, hidden: Tensor) -> Any:
    """Return a result in the shape of the block's: ``hidden`` for its first tensor, zeros for all others."""
    first = next(tensors_of(call.result), None)

    def stand_in(tensor: Tensor) -> Tensor:
        if tensor is first and tensor.shape == hidden.shape:
            return hidden.to(tensor.dtype)
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device=hidden.device)
        # of another shape, the first tensor depends on ``hidden`` all the same, so that gradients reach it
        return zeros + 0 * hidden.mean() if tensor is first and hidden.is_floating_point() else zeros

    return map_tensors(call.result, stand_in)


def hidden_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the boundary tensor among a block's arguments: the first floating tensor, else the first tensor (ids)."""
    tensors = list(tensors_of((args, kwargs)))
    hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), next(iter(tensors), None))
    if hidden is None:
        raise TraceError("block", "its arguments", "A block must be given a tensor; name other blocks (blocks=...).")
    return hidden


def run_with(run: Callable[..., Any], call: SegmentCall, hidden: Tensor) -> Any:
    """Call ``run`` with the arguments of ``call``, the boundary tensor replaced by ``hidden``."""
    before = hidden_state(call.args, call.kwargs)
    args, kwargs = map_tensors((call.args, call.kwargs), lambda tensor: hidden if tensor is before else tensor)
    return run(*args, **kwargs)


def input_leaf(call: SegmentCall) -> Tensor:
    """Return a copy of the boundary tensor that requires a gradient if it is floating."""
    hidden = hidden_state(call.args, call.kwargs).detach().clone()
    return hidden.requires_grad_() if hidden.is_floating_point() else hidden


def fresh_input(leaf: Tensor) -> Tensor:
    """Return a copy of a leaf that has another leaf and is none itself, as a block may change its input in place."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad).clone()


class GradientMarker(torch.autograd.Function):
    """Copies a tensor and calls ``reached`` when its gradient arrives, between the backward passes of two segments."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reached: Callable[[], None]) -> Tensor:
        """Return a copy of the tensor."""
        ctx.reached = reached
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on."""
        ctx.reached()
        return grads[0], None


class DependentCopy(torch.autograd.Function):
    """Makes a tensor depend on others, so that backward runs the graphs that produced them, without gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        """Return a view of the tensor."""
        ctx.others = len(others)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Pass the gradient on to the tensor only."""
        return grads[0], *[None] * ctx.others


class StopRunError(Exception):
    """Raised by a stub once the rest of the model's forward is not needed."""


def _call_once(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str, compute: torch.dtype | None
) -> SegmentCall:
    if next(tensors_of((args, kwargs)), None) is None:
        raise TraceError(f"block {path}", "its arguments", "It is given no tensor; name other blocks (blocks=...).")
    args = tuple(_detached(value, compute) for value in args)
    kwargs = {name: _detached(value, compute) for name, value in kwargs.items()}
    try:
        result = block(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TraceError(path, str(error), "The block cannot be run on its own; name other blocks.") from error
    return SegmentCall(args, kwargs, map_tensors(result, lambda tensor: tensor.to("meta")))


def _detached(value: Any, compute: torch.dtype | None) -> Any:
    """Return a detached copy of an argument, cast to the precision of compute."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None  # a key-value cache would grow with every repetition

    def detach(tensor: Tensor) -> Tensor:
        cast = compute if tensor.is_floating_point() else None
        return tensor.detach().to(cast, copy=True) if cast is not None else tensor.detach().clone()

    return map_tensors(value, detach)


@contextmanager
def _modules_replaced(model: nn.Module, stubs: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules of a model at some paths inside the ``with`` block."""
    originals = {path: model.get_submodule(path) for path in stubs}
    try:
        for path, stub in stubs.items():
            model.set_submodule(path, stub)
        yield
    finally:
        for path, module in originals.items():
            model.set_submodule(path, module)
