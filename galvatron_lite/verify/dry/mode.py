"""Run operations on tensors that have shapes and no data, and record their memory in a ledger."""

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

NAMESPACE = "galvatron"
"""Namespace of this project's operators that send messages; operations inside them are recorded."""
SHARDING = "fsdp"  # namespace of FSDP2's operators that copy between parameters and communication buffers
SMALL = 2**16
"""Items up to which a new tensor of integers has data: positions, sizes, announcements."""


class DryRunError(GalvatronError):
    """A step cannot be run without data, because it depends on values."""


class DryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make tensors without data, and run operations on them.

    Small tensors of integers have data, as process groups, positions and announcements need their values. Tensors on
    the meta device stay as they are. Reading a boolean returns True (after each step the runtime asks whether all
    gradients are finite). ``searchsorted`` in a tensor without data answers as if it held every number equally often,
    so routers send every expert the same number of tokens.
    """

    def __init__(self, ledger: Ledger, operations: FakeCache | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self._cache = operations or FakeCache()
        self._fake = self._cache.fake

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave ``__torch_dispatch__`` unwrapped: nothing is compiled, and the wrapper costs more than most calls."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; subclasses of tensors with a dispatch of their own unwrap themselves first."""
        if func is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        fake = has_subclass = False
        for kind in types:
            if kind is FakeTensor:
                fake = True
            elif issubclass(kind, FakeTensor):
                fake = has_subclass = True
            elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return NotImplemented
            elif kind not in _PLAIN:
                has_subclass = True
        if has_subclass:
            with torch._C.DisableTorchFunctionSubclass():
                return self._run(func, types, args, kwargs, fake)
        return self._run(func, types, args, kwargs, fake)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any, fake: bool) -> Any:
        # private; set while DTensor infers shapes in its own mode (which holds no memory), and in our operators
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is not None:
            if active is not self._fake:
                return func(*args, **kwargs)
            output = self._cache.run(func, args, kwargs, func)
            if _allocates(func):
                self._record(output)
            return output
        if func is _ITEM:
            return _item(args[0])
        if func is _SEARCH and isinstance(args[0], FakeTensor) and type(args[1]) is Tensor and len(args) == 2:
            output = _search_evenly(args[0], args[1])
            self._record(output)
            return output
        if func is _EMPTY_LIKE and _on_meta(kwargs):
            dtype = kwargs.get("dtype") or args[0].dtype
            return torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype, device="meta")
        if not fake and not _makes_fake(func, args, kwargs):
            output = func(*args, **kwargs)
        else:
            if func is _GROUPED:
                func, args, kwargs = torch.ops.aten.new_empty.default, (args[0], _grouped_shape(*args, **kwargs)), {}

            def compute(*args: Any, **kwargs: Any) -> Any:
                return self._fake.__torch_dispatch__(func, types, args, kwargs)

            if func.namespace == NAMESPACE:
                with self:
                    output = compute(*args, **kwargs)
            else:
                output = self._cache.run(func, args, kwargs, compute)
        if _allocates(func):
            self._record(output)
        if func is _COPY:
            self.ledger.record_cast(args[0], output)
        if func.namespace == SHARDING:  # fills gathered parameters, or buffers that are sent
            use = Use.PARAMETERS if "split" in func.name() else Use.COMMUNICATION
            self.ledger.classify(tensors_of((output, kwargs)), use, PASSING)
        return output

    def _record(self, output: Any) -> None:
        if isinstance(output, Tensor):
            device = output.fake_device if isinstance(output, FakeTensor) else output.device
            if device.type != "meta":
                self.ledger.record(output)
        elif isinstance(output, (list, tuple)):
            for item in output:
                self._record(item)


_RANDOM = torch.ops.aten.randint  # makes integers: seeds of other random numbers
_DEVICE, _ITEM = torch.ops.prim.device.default, torch.ops.aten._local_scalar_dense.default
_COPY = torch.ops.aten._to_copy.default
_SEARCH = torch.ops.aten.searchsorted.Tensor
_EMPTY_LIKE = torch.ops.aten.empty_like.default
_PLAIN = (Tensor, torch.nn.Parameter)
_GROUPED = torch.ops.aten._grouped_mm.default
"""Runs in every precision, but torch infers its shape in bfloat16 alone."""


def _grouped_shape(first: Tensor, second: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> list[int]:
    """Return the shape of ``_grouped_mm``: products of groups of rows, or of columns, or of matrices in a batch."""
    groups = [] if offsets is None or first.dim() != second.dim() else [len(offsets)]
    if first.dim() == second.dim() == 3:
        groups = [len(first)]
    return [*groups, first.shape[-2], second.shape[-1]]


def _search_evenly(sorted_tensor: Tensor, numbers: Tensor) -> Tensor:
    """Return the indices of ``numbers`` in a sorted tensor that holds every number below the largest equally often."""
    return numbers.clone() if not len(numbers) else numbers * sorted_tensor.shape[-1] // numbers.max().clamp(min=1)


def _makes_fake(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation on tensors with data, or on none, makes one without data."""
    if _takes_tensors(func) or _on_meta(kwargs):
        return False
    items = _items(func, args)
    dtype = kwargs.get("dtype")
    if dtype is None:
        integers = func.overloadpacket is _RANDOM or (func.overloadpacket is torch.ops.aten.arange and _all_ints(args))
        dtype = torch.int64 if integers else torch.float32
    return bool(items and (dtype.is_floating_point or dtype.is_complex or items > SMALL))


def _on_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _all_ints(args: Any) -> bool:
    return all(isinstance(arg, int) for arg in args)


def _items(func: Any, args: Any) -> int:
    """Return how many items an operation without tensor inputs makes; more than ``SMALL`` if unknown."""
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
def _allocates(func: Any) -> bool:
    return any(output.alias_info is None for output in func._schema.returns)


def _item(tensor: Tensor) -> Any:
    constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if constant is not None:
        return constant.item()
    if tensor.dtype == torch.bool:
        return True
    if tensor.dtype.is_floating_point:
        return 1.0
    raise DryRunError("What runs depends on numbers that only data decides; a dry run cannot follow.")


class FakeCache(OpCache):
    """Results of operations on fake tensors.

    ``FakeTensorMode`` has its own cache, but a look-up takes several times as long (it also covers symbolic sizes,
    sparse tensors and all devices). Operations that this cache does not hold go there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._attributes: dict[torch.device | None, dict[str, Any]] = {}

    def traits_of(self, tensor: Any) -> Traits | None:
        """Return the traits of a fake tensor, with its fake device; None if it cannot be cached."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        dtype = tensor.dtype
        if dtype.is_complex:
            return None
        return dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.fake_device

    def dress(self, bare: Tensor, device: torch.device | None) -> Tensor:
        """Return ``FakeTensor(mode, bare, device)``, but faster: its constructor takes longer than an operation."""
        attributes = self._attributes.get(device)
        if attributes is None:
            empty = torch.empty(0, device="meta")
            attributes = self._attributes[device] = vars(FakeTensor(self.fake, empty, device)).copy()
        dressed = Tensor._make_subclass(FakeTensor, bare, False, dispatch_device=True, device_for_backend_keys=device)
        vars(dressed).update(attributes)
        return dressed
