"""One pipeline stage made from the user's own model object, in place and without tracing its code.

On every stage the model's ``forward`` runs as the user wrote it. Layers of other stages become hollow: they hold no
parameters, and their ``forward`` is replaced. Modules before the stage return what they returned on the stage that has
them, as far as the stage or a later one reads it (see ``flow.py``). The run ends behind the stage's last module. So
glue code between blocks, and around them, needs no changes. Weights of hollow modules stay readable as meta tensors,
because glue code may ask for their shape or dtype (Vision Transformers of transformers do). Modules without parameters
outside the layers (rotary embeddings, dropout) run on every stage.

In a chain, where each layer reads what the layer before it made and nothing else, what travels is exactly what the last
layer of a stage returned, a tensor or a tuple; else it is a dict of tensors by name (``_CrossingOutputs``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, update_wrapper
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_places, map_tensors, places, tensors_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace.meta import meta_copy
from galvatron_lite.model.trace.record import Recorder
from galvatron_lite.model.trace.run import shapes_only
from galvatron_lite.parallelism.pipeline.flow import (
    LayerFlow,
    Output,
    UnknownTensor,
    shape_of,
    sources_of,
    units,
    unknown,
)
from galvatron_lite.parallelism.sharded.tensor import locals_only

_ENTRY = "entry"
"""Name of the first block's input, among those of outputs."""


class StageEnd(BaseException):
    """Leaves the user's forward behind the stage's last layer. Not an ``Exception``: user code must not catch it."""


class StageModel:
    """The part of a model that one stage runs.

    Args:
        model: the whole model, on any device (meta too); changed in place. Parameters of other stages are dropped.
        layers: every layer of the model, in running order.
        names: of this stage's layers: consecutive and at least one.
        device: where the stage will run; needed for a model on the meta device.
        flow: which layers read what. Without it the model must be a chain; a layer that reads more is refused when it
            runs.
        stages: names of the layers of all stages, whose ends are checked; this one's if not given.

    Attributes:
        model: the user's model object.
        layers: this stage's layers.
        first: whether this is the first stage.
        last: whether this is the last stage.

    Raises:
        InputError: ``names`` is empty, not consecutive, or names an unknown layer; or the model cannot be cut there.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        names: Sequence[str],
        device: torch.device | None = None,
        flow: LayerFlow | None = None,
        stages: Sequence[Sequence[str]] = (),
    ) -> None:
        start = _position(layers, names)
        stop = start + len(names)
        starts = [_position(layers, each) for each in stages] or [start, stop]
        self._ends = [list(units(model, layers[:each]))[-1:] for each in starts if each < len(layers)]
        self.model = model
        self.layers = tuple(layers[start:stop])
        self.first, self.last = start == 0, stop == len(layers)
        self._units = tuple(units(model, self.layers))
        # what layers of other stages hold too keeps its parameters here
        self._held = frozenset(module for path in self._units for module in model.get_submodule(path).modules())
        self._flow, self._sender = flow, layers[start - 1].modules[-1] if start and layers[start - 1].modules else ""
        self._crossing: _CrossingOutputs | None = None
        self._enters_at_block = start > 0 and layers[start - 1].role is Role.BEFORE
        self._leaves_at_block = not self.last and self.layers[-1].role is Role.BEFORE
        if flow is not None and not flow.is_chain:
            self._crossing = _CrossingOutputs(flow.crossing(start), flow.crossing(stop), flow.enters(stop))
            self._enters_at_block, self._leaves_at_block = flow.enters(start), flow.enters(stop)
        self._end = None if flow is None or self._leaves_at_block else flow.last_call(range(start, stop))
        self._counts: Counter[str] = Counter()
        self._received: Any = None
        self._produced: Any = None
        self._entered = False
        elsewhere = [model.get_submodule(path) for path in units(model, [*layers[:start], *layers[stop:]])]
        self._hollow_earlier(layers[:start], device)
        for path in units(model, layers[stop:]):
            module = model.get_submodule(path)
            drop_parameters(module, self._held)
            module.forward = self._stop
        model.forward = update_wrapper(partial(self._run_to_end, model.forward), model.forward)
        self._stand_ins = [(module, module.forward) for module in elsewhere]
        for module in elsewhere:  # the stage that has it sends what its hooks made; here they may keep what it returns
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                hooks.update({key: partial(_run_hook, hook) for key, hook in hooks.items()})

    def attach(self) -> None:
        """Install the hooks that feed and read the stage. Call it after every other hook of its layers is in place:
        what is sent is what the layers return, and what is received enters before other hooks see it.
        """
        for path in () if self.first else self._units:

            def check(_module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                check_sources(path, (args, kwargs))

            self.model.get_submodule(path).register_forward_pre_hook(check, prepend=True, with_kwargs=True)
        if self._enters_at_block:
            entry = self.model.get_submodule(self.layers[0].modules[0])
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if not self.last:
            for path in self._units:
                self.model.get_submodule(path).register_forward_hook(partial(self._keep, path))
            self.model.register_forward_hook(self._leave)

    def run(self, call: Callable[[], Any], received: Any) -> Any:
        """Run the stage once.

        Args:
            call: calls the model with a micro-batch. On stages other than the last the call ends where the model
                returns: what would be done with its output is left out.
            received: what this returned on the previous stage; ignored on the first stage.

        Returns:
            What the next stage is to receive: in a chain what the stage's last layer returned, else the tensors that
            it or a later stage reads, by name. On the last stage what ``call`` returned.

        Raises:
            InputError: a layer reads what the stage was not sent.
        """
        for module, forward in self._stand_ins:
            module.forward = forward  # another one since then is for the stage that has the module
        self._begin(received)
        try:
            output = call()
        except StageEnd:
            output = None
        try:
            if not self.last:
                return self._produced if self._crossing is None else self._crossing.produced
            if isinstance(output, Tensor):
                check_sources(self.layers[-1].name, output)
            return output
        finally:
            self._begin(None)

    def check_ends(self) -> None:
        """Refuse hooks of modules that a stage's end leaves before torch has set them up; all ranks do, before they
        exchange anything.

        Raises:
            InputError: names the module.
        """
        names = [path.rsplit(".", cut)[0] for (path,) in filter(None, self._ends) for cut in range(path.count(".") + 1)]
        for name in names:
            if self.model.get_submodule(name)._backward_hooks:
                remedy = (
                    "A pipeline stage ends at it, where its gradient is handed over: hook the output instead "
                    "(output.register_hook in a forward hook), or end the stage elsewhere."
                )
                raise InputError("full backward hook", name, remedy)

    def _begin(self, received: Any) -> None:
        self._received, self._produced, self._entered = received, None, False
        self._counts.clear()
        if self._crossing is not None:
            self._crossing.begin(received)

    def _hollow_earlier(self, earlier: Sequence[Layer], device: torch.device | None) -> None:
        for layer in earlier:
            for path in units(self.model, [layer]):
                module = self.model.get_submodule(path)
                if self._crossing is not None:
                    _hollow_with_shape(module, partial(self._crossing.give, path), self._held)
                elif layer.role is Role.BEFORE:
                    _hollow_with_shape(module, partial(_without_values, path), self._held)
                else:
                    drop_parameters(module, self._held)
                    is_last = path == earlier[-1].modules[-1]
                    module.forward = (lambda *_, **__: self._received) if is_last else partial(self._pass_shape, path)
        if earlier:
            for module in _ancestors(self.model, [*earlier, *self.layers]):
                _drop_loose_parameters(module, device)

    def _run_to_end(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # caught inside the model's forward, so that hooks on the whole model (FSDP's among them) see a normal return
        try:
            return forward(*args, **kwargs)
        except StageEnd:
            return self._produced

    def _leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        raise StageEnd

    def _pass_shape(self, path: str, *_args: Any, **_kwargs: Any) -> Any:
        """Nobody here reads it, but code between layers may take it apart, or change it in place: without values."""
        home = next(tensors_of(self._received)).device
        if self._flow is None:
            like = map_tensors(self._received, shape_of)
        else:
            like = self._flow.like(path, self._received, self._sender)
        return _without_values(path, like, home)

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        if self._leaves_at_block:
            # this stage ends before the first block and has no single last module: it sends what that block would get
            self._produced = next(tensors_of((args, kwargs)))
            if self._crossing is not None:
                self._crossing.hold(_ENTRY, self._produced)
        elif self._produced is None and self._units:
            remedy = "A module of a later stage runs earlier. Give an example batch, so that the order is known."
            raise InputError("layers", self.layers[-1].name, remedy)
        raise StageEnd

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entered:  # the block runs again: it is called with what the stage has computed
            return args, kwargs
        self._entered = True
        received = self._received if self._crossing is None else self._crossing.held[_ENTRY]
        hidden = next(tensors_of((args, kwargs)))
        return map_tensors((args, kwargs), lambda tensor: received if tensor is hidden else tensor)

    def _keep(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        call = self._counts[path]
        self._counts[path] += 1
        if path == self._units[-1]:
            self._produced = output
        if self._crossing is not None:
            self._crossing.keep(path, call, output)
        if (path, call) == self._end:
            # at once: code behind it, which the next stage runs, may change the output in place
            raise StageEnd


class _CrossingOutputs:
    """The outputs of layers that cross a stage's ends, by name, where the model is no chain.

    Incoming are those of earlier layers that this stage or a later one reads; outgoing those, of earlier layers or its
    own, that later stages read, and the first block's input where it ``leaves``.
    """

    def __init__(self, incoming: Sequence[Output], outgoing: Sequence[Output], leaves: bool) -> None:
        self._incoming = set(map(_name_of, incoming))
        self._outgoing = [*map(_name_of, outgoing), *[_ENTRY] * leaves]
        self.held: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def begin(self, received: dict[str, Tensor] | None) -> None:
        self.held, self._versions = {}, {}
        self._counts.clear()
        for name, tensor in (received or {}).items():
            self.hold(name, tensor)

    def hold(self, name: str, tensor: Tensor) -> None:
        self.held[name], self._versions[name] = tensor, _version(tensor)

    def give(self, path: str, output: Any, device: torch.device) -> Any:
        """The output of an earlier layer's module, like ``output`` (on meta); unknown where nobody reads it."""
        call = self._counts[path]
        self._counts[path] += 1

        def hand_over(place: str, tensor: Tensor) -> Tensor:
            source = Output(path, call, place)
            name = _name_of(source)
            return self.held[name] if name in self._incoming else unknown(shape_of(tensor), frozenset([source]), device)

        return map_places(output, hand_over)

    def keep(self, path: str, call: int, output: Any) -> None:
        for place, tensor in places(output):
            name = _name_of(Output(path, call, place))
            if name in self._outgoing:
                self.hold(name, tensor)

    @property
    def produced(self) -> dict[str, Tensor]:
        """What the next stage is sent.

        Raises:
            InputError: something was not made, or code between layers changed it in place since.
        """
        for name in self._outgoing:
            if name not in self.held:
                remedy = "It was not made on this batch, but on the example: give an example batch like all others."
                raise InputError("output of a layer", name, remedy)
            if _version(self.held[name]) != self._versions[name]:
                remedy = (
                    "Code behind the layer changes it in place, and a later pipeline stage reads it: do it on a copy."
                )
                raise InputError("output of a layer", name, remedy)
        return {name: self.held[name] for name in self._outgoing}


def _run_hook(hook: Callable[..., Any], *args: Any) -> None:
    hook(*args)


def _name_of(output: Output) -> str:
    """``downs.0`` of its first call, ``downs.0 2.1`` of a tensor in what the third call gave."""
    return f"{output.path} {output.call}{output.place}" if output.call or output.place else output.path


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place ("In-place correctness checks" in torch's notes on autograd)."""
    with locals_only():
        return tensor._version


def check_sources(layer: str, value: Any) -> None:
    """Refuse what a layer of this stage is given, or the loss, where it is made of what the stage has not.

    Raises:
        InputError: names the layer, and what it is made of.
    """
    missing = [source.path for source in sorted(sources_of(value))]
    if missing or any(isinstance(tensor, UnknownTensor) for tensor in tensors_of(value)):
        remedy = (
            f"It reads what {', '.join(missing) or 'another layer'} made in an earlier pipeline stage, and does not do "
            "so in the example. Give an example batch like all others, or put the layers into one stage."
        )
        raise InputError("layer", layer, remedy)


def check_stages(layers: Sequence[Layer], stages: Sequence[Sequence[str]], flow: LayerFlow | None) -> None:
    """Refuse stages that cannot begin where they do; every rank checks all of them, so that none waits for another.

    Args:
        layers: of the model.
        stages: names of the layers of each.
        flow: which layers read what; None where it is not known.

    Raises:
        InputError: see ``LayerFlow.check``; or a stage begins at a layer without modules, as a loss that the model
            computes by itself, behind one that is not a block.
    """
    for names in stages[1:]:
        start = _position(layers, names)
        if flow is not None:
            flow.check(start, layers)
        before = layers[start - 1].role is Role.BEFORE
        entered = before if flow is None or flow.is_chain else flow.enters(start)
        if entered and not layers[start].modules:
            remedy = "No module of the model is it, so nothing can be handed to it: begin its stage a layer earlier."
            raise InputError("plan, stages", layers[start].name, remedy)


def _position(layers: Sequence[Layer], names: Sequence[str]) -> int:
    known = [layer.name for layer in layers]
    start = known.index(names[0]) if names and names[0] in known else -1
    if start < 0 or known[start : start + len(names)] != list(names):
        raise InputError("stages", list(names), f"A stage holds consecutive layers of the model: {', '.join(known)}.")
    return start


def _ancestors(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """Modules that hold a layer's module but belong to none: the model itself, its decoder, its ModuleList."""
    paths = {path for layer in layers for path in layer.modules}
    names = {path.rsplit(".", depth)[0] for path in paths for depth in range(1, path.count(".") + 1)}
    return [model.get_submodule(name) for name in sorted({"", *names} - paths)]


def drop_parameters(module: nn.Module, kept: Collection[nn.Module] = ()) -> None:
    """Turn every parameter of a module and its submodules, but for some, into a plain attribute on the meta device."""
    for owner in (one for one in module.modules() if one not in kept):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            shape_only = torch.empty_like(parameter, device="meta", requires_grad=False)
            delattr(owner, name)
            setattr(owner, name, shape_only.detach())


def _drop_loose_parameters(module: nn.Module, device: torch.device | None) -> None:
    """Take the parameters a module holds directly; glue code that still reads them gets NaN without memory.

    What glue code computes from them before the first block is thrown away on later stages. Were such a value used
    after the last block all the same, the loss would be NaN, not silently wrong.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        stand_in = torch.full((), float("nan"), dtype=parameter.dtype, device=device or parameter.device)
        delattr(module, name)
        setattr(module, name, stand_in.expand(parameter.shape))


def _hollow_with_shape(
    module: nn.Module, give: Callable[[Any, torch.device], Any], kept: Collection[nn.Module]
) -> None:
    """Drop the module's parameters; it returns what ``give`` makes of its output on the meta device.

    The shape comes from running a copy on the meta device, once for the shapes of its arguments, so it is right for
    every input.
    """
    floating = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    to_meta = partial(_to_meta, floating[0] if floating else None)
    drop_parameters(module, kept)
    twin = meta_copy(module).train(module.training)
    outputs: dict[object, Any] = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next(tensors_of((args, kwargs)), None)
        device, key = torch.get_default_device() if first is None else first.device, _shape_key((args, kwargs))
        if key not in outputs:
            args, kwargs = map_tensors((args, kwargs), to_meta)
            with torch.no_grad(), shapes_only(Recorder()):
                outputs[key] = twin(*args, **kwargs)
        return give(outputs[key], device)

    module.forward = forward


def _shape_key(value: Any) -> object:
    """What the shape of an output depends on."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shape_key(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_shape_key, value))
    return value if isinstance(value, (bool, int, float, str, NoneType)) else type(value)


def _to_meta(dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    # by its shape: a picture of which this rank holds a share says the whole one; in the precision of the parameters,
    # whatever that of compute
    floating = dtype is not None and tensor.is_floating_point()
    return torch.empty(tuple(tensor.shape), dtype=dtype if floating else tensor.dtype, device="meta")


def _without_values(path: str, output: Any, home: torch.device) -> Any:
    """Like what a module returned, see ``unknown``."""
    sources = frozenset([Output(path, 0, "")])
    return map_tensors(output, lambda tensor: unknown(shape_of(tensor), sources, home))
