"""What a model does in a pass, observed at its calls of functions and modules.

Noted are its mean cross-entropies, and values that are used outside of their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from galvatron_lite.capture.limits import everything_in, nodes_behind
from galvatron_lite.model.batch import places, tensors_of
from galvatron_lite.model.graph import Layer
from galvatron_lite.model.trace.flow import at
from galvatron_lite.runtime.loss.weights import TargetCount, mean_of_targets

_GRADIENT: Any = vars(torch._C.TensorBase)["grad"]
VALUELESS = ("type_as", _GRADIENT.__get__)
"""Functions of a parameter whose results do not depend on its values; beside ``new_*`` and ``*_like``."""


class CallObserver(TorchFunctionMode):
    """Observes the calls of functions and modules while a model runs.

    Args:
        model: a copy of the user's model.
        layers: of the copy.
        original: the user's model, whose parameters code of the copy may still read.

    Attributes:
        means: of each mean cross-entropy, its targets, the target that is ignored, and weights of classes.
        takes_gradients: whether the model takes gradients while it runs.
        outside: names of parameters that code outside of their layers reads.
        leaking: paths of layers with values that reach the loss without being returned.
        foreign: shapes of parameters with gradients that no module holds, by id.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], original: nn.Module) -> None:
        super().__init__()
        self.means = list[tuple[Tensor, int, Tensor | None]]()
        self.takes_gradients = False
        self.outside: list[str] = []
        self.leaking: list[str] = []
        self.foreign: dict[int, str] = {}
        self._model = model
        self._running: list[str] = []  # paths of modules
        layer_paths = [path for layer in layers for path in layer.modules]
        # of each parameter, its name, the modules that hold it themselves, and the layers that these are in
        self._holders: dict[int, tuple[str, list[str], list[str]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                _, modules, holders = self._holders.setdefault(id(parameter), (f"{path}.{name}".lstrip("."), [], []))
                modules.append(path)
                holders.extend(layer for layer in layer_paths if at(path, layer))
        hooked = [path for path, module in model.named_modules() if module._forward_hooks]
        self._ends, self._outputs = {*layer_paths, *hooked}, set[Node | None]()  # modules, and nodes of their outputs
        self._originals = {id(parameter): name for name, parameter in original.named_parameters()}
        self._read_outside: dict[str, list[str]] = {}  # the modules that hold each parameter

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forward pass."""
        with self._hooked(self._enter), self:
            yield
        self._note_outside()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Observe the backward pass, in which reversible layers run again, without the modules around them."""

        def enter(path: str, module: nn.Module, _: Any) -> None:
            self._enter(path)
            self._note_parameters(module.parameters(recurse=False))

        with self._hooked(enter):
            yield
        self._note_outside()

    @contextmanager
    def _hooked(self, enter: Callable[..., None]) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(partial(enter, path)).remove)
                stack.callback(module.register_forward_hook(partial(self._leave, path), always_call=True).remove)
            yield

    def _note_outside(self) -> None:
        # a module without a forward only holds parameters for others, as the root does
        runs = {path for path, module in self._model.named_modules() if type(module).forward is not nn.Module.forward}
        self.outside = [
            name for name, modules in self._read_outside.items() if not modules or runs.intersection(modules)
        ]

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _leave(self, path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._running.pop()
        if path in self._ends:
            self._outputs |= {tensor.grad_fn for tensor in everything_in(output)}

    def note_leaks(self, loss: Tensor) -> None:
        """Note layers with values that reach the loss neither as outputs nor through a hook of the model."""
        for node in nodes_behind([loss], self._outputs):
            name, _, layers = self._holders.get(id(getattr(node, "variable", None)), ("", [], []))
            if layers and name not in self._read_outside:
                self.leaking.append(layers[0])

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; note a mean cross-entropy, and the parameters that it reads."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.takes_gradients |= function is torch.autograd.grad
        mean = mean_of_targets(function, args, kwargs)
        if mean is not None:
            weight = mean.get("weight")
            classes = None if weight is None else weight.detach().clone()
            self.means.append((mean["target"].detach().clone(), mean.get("ignore_index", -100), classes))
        if any(True for _ in tensors_of(result)) and _reads_values(function, args):
            self._note_parameters(tensor for tensor in tensors_of((args, kwargs)) if isinstance(tensor, nn.Parameter))
        return result

    def _note_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if id(parameter) in self._originals:
                self._read_outside.setdefault(self._originals[id(parameter)], [])
            elif id(parameter) in self._holders:
                name, modules, layers = self._holders[id(parameter)]
                if layers and not any(layer in self._running for layer in layers):
                    self._read_outside.setdefault(name, modules)
            elif parameter.requires_grad and torch.is_grad_enabled():
                self.foreign[id(parameter)] = str(list(parameter.shape))

    def target_counts(self, batch: Any) -> tuple[TargetCount | None, ...]:
        """Return the divisor of each mean cross-entropy, in order; None if its targets are no entry of the batch."""
        entries = [(_find_entry(target, ignored, batch), ignored, classes) for target, ignored, classes in self.means]
        return tuple(
            None if entry is None else TargetCount(*entry, ignored, classes) for entry, ignored, classes in entries
        )


def _reads_values(function: Any, args: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("new_") or name.endswith("_like") or name in VALUELESS or function in VALUELESS:
        return False
    return name != "to" or isinstance(args[0], nn.Parameter)


def _find_entry(target: Tensor, ignored: int, batch: Any) -> tuple[str, int] | None:
    """Return the entry of the batch that targets are, and the number of its first tokens that they lack (0 or 1)."""
    flat = target.reshape(-1)
    # labels may equal the inputs in an example: an entry with such a name goes first, then the last one
    entries = [*places(batch)][::-1]
    entries.sort(key=lambda entry: not any(word in entry[0] for word in ("label", "target")))
    for place, tensor in entries:
        if tensor.is_floating_point() or tensor.dim() == 0:
            continue
        if _equal(tensor.reshape(-1), flat) or (tensor.dim() == 2 and _equal(tensor.t().reshape(-1), flat)):
            return place, 0
        if tensor.dim() < 2 or tensor.shape[1] < 2:
            continue
        padded = torch.nn.functional.pad(tensor.movedim(1, -1), (0, 1), value=ignored)[..., 1:].movedim(-1, 1)
        if _equal(tensor[:, 1:].reshape(-1), flat) or _equal(padded.reshape(-1), flat):
            return place, 1
    return None


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all())


class RecordingBatch(dict[str, Any]):
    """A batch that records which of its entries are read."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.read_entries = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read_entries.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        self.read_entries.update(self.keys())
        return super().__iter__()

    get: Any = Mapping.get  # these call the methods above
    items: Any = Mapping.items
    values: Any = Mapping.values
