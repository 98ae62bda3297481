"""Random functions that run inside draw numbers by what they are for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.parallelism.cuts.tensor import Call, Cuts, name_of
from galvatron_lite.parallelism.draws.functions import NO_RULES, RANDOM, REFUSED, NumberSource, draws_nothing
from galvatron_lite.parallelism.draws.numbers import normal, stream_of, uniform
from galvatron_lite.parallelism.draws.sites import REMEDY, Drawn, DrawSite, Lot, SampleRows, Sites, places_of
from galvatron_lite.parallelism.pipeline.unknown import UnknownTensor, shape_of, sources_of, unknown


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A call of a module: what its draws depend on. It is kept for recomputation, which draws the same."""

    seed: int  # of the run
    step: int  # of training
    path: str  # of the module
    call: int  # how often it was called before with this micro-batch
    rows: SampleRows  # samples that this rank has of it
    lot: Lot  # what else
    sites: Sites  # draws of the whole model


@dataclass
class Numbers:
    """The numbers of a module's call, draw after draw."""

    ticket: Ticket  # of the call
    drawn: int = field(default=0, init=False)  # draws so far

    def uniform(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> Tensor:
        """See ``functions.Source``."""
        return uniform(*self._next(name, shape, cuts, device))

    def normal(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> Tensor:
        """See ``functions.Source``."""
        return normal(*self._next(name, shape, cuts, device))

    def _next(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> tuple[int, Tensor]:
        ticket, number = self.ticket, self.drawn
        self.drawn += 1
        site = DrawSite(ticket.path, ticket.call, number)
        drawn = ticket.sites.get(site)
        if drawn is None or drawn.function != name:
            where = f"{name} of {ticket.path or 'the model itself'}"
            raise InputError(f"randomness of {where}", "same", f"It did not draw so on the example batch. {REMEDY}")
        where_to = places_of(site, drawn, shape, cuts, ticket.lot, ticket.rows, device)
        return stream_of(ticket.seed, ticket.step, *site), where_to


@dataclass
class Noted:
    """Notes the draws of a module's call; the numbers are none."""

    path: str  # of the module
    call: int  # how often it was called before
    found: dict[DrawSite, tuple[str, tuple[int, ...]]]  # draws by site: the function, and the shape
    drawn: int = field(default=0, init=False)

    def uniform(self, name: str, shape: torch.Size, cuts: Cuts, device: torch.device) -> Tensor:  # noqa: ARG002
        """See ``functions.Source``."""
        self.found[DrawSite(self.path, self.call, self.drawn)] = (name, tuple(shape))
        self.drawn += 1
        return torch.zeros(shape, device=device)

    normal = uniform


class Drawing(TorchFunctionMode):
    """Random functions inside take their numbers from a source.

    Raises:
        InputError: a function draws in a way that is not known.
    """

    def __init__(self, source: NumberSource) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do a call."""
        given, name = kwargs or {}, name_of(func)
        if name in RANDOM and any(isinstance(one, UnknownTensor) for one in tensors_of((args, given))):
            return self._of_unknown(Call(func, name, tuple(args), given, NO_RULES))
        if name in RANDOM:
            made = RANDOM[name](Call(func, name, tuple(args), given, NO_RULES), self._source)
            if made is not NotImplemented:
                return made
        elif name in REFUSED and not draws_nothing(Call(func, name, tuple(args), given, NO_RULES)):
            raise InputError("randomness", "same", f"torch's {name} cannot be drawn share by share. {REMEDY}")
        return func(*args, **given)

    def _of_unknown(self, call: Call) -> Any:
        """Another stage's values: counted among the draws, as that stage counts them; no numbers."""
        (args, kwargs), noted = map_tensors((call.args, call.kwargs), shape_of), Noted("", 0, {})
        made = RANDOM[call.name](Call(call.function, call.name, args, kwargs, NO_RULES), noted)
        self._source.drawn += noted.drawn
        if made is NotImplemented:
            return call.function(*call.args, **call.kwargs)
        if call.name.endswith("_"):
            return call.args[0]
        home = next(one.home for one in tensors_of((call.args, call.kwargs)) if isinstance(one, UnknownTensor))
        return unknown(made, sources_of((call.args, call.kwargs)), home)


def sites_of(few: dict[DrawSite, Any], more: dict[DrawSite, Any], counts: tuple[int, int]) -> dict[DrawSite, Drawn]:
    """What draws are like, from those of two runs with unlike numbers of samples.

    Raises:
        InputError: the runs drew unlike.
    """
    if few.keys() != more.keys():
        raise InputError("randomness", "same", f"How often the model draws depends on the samples. {REMEDY}")
    return {site: _drawn(site, few[site], more[site], counts) for site in few}


def _drawn(site: DrawSite, few: tuple[str, Any], more: tuple[str, Any], counts: tuple[int, int]) -> Drawn:
    name, shape = few
    other, longer = more
    grown = [dim for dim, (one, two) in enumerate(zip(shape, longer, strict=False)) if one != two]
    if name != other or len(shape) != len(longer) or len(grown) > 1:
        raise InputError(f"randomness of {site.path}", "same", f"{name} draws for {shape} and {longer}. {REMEDY}")
    if not grown:
        return Drawn(name, shape, None, 0)
    dim = grown[0]
    each, rest = divmod(shape[dim], counts[0])
    if rest or longer[dim] != each * counts[1]:
        raise InputError(f"randomness of {site.path}", "same", f"{name} draws for {shape} and {longer}. {REMEDY}")
    return Drawn(name, shape, dim, each)
