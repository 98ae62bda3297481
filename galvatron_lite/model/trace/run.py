"""Runs of a model without storages: of the full model, to observe its blocks, and of single regions in detail."""

from __future__ import annotations

import gc
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
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
    """One call of a block."""

    path: str  # of the block
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    heard: list[BlockCall] = field(default_factory=list)  # calls of modules inside it that have hooks of the model

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors of the arguments, in order."""
        return [*tensors_of(self.args), *tensors_of(self.kwargs)]


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that autograd keeps."""

    storage: int  # ``id`` of its storage, which lives as long as the observation
    size: int  # bytes
    calls: int  # number of calls of blocks before
    inside: tuple[str, ...]  # paths of the running blocks


@dataclass(slots=True)
class Observation:
    """One run of the full model."""

    order: list[str] = field(default_factory=list)  # paths of modules in the order of their calls
    calls: list[BlockCall] = field(default_factory=list)  # calls of blocks in order
    output: Any = None  # of the model
    rewritten: list[str] = field(default_factory=list)  # paths of blocks whose outputs code between blocks changes
    kept: list[KeptTensor] = field(default_factory=list)  # tensors that autograd keeps for backward


def observe(twin: nn.Module, batch: Any, blocks: Sequence[str], flow: DataFlow | None = None) -> Observation:
    """Run a full model once on the meta device, and observe calls of its blocks, and in ``flow`` sources of tensors.

    Raises:
        TraceError: the model does not run without data; names the innermost module.
    """
    observation, entered = Observation(), list[str]()
    chosen, running = set(blocks), list[BlockCall]()
    results = dict[int, tuple[str, Tensor, int]]()  # outputs of blocks, by id, with their versions after the last block

    def enter(path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(path)
        observation.order.append(path)
        if flow is not None:
            flow.enter(path)
        if path in chosen:
            observation.rewritten += [path for path, tensor, version in results.values() if tensor._version != version]
            # the model may add to a list that it hands over
            held_args, held_kwargs = map_tensors((args, kwargs), lambda tensor: tensor)
            observation.calls.append(BlockCall(path, held_args, held_kwargs))
            running.append(observation.calls[-1])

    def leave(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        entered.pop()
        result = output if flow is None else flow.leave((args, kwargs), output)
        if path in chosen:
            running.pop().output = result
            results.update((id(tensor), (path, tensor, 0)) for tensor in tensors_of(result))
            results.update((key, (block, one, one._version)) for key, (block, one, _) in list(results.items()))
        elif running and len(module._forward_hooks) > 1:  # the model's hooks beside ours: transformers collects outputs
            running[-1].heard.append(BlockCall(path, args, kwargs, result))
        return result

    def keep(tensor: Tensor) -> Tensor:
        storage, paths = tensor.untyped_storage(), tuple(call.path for call in running)
        observation.kept.append(KeptTensor(id(storage), storage.nbytes(), len(observation.calls), paths))
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
        observation.output = call_model(twin, batch)
    return observation


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Disable garbage collection while operators are recorded: finalizers (of DeepSpeed) run operators, too."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def shapes_only(recorder: Recorder) -> Iterator[None]:
    """Create tensors on the meta device, fuse attention, group experts, and record."""
    hooks = saved_tensors_hooks(recorder.keep, lambda kept: kept)
    with _REPLACING_AUTOCAST, torch.device("meta"), ShapesOnly(), _autocast_on_meta(), hooks, recorder:
        yield


_REPLACING_AUTOCAST = RLock()  # with two threads, the one that ends last would put back what the other one replaced


@contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Replace ``torch.autocast`` of the meta device, which torch does not have, by that of the CPU."""
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
    """Turn any error into a TraceError that names the module, or the innermost module entered inside it."""
    try:
        yield
    except Exception as cause:
        if isinstance(cause, GalvatronError) and not isinstance(cause, TraceError):
            raise
        inner = entered[-1] if entered else ""
        full = ".".join(filter(None, (path, inner)))
        reason = cause.remedy if isinstance(cause, TraceError) else f"{type(cause).__name__}: {cause}".split(". ")[0]
        # torch has no type of error for operators that read values: nonzero, tolist, numpy
        reads_values = isinstance(cause, (ValuesReadError, NotImplementedError)) or "meta " in str(cause)
        kind = ValuesReadError if reads_values else TraceError if isinstance(cause, TraceError) else MetaRunError
        if operator := re.search(r"register_meta function for (\S+)\(\)", reason):
            reason = f"{operator[1]} reads values of tensors."
        elif operator := re.search(r"(aten::\w+).* no fake impl", reason):
            kind, reason = MissingOperatorError, f"PyTorch has no {operator[1]} without data."
        elif kind is MetaRunError:
            reason = f"{reason}{_place_of(cause)}. {_STALE}"
        remedy = f"It does not run without data (on the meta device): {reason}"
        raise kind(f"block {full}" if full else "model", type(module.get_submodule(inner)).__name__, remedy) from cause


class _RegionEnd(torch.autograd.Function):
    """The end of a region: its backward creates a gradient of each output, which lives only as long as it is needed."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.outputs = [(tensor.shape, tensor.dtype) for tensor in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.outputs)


class _RegionStart(torch.autograd.Function):
    """The start of a region: returns a tensor that is no leaf, as a layer would, so that it may be overwritten."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.data  # with the same storage, but no view of the leaf

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def entered(tensor: Tensor) -> Tensor:
    """An input of a region as a layer before it would return it: no leaf, so that it may be overwritten."""
    result: Tensor = _RegionStart.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return result


def region_end(outputs: Sequence[Tensor]) -> Tensor | None:
    """A scalar whose backward creates gradients of all outputs that require one; None if none does."""
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    return _RegionEnd.apply(*trained) if trained else None  # type: ignore[no-untyped-call]


def chain_inputs(calls: Sequence[BlockCall], paths: Collection[str]) -> tuple[int, ...]:
    """Indices in ``BlockCall.inputs`` of the outputs of the block that is called before one of these (equal) blocks.

    If there are none (for the first block): the index of the first floating-point tensor.
    """
    for before, call in zip([None, *calls[:-1]], calls, strict=True):
        if call.path in paths and before is not None:
            outputs = [tensor.untyped_storage() for tensor in tensors_of(before.output)]
            inputs = [tensor.untyped_storage() for tensor in call.inputs]
            indices = tuple(i for i, storage in enumerate(inputs) if any(storage is other for other in outputs))
            if indices:
                return indices
    call = next(call for call in calls if call.path in paths)
    return tuple(i for i, tensor in enumerate(call.inputs) if tensor.is_floating_point())[:1]


@dataclass(slots=True)
class RegionRun:
    """The recording of a region, with the storages that enter and leave it."""

    recording: Recording
    chain: tuple[int, ...]  # storages of outputs of the layer before, or of the batch
    side: tuple[int, ...]  # storages of other inputs
    needed: tuple[int, ...] = ()  # indices of other inputs that backward needs
    handed: tuple[int, ...] = ()  # storages of ``chain`` that the layer before created
    leaving: tuple[int, ...] = ()  # storages of outputs


def run_block(block: nn.Module, call: BlockCall, chain: Sequence[int]) -> RegionRun:
    """Run forward and backward of a block on the meta device, and record them.

    ``chain`` are the indices of the inputs that are outputs of the layer before.

    Raises:
        TraceError: the block does not run without data.
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
"""In place of a number of items of dim 0: the samples are along another dim."""


def block_calls(model: nn.Module, names: Collection[str], batch: Any, samples: int = _FEW) -> dict[str, BlockCall]:
    """The first call of each named block, on the meta device, with a number of samples."""
    observation = observe(meta_copy(model), resize_batch(batch, samples), list(names))
    return {call.path: call for call in reversed(observation.calls)}


def sample_arguments(model: nn.Module, names: Collection[str], batch: Any) -> dict[str, dict[str, int]]:
    """The number of items of dim 0 for each sample, of tensors that named blocks take and return: 1 if dim 0 is that of
    the samples, 0 if it does not grow with them, more if it is samples times heads, ``ELSEWHERE`` if the samples are
    along another dim.

    It is determined from two runs with different numbers of samples, so that a size which equals one of them by chance
    does not mislead.

    Returns:
        By block, then by place in its (args, kwargs, output) (see ``map_places``). Empty if the model does not run.
    """
    try:
        few, more = (block_calls(model, names, batch, samples) for samples in (_FEW, _MORE))
    except TraceError:
        return {}
    return {name: items_a_sample(few[name], more[name], (_FEW, _MORE)) for name in few.keys() & more.keys()}


def items_a_sample(few: BlockCall, more: BlockCall, samples: tuple[int, int]) -> dict[str, int]:
    """The result of ``sample_arguments`` for a block, from its calls with two numbers of samples."""
    before, after = (
        {place: tensor.shape for place, tensor in places((call.args, call.kwargs, call.output))} for call in (few, more)
    )
    return {place: _items(before[place], after[place], samples) for place in before if place in after}


def _items(few: Sequence[int], more: Sequence[int], samples: tuple[int, int]) -> int:
    def grows(size: int, larger: int) -> bool:
        return 0 < size < larger and size % samples[0] == 0 and size // samples[0] * samples[1] == larger

    grown = [dim for dim, sizes in enumerate(zip(few, more, strict=False)) if grows(*sizes)]
    return few[0] // samples[0] if 0 in grown else ELSEWHERE if grown else 0


def argument_name(place: str) -> str:
    """What people call a place of a block's call: ``argument 1`` (its second), ``argument mask``, ``output``."""
    return "output" if place.startswith(_OUTPUT) else f"argument {place[len('.0.') :]}"


def is_folded(place: str, each: int) -> bool:
    """Whether samples of a tensor at a place cannot be moved, by its items for each sample; outputs of samples times
    something else (router logits of tokens) are read by the loss only."""
    return each == ELSEWHERE or (each > 1 and not place.startswith(_OUTPUT))


def check_folded(sampled: Mapping[str, Mapping[str, int]], outputs: bool = False) -> None:
    """Check that samples are along dim 0, not folded with another dim, as their order would not be known.

    Args:
        sampled: by ``sample_arguments``.
        outputs: whether to refuse them in outputs of samples times something else, too.

    Raises:
        InputError: they are not, so that samples cannot be moved between a block and the code around it.
    """
    for name, arguments in sampled.items():
        for place, each in arguments.items():
            if is_folded(place, each) or (outputs and each > 1):
                where = (
                    "samples elsewhere than" if each == ELSEWHERE else f"{each} items a sample (samples times heads)"
                )
                remedy = (
                    f"{argument_name(place).capitalize()} of {name} has {where} along dim 0, which cannot be moved: "
                    "share samples alike in all layers, as with --fix data=1 --fix zero=1, or with the same degrees "
                    "for before, after and the blocks."
                )
                remedy += " Branches have other samples than the code around them: --forbid branches." * outputs
                raise InputError("plan", f"other samples in {name} than around it", remedy)


def mean_of_outputs(output: Any, _: Any = None) -> Tensor:
    """The sum of the means of a model's floating-point outputs; a ``loss_fn`` for models without a loss."""
    means = [tensor.float().mean() for tensor in tensors_of(output) if tensor.is_floating_point()]
    if not means:
        remedy = "Profile the model up to the last tensor of floating numbers, or pass loss_fn."
        raise InputError("output", type(output).__name__, remedy)
    return sum(means[1:], means[0])


def gives_loss(model: nn.Module, batch: Any) -> bool:
    """Whether a model returns its loss, determined on a copy without storages."""
    shapes = resize_batch(batch, 2)
    output = observe(meta_copy(model), shapes, []).output
    try:
        loss_of(output, shapes)
    except InputError:
        return False
    return True
