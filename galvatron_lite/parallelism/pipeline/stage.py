"""One pipeline stage made from the user's own model object, in place and without tracing its code.

Layers of other stages become hollow (see ``hollow.py``). On every stage the model's ``forward`` runs as the user wrote
it. Modules before the stage return what they returned on the stage that has them, as far as the stage or a later one
reads it (see ``flow.py``, ``carry.py``). The run ends behind the stage's last module. So glue code between blocks, and
around them, needs no changes. Modules without parameters outside the layers (rotary embeddings, dropout) run on every
stage.

In a chain, where each layer reads what the layer before it made and nothing else, what travels is exactly what the last
layer of a stage returned, a tensor or a tuple.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.pipeline.carry import Carrier, check_known
from galvatron_lite.parallelism.pipeline.flow import LayerFlow, units
from galvatron_lite.parallelism.pipeline.hollow import (
    drop_loose_parameters,
    drop_parameters,
    hollow_with_shape,
    replace_forward,
)
from galvatron_lite.parallelism.pipeline.unknown import Output, shape_of, unknown


class StageEnd(BaseException):
    """Leaves the user's forward behind the stage's last layer. Not an ``Exception``: user code must not catch it."""


class StageModel:
    """The part of a model that one stage runs.

    Args:
        model: the whole model, on any device (meta too); changed in place. Parameters of other stages are dropped.
        layers: every layer of the model, in running order.
        own: names of this stage's layers: consecutive and at least one.
        device: where the stage will run; needed for a model on the meta device.
        flow: which layers read what. Without it the model must be a chain; a layer that reads more is refused when it
            runs.

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
    ) -> None:
        start = _position(layers, names)
        stop = start + len(names)
        self.model = model
        self.layers = tuple(layers[start:stop])
        self.first, self.last = start == 0, stop == len(layers)
        self._units = tuple(units(model, self.layers))
        self._flow, self._sender = flow, layers[start - 1].modules[-1] if start and layers[start - 1].modules else ""
        self._carrier = _carrier(flow, start, stop)
        self._enters_at_block = start > 0 and layers[start - 1].role is Role.BEFORE
        self._leaves_at_block = not self.last and self.layers[-1].role is Role.BEFORE
        if flow is not None and self._carrier is not None:
            self._enters_at_block, self._leaves_at_block = flow.enters(start), flow.enters(stop)
        self._end = None if flow is None or self._leaves_at_block else flow.last_call(range(start, stop))
        self._counts: Counter[str] = Counter()
        self._received: Any = None
        self._produced: Any = None
        self._entered = False
        self._hollow_earlier(layers[:start], device)
        self._hollow_later(layers[stop:])
        replace_forward(model, partial(self._run_to_end, model.forward))

    def attach(self) -> None:
        """Install the hooks that feed and read the stage. Call it after every other hook of its layers is in place:
        what is sent is what the layers return, and what is received enters before other hooks see it.
        """
        for path in () if self.first else self._units:
            check = partial(self._check, path)
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
        self._begin(received)
        try:
            output = call()
        except StageEnd:
            output = None
        try:
            if not self.last:
                return self._sent()
            if isinstance(output, Tensor):
                check_known(self.layers[-1].name, output)
            return output
        finally:
            self._begin(None)

    def _begin(self, received: Any) -> None:
        self._received, self._produced, self._entered = received, None, False
        self._counts.clear()
        if self._carrier is not None:
            self._carrier.begin(received)

    def _sent(self) -> Any:
        return self._produced if self._carrier is None else self._carrier.produced

    def _hollow_earlier(self, earlier: Sequence[Layer], device: torch.device | None) -> None:
        for layer in earlier:
            for path in units(self.model, [layer]):
                module = self.model.get_submodule(path)
                if self._carrier is not None:
                    hollow_with_shape(module, partial(self._carrier.give, path))
                elif layer.role is Role.BEFORE:
                    hollow_with_shape(module)
                else:
                    drop_parameters(module)
                    is_last = path == earlier[-1].modules[-1]
                    replace_forward(module, self._pass_on if is_last else partial(self._pass_shape, path))
        if earlier:
            for module in _ancestors(self.model, [*earlier, *self.layers]):
                drop_loose_parameters(module, device)

    def _hollow_later(self, later: Sequence[Layer]) -> None:
        for path in units(self.model, later):
            module = self.model.get_submodule(path)
            drop_parameters(module)
            replace_forward(module, self._stop)

    def _run_to_end(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # caught inside the model's forward, so that hooks on the whole model (FSDP's among them) see a normal return
        try:
            return forward(*args, **kwargs)
        except StageEnd:
            return self._produced

    def _leave(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        raise StageEnd

    def _pass_on(self, *_args: Any, **_kwargs: Any) -> Any:
        return self._received

    def _pass_shape(self, path: str, *_args: Any, **_kwargs: Any) -> Any:
        """Nobody here reads it, but code between layers may take it apart, or change it in place: without values."""
        sources, home = frozenset([Output(path, 0, "")]), next(tensors_of(self._received)).device
        if self._flow is None:
            like = map_tensors(self._received, shape_of)
        else:
            like = self._flow.like(path, self._received, self._sender)
        return map_tensors(like, lambda tensor: unknown(tensor, sources, home))

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        if self._leaves_at_block:
            # this stage ends before the first block and has no single last module: it sends what that block would get
            self._produced = next(tensors_of((args, kwargs)))
            if self._carrier is not None:
                self._carrier.keep_entry(self._produced)
        elif self._produced is None and self._units:
            remedy = "A module of a later stage runs earlier. Give an example batch, so that the order is known."
            raise InputError("layers", self.layers[-1].name, remedy)
        raise StageEnd

    def _check(self, path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_known(path, (args, kwargs))

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entered:  # the block runs again: it is called with what the stage has computed
            return args, kwargs
        self._entered = True
        received = self._received if self._carrier is None else self._carrier.entry
        if args:
            return (received, *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: received}

    def _keep(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        call = self._counts[path]
        self._counts[path] += 1
        if path == self._units[-1]:
            self._produced = output
        if self._carrier is not None:
            self._carrier.keep(path, call, output)
        if (path, call) == self._end:
            # at once: code behind it, which the next stage runs, may change the output in place
            raise StageEnd


def check_stages(layers: Sequence[Layer], stages: Sequence[Sequence[str]], flow: LayerFlow | None) -> None:
    """Refuse stages that cannot begin where they do; every rank checks all of them, so that none waits for another.

    Args:
        layers: of the model.
        stages: names of the layers of each.
        flow: which layers read what; None where it is not known.

    Raises:
        InputError: see ``Flow.check``; or a stage begins at a layer without modules, as a loss that the model computes
            by itself, behind one that is not a block.
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


def _carrier(flow: LayerFlow | None, start: int, stop: int) -> Carrier | None:
    """What carries outputs of layers between the stages; None in a chain, and where nothing is known."""
    if flow is None:
        return None
    if flow.is_chain:
        return None
    return Carrier(flow.crossing(start), flow.crossing(stop), flow.enters(stop))


def _position(layers: Sequence[Layer], stage_names: Sequence[str]) -> int:
    names = [layer.name for layer in layers]
    start = names.index(stage_names[0]) if stage_names and stage_names[0] in names else -1
    if start < 0 or names[start : start + len(stage_names)] != list(stage_names):
        raise InputError(
            "stages", list(stage_names), f"A stage holds consecutive layers of the model: {', '.join(names)}."
        )
    return start


def _ancestors(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """Modules that hold a layer's module but belong to none: the model itself, its decoder, its ModuleList."""
    units = {path for layer in layers for path in layer.modules}
    names = {path.rsplit(".", depth)[0] for path in units for depth in range(1, path.count(".") + 1)}
    return [model.get_submodule(name) for name in sorted({"", *names} - units)]
