"""Moving a model's layers from the meta device (or another device) to this process's device, one at a time.

A model too big for one device is built under ``torch.device("meta")``. For each layer in turn the engine allocates
tensors, initialises them, and keeps this rank's shards, so that at most one full layer is in memory at a time.

Initial values are those of building the model and then applying an initialiser to every module, children first:
``reset_parameters`` if a module has it, then ``init_fn`` or, by default, the model's own ``_init_weights``. Every
module draws from a generator seeded by its path, so that the weights depend on the seed and not on the plan.

Buffers that a constructor computes (tables of frequencies, masks, positions) have no value on the meta device, and a
constructor cannot be run again in general. The initialisers restore them (those of transformers do). To check this,
tensors are first filled with a mark (NaN, or the largest integer); a tensor that still contains marks is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Layer, Role

InitFn = Callable[[nn.Module], None]
"""Called for every module, children first, as by ``model.apply``; fills the module's own parameters and buffers."""

Named = tuple[str, nn.Module]


class Materializer:
    """Allocates and initialises a model's layers. Create it after a pipeline stage was cut out of the model."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        device: torch.device,
        seed: int = 0,
        init_fn: InitFn | None = None,
    ) -> None:
        self._model, self._device, self._seed, self._init_fn = model, device, seed, init_fn
        self._home = next((layer for layer in layers if layer.role is Role.BEFORE), layers[0])
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}  # modules and names, by identity of the parameter
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                self._holders.setdefault(id(parameter), []).append((module, name))
        inside = {id(m) for layer in layers for path in layer.modules for m in model.get_submodule(path).modules()}
        self._outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]

    def place(self, layer: Layer) -> None:
        """Allocate and initialise a layer's parameters and buffers, or move them to the device.

        A parameter shared with another layer is initialised once, for both. The layer before the blocks (the first one
        if there is none) includes what no layer contains. On later pipeline stages call this for the layer before the
        blocks as well: it has no parameters there, but its buffers may still be read.

        Raises:
            InputError: a parameter or buffer that nothing initialises.
        """
        modules: list[Named] = []
        for path in layer.modules:
            modules += list(self._model.get_submodule(path).named_modules(prefix=path))[::-1]  # children first
        if layer == self._home:
            modules += self._outside[::-1]
        fresh = {name: self._place_tensors(module) for name, module in modules}
        if any(fresh.values()):
            self._initialise(modules, fresh)
            _check_filled(modules, fresh)

    def _place_tensors(self, module: nn.Module) -> list[str]:
        """Move the module's own tensors, allocate those on the meta device, and return the names of the latter."""
        fresh = []
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                fresh.append(name)
                self._replace(parameter, nn.Parameter(_marked(parameter, self._device), parameter.requires_grad))
            elif parameter.device != self._device:
                parameter.data = parameter.data.to(self._device)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                fresh.append(name)
            setattr(module, name, _marked(buffer, self._device) if buffer.is_meta else buffer.to(self._device))
        return fresh

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        for module, name in self._holders[id(old)]:
            setattr(module, name, new)

    def _initialise(self, modules: Sequence[Named], fresh: dict[str, list[str]]) -> None:
        devices = [] if self._device.type == "cpu" else [self._device]
        for path, module in modules:
            settled = [name for name, _ in module.named_parameters(recurse=False) if name not in fresh[path]]
            is_layers = all(path != name for name, _ in self._outside)
            inner = is_layers and any(names and other.startswith(f"{path}.") for other, names in fresh.items())
            if not fresh[path] and (settled or not inner):
                continue
            kept = {name: module.get_parameter(name) for name in settled}
            for name, parameter in kept.items():
                # shared with a layer that has its values, and perhaps its shards: what is drawn for it here is dropped
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype)))
            with torch.random.fork_rng(devices), torch.no_grad():
                digest = hashlib.sha256(f"{self._seed}:{path}".encode()).digest()
                torch.manual_seed(int.from_bytes(digest[:7], "big"))
                self._run_initialisers(path, module)
            for name, parameter in kept.items():
                setattr(module, name, parameter)

    def _run_initialisers(self, path: str, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if isinstance(module, nn.MultiheadAttention):
            # the only module of torch.nn whose reset is private; transformers calls it, too
            reset = module._reset_parameters
        if callable(reset):
            reset()
        rule = self._init_fn or self._init_rule(path)
        if rule is not None:
            rule(module)

    def _init_rule(self, path: str) -> InitFn | None:
        """The nearest ``_init_weights`` at or above a module.

        The name is private to the model, but by convention (transformers, timm, nanoGPT) it is a method for
        ``model.apply`` that takes a module and fills its own tensors. There is no public function that initialises one
        module of a transformers model.
        """
        parts = path.split(".") if path else []
        for depth in range(len(parts), -1, -1):
            rule = getattr(self._model.get_submodule(".".join(parts[:depth])), "_init_weights", None)
            if callable(rule):
                return cast("InitFn", rule)
        return None


def _marked(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, filled with a value that no initialiser sets."""
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype, device=device)


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _holds_mark(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool:
        # no value is left for a mark: a table without one true entry counts as not restored
        return not bool(tensor.any())
    mark = _mark(tensor.dtype)
    return bool((tensor.isnan() if mark != mark else tensor == mark).any())


def _check_filled(modules: Sequence[Named], fresh: dict[str, list[str]]) -> None:
    for path, module in modules:
        for name in fresh[path]:
            if _holds_mark(getattr(module, name).detach()):
                kind = "parameter" if isinstance(getattr(module, name), nn.Parameter) else "buffer"
                raise InputError(
                    f"initial value of {kind} {f'{path}.{name}'.lstrip('.')}",
                    "meta tensor",
                    f"{type(module).__name__} has no reset_parameters that fills it. Give init_fn a case for this "
                    "module, or build the model on a real device.",
                )
