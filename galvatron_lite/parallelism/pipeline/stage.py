"""One pipeline stage made from the user's own model object, in place and without tracing its code.

Layers of other stages become hollow (see ``hollow.py``). On every stage the model's ``forward`` runs as the user wrote
it. Blocks before the stage return what the previous stage sent: exactly what its last layer returned, a tensor or a
tuple. The first module after the stage ends the run. So glue code between blocks, and around them, needs no changes.
Modules without parameters before the first block (rotary embeddings, dropout) run on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import tensors_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.pipeline.hollow import (
    drop_loose_parameters,
    drop_parameters,
    hollow_with_shape,
    replace_forward,
)


class StageEnd(BaseException):
    """Leaves the user's forward behind the stage's last layer. Not an ``Exception``: user code must not catch it."""


class StageModel:
    """The part of a model that one stage runs.

    Args:
        model: the whole model, on any device (meta too); changed in place. Parameters of other stages are dropped.
        layers: every layer of the model, in running order.
        own: names of this stage's layers: consecutive and at least one.
        device: where the stage will run; needed for a model on the meta device.
        arriving: paths of earlier modules whose results the stage receives, as a mapping: skip connections reach over
            several layers. Empty: one value arrives, what the last layer of the previous stage returned.
        leaving: the same of the next stage.

    Attributes:
        model: the user's model object.
        layers: this stage's layers.
        first: whether this is the first stage.
        last: whether this is the last stage.

    Raises:
        InputError: ``own`` is empty, not consecutive, or names an unknown layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        own: Sequence[str],
        device: torch.device | None = None,
        arriving: Sequence[str] = (),
        leaving: Sequence[str] = (),
    ) -> None:
        start = _position(layers, own)
        stop = start + len(own)
        self.model = model
        self.layers = tuple(layers[start:stop])
        self.first, self.last = start == 0, stop == len(layers)
        self._arriving, self._leaving = tuple(arriving), tuple(leaving)
        self._enters_at_block = start > 0 and layers[start - 1].role is Role.BEFORE and not arriving
        self._received: Any = None
        self._kept: dict[str, Any] = {}
        self._produced: Any = None
        self._hollow_earlier(layers[:start], device)
        self._hollow_later(layers[stop:])
        replace_forward(model, partial(self._run_to_end, model.forward))

    def attach(self) -> None:
        """Install the hooks that feed and read the stage. Call it after every other hook of its layers is in place:
        what is sent is what the last layer returns, and what is received enters before other hooks see it.
        """
        if self._enters_at_block:
            entry = self.model.get_submodule(self.layers[0].modules[0])
            entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        own = {path for layer in self.layers for path in layer.modules}
        for path in own & {*self._leaving}:
            self.model.get_submodule(path).register_forward_hook(partial(self._keep_for_later, path))
        if not self.last and not self._leaving and self.layers[-1].role is not Role.BEFORE:
            exit_module = self.model.get_submodule(self.layers[-1].modules[-1])
            exit_module.register_forward_hook(self._keep)
        if not self.last:
            self.model.register_forward_hook(self._leave)

    def run(self, call: Callable[[], Any], received: Any) -> Any:
        """Run the stage once.

        Args:
            call: calls the model with a micro-batch. On stages other than the last the call ends where the model
                returns: what would be done with its output is left out.
            received: what the previous stage's last layer returned; ignored on the first stage.

        Returns:
            What the stage's last layer returned; on the last stage what ``call`` returned.
        """
        self._received, self._produced = received, None
        try:
            output = call()
        except StageEnd:
            output = None
        produced = output if self.last else self._handed_on()
        self._received, self._produced, self._kept = None, None, {}
        return produced

    def _handed_on(self) -> Any:
        if not self._leaving:
            return self._produced
        return {path: self._kept[path] if path in self._kept else self._received[path] for path in self._leaving}

    def _keep_for_later(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._kept[path] = output

    def _hollow_earlier(self, earlier: Sequence[Layer], device: torch.device | None) -> None:
        for layer in earlier:
            for path in layer.modules:
                module = self.model.get_submodule(path)
                if path in self._arriving:
                    drop_parameters(module)
                    replace_forward(module, partial(self._arrived, path))
                elif layer.role is Role.BEFORE or self._arriving:
                    if next(module.parameters(), None) is not None:
                        hollow_with_shape(module)
                else:
                    drop_parameters(module)
                    replace_forward(module, self._pass_on)
        if earlier:
            for module in _ancestors(self.model, [*earlier, *self.layers]):
                drop_loose_parameters(module, device)

    def _hollow_later(self, later: Sequence[Layer]) -> None:
        for layer in later:
            for path in layer.modules:
                module = self.model.get_submodule(path)
                if layer.role is Role.BLOCK or next(module.parameters(), None) is not None:
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

    def _arrived(self, path: str, *_args: Any, **_kwargs: Any) -> Any:
        return self._received[path]

    def _stop(self, *args: Any, **kwargs: Any) -> Any:
        if self._leaving:
            raise StageEnd
        if self.layers[-1].role is Role.BEFORE:
            # this stage ends before the first block and has no single last module: it sends what that block would get
            self._produced = next(tensors_of((args, kwargs)))
        elif self._produced is None:
            remedy = "A module of a later stage runs earlier. Give an example batch, so that the order is known."
            raise InputError("layers", self.layers[-1].name, remedy)
        raise StageEnd

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._received, *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: self._received}

    def _keep(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._produced = output


def _position(layers: Sequence[Layer], own: Sequence[str]) -> int:
    names = [layer.name for layer in layers]
    start = names.index(own[0]) if own and own[0] in names else -1
    if start < 0 or names[start : start + len(own)] != list(own):
        raise InputError("stages", list(own), f"A stage holds consecutive layers of the model: {', '.join(names)}.")
    return start


def _ancestors(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """Modules that hold a layer's module but belong to none: the model itself, its decoder, its ModuleList."""
    units = {path for layer in layers for path in layer.modules}
    names = {path.rsplit(".", depth)[0] for path in units for depth in range(1, path.count(".") + 1)}
    return [model.get_submodule(name) for name in sorted({"", *names} - units)]
