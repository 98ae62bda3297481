"""Pointwise functions and dropout: they run on shards, after operands have been aligned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.sharded.calls import (
    align,
    align_all,
    argument,
    call_full,
    common_specs,
    handled_by,
    input_first,
    on_full,
    on_locals,
    refuse_write,
    tensors_among,
    wrap_like,
)
from galvatron_lite.parallelism.sharded.tensor import (
    Call,
    Handler,
    ShardedTensor,
    ShardSpecs,
    in_place,
    locals_only,
    specs_of,
    to_local,
    wrap_locals,
)


def pointwise(call: Call) -> Any:
    """Run a function whose results depend on items of its arguments at the same position, with broadcasting.

    Raises:
        InputError: ``out=`` is given.
        RuntimeError: global shapes that cannot be broadcast.
    """
    if call.kwargs:
        call = input_first(call)
    args, kwargs = call.args, call.kwargs
    tensors = tensors_among(call) if kwargs else [arg for arg in args if isinstance(arg, Tensor)]
    sharded: Any = tensors[0]
    if len(tensors) > 1:
        sharded = next(tensor for tensor in tensors if isinstance(tensor, ShardedTensor))
        with locals_only():
            dims = sharded.dim()
            fit = all(tensor is sharded or _fits(tensor, sharded, dims) for tensor in tensors)
        if not fit or (sharded is not tensors[0] and in_place(call)):
            return _aligned(call, tensors)
    with locals_only():
        if len(tensors) > 1 and not in_place(call):
            args = tuple(_plain_mask(arg) for arg in args)
        result = call.function(*args, **kwargs)
    return wrap_locals(result, sharded.specs, call.rules)


def _plain_mask(value: Any) -> Any:
    """Make masks plain: autograd saves them as they are, and recomputation compares the shapes that they report."""
    return to_local(value) if isinstance(value, ShardedTensor) and value.dtype == torch.bool else value


def _fits(other: Tensor, sharded: ShardedTensor, dims: int) -> bool:
    """Whether a tensor needs no alignment: it is sharded in the same way, or is broadcast along the sharded dims.

    In the backward of a user's ``Function``, autograd passes gradients of sharded tensors as plain shards.
    """
    count = other.dim()
    if isinstance(other, ShardedTensor):
        return count == dims and other.specs == sharded.specs
    if other.shape == sharded.shape and not torch.is_grad_enabled():
        return True
    return count <= dims and all(
        spec.dim < dims - count or (other.shape[spec.dim - dims + count] == 1 and spec.extent > 1)
        for spec in sharded.specs
    )


def _aligned(call: Call, tensors: list[Tensor]) -> Any:
    writes = in_place(call)
    if writes and not isinstance(tensors[0], ShardedTensor):
        return call_full(call)
    with locals_only():
        specs = specs_of(tensors[0]) if writes else common_specs(tensors)
        aligned = align_all(call, specs, max(tensor.dim() for tensor in tensors))
        result = call.function(*aligned.args, **aligned.kwargs)
    return wrap_locals(result, specs, call.rules)


def cast(call: Call) -> Any:
    """Run ``to``, ``type_as`` and similar functions, of a sharded tensor, or of a full one like a sharded one."""
    return wrap_like(call, on_locals(call), call.args[0])


def _prelu(call: Call) -> Any:
    """``prelu``: one weight, or one for each channel (dim 1)."""
    call = input_first(call)
    tensor, weight = call.args[0], argument(call, 1, "weight")
    with locals_only():
        specs = tuple(spec.at_dim(0) for spec in specs_of(tensor) if spec.dim == 1)
        result = call.function(tensor, align(weight, specs, 1) if weight.dim() else weight)
    return wrap_like(call, result, tensor)


def _data(call: Call) -> Any:
    """``data`` can be read, not written."""
    return refuse_write(call._replace(name="data_")) if len(call.args) > 1 else cast(call)


_UNARY = """
abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh ceil cos cosh deg2rad digamma
erf erfc erfinv exp exp2 expm1 fix floor frac lgamma log log10 log1p log2 logit nan_to_num neg negative positive rad2deg
reciprocal round rsqrt sigmoid sign sgn sin sinc sinh special_expit sqrt square tan tanh trunc i0 mvlgamma polygamma
relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid hardshrink softplus softsign
softshrink tanhshrink logsigmoid log_sigmoid threshold
isnan isinf isfinite isneginf isposinf isreal signbit logical_not bitwise_not conj resolve_conj resolve_neg real angle
zeros_like ones_like empty_like full_like fill zero clone detach contiguous alias
__neg__ __pos__ __abs__ __invert__
"""

_BROADCAST = """
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2
hypot maximum minimum fmax fmin copysign heaviside ldexp logaddexp logaddexp2 nextafter xlogy xlog1py gcd lcm
eq ne not_equal lt less le less_equal gt greater ge greater_equal isclose
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
clamp clamp_min clamp_max clip lerp addcmul addcdiv masked_fill copy expand_as
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __rdiv__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__
__mod__ __rmod__ __pow__ __rpow__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rlshift__ __rshift__
__rrshift__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
__iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
"""

_CASTS = "to type type_as float double half bfloat16 int long short char bool byte cpu cuda xpu pin_memory"


def _with_writing(names: str) -> str:
    """Add the names of the functions that write to their first argument."""
    return " ".join([names, *(f"{name}_" for name in names.split() if not name.endswith("_"))])


HANDLERS: Mapping[str, Handler] = {
    **handled_by(pointwise, _with_writing(_UNARY)),
    **handled_by(pointwise, _with_writing(_BROADCAST)),
    **handled_by(cast, _CASTS),
    "requires_grad_": pointwise,
    "data": _data,
    # ``where(condition, x, y)``; ``where(condition)`` lists places, of the full tensor
    "where": lambda call: pointwise(call) if len(call.args) + len(call.kwargs) > 1 else on_full(call),
    "prelu": _prelu,
}


# Dropout: each rank draws for the items of its shard; draws for samples or channels are the same on all ranks.
#
# Ranks of an image have the same random state: they work on the same samples, and code that draws for a sample or a
# channel (stochastic depth, ``dropout2d``) must draw the same on all of them. Draws for single items must differ
# between shards, but leave the same state on all ranks, whatever the length of their shards. So every rank draws one
# number from torch's CPU generator; with the rank's index it seeds a generator for the shard. Checkpointing restores
# the CPU's state, hence the same pattern.


_SEEDS = 2**62
_PRIME = 1_000_003


def _dropout(call: Call) -> Any:
    """Drop single items; the mask takes a byte an item until backward, as in torch."""
    call = input_first(call)
    with locals_only():
        shape = call.args[0].shape
    return _dropped(call, shape, call.args[0].specs, argument(call, 2, "training", call.name == "dropout"))


def _channel_dropout(call: Call) -> Any:
    """Drop channels of samples (dims 0 and 1), the same ones on all ranks with pixels of them."""
    call = input_first(call)
    tensor, training = call.args[0], argument(call, 2, "training", True)
    specs = tuple(spec for spec in tensor.specs if spec.dim <= 1)
    with locals_only():
        if specs:
            return _dropped(call, (*tensor.shape[:2], *[1] * (tensor.dim() - 2)), specs, training)
        result = call.function(*call.args, **call.kwargs)
        result = result.view_as(result) if result is tensor and not call.kwargs.get("inplace") else result
    return wrap_like(call, result, tensor)


def _dropped(call: Call, shape: tuple[int, ...], specs: ShardSpecs, training: bool) -> Any:
    """Drop items by a mask of local shape ``shape``, which is sharded by ``specs``."""
    tensor, rate = call.args[0], argument(call, 1, "p", 0.5)
    writes = argument(call, 3, "inplace", False) or call.name == "dropout_"
    if not 0 <= rate <= 1:
        raise InputError("dropout probability", rate, "It lies between 0 and 1.")
    with locals_only():
        if not (training and rate):
            return wrap_like(call, tensor if writes else tensor.view_as(tensor), tensor)
        kept = torch.empty(shape, dtype=torch.bool, device=tensor.device)
        seed = int(torch.randint(_SEEDS, (), device="cpu").item())  # advances torch's generator equally on all ranks
        for spec in specs:
            seed = (seed * _PRIME + spec.group.rank) % _SEEDS
        if not kept.is_meta:
            kept.bernoulli_(1 - rate, generator=Generator(tensor.device).manual_seed(seed))
        scale = 1 / (1 - rate) if rate < 1 else 0.0
        return wrap_like(call, tensor.mul_(kept).mul_(scale) if writes else tensor * kept * scale, tensor)


DROPOUT: Mapping[str, Handler] = {
    **handled_by(_dropout, "dropout dropout_"),
    **handled_by(_channel_dropout, "dropout1d dropout2d dropout3d feature_dropout"),
}
