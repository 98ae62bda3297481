"""The sources of every tensor of a run: modules that computed it, parameters and buffers that were read.

Operators are observed below autograd, so that tensors without a gradient (an argmax, a detached target) have sources,
too. Sources belong to storages: all tensors of a storage have the sources of every operator that writes into it. So no
source is missed, but a tensor may have sources that do not reach it.

If a module returns an input or a view of it (Flatten, Identity, Dropout in evaluation), it returns a copy during the
run: readers of the copy depend on the module, readers of the input do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.trace.operators import flops, name_of
from galvatron_lite.model.trace.record import leads_to_error

READ = torch.ops.aten._local_scalar_dense.default
"""The operator that reads the value of a tensor."""
_ORDERS = {"gt", "ge", "lt", "le"}
_NOT_NEGATIVE = {"abs", "square", "relu", "exp", "norm", "linalg_vector_norm"}
_REDUCTIONS = {"sum", "mean", "max", "amax"}


def inside(path: str, ancestor: str) -> bool:
    """Whether a module path is strictly below another."""
    return path != ancestor and (not ancestor or path.startswith(ancestor + "."))


def at(path: str, module: str) -> bool:
    """Whether a path is that of a module or of something inside it."""
    return path == module or inside(path, module)


class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the sources of tensors while it is entered. A set of sources is an integer with a bit for each.

    Attributes:
        modules: bit by module path; the source of a tensor is the innermost module that computed it.
        parameters: bit by parameter name; the first name of shared ones.
        buffers: bit by buffer name.
        batch: bit of the model's inputs.
        inputs: sources of all tensors that a module's own code reads, by module path.
        entries: sources of each of these tensors that depends on the model's inputs, by module path.
        readers: paths of modules whose own code reads a parameter, by parameter name.
        work: forward FLOPs of a module's own code, by module path.
        ran: paths of modules that ran.
        written: names of parameters that were written into.
        copied: whether a module returned a copy of an input.
        asked: each read of a tensor's value: path of the module whose code reads it, and its sources.
        compared: path of a module whose code reads how a number that depends on the model's inputs compares with
            another; None if none does.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        bits = iter(1 << number for number in range(1 << 62))
        self.batch = next(bits)
        self.modules = {path: next(bits) for path, _ in model.named_modules()}
        self.parameters = {name: next(bits) for name, _ in model.named_parameters()}
        self.buffers = {name: next(bits) for name, _ in model.named_buffers()}
        self.inputs, self.work = dict.fromkeys(self.modules, 0), dict.fromkeys(self.modules, 0)
        self.entries: dict[str, set[int]] = {path: set() for path in self.modules}
        self.readers: dict[str, set[str]] = {name: set() for name in self.parameters}
        self._sources, self._names = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._copies, self._comparisons, self._positive = (WeakIdKeyDictionary() for _ in range(3))
        self._decisions, self._running = 0, [""]
        self.ran, self.written, self.copied = set[str](), set[str](), False
        self.asked: list[tuple[str, int]] = []
        self.compared: str | None = None
        for tensor in tensors_of(batch):
            self._add(tensor.untyped_storage(), self.batch)
        for name, parameter in model.named_parameters():
            self._add(parameter.untyped_storage(), self.parameters[name])
            self._names.setdefault(parameter.untyped_storage(), name)  # type: ignore[no-untyped-call]
        for name, buffer in model.named_buffers():
            self._add(buffer.untyped_storage(), self.buffers[name])

    def enter(self, path: str) -> None:
        """Note that a module begins to run."""
        self._running.append(path)
        self.ran.add(path)

    def leave(self, args: Any, output: Any) -> Any:
        """Note that the last module has run; return its output, with copies of inputs that it did not write."""
        path, result = self._running[-1], output
        arguments = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
        returned = [tensor for tensor in tensors_of(output) if tensor.untyped_storage()._cdata in arguments]
        if returned:
            bits = reduce(or_, (bit for name, bit in self.modules.items() if at(name, path)))
            unwritten = {id(tensor) for tensor in returned if not self.sources_of_tensors([tensor]) & bits}
            result = map_tensors(output, lambda tensor: self._copy(tensor) if id(tensor) in unwritten else tensor)
        self._running.pop()
        return result if type(result) is type(output) else output

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy by the running module; a write into one counts as a write into both."""
        copy = tensor.clone()
        copies = self._copies.get(tensor.untyped_storage(), [tensor.untyped_storage()])  # type: ignore[no-untyped-call]
        copies.append(copy.untyped_storage())
        for storage in copies:
            self._copies[storage] = copies
        self.copied = True
        return copy

    def sources_of_tensors(self, tensors: Iterable[Tensor]) -> int:
        """The sources of some tensors together."""
        bits = 0
        for tensor in tensors:
            bits = _union(bits, int(self._sources.get(tensor.untyped_storage(), 0)))  # type: ignore[no-untyped-call]
        return bits

    def reaching(self, outputs: Iterable[Tensor], model: nn.Module) -> int:
        """The sources of a run's outputs, of values that decided what ran, and of tensors that the model stores.

        If they contain a buffer, they contain what was written into it, which the next run reads.
        """
        attributes = (vars(module).items() for module in model.modules())
        registered = ("_parameters", "_buffers", "_modules")
        stored = [value for items in attributes for name, value in items if name not in registered]
        bits = self.sources_of_tensors(outputs) | self._decisions | self.sources_of_tensors(tensors_of(stored))
        written = {bit: self.sources_of_tensors([model.get_buffer(name)]) for name, bit in self.buffers.items()}
        while True:
            more = bits
            for bit, sources in written.items():
                more = more | sources if more & bit else more
            if more == bits:
                return bits
            bits = more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note the sources of its outputs."""
        kwargs = kwargs or {}
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        path = self._running[-1]
        bits = self._note_inputs(inputs, path)
        if func is READ:
            self._decisions |= bits
            self.asked.append((path, bits))
            if bits & self.batch and self.compares(inputs[0]) and not leads_to_error():
                self.compared = path
        output = func(*args, **kwargs)
        self._note_comparison(func, args, inputs, output)
        self.work[path] += flops(func, args, kwargs, output)
        bits = _union(bits, self.modules[path] | self._decisions)
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in tensors_of(output):
            if tensor.untyped_storage()._cdata not in input_storages:
                self._add(tensor.untyped_storage(), bits)
        for place, name in _writing(func):
            for tensor in tensors_of(args[place] if place < len(args) else kwargs.get(name)):
                storage = tensor.untyped_storage()
                if (parameter := self._names.get(storage)) is not None:  # type: ignore[no-untyped-call]
                    self.written.add(parameter)
                for copy in self._copies.get(storage, [storage]):  # type: ignore[no-untyped-call]
                    self._add(copy, bits)
        return output

    def compares(self, tensor: Tensor) -> bool:
        """Whether a tensor is the result of a comparison of two floating-point numbers.

        ``hidden.abs().sum() > 0`` is none: it asks whether any element is not zero.
        """
        return bool(self._comparisons.get(tensor.untyped_storage(), False))  # type: ignore[no-untyped-call]

    def _note_comparison(self, func: Any, args: Sequence[Any], inputs: Sequence[Tensor], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        name, storage = name_of(func), output.untyped_storage()
        if not _writing(func) and any(tensor.untyped_storage()._cdata == storage._cdata for tensor in inputs):
            return  # a view
        is_positive = bool(inputs) and inputs[0].untyped_storage() in self._positive
        if name in _NOT_NEGATIVE or (name in _REDUCTIONS and is_positive):
            self._positive[storage] = True
        elif storage in self._positive:
            del self._positive[storage]  # overwritten
        if output.dtype is torch.bool and output.numel() == 1 and all(tensor.numel() == 1 for tensor in inputs):
            orders = name in _ORDERS and any(tensor.is_floating_point() for tensor in inputs)
            if (orders and not (is_positive and args[1:] == (0,))) or any(map(self.compares, inputs)):
                self._comparisons[storage] = True

    def _note_inputs(self, inputs: Collection[Tensor], path: str) -> int:
        """Note what a module's code reads; return the sources of all of it."""
        module_bits, bits = self.modules[path], self._decisions
        for tensor in inputs:
            tensor_bits = self.sources_of_tensors([tensor])
            bits = _union(bits, tensor_bits)
            if tensor_bits & self.batch and not tensor_bits & module_bits:
                self.entries[path].add(tensor_bits)
            name = self._names.get(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            if name is not None:
                self.readers[name].add(path)
        self.inputs[path] = _union(self.inputs[path], bits)
        return bits

    def _add(self, storage: UntypedStorage, sources: int) -> None:
        self._sources[storage] = _union(int(self._sources.get(storage, 0)), sources)  # type: ignore[no-untyped-call]


def _union(first: int, second: int) -> int:
    """The union of two sets; the larger set itself if it contains the other, to save memory."""
    both = first | second
    return first if both == first else second if both == second else both


@cache
def _writing(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of arguments that an operator writes into; some batch norms do not declare running
    statistics."""
    arguments = func._schema.arguments  # documented by torch.library.infer_schema; an operator has no public function
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name.startswith("running_")
    )


@dataclass(slots=True)
class Needs:
    """What a group of modules does and needs in a run."""

    ran: bool = False  # whether any of them ran
    earlier: set[str] = field(default_factory=set)  # names of other groups that are sources of its inputs
    batch: bool = False  # whether it reads the model's inputs, or what code between the groups computes of them
    work: int = 0  # forward FLOPs
    busy: int = 0  # number of modules whose own code has FLOPs


def needs_of(flow: DataFlow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, Needs]:
    """What each group of modules needs, by its name.

    A group also needs another if it reads what code elsewhere computes of parameters that only the other contains.
    """
    bits = group_bits(flow, model, groups)
    all_bits, inputs = sum(bits.values()), dict.fromkeys(groups, 0)
    needs_by_name = {name: Needs() for name in groups}
    for path, name in held_by(flow.modules, groups).items():
        needs = needs_by_name[name]
        needs.ran = needs.ran or path in flow.ran
        needs.work += flow.work[path]
        needs.busy += flow.work[path] > 0
        needs.batch = needs.batch or any(not entry & all_bits for entry in flow.entries[path])
        inputs[name] |= flow.inputs[path]
    for name, needs in needs_by_name.items():
        needs.earlier |= {other for other, bit in bits.items() if other != name and inputs[name] & bit}
    return needs_by_name


def group_bits(flow: DataFlow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, int]:
    """The sources that show that a group worked on a tensor: its modules, and parameters that only it contains."""
    bits = dict.fromkeys(groups, 0)
    for path, name in held_by(flow.modules, groups).items():
        bits[name] |= flow.modules[path]
    for parameter, names in holders_of(model, groups).items():
        for name in names if len(names) == 1 else ():
            bits[name] |= flow.parameters[parameter]
    return bits


def holders_of(model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """The groups that contain each parameter, by its name; several contain a shared one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[str, set[str]] = {}
    for group, paths in groups.items():
        for parameter in (parameter for path in paths for parameter in model.get_submodule(path).parameters()):
            holders.setdefault(names[id(parameter)], set()).add(group)
    return holders


def held_by(paths: Collection[str], groups: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The group of each path, by the nearest module around it; paths outside of all groups are left out."""
    owner = {path: name for name, members in groups.items() for path in members}
    holders: dict[str, str] = {}
    for path in paths:
        above = path
        while above and above not in owner:
            above = above.rpartition(".")[0]
        if above in owner:
            holders[path] = owner[above]
    return holders
