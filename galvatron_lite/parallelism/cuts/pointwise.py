"""Functions of each item by itself: on shares, after operands have been brought to the same cuts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.parallelism.cuts.alignment import brought, common_cuts, moved
from galvatron_lite.parallelism.cuts.calls import argument, fronted, handled_by, in_place
from galvatron_lite.parallelism.cuts.fallback import gathered, on_whole, refuse_writing
from galvatron_lite.parallelism.cuts.tensor import Call, CutTensor, Handler, cut_like, cuts_of, local_of, shares_only


def pointwise(call: Call) -> Any:
    """A function whose result at a place depends on its arguments at that place, which are broadcast.

    Raises:
        InputError: ``out=`` is given.
        RuntimeError: whole shapes that cannot be broadcast.
    """
    if call.kwargs:
        call = fronted(call)
    args, kwargs = call.args, call.kwargs
    tensors = [one for one in args if isinstance(one, Tensor)]
    if kwargs:
        tensors += [one for one in kwargs.values() if isinstance(one, Tensor)]
    cut: Any = tensors[0]
    if len(tensors) > 1:
        cut = _fitted(tensors)
        if cut is None or (cut is not tensors[0] and in_place(call)):
            return _together(call, tensors)
    with shares_only():
        if len(tensors) > 1 and not in_place(call):
            args = tuple(_saved(one) for one in args)
        result = call.function(*args, **kwargs)
    return cut_like(result, cut.cuts, call.rules)


def _saved(value: Any) -> Any:
    """Masks as plain tensors: autograd saves them as they are, and recomputation compares the shapes that they tell."""
    return local_of(value) if isinstance(value, CutTensor) and value.dtype == torch.bool else value


def _fitted(tensors: list[Tensor]) -> CutTensor | None:
    """The first that is cut, if the others are broadcast to its share as they are; None otherwise."""
    first = next(one for one in tensors if isinstance(one, CutTensor))
    with shares_only():
        dims = first.dim()
        fits = all(one is first or _fits(one, first, dims) for one in tensors)
    return first if fits else None


def _fits(other: Tensor, cut: CutTensor, dims: int) -> bool:
    """Whether a tensor is cut in the same way, or as whole as it is has no dim where the other one is cut.

    In the backward pass of a ``Function`` of the user's, autograd hands gradients of cut tensors in as plain shares.
    """
    own = other.dim()
    if isinstance(other, CutTensor):
        return own == dims and other.cuts == cut.cuts
    if other.shape == cut.shape and not torch.is_grad_enabled():
        return True
    return own <= dims and all(
        one.dim < dims - own or (other.shape[one.dim - dims + own] == 1 and one.extent > 1) for one in cut.cuts
    )


def _together(call: Call, tensors: list[Tensor]) -> Any:
    writes = in_place(call)
    if writes and not isinstance(tensors[0], CutTensor):
        return call.function(*gathered(call.args), **gathered(call.kwargs))
    with shares_only():
        dims = max(one.dim() for one in tensors)
        cuts = tensors[0].cuts if isinstance(tensors[0], CutTensor) and writes else common_cuts(tensors)
        args = [brought(one, cuts, dims) if isinstance(one, Tensor) else one for one in call.args]
        given = {
            name: brought(one, cuts, dims) if isinstance(one, Tensor) else one for name, one in call.kwargs.items()
        }
        result = call.function(*args, **given)
    return cut_like(result, cuts, call.rules)


def cast(call: Call) -> Any:
    """``to``, ``type_as`` and their kind: of a cut tensor; of a whole one, like a cut one."""
    target = call.args[0]
    with shares_only():
        result = call.function(*call.args, **call.kwargs)
    return cut_like(result, target.cuts, call.rules) if isinstance(target, CutTensor) else result


def _where(call: Call) -> Any:
    """``where(condition, x, y)``; where it lists places, of the whole picture."""
    return pointwise(call) if len(call.args) + len(call.kwargs) > 1 else on_whole(call)


def _prelu(call: Call) -> Any:
    """``prelu``: one weight, or one for each channel (dim 1)."""
    call = fronted(call)
    tensor, weight = call.args[0], argument(call, 1, "weight")
    with shares_only():
        cuts = tuple(moved(cut, 0) for cut in cuts_of(tensor) if cut.dim == 1)
        result = call.function(tensor, brought(weight, cuts, 1) if weight.dim() else weight)
    return cut_like(result, cuts_of(tensor), call.rules)


def _data(call: Call) -> Any:
    """``data``: read, not written."""
    if len(call.args) > 1:
        return refuse_writing(call._replace(name="data_"))
    return cast(call)


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

_MORE = """
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

_CASTS = """
to type type_as float double half bfloat16 int long short char bool byte cpu cuda xpu pin_memory
"""


def _written(names: str) -> str:
    """The names, and those of the functions that write to their first argument."""
    return " ".join([names, *(f"{name}_" for name in names.split() if not name.endswith("_"))])


HANDLERS: Mapping[str, Handler] = {
    **handled_by(pointwise, _written(_UNARY)),
    **handled_by(pointwise, _written(_MORE)),
    **handled_by(cast, _CASTS),
    "requires_grad_": pointwise,
    "data": _data,
    "where": _where,
    "prelu": _prelu,
}
