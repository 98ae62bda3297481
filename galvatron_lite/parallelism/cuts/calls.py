"""Reading the arguments of calls, whichever way they were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.tensor import Call, Handler


def argument(call: Call, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or, where that is not given, by name."""
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def arguments(call: Call, public: Callable[..., Any], built_in: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments by the names of a documented function, with its defaults.

    Args:
        call: of it, or of torch's built-in function of the same name.
        public: the documented one, of which torch has checked what it was given.
        built_in: names of the arguments of the other one, in its order; none where there is none.
    """
    names, defaults = _signature(public)
    order = names if call.function is public or not built_in else built_in
    return {**defaults, **dict(zip(order, call.args, strict=False)), **call.kwargs}


@cache
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the arguments, in order, and defaults by name."""
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    return tuple(parameters), defaults


def fronted(call: Call) -> Call:
    """The call with its first argument given by position, also where it was given as ``input=``; without ``out``.

    Raises:
        InputError: the result is to be written to a given tensor.
    """
    if call.kwargs.get("out") is not None:
        raise InputError(f"out= of {call.name}", "a tensor", "Use what the function returns: pictures are split.")
    if call.args or "input" not in call.kwargs:
        return call
    rest = {name: value for name, value in call.kwargs.items() if name != "input"}
    return call._replace(args=(call.kwargs["input"],), kwargs=rest)


_OPERATORS = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


def in_place(call: Call) -> bool:
    """Whether a call writes to its first argument."""
    name = call.name
    if name.startswith("__"):
        return name in _WRITING
    return name.endswith("_") or bool(call.kwargs.get("inplace"))


_WRITING = frozenset(["__setitem__", *map("__i{}__".format, _OPERATORS)])


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors among the arguments, in order; not those in lists."""
    return [one for one in chain(call.args, call.kwargs.values()) if isinstance(one, Tensor)]


def handled_by(handler: Handler, names: str) -> dict[str, Handler]:
    """A table in which one handler does many functions, named between spaces."""
    return dict.fromkeys(names.split(), handler)
