"""Which layers' outputs are read where, through whatever code lies between, found by a run of a copy on meta."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import (
    LossFn,
    call_model,
    loss_of,
    map_places,
    map_tensors,
    places,
    resize_batch,
    tensors_of,
)
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.record import Recorder
from galvatron_lite.model.trace.run import explaining, shapes_only
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, locals_only, name_of

# Tensors without values, which know the outputs of layers that they are made of.
#
# Code between layers runs on every pipeline stage, also on what another stage has and nobody here reads. It is given
# such tensors: every torch function tells their shapes alone, without work and memory. In a run of the whole model they
# show what a layer reads, through whatever code lies between.


class Output(NamedTuple):
    """A tensor that a layer's module returned."""

    path: str  # of the module; a parameter that no layer holds has its own path and call -1
    call: int  # how many times it had run before in this pass
    place: str  # of the tensor in what it returned (see ``map_places``)


Sources = frozenset[Output]
_VALUES = frozenset(("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"))
"""Functions that give values of a tensor to Python."""
_FACTORIES = frozenset((
    "new_tensor", "new_empty", "new_full", "new_ones", "new_zeros", "empty_like", "full_like", "ones_like",
    "zeros_like", "rand_like", "randn_like", "randint_like",
))  # fmt: skip
"""Functions that ask a tensor for its shape, dtype and device alone."""


class UnknownTensor(ShardedTensor):
    """See the module; made by ``unknown``. A subclass of cut tensors, so that among them it is asked first."""

    sources: Sources  # what it is made of
    home: torch.device  # its ``device``

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do with the shapes what the function does with values."""
        name, kwargs = name_of(func), {} if kwargs is None else kwargs
        first = args[0] if args else None
        one = next(tensor for tensor in tensors_of((args, kwargs)) if isinstance(tensor, UnknownTensor))
        if name == "device":
            return one.home
        if name in _VALUES:
            paths = ", ".join(sorted(source.path for source in one.sources))
            remedy = "Code between layers reads values of it to decide what runs: put all layers into one stage."
            raise InputError("stages, output of", paths, remedy)
        if name in _FACTORIES:
            shape = shape_of(one)
            return func(torch.empty((), dtype=shape.dtype, device=one.home).expand(shape.shape), *args[1:], **kwargs)
        if name in ("to", "cpu", "cuda"):
            args = tuple(value for value in args if not isinstance(value, (str, torch.device)))
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        sources, home = sources_of((args, kwargs)), one.home
        if writes(name) and isinstance(first, Tensor):
            return _write(func, first, args[1:], kwargs, sources)
        with locals_only():
            result = func(*map_tensors(args, shape_of), **map_tensors(kwargs, shape_of))
        return map_tensors(result, lambda tensor: unknown(tensor, sources, home))


def unknown(shape: Tensor, sources: Sources, home: torch.device) -> Tensor:
    """Turn a tensor on the meta device, which nobody else holds, into an unknown one; ``home``: its ``device``."""
    tensor: UnknownTensor = shape  # type: ignore[assignment]
    tensor.__class__ = UnknownTensor
    tensor.sources, tensor.home, tensor.specs = sources, home, ()
    return tensor


def sources_of(value: Any) -> Sources:
    """What the unknown tensors in a nest are made of."""
    return frozenset().union(*(one.sources for one in tensors_of(value) if isinstance(one, UnknownTensor)))


def shape_of(tensor: Tensor) -> Tensor:
    """A plain tensor on the meta device like it; of a share as large as the whole."""
    if not isinstance(tensor, UnknownTensor):
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
    with locals_only():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def writes(name: str) -> bool:
    """Whether a function changes its first argument."""
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name == "__setitem__" or augmented or (name.endswith("_") and not name.endswith("__"))


def _write(func: Callable[..., Any], target: Tensor, args: Any, kwargs: Any, sources: Sources) -> Any:
    """The target is unknown from now on."""
    if not isinstance(target, UnknownTensor):
        unknown(target, sources, target.device)
    target.sources = sources  # type: ignore[attr-defined]
    with locals_only():
        if target.is_meta:
            func(target, *map_tensors(args, shape_of), **map_tensors(kwargs, shape_of))
    return target


_META = torch.device("meta")
_SAMPLES = 2
LOOSE = -1
"""Instead of a call's number: a parameter that no layer holds."""


@dataclass(frozen=True, slots=True)
class LayerRead:
    """A layer reads something."""

    sources: Sources  # what that is made of
    reader: int  # place of the layer among the layers
    # whether it is the hidden state that the first block is given, made by code behind the layer before
    is_entry: bool = False


@dataclass(frozen=True, slots=True)
class LayerFlow:
    """How tensors go between the layers of a model."""

    places: Mapping[str, int]  # of the layers' modules: the number of their layer
    calls: tuple[tuple[str, int], ...]  # of the layers' modules, in order: path, and how many times it had run before
    reads: tuple[LayerRead, ...]  # in order
    # by path, what the layers' modules returned last in a run of a few samples; its tensors without values
    outputs: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # parameters of modules that never run, which another layer than theirs is handed; and that layer
    borrowed: tuple[tuple[str, int], ...] = ()

    def like(self, path: str, received: Any, sender: str) -> Any:
        """What a module returns on the stage that has it, as far as code between layers sees: tensors without values.

        ``received`` is what ``sender``, another layer's module, returned; what had the same form and shapes in the
        example is like it, so that batches may have other lengths.
        """
        output, other = self.outputs.get(path), self.outputs.get(sender)
        if output is None or other is None or _form(output) == _form(other):
            return map_tensors(received, shape_of)
        rows, few = (next(tensors_of(value)).shape[0] for value in (received, other))

        def resized(tensor: Tensor) -> Tensor:
            if tensor.dim() == 0 or tensor.shape[0] * rows % few:
                return torch.empty_like(tensor)
            return tensor.new_empty((tensor.shape[0] * rows // few, *tensor.shape[1:]))

        return map_tensors(output, resized)

    @property
    def is_chain(self) -> bool:
        """Whether each layer reads what the layer before it made, and nothing else; the second layer one tensor."""
        pairs = ((source, read.reader) for read in self.reads for source in read.sources if not read.is_entry)
        near = all(reader - self.places.get(one.path, 0) in ((0, 1), (0,))[one.call == LOOSE] for one, reader in pairs)
        second = (read.sources for read in self.reads if read.reader == 1)
        return near and sum(any(self.places.get(one.path) == 0 for one in sources) for sources in second) <= 1

    def enters(self, cut: int) -> bool:
        """Whether the stage that begins at layer ``cut`` is given its first block's input instead of outputs."""
        return cut == 1 and any(read.is_entry for read in self.reads)

    def crossing(self, cut: int) -> tuple[Output, ...]:
        """Outputs of layers before ``cut`` that it, or a layer after it, reads; in the order they are made."""
        order = {call: number for number, call in enumerate(self.calls)}
        outputs = {source for source in self._sources(cut) if self.places.get(source.path, 0) < cut}
        return tuple(sorted(outputs, key=lambda one: (order[one.path, one.call], one.place)))

    def last_call(self, places: range) -> tuple[str, int] | None:
        """Behind which call the stage of these layers has done all its work; None: it calls no module."""
        return next((call for call in reversed(self.calls) if self.places[call[0]] in places), None)

    def check(self, cut: int, layers: Sequence[Layer]) -> None:
        """Refuse a stage that begins at layer ``cut`` where the model cannot be cut there.

        Raises:
            InputError: a module of an earlier layer runs again behind it, or code behind it reads a parameter that no
                layer holds; or layers are handed one of another layer, by code between them.
        """
        for name, reader in self.borrowed:
            remedy = f"{layers[reader].name} is handed the parameter {name} of another layer: train it in one stage."
            raise InputError("stages", layers[cut].name, remedy)
        later = [number for number, (path, _) in enumerate(self.calls) if self.places[path] >= cut]
        for path, _ in self.calls[later[0] :] if later else ():
            if self.places[path] < cut:
                remedy = f"{path} runs again behind it: put the layers between into one stage."
                raise InputError("stages", layers[cut].name, remedy)
        for source in self._sources(cut):
            if source.call == LOOSE:
                remedy = f"It reads the parameter {source.path}, which no layer holds: begin no stage here or before."
                raise InputError("stages", layers[cut].name, remedy)

    def _sources(self, cut: int) -> Iterator[Output]:
        """Of all that is read behind ``cut``, but for the entry where that is what is sent."""
        for read in self.reads:
            if read.reader >= cut and not (cut == 1 and read.is_entry):
                yield from read.sources


def flow_of(model: nn.Module, layers: Sequence[Layer], batch: Any, loss_fn: LossFn | None = None) -> LayerFlow:
    """How tensors go between the layers of a model when it is trained on such a batch.

    Args:
        model: on any device; a copy is run on the meta device.
        layers: of the model, in running order.
        batch: an example.
        loss_fn: how the loss is made of the output, which the last layer reads. Where it does not run on the meta
            device, all of the output counts as read.

    Raises:
        TraceError: the model does not run on the batch.
    """
    run = _observe(model, layers, batch, loss_fn)
    idle = {path: place for path, place in run.places.items() if not run.counts[path]}
    borrowed: tuple[tuple[str, int], ...] = ()
    if idle:
        borrowed = _borrowed(_observe(model, layers, batch, loss_fn, idle), idle)
    return LayerFlow(run.places, tuple(run.calls), tuple(run.reads), run.returned, borrowed)


def units(model: nn.Module, layers: Sequence[Layer]) -> dict[str, int]:
    """Modules that one stage alone runs, by path the number of their layer, in running order.

    Others (dropout, rotary embeddings) run wherever they are met.
    """
    return {
        path: number
        for number, layer in enumerate(layers)
        for path in layer.modules
        if layer.role is Role.BLOCK or next(model.get_submodule(path).parameters(), None) is not None
    }


@dataclass(slots=True)
class _Run:
    places: dict[str, int]
    first_block: str
    calls: list[tuple[str, int]] = field(default_factory=list)
    reads: list[LayerRead] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    outputs: list[Tensor] = field(default_factory=list)
    returned: dict[str, Any] = field(default_factory=dict)

    def enter(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((path, self.counts[path]))
        hidden = next(tensors_of((args, kwargs)), None) if path == self.first_block and not self.counts[path] else None
        for tensor in tensors_of((args, kwargs)):
            is_entry = tensor is hidden and all(tensor is not output for output in self.outputs)
            if sources := sources_of(tensor):
                self.reads.append(LayerRead(sources, self.places[path], is_entry))
        return map_tensors((args, kwargs), shape_of)

    def leave(self, path: str, _: nn.Module, __: Any, output: Any) -> Any:
        call = self.counts[path]
        self.counts[path] += 1
        self.returned[path] = map_tensors(output, lambda tensor: torch.empty_like(shape_of(tensor), device=_META))

        def announce(place: str, tensor: Tensor) -> Tensor:
            self.outputs.append(unknown(shape_of(tensor), frozenset([Output(path, call, place)]), _META))
            return self.outputs[-1]

        return map_places(output, announce)


def _observe(
    model: nn.Module, layers: Sequence[Layer], batch: Any, loss_fn: LossFn | None, idle: Collection[str] = ()
) -> _Run:
    """A run of a copy; parameters of the idle modules are known by their names, as those are that no layer holds."""
    twin, example = meta_copy(model), resize_batch(batch, _SAMPLES)
    has_entry = len(layers) > 1 and layers[0].role is Role.BEFORE and bool(layers[1].modules)
    run = _Run(units(twin, layers), layers[1].modules[0] if has_entry else "")
    _mark_loose(twin, layers, idle)
    with ExitStack() as stack:
        for path in run.places:
            module = twin.get_submodule(path)
            module.register_forward_pre_hook(partial(run.enter, path), with_kwargs=True)
            module.register_forward_hook(partial(run.leave, path), prepend=True)  # the model's own hear of it, too
        stack.enter_context(explaining("", twin))
        stack.enter_context(shapes_only(Recorder()))
        stack.enter_context(torch.no_grad())
        output = call_model(twin, example)
        with suppress(Exception):  # the user's function, on tensors without values
            output = loss_of(output, example, loss_fn)
        run.reads.append(LayerRead(sources_of(output), len(layers) - 1))
    return run


def _borrowed(run: _Run, idle: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The first parameter of an idle module that another layer reads, and that layer."""
    return tuple(
        (one.path, read.reader)
        for read in run.reads
        for one in sorted(read.sources, key=lambda one: one.path)
        for path, place in idle.items()
        if one.call == LOOSE
        and one.path.startswith(f"{path}.")
        and place not in (read.reader, read.reader - read.is_entry)
    )[:1]


def _form(value: Any) -> list[tuple[str, torch.Size]]:
    return [(place, tensor.shape) for place, tensor in places(value)]


def _mark_loose(model: nn.Module, layers: Sequence[Layer], idle: Collection[str]) -> None:
    """Make parameters that no layer's modules hold known by their name, and those of idle ones."""
    modules = {path for layer in layers for path in layer.modules} - set(idle)
    held = {id(p) for path in modules for p in model.get_submodule(path).parameters()}
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in held:
                source = Output(f"{prefix}.{name}".lstrip("."), LOOSE, "")
                delattr(module, name)
                setattr(module, name, unknown(shape_of(parameter), frozenset([source]), _META))
