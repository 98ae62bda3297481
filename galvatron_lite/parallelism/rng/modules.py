"""Modules that draw the same numbers on one process and on many.

A draw of a module is one number after another for the items of a global tensor. Each is decided by the seed of the run,
the step, the module's name, how often it was called and drew before, the sample's number in the global batch, and the
item's place in the sample. So neither micro-batches, nor shards, nor where or how often a pass runs matters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from galvatron_lite.errors import InputError, TraceError
from galvatron_lite.model.batch import batch_size, map_tensors, resize_batch, tensors_of
from galvatron_lite.model.discover import discover_layers
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.run import observe
from galvatron_lite.parallelism.pipeline.flow import UnknownTensor, shape_of, sources_of, unknown
from galvatron_lite.parallelism.rng.numbers import (
    NO_RULES,
    RANDOM,
    REFUSED,
    REMEDY,
    Distribution,
    Drawn,
    DrawSite,
    NumberSource,
    SampleRows,
    SampleSlice,
    Sites,
    draws_nothing,
    places_of,
    stream_of,
)
from galvatron_lite.parallelism.sharded.tensor import Call, ShardSpecs, name_of

RNG_KEY = "galvatron_rng_key"
"""Name of the argument that tells a module what its draws depend on."""
_COUNTS = (2, 3)

_Noted = dict[DrawSite, tuple[str, tuple[int, ...]]]
"""Draws by site: the function, and the shape."""


@dataclass(frozen=True, slots=True, eq=False)
class RngKey:
    """A call of a module, as far as its draws depend on it. It is kept for recomputation, which draws the same."""

    seed: int  # of the run
    step: int  # of training
    path: str  # of the module
    call: int  # how often it was called before with this micro-batch
    rows: SampleRows  # samples that this rank has of it
    slice: SampleSlice
    sites: Sites  # draws of the global model


@dataclass
class _Numbers:
    """The numbers of a module's call, draw after draw."""

    key: RngKey
    drawn: int = field(default=0, init=False)

    def draw(
        self, numbers: Distribution, name: str, shape: torch.Size, specs: ShardSpecs, device: torch.device
    ) -> Tensor:
        key, site = self.key, DrawSite(self.key.path, self.key.call, self.drawn)
        self.drawn += 1
        drawn = key.sites.get(site)
        if drawn is None or drawn.function != name:
            where = f"{name} of {key.path or 'the model itself'}"
            raise InputError(f"randomness of {where}", "same", f"It did not draw so on the example batch. {REMEDY}")
        places = places_of(site, drawn, shape, specs, key.slice, key.rows, device)
        return numbers(stream_of(key.seed, key.step, *site), places)


@dataclass
class _Recorder:
    """Notes the draws of a module's call, and returns zeros."""

    path: str  # of the module
    call: int  # how often it was called before
    noted: _Noted
    drawn: int = field(default=0, init=False)

    def draw(
        self,
        numbers: Distribution,  # noqa: ARG002
        name: str,
        shape: torch.Size,
        specs: ShardSpecs,  # noqa: ARG002
        device: torch.device,
    ) -> Tensor:
        self.noted[DrawSite(self.path, self.call, self.drawn)] = (name, tuple(shape))
        self.drawn += 1
        return torch.zeros(shape, device=device)


class Drawing(TorchFunctionMode):
    """Mode in which random functions take their numbers from a source.

    Raises:
        InputError: a function draws in a way that has no rule.
    """

    def __init__(self, source: NumberSource) -> None:
        super().__init__()
        self._source = source

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do a call."""
        named, name = kwargs or {}, name_of(func)
        if name in RANDOM or name in REFUSED:
            call = Call(func, name, tuple(args), named, NO_RULES)
            if name in REFUSED:
                if not draws_nothing(call):
                    raise InputError("randomness", "same", f"torch's {name} cannot be drawn share by share. {REMEDY}")
            elif any(isinstance(one, UnknownTensor) for one in tensors_of((args, named))):
                return self._of_unknown(call)
            elif (result := RANDOM[name](call, self._source)) is not NotImplemented:
                return result
        return func(*args, **named)

    def _of_unknown(self, call: Call) -> Any:
        """Another stage's values: counted among the draws, as that stage counts them; no numbers."""
        (args, kwargs), recorder = map_tensors((call.args, call.kwargs), shape_of), _Recorder("", 0, {})
        result = RANDOM[call.name](call._replace(args=args, kwargs=kwargs), recorder)
        self._source.drawn += recorder.drawn
        if result is NotImplemented:
            return call.function(*call.args, **call.kwargs)
        if call.name.endswith("_"):
            return call.args[0]
        home = next(one.home for one in tensors_of((call.args, call.kwargs)) if isinstance(one, UnknownTensor))
        return unknown(result, sources_of((call.args, call.kwargs)), home)


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
            InputError: its samples are of another size than the example's: shards could not be told from full tensors.
        """
        if self._sizes is not None and _sizes(part) != self._sizes:
            remedy = f"Samples must be of the example batch's sizes {self._sizes}. {REMEDY}"
            raise InputError("sizes of samples", _sizes(part), remedy)
        self._starts[id(part)] = start

    def begin(self, part: object, rows: int) -> None:
        """Forward of a micro-batch of so many samples, over all ranks."""
        self._first, self._rows = self._starts.get(id(part), 0), rows
        self._calls.clear()

    def key(self, path: str, slice_: SampleSlice) -> RngKey:
        """For a call of a module."""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        each = self._rows // slice_.batch
        rows = SampleRows(self._first + slice_.place * each, each)
        return RngKey(self.seed, self.step, path, call, rows, slice_, self.sites)

    def inside(self, slice_: SampleSlice) -> Drawing:
        """Code between layers runs inside."""
        return Drawing(_Numbers(self.key("", slice_)))


def _sizes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors_of(batch)]


def draw_inside(module: nn.Module) -> None:
    """Make the module's forward, in place, draw by a key among its arguments; call it before recomputation's set-up."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        key: RngKey = kwargs.pop(RNG_KEY)
        with Drawing(_Numbers(key)):
            return forward(*args, **kwargs)

    module.forward = run


def draw_nothing(model: nn.Module, paths: Iterable[str]) -> None:
    """Make modules of other stages, in place, draw zeros: those without parameters run here too, to no use."""
    for path in paths:
        _record(model.get_submodule(path), path, {})


def pass_keys(module: nn.Module, path: str, draws: Draws, slice_: SampleSlice) -> None:
    """Give each call of the module, in place, a key; call it last."""
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, RNG_KEY: draws.key(path, slice_)})

    module.forward = run


def find_sites(model: nn.Module, layers: Iterable[Layer], batch: Any) -> Sites:
    """Where a model draws in training, and what for; found by running a copy of it without storage.

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
        few, more = (_noted(meta_copy(model), paths, resize_batch(batch, samples)) for samples in _COUNTS)
    except TraceError as unseen:
        raise InputError("randomness", "same", f"What is drawn cannot be seen: {unseen} {REMEDY}") from unseen
    if few.keys() != more.keys():
        raise InputError("randomness", "same", f"How often the model draws depends on the samples. {REMEDY}")
    return {site: _drawn(site, few[site], more[site]) for site in few}


def _noted(twin: nn.Module, paths: Sequence[str], batch: Any) -> _Noted:
    noted: _Noted = {}
    for path in paths:
        _record(twin.get_submodule(path), path, noted)
    with torch.no_grad(), Drawing(_Recorder("", 0, noted)):
        observe(twin, batch, [])
    return noted


def _record(module: nn.Module, path: str, noted: _Noted) -> None:
    """Make the module's forward, in place, note its draws."""
    forward, calls = module.forward, count()

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with Drawing(_Recorder(path, next(calls), noted)):
            return forward(*args, **kwargs)

    module.forward = run


def _drawn(site: DrawSite, few: tuple[str, tuple[int, ...]], more: tuple[str, tuple[int, ...]]) -> Drawn:
    """The draw whose function and shape these are for two numbers of samples."""
    (name, shape), (other, longer) = few, more
    grown = [dim for dim, (one, two) in enumerate(zip(shape, longer, strict=False)) if one != two]
    if not grown and more == few:
        return Drawn(name, shape, None, 0)
    if name == other and len(shape) == len(longer) and len(grown) == 1:
        dim = grown[0]
        each, rest = divmod(shape[dim], _COUNTS[0])
        if not rest and longer[dim] == each * _COUNTS[1]:
            return Drawn(name, shape, dim, each)
    raise InputError(f"randomness of {site.path}", "same", f"{name} draws for {shape} and {longer}. {REMEDY}")


@contextmanager
def same_randomness(model: nn.Module, batch: Any, seed: int = 0, blocks: Any = None) -> Iterator[Draws]:
    """Inside, a plain model on one process draws what every plan with ``randomness="same"`` draws.

    Each call of the model in training is a step, and must be given the step's full batch.

    Args:
        model: the user's.
        batch: an example.
        seed: as passed to ``auto_parallelize``.
        blocks: as passed to it.

    Raises:
        InputError: the model draws in a way that cannot be shared.
    """
    layers = discover_layers(model, batch, blocks)
    draws = Draws(seed, find_sites(model, layers, batch))
    modules = {path: model.get_submodule(path) for path in draws.paths if path}
    before: Mapping[nn.Module, Any] = {one: vars(one).get("forward") for one in (model, *modules.values())}
    for path, module in modules.items():
        draw_inside(module)
        pass_keys(module, path, draws, SampleSlice())
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        draws.begin_step(0, model.training and torch.is_grad_enabled())
        draws.begin(None, batch_size((args, kwargs)))
        with draws.inside(SampleSlice()):
            return forward(*args, **kwargs)

    model.forward = run
    try:
        yield draws
    finally:
        for module, original in before.items():
            del module.forward
            if original is not None:
                module.forward = original
