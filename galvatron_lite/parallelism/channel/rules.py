"""What functions do with pictures whose channels are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from galvatron_lite.parallelism.channel import local
from galvatron_lite.parallelism.channel.functions import gather_complete
from galvatron_lite.parallelism.channel.nests import map_tensors, tensors_in
from galvatron_lite.parallelism.cuts import asking, fallback
from galvatron_lite.parallelism.cuts.calls import in_place
from galvatron_lite.parallelism.cuts.functions import enter, leave
from galvatron_lite.parallelism.cuts.shared import SHARED
from galvatron_lite.parallelism.cuts.tensor import (
    Call,
    CutTensor,
    Handler,
    Rules,
    cut_tensors,
    shares_only,
    whole_shape,
)
from galvatron_lite.parallelism.spatial import norms, pads

HANDLERS: Mapping[str, Handler] = {**SHARED, **pads.HANDLERS, **norms.HANDLERS, **local.HANDLERS}
"""In which gradients of what is whole are parts on each rank."""

CHANNELS_RULES = Rules(HANDLERS, fallback.on_whole, ("channels",))
"""By ``channels``: every picture is shared."""


def on_whole(call: Call) -> Any:
    """``fallback.on_whole`` where gradients of what is whole are complete on every rank.

    Raises:
        InputError: the function would write to shares.
    """
    fallback.refuse_writing(call)
    return _on_gathered(call)


def _on_gathered(call: Call) -> Any:
    return call.function(*map_tensors(call.args, _gathered), **map_tensors(call.kwargs, _gathered))


def _gathered(tensor: Tensor) -> Tensor:
    return gather_complete(tensor) if isinstance(tensor, CutTensor) else tensor


def is_picture(tensor: Tensor, dims: int) -> bool:
    """Whether a whole tensor that meets shares of ``dims`` dims counts as made from the layer's input.

    Parameters do not, nor does what has fewer dims: of these each rank's gradient is a part. Whether one takes a
    gradient does not matter, as that may change from the run that told what is partial to the others.
    """
    return tensor.dim() == dims and not isinstance(tensor, nn.Parameter)


Witness = Callable[[Call, list[Tensor]], None]
"""Is told of calls that shares and whole tensors meet in, and of the latter that are not pictures."""


def _nobody(_call: Call, _met: list[Tensor]) -> None:
    pass


def filters_rules(witness: Witness = _nobody) -> Rules:
    """By ``filters``: gradients of what is whole are complete on every rank.

    A whole picture and shares of another (a shortcut) meet as whole pictures, as both must be so in the end. The other
    handlers take gradients of what is whole for parts; so what they are given is entered and what they make left.

    Args:
        witness: see ``Witness``.
    """
    table: dict[str, Handler] = {}
    rules = Rules(table, on_whole, ("filters",))
    inner = Rules(HANDLERS, _give_up, ("filters",))
    table |= {name: _complete(handler, inner, witness) for name, handler in HANDLERS.items()}
    table |= asking.HANDLERS
    table |= {name: _gather_joined(table[name]) for name in local.CATS}
    return rules


_GIVEN_UP = object()


def _give_up(_call: Call) -> Any:
    return _GIVEN_UP


def _complete(handler: Handler, inner: Rules, witness: Witness) -> Handler:
    def handle(call: Call) -> Any:
        met = [one for one in tensors_in((call.args, call.kwargs)) if not isinstance(one, CutTensor)]
        if met and _needs_whole(call, met):
            return _written(call, _on_gathered(call))
        return _on_shares(handler, inner, call, met, witness)

    return handle


def _gather_joined(handler: Handler) -> Handler:
    """``cat`` of shares along the channels: of whole pictures, as each is gathered in the end."""

    def handle(call: Call) -> Any:
        return handler(call) if local.cat_dim(call) is None else _on_gathered(call)

    return handle


def _needs_whole(call: Call, met: list[Tensor]) -> bool:
    """Whether a whole picture with all channels is among the arguments, and the result may be whole, too."""
    if call.name == "__setitem__":
        return False
    first = next(cut_tensors((call.args, call.kwargs)))
    dims, cut = len(whole_shape(first)), first.cuts[0]
    return any(is_picture(one, dims) and one.shape[cut.dim] > 1 for one in met)


def _written(call: Call, result: Tensor) -> Tensor:
    """A result, which is whole; where a function writes to shares (``+=`` too), which may have other names, they have
    it as well."""
    if in_place(call) and isinstance(call.args[0], CutTensor):
        shares = call.args[0]
        (cut,) = shares.cuts
        own = enter(result, (cut.line,)).narrow(cut.dim, cut.start, cut.length)
        with shares_only():
            shares.copy_(own)
    return result


def _on_shares(handler: Handler, inner: Rules, call: Call, met: list[Tensor], witness: Witness) -> Any:
    first = next(cut_tensors((call.args, call.kwargs)))
    dims, lines = len(whole_shape(first)), [first.cuts[0].line]

    def entered(tensor: Tensor) -> Tensor:
        whole = not isinstance(tensor, CutTensor) and is_picture(tensor, dims)
        return enter(tensor, lines) if whole else tensor

    def left(tensor: Tensor) -> Tensor:
        if isinstance(tensor, CutTensor):
            tensor.rules = call.rules
            return tensor
        return leave(tensor, lines) if tensor.requires_grad else tensor

    args, kwargs = (map_tensors(call.args, entered), map_tensors(call.kwargs, entered)) if met else call[2:4]
    result = handler(call._replace(args=args, kwargs=kwargs, rules=inner))
    if result is _GIVEN_UP:
        return call.rules.otherwise(call)
    witness(call, [one for one in met if not is_picture(one, dims)])
    return map_tensors(result, left)
