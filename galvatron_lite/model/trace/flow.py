"""What every tensor of a run is made of: the modules that worked on it, the parameters and buffers that were read.

Seen below autograd, operator by operator, so that what takes no gradient (an argmax, a detached target) is followed,
too. Tensors are told apart by their storage: what one operator writes into a storage, everything that looks at that
storage is made of. So nothing that reaches a tensor is missed, and now and then something is counted that does not.

A module that hands on what it was given, or a view of it (Flatten, Identity, Dropout in evaluation), hands on a copy
while this is watched: who reads that depends on the module, and who reads what it was given does not.
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
_ORDER = {"gt", "ge", "lt", "le"}
_SIZES = {"abs", "square", "relu", "exp", "norm", "linalg_vector_norm"}
_SUMS = {"sum", "mean", "max", "amax"}


def inside(path: str, ancestor: str) -> bool:
    """Whether a module path lies strictly below another."""
    return path != ancestor and (not ancestor or path.startswith(ancestor + "."))


def at(path: str, module: str) -> bool:
    """Whether a path is that of a module or lies inside it."""
    return path == module or inside(path, module)


class DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what tensors are made of while it is entered; sets are the bits of a whole number.

    Attributes:
        modules: bit by module path; a tensor has that of the innermost module that worked on it.
        parameters: bit by parameter name, shared ones under their first.
        buffers: bit by buffer name.
        batch: bit of the model's inputs.
        given: by module path what the tensors are made of that its own code was given.
        entries: by module path what those of them are made of that are made of the model's inputs.
        readers: by parameter name paths of modules whose own code reads it.
        work: by module path forward FLOPs of its own code.
        ran: paths of modules that ran.
        written: names of parameters that were written into.
        copied: whether a module handed on a copy of what it was given.
        asked: values of tensors that code read: path of the module whose code it is, and what they are made of.
        compared: path of a module whose code read how a number made of the model's inputs compares with another; None
            where none did.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        bits = iter(1 << number for number in range(1 << 62))
        self.batch = next(bits)
        self.modules = {path: next(bits) for path, _ in model.named_modules()}
        self.parameters = {name: next(bits) for name, _ in model.named_parameters()}
        self.buffers = {name: next(bits) for name, _ in model.named_buffers()}
        self.given, self.work = dict.fromkeys(self.modules, 0), dict.fromkeys(self.modules, 0)
        self.entries: dict[str, set[int]] = {path: set() for path in self.modules}
        self.readers: dict[str, set[str]] = {name: set() for name in self.parameters}
        self._made, self._names = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._same, self._ordered, self._sizes = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._decided, self._running = 0, [""]
        self.ran, self.written, self.copied = set[str](), set[str](), False
        self.asked: list[tuple[str, int]] = []
        self.compared: str | None = None
        for tensor in tensors_of(batch):
            self._mark(tensor.untyped_storage(), self.batch)
        for name, parameter in model.named_parameters():
            self._mark(parameter.untyped_storage(), self.parameters[name])
            self._names.setdefault(parameter.untyped_storage(), name)  # type: ignore[no-untyped-call]
        for name, buffer in model.named_buffers():
            self._mark(buffer.untyped_storage(), self.buffers[name])

    def enter(self, path: str) -> None:
        """A module begins to run."""
        self._running.append(path)
        self.ran.add(path)

    def leave(self, args: Any, output: Any) -> Any:
        """The module that began last has run; returns its output, with copies of inputs that it did not write."""
        path, handed = self._running[-1], output
        arguments = {tensor.untyped_storage()._cdata for tensor in tensors_of(args)}
        again = [tensor for tensor in tensors_of(output) if tensor.untyped_storage()._cdata in arguments]
        if again:
            bits = reduce(or_, (bit for name, bit in self.modules.items() if at(name, path)))
            kept = {id(tensor) for tensor in again if not self.sources_of_tensors([tensor]) & bits}
            handed = map_tensors(output, lambda one: self._apart(one) if id(one) in kept else one)
        self._running.pop()
        return handed if type(handed) is type(output) else output

    def _apart(self, tensor: Tensor) -> Tensor:
        """A copy that the running module made; what is written into either is written into both."""
        copy = tensor.clone()
        family = self._same.get(tensor.untyped_storage(), [tensor.untyped_storage()])  # type: ignore[no-untyped-call]
        family.append(copy.untyped_storage())
        for storage in family:
            self._same[storage] = family
        self.copied = True
        return copy

    def sources_of_tensors(self, tensors: Iterable[Tensor]) -> int:
        """What tensors are made of, all together."""
        bits = 0
        for tensor in tensors:
            bits = _union(bits, int(self._made.get(tensor.untyped_storage(), 0)))  # type: ignore[no-untyped-call]
        return bits

    def reaching(self, outputs: Iterable[Tensor], model: nn.Module) -> int:
        """What a run's outputs are made of, with what decided what was run and what the model remembers of the run.

        A buffer that the outputs read may have been written in the run before.
        """
        attributes = (vars(module).items() for module in model.modules())
        registered = ("_parameters", "_buffers", "_modules")
        remembered = [value for items in attributes for name, value in items if name not in registered]
        bits = self.sources_of_tensors(outputs) | self._decided | self.sources_of_tensors(tensors_of(remembered))
        written = {bit: self.sources_of_tensors([model.get_buffer(name)]) for name, bit in self.buffers.items()}
        while True:
            more = bits
            for bit, sources in written.items():
                more = more | sources if more & bit else more
            if more == bits:
                return bits
            bits = more

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and note what its outputs are made of."""
        kwargs = kwargs or {}
        taken = [*tensors_of(args), *tensors_of(kwargs)]
        path = self._running[-1]
        bits = self._note_taken(taken, path)
        if func is READ:
            self._decided |= bits
            self.asked.append((path, bits))
            if bits & self.batch and self.compares(taken[0]) and not leads_to_error():
                self.compared = path
        output = func(*args, **kwargs)
        self._note_order(func, args, taken, output)
        self.work[path] += flops(func, args, kwargs, output)
        bits = _union(bits, self.modules[path] | self._decided)
        looked_at = {tensor.untyped_storage()._cdata for tensor in taken}
        for tensor in tensors_of(output):
            if tensor.untyped_storage()._cdata not in looked_at:
                self._mark(tensor.untyped_storage(), bits)
        for place, name in _writing(func):
            for tensor in tensors_of(args[place] if place < len(args) else kwargs.get(name)):
                storage = tensor.untyped_storage()
                if (parameter := self._names.get(storage)) is not None:  # type: ignore[no-untyped-call]
                    self.written.add(parameter)
                for one in self._same.get(storage, [storage]):  # type: ignore[no-untyped-call]
                    self._mark(one, bits)
        return output

    def compares(self, tensor: Tensor) -> bool:
        """Whether a tensor says how one floating number compares with another.

        Whether a sum of sizes (``hidden.abs().sum()``) is above zero asks whether any of them is, and compares nothing.
        """
        return bool(self._ordered.get(tensor.untyped_storage(), False))  # type: ignore[no-untyped-call]

    def _note_order(self, func: Any, args: Sequence[Any], taken: Sequence[Tensor], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        name, storage = name_of(func), output.untyped_storage()
        if not _writing(func) and any(one.untyped_storage()._cdata == storage._cdata for one in taken):
            return  # a view
        sized = bool(taken) and taken[0].untyped_storage() in self._sizes
        if name in _SIZES or (name in _SUMS and sized):
            self._sizes[storage] = True
        elif storage in self._sizes:
            del self._sizes[storage]  # written over
        if output.dtype is torch.bool and output.numel() == 1 and all(one.numel() == 1 for one in taken):
            orders = name in _ORDER and any(one.is_floating_point() for one in taken)
            if (orders and not (sized and args[1:] == (0,))) or any(map(self.compares, taken)):
                self._ordered[storage] = True

    def _note_taken(self, taken: Collection[Tensor], path: str) -> int:
        module_bits, bits = self.modules[path], self._decided
        for tensor in taken:
            tensor_bits = self.sources_of_tensors([tensor])
            bits = _union(bits, tensor_bits)
            if tensor_bits & self.batch and not tensor_bits & module_bits:
                self.entries[path].add(tensor_bits)
            name = self._names.get(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            if name is not None:
                self.readers[name].add(path)
        self.given[path] = _union(self.given[path], bits)
        return bits

    def _mark(self, storage: UntypedStorage, sources: int) -> None:
        self._made[storage] = _union(int(self._made.get(storage, 0)), sources)  # type: ignore[no-untyped-call]


def _union(one: int, other: int) -> int:
    """Both sets together; the very same object where one holds the other, since thousands are kept."""
    both = one | other
    return one if both == one else other if both == other else both


@cache
def _writing(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of arguments that an operator writes into; not all batch norms say so of running statistics."""
    arguments = func._schema.arguments  # what torch.library.infer_schema documents; no public way to ask an operator
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name.startswith("running_")
    )


@dataclass(slots=True)
class Needs:
    """What a group of modules did in a run."""

    ran: bool = False  # whether any of it did
    # names of groups that what it was given is made of, directly or not; itself never
    earlier: set[str] = field(default_factory=set)
    batch: bool = False  # whether it was given the model's inputs, or what code between the groups made of them
    work: int = 0  # forward FLOPs
    busy: int = 0  # modules of it with FLOPs of their own


def needs_of(flow: DataFlow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, Needs]:
    """What each group of modules needs, by its name.

    A group that is given what code elsewhere made of parameters that one other group alone holds needs that one.
    """
    homes, bits = held_by(flow.modules, groups), group_bits(flow, model, groups)
    every, passed_on = sum(bits.values()), dict.fromkeys(groups, 0)
    found = {name: Needs() for name in groups}
    for path, name in homes.items():
        needs = found[name]
        needs.ran = needs.ran or path in flow.ran
        needs.work += flow.work[path]
        needs.busy += flow.work[path] > 0
        needs.batch = needs.batch or any(not entry & every for entry in flow.entries[path])
        passed_on[name] |= flow.given[path]
    for name, needs in found.items():
        needs.earlier |= {other for other, bit in bits.items() if other != name and passed_on[name] & bit}
    return found


def group_bits(flow: DataFlow, model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, int]:
    """By group of modules what tensors that it worked on are made of: its modules, and parameters that it alone has."""
    bits = dict.fromkeys(groups, 0)
    for path, name in held_by(flow.modules, groups).items():
        bits[name] |= flow.modules[path]
    for parameter, names in holders_of(model, groups).items():
        for name in names if len(names) == 1 else ():
            bits[name] |= flow.parameters[parameter]
    return bits


def holders_of(model: nn.Module, groups: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """The groups that hold each parameter, by its name; several hold a shared one."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[str, set[str]] = {}
    for group, paths in groups.items():
        for parameter in (parameter for path in paths for parameter in model.get_submodule(path).parameters()):
            holders.setdefault(names[id(parameter)], set()).add(group)
    return holders


def held_by(paths: Collection[str], groups: Mapping[str, Collection[str]]) -> dict[str, str]:
    """The group that holds each path: that of the nearest module around it; paths outside all groups are left out."""
    owner = {path: name for name, members in groups.items() for path in members}
    holders: dict[str, str] = {}
    for path in paths:
        above = path
        while above and above not in owner:
            above = above.rpartition(".")[0]
        if above in owner:
            holders[path] = owner[above]
    return holders
