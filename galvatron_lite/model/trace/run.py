"""Runs of a model without storages: once whole to see its blocks, then region by region in detail."""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from galvatron_lite.errors import GalvatronError, InputError, TraceError
from galvatron_lite.model.batch import call_model, loss_of, map_tensors, places, resize_batch, tensors_of
from galvatron_lite.model.frames import PACKAGE, TORCH
from galvatron_lite.model.gates import keeping_gates
from galvatron_lite.model.trace.flow import DataFlow
from galvatron_lite.model.trace.meta import left_to_the_plan, meta_copy
from galvatron_lite.model.trace.operators import ShapesOnly
from galvatron_lite.model.trace.record import MetaRunError, MissingOperatorError, Recorder, Recording, ValuesReadError


@dataclass(slots=True)
class BlockCall:
    """One call of a block: what went in and what came out."""

    path: str  # of the block
    args: tuple[Any, ...]  # what it was given by position
    kwargs: dict[str, Any]  # what it was given by name
    output: Any = None  # what it returned
    # calls of modules inside it to whose outputs the model listens, by forward hooks of its own
    heard: list[BlockCall] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """Every tensor that went in, in order."""
        return [*tensors_of(self.args), *tensors_of(self.kwargs)]


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that autograd keeps."""

    storage: int  # its storage, by ``id``: while the observation lives, so does that
    size: int  # bytes
    calls: int  # blocks that were called before
    inside: tuple[str, ...]  # paths of blocks that ran


@dataclass(slots=True)
class Observation:
    """One run of the whole model."""

    order: list[str] = field(default_factory=list)  # module paths in the order they were entered
    calls: list[BlockCall] = field(default_factory=list)  # calls of blocks in order
    output: Any = None  # what the model returned
    # paths of blocks whose results code between blocks writes to
    rewritten: list[str] = field(default_factory=list)
    kept: list[KeptTensor] = field(default_factory=list)  # what autograd keeps for backward


def observe(twin: nn.Module, batch: Any, blocks: Sequence[str], flow: DataFlow | None = None) -> Observation:
    """Run a model on the meta device once, whole, and note its blocks' calls, and what its tensors are made of."""
    seen, entered = Observation(), list[str]()
    chosen, inside = set(blocks), list[BlockCall]()
    results = dict[int, tuple[str, Tensor, int]]()  # of blocks, by id, with their versions outside of blocks

    def enter(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(path)
        seen.order.append(path)
        if flow is not None:
            flow.enter(path)
        if path in chosen:
            seen.rewritten += [path for path, tensor, version in results.values() if tensor._version != version]
            seen.calls.append(BlockCall(path, args, kwargs))
            inside.append(seen.calls[-1])

    def leave(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered.pop()
        handed = output if flow is None else flow.leave((args, kwargs), output)
        if path in chosen:
            inside.pop().output = handed
            results.update((id(tensor), (path, tensor, 0)) for tensor in tensors_of(handed))
            results.update((key, (home, one, one._version)) for key, (home, one, _) in list(results.items()))
        elif inside and len(module._forward_hooks) > 1:  # the model's own beside ours: transformers collects outputs so
            inside[-1].heard.append(BlockCall(path, args, kwargs, handed))
        return handed

    def keep(tensor: Tensor) -> Tensor:
        storage, paths = tensor.untyped_storage(), tuple(call.path for call in inside)
        seen.kept.append(KeptTensor(id(storage), storage.nbytes(), len(seen.calls), paths))
        return tensor

    with ExitStack() as stack:
        for path, module in twin.named_modules():
            enter_handle = module.register_forward_pre_hook(partial(enter, path), with_kwargs=True, prepend=True)
            leave_handle = module.register_forward_hook(partial(leave, path), with_kwargs=True)
            stack.callback(enter_handle.remove)
            stack.callback(leave_handle.remove)
        stack.enter_context(explaining("", twin, entered))
        stack.enter_context(shapes_only(Recorder()))
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(flow or nullcontext())
        seen.output = call_model(twin, batch)
    return seen


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Nothing is collected while operators are recorded: finalizers (as of DeepSpeed) run some of their own."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def shapes_only(recorder: Recorder) -> Iterator[None]:
    """Tensors are made on the meta device, attention is fused, experts are grouped, and the recorder listens."""
    hooks = saved_tensors_hooks(recorder.keep, lambda kept: kept)
    with torch.device("meta"), ShapesOnly(), _autocast_on_meta(), hooks, recorder:
        yield


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """``torch.autocast(tensor.device.type)`` in a model's code is that of the CPU: torch has none for meta."""
    begin, is_enabled = torch.autocast.__init__, torch.is_autocast_enabled

    def begin_anywhere(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, device_type.replace("meta", "cpu"), *args, **kwargs)

    def is_enabled_anywhere(*device_type: str) -> bool:
        return is_enabled(*(name.replace("meta", "cpu") for name in device_type))

    torch.autocast.__init__ = begin_anywhere  # type: ignore[method-assign]
    torch.is_autocast_enabled = is_enabled_anywhere  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast.__init__, torch.is_autocast_enabled = begin, is_enabled  # type: ignore


_STALE = (
    "Batch sizes change while a model is traced: if it keeps tensors of an earlier batch (a memory, a cache), let it "
    "begin anew when the batch size changes."
)


def _place_of(error: Exception) -> str:
    """Where the user's code raised an error: file and line."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith((TORCH, PACKAGE))]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


@contextmanager
def explaining(path: str, module: nn.Module, entered: Sequence[str] = ()) -> Iterator[None]:
    """Turn what goes wrong into a TraceError that names the module, or the innermost one entered inside it."""
    try:
        yield
    except Exception as cause:
        if isinstance(cause, GalvatronError) and not isinstance(cause, TraceError):
            raise
        part = entered[-1] if entered else ""
        full = ".".join(filter(None, (path, part)))
        reason = cause.remedy if isinstance(cause, TraceError) else f"{type(cause).__name__}: {cause}".split(". ")[0]
        # torch has no type of error of its own for operators that would need values: nonzero, tolist, numpy
        values = isinstance(cause, (ValuesReadError, NotImplementedError)) or "meta " in str(cause)
        kind = ValuesReadError if values else TraceError if isinstance(cause, TraceError) else MetaRunError
        if operator := re.search(r"register_meta function for (\S+)\(\)", reason):
            reason = f"{operator[1]} reads values of tensors."
        elif operator := re.search(r"(aten::\w+).* no fake impl", reason):
            kind, reason = MissingOperatorError, f"PyTorch has no {operator[1]} without data."
        elif kind is MetaRunError:
            reason = f"{reason}{_place_of(cause)}. {_STALE}"
        remedy = f"It does not run without data (on the meta device): {reason}"
        raise kind(f"block {full}" if full else "model", type(module.get_submodule(part)).__name__, remedy) from cause


class _Incoming(torch.autograd.Function):
    """Ends a region: its backward hands each output a gradient that lives no longer than the region needs it."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.outputs = [(tensor.shape, tensor.dtype) for tensor in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.outputs)


class _Entering(torch.autograd.Function):
    """Begins a region: hands on a tensor that is no leaf, as a layer before would, so that it may be overwritten."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # the same storage, but no view of the leaf

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def entered(tensor: Tensor) -> Tensor:
    """What begins a region, as a layer before would have handed it on: no leaf, so that it may be overwritten."""
    handed: Tensor = _Entering.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return handed


def region_end(outputs: Sequence[Tensor]) -> Tensor | None:
    """A scalar whose backward gives every output that trains a gradient; None where none does."""
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    return _Incoming.apply(*trained) if trained else None  # type: ignore[no-untyped-call]


def chain_inputs(calls: Sequence[BlockCall], paths: Collection[str]) -> tuple[int, ...]:
    """Places in ``BlockCall.inputs`` of what comes out of the block called before one of these (equal) blocks.

    Where that cannot be seen (the first block): the first floating tensor.
    """
    for before, call in zip([None, *calls[:-1]], calls, strict=True):
        if call.path in paths and before is not None:
            storages = [tensor.untyped_storage() for tensor in tensors_of(before.output)]
            taken = [tensor.untyped_storage() for tensor in call.inputs]
            places = tuple(i for i, storage in enumerate(taken) if any(storage is other for other in storages))
            if places:
                return places
    call = next(call for call in calls if call.path in paths)
    return tuple(i for i, tensor in enumerate(call.inputs) if tensor.is_floating_point())[:1]


@dataclass(slots=True)
class RegionRun:
    """One region's recording, and which storages enter and leave it."""

    recording: Recording  # what it did
    chain: tuple[int, ...]  # storages that enter from the layer before, or of the batch
    side: tuple[int, ...]  # those that enter at its side
    needed: tuple[int, ...] = ()  # places of inputs at its side that backward needs
    handed: tuple[int, ...] = ()  # those among ``chain`` that the layer before made
    leaving: tuple[int, ...] = ()  # storages that the next layer takes


def run_block(block: nn.Module, call: BlockCall, chain: Sequence[int]) -> RegionRun:
    """Run a block forward and backward on the meta device, writing down what it does.

    Args:
        call: what goes in.
        chain: places of the inputs that come from the layer before; they get gradients, unless they did not when the
            model ran (pictures of the batch).
    """
    recorder, recording = Recorder(), Recording()
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.inputs]
    supply = iter(entered(tensor) for tensor in inputs)
    args, kwargs = map_tensors((call.args, call.kwargs), lambda _: next(supply))
    modes = keeping_gates(block), explaining(call.path, block), shapes_only(recorder), recorder.watching(block)
    with ExitStack() as stack:
        for mode in (*modes, left_to_the_plan()):
            stack.enter_context(mode)
        recorder.target = recording
        numbers = [recorder.number(tensor) for tensor in inputs]
        output = block(*args, **kwargs)
        end = region_end(list(tensors_of(output)))
        leaving = tuple(recorder.number(tensor) for tensor in tensors_of(output))
        del output
        recorder.start_backward(recording)
        if end is not None:
            torch.autograd.backward([end])  # end.backward() would leave the modes
        recorder.finish(recording, block.parameters())
    side = tuple(number for place, number in enumerate(numbers) if place not in chain)
    needed = tuple(place for place, number in enumerate(numbers) if number in side and number in recording.kept)
    entering = tuple(numbers[place] for place in chain)
    return RegionRun(recording, entering, side, needed, entering, leaving)


_FEW, _MORE = 2, 3
_OUTPUT = ".2"
ELSEWHERE = -1
"""Instead of items of dim 0 a sample: the samples lie along another dim."""


def block_calls(model: nn.Module, names: Collection[str], batch: Any, samples: int = _FEW) -> dict[str, BlockCall]:
    """The first call of each named block, on the meta device, with so many samples."""
    seen = observe(meta_copy(model), resize_batch(batch, samples), list(names))
    return {call.path: call for call in reversed(seen.calls)}


def sample_arguments(model: nn.Module, names: Collection[str], batch: Any) -> dict[str, dict[str, int]]:
    """How many items of dim 0 each sample has of the tensors that each named block takes and returns: 1 of those that
    have the samples there, 0 of those that do not grow with them, more where it is samples times heads, ``ELSEWHERE``
    where the samples lie along another dim.

    Two runs with unlike numbers of samples tell. A size that equals the number of samples by chance does not mislead.

    Returns:
        By block, then by place in its (args, kwargs, output) (see ``map_places``). Empty where the model cannot be run
        this way.
    """
    try:
        few, more = (block_calls(model, names, batch, samples) for samples in (_FEW, _MORE))
    except TraceError:
        return {}
    return {name: items_a_sample(few[name], more[name], (_FEW, _MORE)) for name in few.keys() & more.keys()}


def items_a_sample(few: BlockCall, more: BlockCall, samples: tuple[int, int]) -> dict[str, int]:
    """Items of dim 0 for each sample, by place, from calls of a block with two numbers of samples; see
    ``sample_arguments``."""
    one, other = (
        {place: tensor.shape for place, tensor in places((call.args, call.kwargs, call.output))} for call in (few, more)
    )
    return {place: _items(one[place], other[place], samples) for place in one if place in other}


def _items(few: Sequence[int], more: Sequence[int], samples: tuple[int, int]) -> int:
    grown = [dim for dim, sizes in enumerate(zip(few, more, strict=False)) if _grows(*sizes, samples)]
    return few[0] // samples[0] if 0 in grown else ELSEWHERE if grown else 0


def _grows(one: int, other: int, samples: tuple[int, int]) -> bool:
    return 0 < one < other and one % samples[0] == 0 and one // samples[0] * samples[1] == other


def is_folded(place: str, each: int) -> bool:
    """Whether samples cannot be moved of what has so many items each at a place; outputs of samples times something
    else (router logits of tokens) are for the loss alone."""
    return each == ELSEWHERE or (each > 1 and not place.startswith(_OUTPUT))


def check_folded(sampled: Mapping[str, Mapping[str, int]]) -> None:
    """See that blocks that take other samples than the code around them have these along dim 0, not folded with
    something else, as nothing tells which of the two comes first: else samples cannot be moved.
    """
    for name, arguments in sampled.items():
        for place, each in arguments.items():
            if is_folded(place, each):
                where = (
                    "samples elsewhere than" if each == ELSEWHERE else f"{each} items a sample (samples times heads)"
                )
                what = "The output" if place.startswith(_OUTPUT) else f"Argument {place.lstrip('.')}"
                remedy = (
                    f"{what} of {name} has {where} along dim 0, which cannot be moved: share samples alike in all "
                    "layers, as with --fix data=1 --fix zero=1, or with the same degrees for before, after and the "
                    "blocks."
                )
                raise InputError("plan", f"other samples in {name} than around it", remedy)


def mean_of_outputs(output: Any, _: Any = None) -> Tensor:
    """A scalar made of every floating tensor that a model gives; a ``loss_fn`` that stands in for a loss."""
    means = [tensor.float().mean() for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not means:
        remedy = "Profile the model up to the last tensor of floating numbers, or pass loss_fn."
        raise InputError("output", type(output).__name__, remedy)
    return sum(means[1:], means[0])


def gives_loss(model: nn.Module, batch: Any) -> bool:
    """Whether a model gives its loss itself, seen on a copy without storages."""
    shapes = resize_batch(batch, 2)
    output = observe(meta_copy(model), shapes, []).output
    try:
        loss_of(output, shapes)
    except InputError:
        return False
    return True
