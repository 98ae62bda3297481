"""Running operations on tensors that have shapes and no data, under a ledger of what they hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

# FakeTensorMode has no public name, though torch documents it (docs.pytorch.org, "Fake tensor");
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_lite.errors import GalvatronError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.verify.dry.ledger import Ledger, Use

OWN = "galvatron"
"""Namespace of this project's operators that send messages: what they do inside is seen."""
SHARDING = "fsdp"  # namespace of the operators between what ZeRO shares out and what it sends
SMALL = 2**16
"""Items of a tensor of whole numbers, made from nothing, up to which it is real: places, sizes, announcements."""


class DryRunError(GalvatronError):
    """What runs depends on values, which a dry run does not have."""


class DryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All that is made from nothing has no data, and neither has what is made of it.

    Small tensors of whole numbers are real where they are made from nothing or of real ones, as process groups,
    positions and announcements need their values; so are tensors on the meta device what they always are. Whether
    something is finite, which is asked behind every step, is answered with yes. Where numbers stand in a sorted tensor
    without data is answered as if it held each as often as the others: routers send every expert as many tokens.
    """

    def __init__(self, ledger: Ledger, operations: OpCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self._known = operations or OpCache()
        self._fake = self._known.fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not wrap ``__torch_dispatch__``: nothing here is compiled, and the wrapper costs more than most calls."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; tensors that wrap others take it apart first."""
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        fake = cut = False
        for kind in types:
            if kind is FakeTensor:
                fake = True
            elif issubclass(kind, FakeTensor):
                fake = cut = True
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented
            elif kind not in _PLAIN:
                cut = True
        if cut:
            with torch._C.DisableTorchFunctionSubclass():  # they are what they hold
                return self._run(func, types, args, kwargs, fake)
        return self._run(func, types, args, kwargs, fake)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, fake: bool) -> Any:
        # private; set where DTensor finds out shapes in a mode of its own (nothing is held), and in our own operators
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is not None:
            if active is not self._fake:
                return func(*args, **kwargs)
            made = self._known.run(func, args, kwargs, func)
            if _makes(func):
                self._enter(made)
            return made
        if func is _ITEM:
            return _answer(args[0])
        if func is _SEARCH and isinstance(args[0], FakeTensor) and type(args[1]) is Tensor and len(args) == 2:
            made = _evenly(args[0], args[1])
            self._enter(made)
            return made
        if func is _EMPTY_LIKE and _on_meta(kwargs):
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="meta")
        if not fake and not _fakes(func, args, kwargs):
            made = func(*args, **kwargs)
        else:
            if func is _GROUPED:
                func, args, kwargs = torch.ops.aten.new_empty.default, (args[0], _grouped(*args, **kwargs)), {}

            def compute(*args: Any, **kwargs: Any) -> Any:
                return self._fake.__torch_dispatch__(func, types, args, kwargs)

            with self if func.namespace == OWN else nullcontext():
                made = self._known.run(func, args, kwargs, compute)
        if _makes(func):
            self._enter(made)
        if func is _COPY:
            self.ledger.copied(args[0], made)
        if func.namespace == SHARDING:
            self._sort(func, kwargs, made)
        return made

    def _sort(self, func: Any, kwargs: Any, output: Any) -> None:
        """What FSDP2's own operators fill: whole parameters, or buffers that are sent."""
        use = Use.PARAMETERS if "split" in func.name() else Use.COMMUNICATION
        self.ledger.use(tensors_of((output, kwargs)), use, _PASSING)

    def _enter(self, output: Any) -> None:
        if isinstance(output, Tensor):
            device = output.fake_device if isinstance(output, FakeTensor) else output.device
            if device.type != "meta":
                self.ledger.see(output)
        elif isinstance(output, (list, tuple)):
            for one in output:
                self._enter(one)


_PASSING = frozenset({Use.TEMPORARY, Use.ACTIVATIONS})
_RANDOM = torch.ops.aten.randint  # makes whole numbers: the beginnings of other random numbers
_DEVICE, _ITEM = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
_COPY = torch.ops.aten._to_copy.default
_SEARCH = torch.ops.aten.searchsorted.Tensor
_EMPTY_LIKE = torch.ops.aten.empty_like.default
_PLAIN = (Tensor, torch.nn.Parameter)
_GROUPED = torch.ops.aten._grouped_mm.default
"""Its shapes are torch's to tell in bfloat16 alone, though it runs in every precision."""


def _grouped(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> list[int]:
    """The shape of products of groups: rows of one matrix, columns of the other, or matrices one by one."""
    groups = [] if offsets is None or first.dim() != second.dim() else [len(offsets)]
    if first.dim() == second.dim() == 3:
        groups = [len(first)]
    return [*groups, first.shape[-2], second.shape[-1]]


def _evenly(held: Tensor, numbers: Tensor) -> Tensor:
    """Where numbers up to the greatest of them begin among sorted ones that hold each below it equally often."""
    return numbers.clone() if not len(numbers) else numbers * held.shape[-1] // numbers.max().clamp(min=1)


def _fakes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation on plain tensors, or on none, makes a tensor without data."""
    if _takes_tensors(func):
        return False
    if _on_meta(kwargs):
        return False
    items = _items(func, args)
    dtype = kwargs.get("dtype")
    if dtype is None:
        whole = func.overloadpacket is _RANDOM or (func.overloadpacket is torch.ops.aten.arange and _all_ints(args))
        dtype = torch.int64 if whole else torch.float32
    return bool(items and (dtype.is_floating_point or dtype.is_complex or items > SMALL))


def _on_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _all_ints(args: Any) -> bool:
    return all(isinstance(one, int) for one in args)


def _items(func: Any, args: Any) -> int:
    """How many items an operation makes from nothing; more than ``SMALL`` where that is not known."""
    sizes = next((one for one in args if isinstance(one, (list, tuple))), None)
    if sizes is not None:
        return int(prod(sizes))
    if func.overloadpacket is torch.ops.aten.arange and _all_ints(args):
        start, stop, *step = args if len(args) > 1 else (0, *args)
        return int(abs(stop - start) // abs(step[0] if step else 1)) + 1
    return SMALL + 1


@cache
def _takes_tensors(func: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in func._schema.arguments)


@cache
def _makes(func: Any) -> bool:
    return any(one.alias_info is None for one in func._schema.returns)


def _answer(tensor: Tensor) -> Any:
    known = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if known is not None:
        return known.item()
    if tensor.dtype == torch.bool:
        return True
    if tensor.dtype.is_floating_point:
        return 1.0
    remedy = "What runs depends on numbers that only data decides; a dry run cannot follow."
    raise DryRunError(remedy)


_PLAIN_VALUES = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """A tensor that an operation returns."""

    source: int  # place among the operation's tensors of that which is returned as it is, or is looked at; -1: none
    same: bool  # it is returned as it is
    shape: tuple[int, ...] = ()  # shape, stride, offset, dtype, device: of anything else
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class CachedOutputs:
    """All that an operation returns, and the sequence that it comes in; None: one tensor, or none."""

    made: tuple[OutputSpec, ...]
    sequence: type | None


class OpCache:
    """Operations that were run, and what they returned: thousands of layers and micro-batches do the same.

    ``FakeTensorMode`` has a memory of its own, which takes several times as long to ask (it also knows symbolic sizes,
    sparse tensors and devices of all kinds). What is not plain here is left to it.
    """

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._answers: dict[Any, CachedOutputs | None] = {}
        self._dresses: dict[torch.device | None, dict[str, Any]] = {}

    def run(self, func: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        """What the operation returns; ``compute`` runs it where that is not known."""
        tensors: list[Tensor] = []
        key: list[Any] = [id(func)]  # operators live as long as torch; hashing them runs Python code
        if not (_is_plain(func) and _add_key(key, tensors, args) and _add_key(key, tensors, tuple(kwargs.items()))):
            return compute(*args, **kwargs)
        full_key = tuple(key)
        answer = self._answers.get(full_key)
        if answer is not None:
            # private, as in torch's own fake tensors: what is made here is no operation of the model's
            with torch._C._DisableTorchDispatch():
                return self._repeat(answer, tensors)
        found = compute(*args, **kwargs)
        if full_key not in self._answers:
            self._answers[full_key] = _outputs_of(found, tensors)
        return found

    def _repeat(self, answer: CachedOutputs, tensors: list[Tensor]) -> Any:
        if answer.sequence is None:
            return self._make(answer.made[0], tensors) if answer.made else None
        return answer.sequence([self._make(one, tensors) for one in answer.made])

    def _make(self, one: OutputSpec, tensors: list[Tensor]) -> Tensor:
        if one.same:
            return tensors[one.source]
        if one.source < 0:
            bare = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
        else:
            bare = _empty(one.dtype)
            bare.set_(tensors[one.source].untyped_storage(), one.offset, one.shape, one.stride)
        return self._dress(bare, one.device)

    def _dress(self, bare: Tensor, device: torch.device | None) -> Tensor:
        """What ``FakeTensor(mode, bare, device)`` gives, which checks and sets for longer than an operation takes."""
        known = self._dresses.get(device)
        if known is None:
            known = self._dresses[device] = vars(FakeTensor(self.fake, _empty(torch.float32), device)).copy()
        made = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        vars(made).update(known)
        return made


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


def _add_key(key: list[Any], tensors: list[Tensor], values: Any) -> bool:
    for value in values:
        kind = type(value)
        if kind in _PLAIN_VALUES:
            key.append(kind)
            key.append(value)
        elif issubclass(kind, FakeTensor):
            if value.constant is not None or value.dtype.is_complex:
                return False
            tensors.append(value)
            key += (
                _number(tensors, value), value.dtype, value.shape, value.stride(), value.storage_offset(),
                value.fake_device,
            )  # fmt: skip
        elif kind is list or kind is tuple:
            key.append(len(value))
            if not _add_key(key, tensors, value):
                return False
        else:
            return False
    return True


def _number(tensors: list[Tensor], value: Tensor) -> int:
    return next(number for number, one in enumerate(tensors) if one is value)


@cache
def _is_plain(func: Any) -> bool:
    """Whether what an operation returns is told by the shapes it is given, and it changes none of them."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return False
    changes = torch.Tag.inplace_view in func.tags or func.overloadpacket in _CHANGING
    return func.namespace in ("aten", "fsdp") and not changes


_CHANGING = frozenset({
    torch.ops.aten.set_, torch.ops.aten.resize_, torch.ops.aten.resize_as_, torch.ops.aten.lift_fresh,
    torch.ops.aten.lift, torch.ops.aten.lift_fresh_copy, torch.ops.aten.scalar_tensor,
})  # fmt: skip
"""Operations that change what shape a tensor has, or whose values torch keeps beside the tensor."""


def _outputs_of(outputs: Any, tensors: list[Tensor]) -> CachedOutputs | None:
    if outputs is None:
        return CachedOutputs((), None)
    if isinstance(outputs, Tensor):
        made = _spec_of(outputs, tensors)
        return None if made is None else CachedOutputs((made,), None)
    if type(outputs) not in (list, tuple):
        return None
    every = [_spec_of(one, tensors) for one in outputs]
    fresh = [id(one.untyped_storage()) for one, made in zip(outputs, every, strict=True) if made and made.source < 0]
    if any(one is None for one in every) or len(set(fresh)) < len(fresh):
        return None
    return CachedOutputs(tuple(one for one in every if one is not None), type(outputs))


def _spec_of(outputs: Any, tensors: list[Tensor]) -> OutputSpec | None:
    if type(outputs) is not FakeTensor or outputs.constant is not None or outputs.dtype.is_complex:
        return None
    for number, one in enumerate(tensors):
        if one is outputs:
            return OutputSpec(number, same=True)
    shape, stride, offset = tuple(outputs.shape), outputs.stride(), int(outputs.storage_offset())
    storages = [id(one.untyped_storage()) for one in tensors]
    own = id(outputs.untyped_storage())
    if own in storages:
        return OutputSpec(storages.index(own), False, shape, stride, offset, outputs.dtype, outputs.fake_device)
    if offset or outputs.untyped_storage().nbytes() != _room(shape, stride) * outputs.itemsize:
        return None
    return OutputSpec(-1, False, shape, stride, 0, outputs.dtype, outputs.fake_device)


def _room(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
