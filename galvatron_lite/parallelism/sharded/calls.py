"""Calls of torch functions: read their arguments, align their operands, and gather tensors without a rule."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch import eager_transforms, vmap
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import handle_torch_function, has_torch_function

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors
from galvatron_lite.parallelism.sharded.collectives import full_tensor, gather_dims, local_part
from galvatron_lite.parallelism.sharded.groups import AxisGroup
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpec,
    ShardSpecs,
    global_shape,
    in_place,
    locals_only,
    sharded_tensors,
    specs_of,
    wrap_locals,
)

# Arguments


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """Return an argument by position or by name."""
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def named_arguments(call: Call, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; ``defaults`` has all arguments in order."""
    return {**defaults, **dict(zip(defaults, call.args, strict=False)), **call.kwargs}


ATTENTION: Mapping[str, Any] = {
    "query": None, "key": None, "value": None,
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
"""Arguments of ``scaled_dot_product_attention`` and their defaults."""


def arguments(call: Call, public: Callable[..., Any], built_in: Sequence[str] = ()) -> dict[str, Any]:
    """Return arguments by the names of a documented function, with its defaults.

    Args:
        call: of the documented function, or of torch's built-in function of the same name.
        public: the documented function.
        built_in: argument names of the built-in function, in order; empty if there is none.
    """
    names, defaults = _signature(public)
    order = names if call.function is public or not built_in else built_in
    return {**defaults, **dict(zip(order, call.args, strict=False)), **call.kwargs}


@cache
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the arguments in order, and the defaults by name."""
    parameters = inspect.signature(function).parameters
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return tuple(parameters), defaults


def input_first(call: Call) -> Call:
    """Move ``input=`` to the first position, and refuse ``out=``.

    Raises:
        InputError: the call has ``out=``.
    """
    if call.kwargs.get("out") is not None:
        raise InputError(f"out= of {call.name}", "a tensor", "Use what the function returns: pictures are split.")
    if call.args or "input" not in call.kwargs:
        return call
    rest = {name: value for name, value in call.kwargs.items() if name != "input"}
    return call._replace(args=(call.kwargs["input"],), kwargs=rest)


def tensors_among(call: Call) -> list[Tensor]:
    """Return the tensors among the arguments in order, without those in lists."""
    return [value for value in chain(call.args, call.kwargs.values()) if isinstance(value, Tensor)]


def handled_by(handler: Handler, names: str) -> dict[str, Handler]:
    """Return a table with one handler for several functions; ``names`` are separated by spaces."""
    return dict.fromkeys(names.split(), handler)


def on_locals(call: Call) -> Any:
    """Call the function with the local tensors."""
    with locals_only():
        return call.function(*call.args, **call.kwargs)


def wrap_like(call: Call, result: Any, tensor: Tensor) -> Any:
    """Turn the result of a function of shards into sharded tensors with the specs of ``tensor``."""
    return wrap_locals(result, specs_of(tensor), call.rules)


# Alignment: all operands of a function get the same specs


def same_group(first: AxisGroup, second: AxisGroup) -> bool:
    """Whether two groups have the same ranks."""
    return first is second or first == second


def spec_at(specs: ShardSpecs, dim: int) -> ShardSpec | None:
    """Return the spec of a dim; None if it is not sharded."""
    return next((spec for spec in specs if spec.dim == dim), None)


def without_dims(specs: ShardSpecs, dims: Sequence[int]) -> ShardSpecs:
    """Return the specs of a tensor after some unsharded dims have been removed."""
    return tuple(spec.at_dim(spec.dim - sum(dim < spec.dim for dim in dims)) for spec in specs)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which shapes are broadcast."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def common_specs(tensors: Sequence[Tensor]) -> ShardSpecs:
    """Return how the result of a pointwise function of tensors is sharded.

    Raises:
        RuntimeError: the global shapes cannot be broadcast.
    """
    shape = broadcast(*map(global_shape, tensors))
    shifted = [[spec.at_dim(spec.dim + len(shape) - tensor.dim()) for spec in specs_of(tensor)] for tensor in tensors]
    return first_specs([spec for spec in specs if spec.extent == shape[spec.dim]] for specs in shifted)


def first_specs(candidates: Iterable[Iterable[ShardSpec]]) -> ShardSpecs:
    """Return the first spec of each dim, unless its group already shards another dim."""
    specs = dict[int, ShardSpec]()
    for spec in chain.from_iterable(candidates):
        if spec.dim not in specs and not any(same_group(spec.group, other.group) for other in specs.values()):
            specs[spec.dim] = spec
    return tuple(specs[dim] for dim in sorted(specs))


def align(tensor: Tensor, specs: ShardSpecs, dims: int) -> Tensor:
    """Return the local part of an operand of a function whose result has ``dims`` dims and these specs.

    Dims that are sharded in another way are gathered; of full dims this rank takes its part. Dims of extent 1 are
    broadcast. Call it within ``locals_only``.
    """
    before = dims - tensor.dim()
    kept = specs_of(tensor)
    for spec in kept:
        wanted = spec_at(specs, spec.dim + before)
        if wanted is None or spec.extent != wanted.extent or not same_group(spec.group, wanted.group):
            tensor, kept = gather_dims(tensor, [spec]), tuple(other for other in kept if other is not spec)
    for wanted in specs:
        dim = wanted.dim - before
        if dim >= 0 and spec_at(kept, dim) is None and (tensor.shape[dim] != 1 or wanted.extent == 1):
            tensor = local_part(tensor, wanted, dim)
    return tensor


def align_all(call: Call, specs: ShardSpecs, dims: int) -> Call:
    """Align every tensor among the arguments; see ``align``."""

    def aligned(value: Any) -> Any:
        return align(value, specs, dims) if isinstance(value, Tensor) else value

    kwargs = {name: aligned(value) for name, value in call.kwargs.items()}
    return call._replace(args=tuple(map(aligned, call.args)), kwargs=kwargs)


# Fallback: gather the tensors, and run the function on every rank

_FLAT_IMAGE = 4
"""Dims of images without depth."""


def on_full(call: Call) -> Any:
    """Gather every sharded tensor among the arguments and call the function on every rank; warn once per line of code.

    Raises:
        InputError: the function would write to a sharded tensor.
    """
    refuse_write(call)
    tensor = next(sharded_tensors((call.args, call.kwargs)))
    refuse_transform(tensor)
    warn_gathered(call, tensor)
    return call_full(call)


def call_full(call: Call) -> Any:
    """Call the function with full tensors; gradients are sharded again."""
    return call.function(*map_tensors(call.args, full_tensor), **map_tensors(call.kwargs, full_tensor))


def refuse_write(call: Call) -> None:
    """Raise InputError if a call would write to a sharded tensor: it would write to a gathered copy."""
    target = call.args[0] if call.args and in_place(call) else call.kwargs.get("out")
    written = next(sharded_tensors(target), None)
    if written is not None:
        remedy = "Write what returns a new tensor instead (x = x.add(y) for x.add_(y), torch.where, torch.cat), or "
        field = f"{call.name} of a split {written.rules.what}"
        raise InputError(field, _location(_caller()), f"{remedy}{keep_full(written)}")


def refuse_transform(tensor: ShardedTensor) -> None:
    """Raise InputError inside of a ``torch.func`` transform: what moves between ranks cannot be transformed."""
    if peek_interpreter_stack() is not None:
        remedy = f"What ranks send one another cannot be transformed: {keep_full(tensor)}"
        raise InputError(f"torch.func of a split {tensor.rules.what}", _location(_caller()), remedy)


def warn_gathered(call: Call, tensor: ShardedTensor) -> None:
    """Warn, once per line of the user's code and on the first rank only, that a function gathers a tensor."""
    if any(spec.group.rank for spec in tensor.specs):
        return
    frame = _caller()
    what = tensor.rules.what
    reason = call.gather_reason or f"has no rule for split {what}s"
    message = (
        f"torch.{call.name} {reason}: in {_location(frame)} the whole {what} is gathered on every "
        f"rank, and what follows is computed by all of them. If that costs too much, {keep_full(tensor)}"
    )
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    module = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def keep_full(tensor: ShardedTensor) -> str:
    """Explain how to plan so that a layer gets full tensors: without the degrees that shard such tensors."""
    flat = len(global_shape(tensor)) == _FLAT_IMAGE
    names = " ".join(f"--fix LAYER.{name}=1" for name in tensor.rules.pins if not (flat and name == "depth"))
    return f"keep its layer whole: plan with {names} (LAYER: its name in the plan)."


def _caller() -> FrameType:
    """The innermost frame outside torch and this package, or the outermost frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_INTERNAL):
        frame = frame.f_back
    return frame


def _location(frame: FrameType) -> str:
    module = frame.f_locals.get("self")
    name = f"{type(module).__name__}, " if isinstance(module, nn.Module) else ""
    return f"{name}{frame.f_code.co_filename}:{frame.f_lineno}"


# Custom autograd functions


_INTERNAL = ("galvatron_lite.", "torch.", "contextlib.")
"""Packages whose functions expect local tensors, and those between a line of the user's and the function it calls."""


def intercept_custom_functions() -> None:
    """Send custom autograd functions with sharded arguments to the rules, and keep them from ``torch.func``.

    Repeated calls change nothing.

    ``torch.autograd.Function.apply`` is no torch function: it would read the memory of a shard. Torch has no public
    extension point for it, so this puts a method between ``Function`` and its base in C++ (user code may hold
    ``MyFunction.apply`` already). Without sharded arguments that method calls torch's.
    """
    _SingleLevelFunction.apply = classmethod(_apply_custom)  # type: ignore[attr-defined]
    for module, name in ((vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad")):
        if not hasattr(enter := getattr(module, name), "refuses"):
            setattr(module, name, _without_shards(enter))


def _without_shards(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse sharded tensors that enter a ``torch.func`` transform, which would read the memory of a shard."""

    @wraps(enter)
    def run(tensor: Any, *args: Any) -> Any:
        if isinstance(tensor, ShardedTensor) and has_torch_function((tensor,)):
            refuse_transform(tensor)
        return enter(tensor, *args)

    run.refuses = True  # type: ignore[attr-defined]
    return run


def apply_internal(function: type[Function], *args: Any) -> Any:
    """``function.apply`` without checks for ``torch.func`` and users' functions; saves a few microseconds a call."""
    return super(_SingleLevelFunction, function).apply(*args)  # type: ignore[misc]


def _apply_custom(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = super(_SingleLevelFunction, cls).apply
    sharded = () if cls.__module__.startswith(_INTERNAL) else tuple(sharded_tensors((args, kwargs)))
    if not sharded or not has_torch_function(sharded):
        return apply(*args, **kwargs)

    def call_gathered(*args: Any, **kwargs: Any) -> Any:
        return _apply_custom(cls, *args, **kwargs)  # sharded still, where a mode took the call first

    call_gathered.__name__ = f"{cls.__name__}.apply"
    return handle_torch_function(call_gathered, sharded, *args, **kwargs)
