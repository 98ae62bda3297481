"""A tensor that holds this rank's share of a larger one, and knows how that is cut.

To code that uses it, it is the whole tensor: it tells its whole shape, and every torch function that is called with it
goes to the ``Rules`` it carries, which know what the function means for shares. Only public extension points of torch
are used (``__torch_function__``). Autograd, saved tensors and kernels see plain tensors of the local shape.

Gradients: the objective is the sum over ranks of what each starts its backward pass from, and the backward of every
collective is its exact adjoint. So the gradient of a tensor or parameter that is whole on every rank of a line is a
part on each; their sum over the line is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cuts.laying import Pieces, length_of, pieces_of
from galvatron_lite.parallelism.cuts.line import Line


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim of a tensor is shared."""

    dim: int  # counted from the front
    extent: int  # of the whole tensor
    line: Line  # the ranks that share it, by ``shares.share`` unless it has pieces of its own (``laying.LaidLine``)

    @property
    def pieces(self) -> Pieces:
        """This rank's share, in order."""
        return pieces_of(self.extent, self.line, self.line.rank)

    @property
    def start(self) -> int:
        """Where this rank's share begins, which is one piece."""
        ((start, _),) = self.pieces
        return start

    @property
    def length(self) -> int:
        """Items of this rank's share."""
        return length_of(self.pieces)


shares_only = torch._C.DisableTorchFunctionSubclass
"""Context in which cut tensors are to torch what they hold: plain tensors of the local shape.

New tensors are then plain, and in-place functions return the cut tensor itself. Documented in "Extending PyTorch" as
the way out of ``__torch_function__``.
"""

Cuts = tuple[Cut, ...]
"""At most one a dim, in the order of dims."""


class Call(NamedTuple):
    """A torch function that was called with a cut tensor."""

    function: Callable[..., Any]  # what was called
    name: str  # its name: ``conv2d``, ``add``, ``shape`` (of a property)
    args: tuple[Any, ...]  # as they were given
    kwargs: dict[str, Any]  # as they were given
    rules: Rules  # of the first cut tensor among the arguments
    because: str = ""  # why the picture is gathered, where that is by design


Handler = Callable[[Call], Any]
"""Does a call: returns plain tensors that are whole on every rank, and cut ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What functions do with cut tensors."""

    handlers: Mapping[str, Handler]  # by the function's name
    otherwise: Handler  # of every other function
    pins: tuple[str, ...] = ("depth", "height", "width")  # degrees of a plan that cut what has these rules
    what: str = "picture"  # what that is, for messages


class CutTensor(torch.Tensor):
    """See the module. Made by ``cut_tensor``; read by ``local_of``."""

    cuts: Cuts  # how it is cut; never empty
    rules: Rules  # what functions do with it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand the call to the rules of the first cut tensor among the arguments."""
        given = {} if kwargs is None else kwargs
        first = args[0] if args else None
        rules = first.rules if isinstance(first, CutTensor) else next(cut_tensors((args, given))).rules
        name = name_of(func)
        return rules.handlers.get(name, rules.otherwise)(Call(func, name, args, given, rules))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a torch function; of a property (``Tensor.shape.__get__``) the property's."""
    name: str = getattr(function, "__name__", type(function).__name__)
    return str(function.__self__.__name__) if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def cut_tensors(value: Any) -> Iterator[CutTensor]:
    """Every cut tensor in a nest of tuples, lists and mappings."""
    if isinstance(value, CutTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from cut_tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from cut_tensors(item)


def cut_tensor(local: Tensor, cuts: Sequence[Cut], rules: Rules) -> Tensor:
    """This rank's share as a cut tensor; the tensor itself, which is whole, where there are no cuts.

    Args:
        local: the share, a plain tensor of which nobody else takes notice; it becomes the cut tensor.
        cuts: how the whole is cut, by dims of ``local``.
        rules: what functions do with it.

    Raises:
        InputError: the share has another length than the rule of shares gives.
    """
    if not cuts:
        return local
    for cut in cuts:
        if local.shape[cut.dim] != cut.length:
            remedy = (
                f"Rank {cut.line.rank} of {cut.line.size} holds {cut.length} of {cut.extent} items of dim {cut.dim}."
            )
            raise InputError("share of a cut tensor", tuple(local.shape), remedy)
    # As torch's own parameters of unknown shape do when they take shape. `as_subclass` would make a view, and in-place
    # functions on a view cost a copy in backward.
    made: CutTensor = local  # type: ignore[assignment]
    made.__class__ = _cut_kind(type(local))
    made.cuts, made.rules = tuple(sorted(cuts, key=lambda cut: cut.dim)), rules
    return made


def cut_like(result: Any, cuts: Cuts, rules: Rules) -> Any:
    """What a function made of shares, as cut tensors: ``cut_tensor`` without the check, for tuples and lists too.

    Tensors that are cut already (an in-place function returns its argument), and what is no tensor, stay as they are.
    """
    if _is_plain(result):
        if cuts:
            kind: type[Tensor] = type(result)
            result.__class__ = _cut_kind(kind)
            result.cuts, result.rules = cuts, rules
        return result
    if isinstance(result, (tuple, list)):
        return type(result)([cut_like(_alias(one), cuts, rules) for one in result])
    return result


def _alias(one: Any) -> Any:
    """Places (of ``topk``) by another name: autograd saves them itself, and recomputation compares their shapes."""
    return one.view_as(one) if _is_plain(one) and not one.is_floating_point() else one


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor of torch's own, or of a mode that runs operations in another way (without data)."""
    kind = type(value)
    if kind is Tensor or not isinstance(value, Tensor) or isinstance(value, CutTensor):
        return kind is Tensor
    return "__torch_dispatch__" in vars(kind)


@cache
def _cut_kind(kind: type[Tensor]) -> type[CutTensor]:
    """The type of cut tensors whose shares are of this type."""
    return CutTensor if kind is Tensor else type(f"Cut{kind.__name__}", (CutTensor, kind), {})


def uncut(tensor: Tensor) -> Tensor:
    """The cut tensor itself, from now on a plain one of the local shape; for code that nobody else shares it with."""
    if isinstance(tensor, CutTensor):
        tensor.__class__ = type(tensor).__mro__[1 if type(tensor) is CutTensor else 2]
        del tensor.cuts, tensor.rules
    return tensor


def local_of(tensor: Tensor) -> Tensor:
    """The share as a plain tensor (a view of the cut tensor); plain tensors as they are."""
    if not isinstance(tensor, CutTensor):
        return tensor
    with shares_only():
        return tensor.as_subclass(Tensor)


def cuts_of(tensor: Tensor) -> Cuts:
    """How a tensor is cut; nothing for a plain one."""
    return tensor.cuts if isinstance(tensor, CutTensor) else ()


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor."""
    if not isinstance(tensor, CutTensor):
        return tuple(tensor.shape)
    with shares_only():
        shape = list(tensor.shape)
    for cut in tensor.cuts:
        shape[cut.dim] = cut.extent
    return tuple(shape)
