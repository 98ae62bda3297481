"""Recording of a run on the meta device: operators, storages created and freed, and tensors that autograd keeps."""

from __future__ import annotations

import ast
import linecache
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.frames import PACKAGE, TORCH, callers
from galvatron_lite.model.graph import OperatorClass
from galvatron_lite.model.trace.op_cache import OpCache
from galvatron_lite.model.trace.operators import (
    classify,
    extents,
    flops,
    groups,
    is_causal,
    moved,
    name_of,
    statistics_of,
)

_CACHE = OpCache()
_FAULTS, _JOINS = {"isnan", "isinf"}, {"any", "logical_or", "bitwise_or"}
"""Operators that look for numbers that are not finite, and those that join their results."""
_ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def leads_to_error() -> bool:
    """Whether the user's code that reads a boolean raises an error if it is true."""
    file, line = next(callers((TORCH, PACKAGE)), ("", 0))
    return line in _lines_before_errors(file)


@cache
def _lines_before_errors(file: str) -> frozenset[int]:
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return frozenset()
    raising = [node.test for node in nodes if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)]
    asserted = [node.test for node in nodes if isinstance(node, ast.Assert) and _negates(node.test)]
    tests = [*(test for test in raising if not _negates(test)), *asserted]
    return frozenset(line for test in tests for line in range(test.lineno, (test.end_lineno or test.lineno) + 1))


def _negates(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Not) for node in ast.walk(test))


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call."""

    path: str  # of the module whose code calls it, relative to the region
    name: str  # of the operator
    kind: OperatorClass  # what bounds its time
    shape: tuple[int, ...]  # as ``Operator.shape``; of attention with the samples before it
    flops: int  # multiply-adds counted as two; 0 for memory-bound operators
    moved: int  # bytes of its inputs and outputs
    backward: bool  # whether it ran in backward
    outputs: tuple[int, ...]  # storages of its outputs
    causal: bool = False  # of attention: whether a query sees no later key
    statistics: int = 0  # number of sums over all pixels of a picture on which its result depends
    groups: int = 1  # number of matmuls of that shape, one for each expert of a mixture
    weight_bytes: int = 0  # of figures for one sample: bytes that do not grow with the samples
    reads: int = 0  # of a matmul: storage of the operand left of the weight


@dataclass(slots=True)
class Recording:
    """The record of one region's run. Storages are numbered in the order of first use."""

    calls: list[OperatorCall] = field(default_factory=list)  # in order
    sizes: dict[int, int] = field(default_factory=dict)  # bytes by storage
    # storages created (number) and freed (-number), in order, without those that existed before
    events: list[int] = field(default_factory=list)
    forward_events: int = 0  # number of events in forward
    kept: dict[int, None] = field(default_factory=dict)  # storages autograd keeps for backward, in order
    gradients: set[int] = field(default_factory=set)  # storages of parameter gradients


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator call below autograd in ``target``, unless that is None.

    Values of boolean tensors (``mask.all()``) are true when they are read: such checks usually ask for the simple case
    (no padding, no packing). They are false if they ask whether numbers are not finite, or if true would only raise an
    error (``if hidden.max() > 100: raise``). Reads of other values raise ValuesReadError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target: Recording | None = None
        self.path = ""
        self.backward = self._ignored = False
        self._numbers, self._faults = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._next = count(1)
        self._callers: list[str] = []
        self._nodes: dict[Node, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype is torch.bool:
                return args[0].untyped_storage() not in self._faults and not leads_to_error()
            raise ValuesReadError("model", "tensor.item()", "The model reads values of tensors to decide what to run.")
        if self.target is None or self._ignored:
            return self._run(func, args, kwargs)
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        input_numbers = {self.number(tensor) for tensor in inputs}
        output = self._run(func, args, kwargs)
        outputs, name = list(tensors_of(output)), name_of(func)
        numbers = tuple(self.number(tensor, created=True) for tensor in outputs)
        in_place = any(output is tensor for output in outputs for tensor in inputs)
        if name not in _ALLOCATIONS and (in_place or not set(numbers) <= input_numbers):
            kind = classify(func)
            left = args[1 if name in ("addmm", "baddbmm") else 0] if kind is OperatorClass.MATMUL else None
            call = OperatorCall(
                self.path, name, kind, extents(func, args, outputs), flops(func, args, kwargs, output),
                moved(func, inputs, outputs), self.backward, numbers, is_causal(func, args),
                statistics_of(name, args), groups(func, args), reads=0 if left is None else self.number(left),
            )  # fmt: skip
            self.target.calls.append(call)
        return output

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        output, name = _CACHE.run(func, args, kwargs, func), name_of(func)
        joins = name in _JOINS and any(tensor.untyped_storage() in self._faults for tensor in tensors_of(args))
        if name in _FAULTS or joins:
            self._faults[output.untyped_storage()] = True
        return output

    def number(self, tensor: Tensor, created: bool = False) -> int:
        """The number of a tensor's storage; a new storage gets the next, and an event if it was ``created``."""
        storage = tensor.untyped_storage()
        number = int(self._numbers.get(storage, 0))  # type: ignore[no-untyped-call]
        if not number:
            number = self._numbers[storage] = next(self._next)
            if created and self.target is not None:
                self.target.events.append(number)
                weakref.finalize(storage, self.target.events.append, -number).atexit = False
        if self.target is not None:
            self.target.sizes[number] = storage.nbytes()
        return number

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that autograd keeps a tensor; the pack hook of ``saved_tensors_hooks``."""
        if self.target is not None:
            self.target.kept.setdefault(self.number(tensor))
        return tensor

    def claim(self, output: Any, path: str) -> None:
        """Assign the autograd nodes above ``output`` to a module, unless they are assigned already.

        Operators that are not recorded in forward are not recorded in backward either.
        """
        pending = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in self._nodes:
                continue
            self._nodes[node] = path
            node.register_prehook(partial(self._enter_backward, path, self.target is None))
            pending.extend(following for following, _ in node.next_functions if following is not None)

    def _enter_backward(self, path: str, ignored: bool, _: Any) -> None:
        self.path, self._ignored = path, ignored

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Inside, assign what runs in each submodule, forward and backward, to its path."""
        handles = []
        for path, child in module.named_modules():
            handles.append(child.register_forward_pre_hook(partial(self._enter, path), prepend=True, with_kwargs=True))
            handles.append(child.register_forward_hook(partial(self._leave, path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.claim((args, kwargs), self.path)
        self._callers.append(self.path)
        self.path = path

    def _leave(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        self.claim(output, path)
        self.path = self._callers.pop()

    def start_backward(self, target: Recording) -> None:
        """From here on record calls in ``target`` as backward calls."""
        target.forward_events = len(target.events)
        self.target, self.backward, self.path, self._ignored = target, True, "", False

    def finish(self, target: Recording, parameters: Iterable[nn.Parameter]) -> None:
        """Record the gradients of parameters, and release them."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        self.target = target
        target.gradients = {self.number(p.grad) for p in trainable if p.grad is not None}
        self.target = None
        for parameter in trainable:
            parameter.grad = None


class MetaRunError(TraceError):
    """The model does not run without data; it may run with data."""


class ValuesReadError(MetaRunError):
    """The model reads values of tensors to decide what to run, so it cannot be captured without data."""

    instead = "let masks take the place of values (torch.where, or all experts on all tokens)."

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(
            field, value, reason if _TRAINS in reason else f"{reason.rstrip('.')}. {_TRAINS} {self.instead}"
        )


class MissingOperatorError(ValuesReadError):
    """The model calls an operator for which PyTorch has no implementation without data."""

    instead = "take another operator."


class UnlikeRunsError(ValuesReadError):
    """The model runs other operators with another batch size, as a loop over samples does."""

    instead = "run the same operators whatever the batch size, or name its blocks (blocks=)."


_TRAINS = "auto_parallelize trains such a model, every rank all of it; for other plans"
