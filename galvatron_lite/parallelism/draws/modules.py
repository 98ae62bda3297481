"""Modules that draw by what for, on one process or on many: the seed, the step, the module and the sample decide.

A draw of a module is one number after another for the items of a whole tensor; each is decided by the seed of the run,
the step, the module's name, how often it was called and drew before, the sample's number in the global batch, and the
item's place in the sample. So neither micro-batches, nor what is split, nor where or how often a pass runs matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.batch import batch_size, resize_batch, tensors_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import observe
from galvatron_lite.parallelism.draws.mode import Drawing, Noted, Numbers, Ticket, sites_of
from galvatron_lite.parallelism.draws.sites import REMEDY, DrawSite, Lot, SampleRows, Sites

TICKET = "galvatron_ticket"
"""Name of the argument that tells a module what its draws depend on."""
_COUNTS = (2, 3)


class Draws:
    """What decides the draws of a run, on this rank.

    Args:
        seed: of the run.
        sites: from ``find_sites``.
        batch: the example that they were found on; None: batches are not checked.

    Attributes:
        step: of training, from 0.
    """

    def __init__(self, seed: int, sites: Sites, batch: Any = None) -> None:
        self.seed, self.sites, self.step = seed, sites, 0
        self._sizes = None if batch is None else _sizes(batch)
        self._base, self._passes = 0, 0
        self._first, self._rows = 0, 0
        self._calls: dict[str, int] = {}
        self._starts: dict[int, int] = {}

    @property
    def paths(self) -> frozenset[str]:
        """Modules that draw."""
        return frozenset(site.path for site in self.sites)

    def begin_step(self, steps: int, trains: bool) -> None:
        """A batch is next: the first since ``steps`` steps were done, or one more of a loop that does not count."""
        if steps != self._base:
            self._base, self._passes = steps, 0
        self.step = steps + self._passes
        self._passes += trains

    def note(self, part: object, start: int) -> None:
        """A micro-batch begins with this sample of the global batch.

        Raises:
            InputError: its samples are of another size than the example's: shares could not be told from wholes.
        """
        if self._sizes is not None and _sizes(part) != self._sizes:
            remedy = f"Samples must be of the example batch's sizes {self._sizes}. {REMEDY}"
            raise InputError("sizes of samples", _sizes(part), remedy)
        self._starts[id(part)] = start

    def begin(self, part: object, rows: int) -> None:
        """Forward of a micro-batch of so many samples, over all ranks."""
        self._first, self._rows = self._starts.get(id(part), 0), rows
        self._calls.clear()

    def ticket(self, path: str, lot: Lot) -> Ticket:
        """For a call of a module."""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        each = self._rows // lot.batch
        rows = SampleRows(self._first + lot.place * each, each)
        return Ticket(self.seed, self.step, path, call, rows, lot, self.sites)

    def inside(self, lot: Lot) -> Drawing:
        """Code between layers runs inside."""
        return Drawing(Numbers(self.ticket("", lot)))


def _sizes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors_of(batch)]


def draw_inside(module: nn.Module) -> None:
    """Make the module's forward, in place, draw by a ticket that it is given; to be called before it is made to
    recompute."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        ticket: Ticket = kwargs.pop(TICKET)
        with Drawing(Numbers(ticket)):
            return forward(*args, **kwargs)

    module.forward = run


def draw_nothing(model: nn.Module, paths: Iterable[str]) -> None:
    """Modules of other stages, which run in this one's forward too where they have no parameters, in place: what they
    make is not used."""
    for path in paths:
        module = model.get_submodule(path)
        module.forward = _noting(module.forward, path, {})


def give_tickets(module: nn.Module, path: str, draws: Draws, lot: Lot) -> None:
    """Give each call of the module, in place, a ticket; to be called last."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, TICKET: draws.ticket(path, lot)})

    module.forward = run


def find_sites(model: nn.Module, layers: Iterable[Layer], batch: Any) -> Sites:
    """Where a model draws in training, and what for; found by running a copy of it without storages.

    Args:
        model: not changed.
        layers: of it.
        batch: an example.

    Raises:
        InputError: there is no example, the model does not run so, or draws in a way that cannot be shared.
    """
    if batch is None:
        raise InputError("batch", None, f"Give an example batch, so that it is seen what is drawn. {REMEDY}")
    paths = [path for layer in layers for path in layer.modules]
    try:
        few, more = (_noted(meta_copy(model), paths, resize_batch(batch, count)) for count in _COUNTS)
    except TraceError as unseen:
        raise InputError("randomness", "same", f"What is drawn cannot be seen: {unseen} {REMEDY}") from unseen
    return sites_of(few, more, (_COUNTS[0], _COUNTS[1]))


def _noted(twin: nn.Module, paths: Sequence[str], batch: Any) -> dict[DrawSite, tuple[str, tuple[int, ...]]]:
    found: dict[DrawSite, tuple[str, tuple[int, ...]]] = {}
    for path in paths:
        module = twin.get_submodule(path)
        module.forward = _noting(module.forward, path, found)
    with torch.no_grad(), Drawing(Noted("", 0, found)):
        observe(twin, batch, [])
    return found


def _noting(forward: Callable[..., Any], path: str, draws: dict[DrawSite, tuple[str, tuple[int, ...]]]) -> Any:
    calls = iter(range(1 << 30))

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Drawing(Noted(path, next(calls), draws)):
            return forward(*args, **kwargs)

    return run


@contextmanager
def same_randomness(model: nn.Module, batch: Any, seed: int = 0, blocks: Any = None) -> Iterator[Draws]:
    """Inside, a plain model on one process draws what every plan with ``randomness="same"`` draws.

    Each call of the model in training is a step, and must be given the step's whole batch.

    Args:
        model: the user's, whole.
        batch: an example.
        seed: that was given to ``auto_parallelize``.
        blocks: as given to it.

    Raises:
        InputError: the model draws in a way that cannot be shared.
    """
    layers = discover_layers(model, batch, blocks)
    draws = Draws(seed, find_sites(model, layers, batch))
    modules = {path: model.get_submodule(path) for path in draws.paths if path}
    before: Mapping[nn.Module, Any] = {one: vars(one).get("forward") for one in (model, *modules.values())}
    for path, module in modules.items():
        draw_inside(module)
        give_tickets(module, path, draws, Lot())
    model.forward = _stepping(model, draws)
    try:
        yield draws
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _stepping(model: nn.Module, draws: Draws) -> Callable[..., Any]:
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        draws.begin_step(0, model.training and torch.is_grad_enabled())
        draws.begin(None, batch_size((args, kwargs)))
        with draws.inside(Lot()):
            return forward(*args, **kwargs)

    return run
