"""Running operations on tensors that have shapes and no data, under a ledger of what they hold."""

from __future__ import annotations

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
from galvatron_lite.model.trace.op_cache import OpCache, Traits
from galvatron_lite.verify.dry.ledger import PASSING, Ledger, Use

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

    def __init__(self, ledger: Ledger, operations: FakeCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self._known = operations or FakeCache()
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
            output = self._known.run(func, args, kwargs, func)
            if _makes(func):
                self._enter(output)
            return output
        if func is _ITEM:
            return _answer(args[0])
        if func is _SEARCH and isinstance(args[0], FakeTensor) and type(args[1]) is Tensor and len(args) == 2:
            output = _evenly(args[0], args[1])
            self._enter(output)
            return output
        if func is _EMPTY_LIKE and _on_meta(kwargs):
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="meta")
        if not fake and not _fakes(func, args, kwargs):
            output = func(*args, **kwargs)
        else:
            if func is _GROUPED:
                func, args, kwargs = torch.ops.aten.new_empty.default, (args[0], _grouped(*args, **kwargs)), {}

            def compute(*args: Any, **kwargs: Any) -> Any:
                return self._fake.__torch_dispatch__(func, types, args, kwargs)

            if func.namespace == OWN:
                with self:
                    output = compute(*args, **kwargs)
            else:
                output = self._known.run(func, args, kwargs, compute)
        if _makes(func):
            self._enter(output)
        if func is _COPY:
            self.ledger.record_cast(args[0], output)
        if func.namespace == SHARDING:
            self._sort(func, kwargs, output)
        return output

    def _sort(self, func: Any, kwargs: Any, output: Any) -> None:
        """What FSDP2's own operators fill: whole parameters, or buffers that are sent."""
        use = Use.PARAMETERS if "split" in func.name() else Use.COMMUNICATION
        self.ledger.classify(tensors_of((output, kwargs)), use, PASSING)

    def _enter(self, output: Any) -> None:
        if isinstance(output, Tensor):
            device = output.fake_device if isinstance(output, FakeTensor) else output.device
            if device.type != "meta":
                self.ledger.record(output)
        elif isinstance(output, (list, tuple)):
            for one in output:
                self._enter(one)


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
        runs_for_real = func.overloadpacket is _RANDOM or (
            func.overloadpacket is torch.ops.aten.arange and _all_ints(args)
        )
        dtype = torch.int64 if runs_for_real else torch.float32
    return bool(items and (dtype.is_floating_point or dtype.is_complex or items > SMALL))


def _on_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _all_ints(args: Any) -> bool:
    return all(isinstance(arg, int) for arg in args)


def _items(func: Any, args: Any) -> int:
    """How many items an operation makes from nothing; more than ``SMALL`` where that is not known."""
    sizes = next((arg for arg in args if isinstance(arg, (list, tuple))), None)
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
    constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if constant is not None:
        return constant.item()
    if tensor.dtype == torch.bool:
        return True
    if tensor.dtype.is_floating_point:
        return 1.0
    remedy = "What runs depends on numbers that only data decides; a dry run cannot follow."
    raise DryRunError(remedy)


class FakeCache(OpCache):
    """The same of fake tensors.

    ``FakeTensorMode`` has a memory of its own, which takes several times as long to ask (it also knows symbolic sizes,
    sparse tensors and devices of all kinds). What is not plain here is left to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._dresses: dict[torch.device | None, dict[str, Any]] = {}

    def traits_of(self, tensor: Any) -> Traits | None:
        """As of tensors on the meta device; the device is the one that is shown."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        dtype = tensor.dtype
        if dtype.is_complex:
            return None
        return dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.fake_device

    def dress(self, bare: Tensor, device: torch.device | None) -> Tensor:
        """What ``FakeTensor(mode, bare, device)`` gives, which checks and sets for longer than an operation takes."""
        cached = self._dresses.get(device)
        if cached is None:
            empty = torch.empty(0, device="meta")
            cached = self._dresses[device] = vars(FakeTensor(self.fake, empty, device)).copy()
        dressed = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        vars(dressed).update(cached)
        return dressed
