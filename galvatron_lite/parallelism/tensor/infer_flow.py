"""Finds candidate regions by following the data: which linears feed which, and what runs between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from galvatron_lite.parallelism.tensor.infer_probe import LowRank, Probe, tensors_of

OUTSIDE = ""
"""Label of the block's own inputs."""


@dataclass
class LinearCall:
    """One call of a linear in the reference run: its input [..., inputs] and output [..., outputs]."""

    tensor: Tensor
    output: Tensor


@dataclass
class ReferenceRun:
    """What happened in a run of the whole, unsplit double.

    Attributes:
        calls: of each linear, in running order.
        outputs: tensors the block returned.
        arguments: positional and keyword inputs of every module call, by path.
        integers: (path, name) of every integer attribute the block's code read.
    """

    calls: dict[str, list[LinearCall]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    integers: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Linears that may form a region, unproven."""

    columns: tuple[str, ...]  # paths of linears whose outputs reach only the row
    row: str  # path of the linear that takes in nothing else
    inner: tuple[str, ...]  # names of parameters used between them


class _Mark(Function):
    """Identity that leaves its label in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, label: str) -> Tensor:
        ctx.label = label
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("the graph is only looked at")


def run_reference(probe: Probe) -> ReferenceRun:
    """Runs the whole double once and writes down what happens."""
    reference = ReferenceRun()
    handlers = {path: _recorder(path, reference) for path in probe.weights}
    hooks = [_watch_arguments(path, module, reference) for path, module in probe.block.named_modules() if path]
    classes = [_watch_integers(path, module, reference) for path, module in probe.block.named_modules()]
    try:
        reference.outputs = probe.run(handlers, mark(probe.hidden, OUTSIDE))
    finally:
        for module, original in classes:
            module.__class__ = original
        for hook in hooks:
            hook.remove()
    return reference


def mark(tensor: Tensor, label: str) -> Tensor:
    """The tensor under a label that ``sources`` finds."""
    result: Tensor = _Mark.apply(tensor, label)  # type: ignore[no-untyped-call]
    return result


def find_candidates(probe: Probe, reference: ReferenceRun) -> tuple[list[Candidate], list[str]]:
    """Linears (columns) whose outputs reach one linear (row) and nothing else, which is reached by nothing else.

    Also, in words, why linears that almost are such a group are not.
    """
    once = {path: calls[0] for path, calls in reference.calls.items() if len(calls) == 1}
    reached = {path: sources([call.tensor for call in calls]) for path, calls in reference.calls.items()}
    result = sources(reference.outputs)
    shared = _shared_parameters(probe.block)
    names = {id(parameter): name for name, parameter in probe.block.named_parameters()}
    found, dropped = [], []
    for row in once:
        columns, inner = reached[row]
        others = [reach for path, reach in reached.items() if path != row] + [result]
        leaks = any(columns & labels or inner & parameters for labels, parameters in others)
        if not columns or not columns <= reference.calls.keys() or not inner <= names.keys():
            continue  # the block's input reaches it past all linears
        ordered = tuple(path for path in reference.calls if path in columns)
        if leaks:
            why = "what they compute is also used elsewhere in the block, or returned"
        elif not columns <= once.keys() or shared & ({row} | columns):
            why = "a weight is used more than once"
        else:
            found.append(Candidate(ordered, row, tuple(sorted(names[key] for key in inner))))
            continue
        dropped.append(f"{', '.join(ordered)} → {row} cannot be split: {why}")
    return found, dropped


def sources(tensors: Iterable[Tensor]) -> tuple[set[str], set[int]]:
    """Labels of marked tensors, and identities of parameters, that tensors were computed from without another mark."""
    labels: set[str] = set()
    parameters: set[int] = set()
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    parameters.update(id(tensor) for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad)
    seen: set[Any] = set()
    while pending:
        node: Any = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "label"):
            labels.add(node.label)
        elif hasattr(node, "variable"):
            parameters.add(id(node.variable))
        else:
            pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return labels, parameters


def _recorder(path: str, reference: ReferenceRun) -> Any:
    def record(weight: LowRank, tensor: Tensor) -> Tensor:
        output = weight(tensor)
        reference.calls.setdefault(path, []).append(LinearCall(tensor, output.detach()))
        return mark(output if output.requires_grad else output.requires_grad_(), path)

    return record


def _watch_arguments(path: str, module: nn.Module, reference: ReferenceRun) -> Any:
    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reference.arguments.setdefault(path, []).append((args, kwargs))

    return module.register_forward_pre_hook(note, with_kwargs=True)


def _watch_integers(path: str, module: nn.Module, reference: ReferenceRun) -> tuple[nn.Module, type[nn.Module]]:
    """Makes the module write down which of its own integers are read, by a subclass it gets for the run."""
    original = type(module)

    def read(self: nn.Module, name: str) -> Any:
        value = original.__getattribute__(self, name)
        if type(value) is int and name in vars(self):
            reference.integers.add((path, name))
        return value

    try:
        module.__class__ = type(original.__name__, (original,), {"__getattribute__": read})
    except TypeError:  # a class that cannot be derived from, such as a scripted module's
        return module, original
    return module, original


def _shared_parameters(block: nn.Module) -> set[str]:
    """Paths of modules one of whose parameters has another name too."""
    owners: dict[int, list[str]] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {path for paths in owners.values() if len(paths) > 1 for path in paths}


def identical_argument(reference: ReferenceRun, path: str, tensor: Tensor) -> int | str | None:
    """Position or keyword at which the module at ``path``, called once, takes in this very tensor."""
    calls = reference.arguments.get(path, [])
    if len(calls) != 1:
        return None
    args, kwargs = calls[0]
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    keys = [key for key, value in named if value is tensor]
    nested = sum(item is tensor for _, value in named for item in tensors_of(value))
    return keys[0] if len(keys) == 1 and nested == 1 else None
