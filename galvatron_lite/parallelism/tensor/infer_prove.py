"""Finds regions of a block that can be split, and tests each by running shards of its double.

Candidates come from the autograd graph: linears (columns) whose outputs reach one other linear (row), or several rows
with the same columns (a row and its adapter), and nothing else. A region can be split if, with its columns cut to a
rank's shard and its attributes divided, the input of a row equals that rank's slice of the unsplit input, so that the
row's partial products add up to the unsplit product; and if, with the unsplit product passed on, the block's output
does not change. Tokens can be split if the block, run on half of the tokens, but on all of them inside the regions,
returns that half of its output. Inputs and weights are random, so that equality at one point implies equality
everywhere, and of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, islice, product, starmap
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.infer_probe import Handler, LowRank, Probe, describe
from galvatron_lite.parallelism.tensor.regions import AttributePatch, Column, Region, TokenGather

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value; blocks may compute parts of their work in float32."""
MAX_TRIALS = 600
"""Most combinations of fused parts and attributes that are tested for one region."""
MAX_PATCHED = 4
"""Most attributes that are divided together."""
MAX_GATHERS = 64
"""Most combinations of places to gather tokens that are tested."""
_INPUT = ""
"""Label of the block's input."""


class Mismatch(Exception):  # noqa: N818
    """The shard of a rank does not compute its part."""


@dataclass
class ReferenceRun:
    """A run of the unsplit double."""

    # (input [..., inputs], output [..., outputs]) of every call of each linear, in running order
    calls: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)  # of the block
    # positional and keyword inputs of every module call, by path
    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    integers: set[tuple[str, str]] = field(default_factory=set)  # (path, name) of integer attributes that were read


def run_reference(probe: Probe) -> ReferenceRun:
    """Run the unsplit double once and record it."""
    reference = ReferenceRun()

    def record(path: str, weight: LowRank, tensor: Tensor) -> Tensor:
        output = weight(tensor)
        reference.calls.setdefault(path, []).append((tensor, output.detach()))
        return _labelled(output if output.requires_grad else output.requires_grad_(), path)

    def record_arguments(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reference.arguments.setdefault(path, []).append((args, kwargs))

    modules = list(probe.block.named_modules())
    hooks = [
        module.register_forward_pre_hook(partial(record_arguments, path), with_kwargs=True)
        for path, module in modules
        if path
    ]
    classes = [(module, type(module)) for _, module in modules]
    for path, module in modules:
        _record_integers(path, module, reference)
    try:
        handlers: dict[str, Handler] = {path: partial(record, path) for path in probe.weights}
        reference.outputs = probe.run(handlers, _labelled(probe.hidden, _INPUT))
    finally:
        for module, original in classes:
            module.__class__ = original
        for hook in hooks:
            hook.remove()
    return reference


def _record_integers(path: str, module: nn.Module, reference: ReferenceRun) -> None:
    """Give a module, for the run, a subclass that records which of its integer attributes are read."""
    original = type(module)

    def read(self: nn.Module, name: str) -> Any:
        value = original.__getattribute__(self, name)
        if type(value) is int and name in vars(self):
            reference.integers.add((path, name))
        return value

    try:
        module.__class__ = type(original.__name__, (original,), {"__getattribute__": read})
    except TypeError:  # a class without subclasses, such as that of scripted modules
        return


class _Label(Function):
    """Identity with a label in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, label: str) -> Tensor:
        ctx.label = label
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("the graph is only searched")


def _labelled(tensor: Tensor, label: str) -> Tensor:
    result: Tensor = _Label.apply(tensor, label)  # type: ignore[no-untyped-call]
    return result


def _sources(tensors: Iterable[Tensor]) -> tuple[set[str], set[int]]:
    """The nearest labels, and identities of parameters after these, from which tensors were computed."""
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """Linears that may form a region."""

    columns: tuple[str, ...]  # paths of linears whose outputs reach only the rows
    rows: tuple[str, ...]  # paths of the linears that read all columns and nothing else
    inner: tuple[str, ...]  # names of parameters used between them
    sources: tuple[int, ...]  # index of the tensor that each column reads
    feeders: tuple[str, ...]  # paths of linears whose outputs reach only columns


def find_candidates(probe: Probe, reference: ReferenceRun) -> tuple[list[Candidate], list[str]]:
    """Return candidates, largest weights first, and the reasons why similar groups of linears are none."""
    once = {path for path, calls in reference.calls.items() if len(calls) == 1}
    reached = {path: _sources([tensor for tensor, _ in calls]) for path, calls in reference.calls.items()}
    result = _sources(reference.outputs)
    tied = _modules_with_tied_parameters(probe.block)
    names = {id(parameter): name for name, parameter in probe.block.named_parameters()}
    candidates, dropped = [], []
    for row in (path for path in reference.calls if path in once):
        columns = reached[row][0]
        rows = tuple(path for path in reference.calls if path in once and reached[path][0] == columns)
        inner = set().union(*(reached[path][1] for path in rows))
        if not columns or not columns <= reference.calls.keys() or not inner <= names.keys() or row != rows[0]:
            continue  # the block's input reaches it past all linears, or another row was first
        others = [reach for path, reach in reached.items() if path not in rows] + [result]
        ordered = tuple(path for path in reference.calls if path in columns)
        if any(columns & labels or inner & parameters for labels, parameters in others):
            reason = "what they compute is also used elsewhere in the block, or returned"
        elif not columns <= once or tied & {*rows, *columns}:
            reason = "a weight is used more than once"
        else:
            tensors = list(dict.fromkeys(id(_input_of(reference, path)) for path in ordered))
            sources = tuple(tensors.index(id(_input_of(reference, path))) for path in ordered)
            feeders = _feeders(columns, reached, result[0]) & once - tied
            ends = (tuple(sorted(names[key] for key in inner)), sources, tuple(sorted(feeders)))
            candidates.append(Candidate(ordered, rows, *ends))
            continue
        dropped.append(f"{', '.join(ordered)} → {', '.join(rows)} cannot be split: {reason}")
    candidates.sort(key=lambda candidate: -items_of(probe, (*candidate.columns, *candidate.rows)))
    return candidates, dropped


def _feeders(columns: Set[str], reached: Mapping[str, tuple[set[str], set[int]]], returned: Set[str]) -> set[str]:
    """Linears that only these columns read."""
    read = set().union(*(reached[path][0] for path in columns)) & reached.keys()
    elsewhere = set(returned).union(*(labels for path, (labels, _) in reached.items() if path not in columns))
    return read - elsewhere


def items_of(probe: Probe, paths: Iterable[str]) -> int:
    """Count the items of the weights of linears."""
    return sum(probe.weights[path].inputs * probe.weights[path].outputs for path in paths)


def _modules_with_tied_parameters(block: nn.Module) -> set[str]:
    owners: dict[int, list[str]] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {path for paths in owners.values() if len(paths) > 1 for path in paths}


def prove_region(probe: Probe, reference: ReferenceRun, candidate: Candidate) -> tuple[Region, int] | str:
    """Return the region and the largest degree of its split, or why it cannot be split.

    Every divisor of the degree is legal. Degrees are tested, the smallest on all ranks.
    """
    extents = [probe.weights[path].outputs for path in candidate.columns]
    extents += [probe.weights[path].inputs for path in candidate.rows]
    reason = f"its features {extents} have no common divisor"
    for prime in prime_factors(math.gcd(*extents)):
        region = _prove_at(probe, reference, candidate, prime)
        if isinstance(region, Region):
            return region, _largest_degree(probe, reference, region)
        reason = region
    return reason


def prime_factors(number: int) -> list[int]:
    """Return the distinct prime factors, ascending."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        if number % divisor == 0:
            factors.append(divisor)
            while number % divisor == 0:
                number //= divisor
        divisor += 1
    return factors + [number] * (number > 1)


def check_ranks(
    probe: Probe, reference: ReferenceRun, regions: Sequence[Region], degree: int, ranks: Iterable[int]
) -> str:
    """Explain why a rank's shard of the regions, all split together, is wrong; empty if all are right."""
    for rank in ranks:
        handlers: dict[str, Handler] = {}
        for region in regions:
            for column in region.columns:
                handlers[column.path] = partial(_run_columns, column, degree, rank)
            for row in region.rows:
                handlers[row] = partial(_compare_row, reference, row, degree, rank)
        try:
            with _divided(probe.block, regions, degree):
                outputs = probe.run(handlers)
            if len(outputs) != len(reference.outputs) or not all(map(_close, outputs, reference.outputs)):
                return "the block's output depends on more than the sum of the shares"
        except Exception as error:  # the block is the user's code: any error means that it cannot run this way
            return str(error) if isinstance(error, Mismatch) else describe(error)
    return ""


def _run_columns(column: Column, degree: int, rank: int, weight: LowRank, tensor: Tensor) -> Tensor:
    return weight.columns(column.parts, degree, rank)(tensor)


def _compare_row(reference: ReferenceRun, path: str, degree: int, rank: int, weight: LowRank, tensor: Tensor) -> Tensor:
    """Compare the input of a row with the rank's slice of the reference, and return the unsplit product."""
    (expected, output), *_ = reference.calls[path]
    if not _close(tensor, expected.narrow(-1, *share(weight.inputs, degree, rank))):
        raise Mismatch("the shares, run one by one, do not add up to the whole")
    return output


def _close(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    scale = float(right.detach().abs().max()) if right.numel() else 0.0
    return not right.numel() or float((left.detach() - right.detach()).abs().max()) <= TOLERANCE * scale


@contextmanager
def _divided(block: nn.Module, regions: Sequence[Region], degree: int) -> Iterator[None]:
    """Divide the regions' attributes by the degree within the context."""
    patches = [(block.get_submodule(patch.path), patch) for region in regions for patch in region.attributes]
    if any(patch.value % degree for _, patch in patches):
        raise Mismatch(f"an attribute is not divisible by {degree}")
    try:
        for module, patch in patches:
            setattr(module, patch.name, patch.value // degree)
        yield
    finally:
        for module, patch in patches:
            setattr(module, patch.name, patch.value)


def _prove_at(probe: Probe, reference: ReferenceRun, candidate: Candidate, degree: int) -> Region | str:
    """The region with the fused parts and attributes that are right on all ranks at a degree, or why there is none."""
    fused = [_possible_parts(probe, candidate, path, degree) for path in candidate.columns]
    patches = _possible_patches(probe, reference, candidate, degree)
    subsets = [chosen for size in range(MAX_PATCHED + 1) for chosen in combinations(patches, size)]
    reason = ""
    for parts, chosen in islice(product(product(*fused), subsets), MAX_TRIALS):
        columns = tuple(starmap(Column, zip(candidate.columns, parts, candidate.sources, strict=True)))
        region = Region(columns, candidate.rows, chosen, candidate.inner, candidate.feeders)
        failure = check_ranks(probe, reference, [region], degree, range(degree))
        if not failure:
            return region
        reason = reason or failure
    return reason or f"its features cannot be shared by {degree}"


def _possible_parts(probe: Probe, candidate: Candidate, path: str, degree: int) -> list[tuple[int, ...]]:
    """Sizes of the projections that a column may fuse: one, equal parts, or a query with fewer keys and values."""
    outputs, inner = probe.weights[path].outputs, probe.weights[candidate.rows[0]].inputs
    options: list[tuple[int, ...]] = [(outputs,)]
    options += [(outputs // count,) * count for count in (2, 3) if outputs % count == 0]
    rest, odd = divmod(outputs - inner, 2)
    if rest > 0 and not odd and rest != inner:
        options.append((inner, rest, rest))
    return [parts for parts in options if all(part % degree == 0 for part in parts)]


def _possible_patches(probe: Probe, reference: ReferenceRun, candidate: Candidate, degree: int) -> list[AttributePatch]:
    """Integer attributes that were read and can be divided; those of modules near the region, and of heads, first."""
    near = {path.rpartition(".")[0] for path in (*candidate.columns, *candidate.rows)}
    near |= {path.rpartition(".")[0] for path in near if "." in path}  # around an adapter's module
    patches = []
    for path, name in reference.integers:
        value = getattr(probe.block.get_submodule(path), name)
        if path not in probe.weights and value > 1 and value % degree == 0:
            patches.append(AttributePatch(path, name, value))
    return sorted(patches, key=lambda patch: (patch.path not in near, "head" not in patch.name, patch.path, patch.name))


def _largest_degree(probe: Probe, reference: ReferenceRun, region: Region) -> int:
    """The product of the largest prime powers by which the region can be split."""
    extents = [part for column in region.columns for part in column.parts]
    extents += [probe.weights[path].inputs for path in region.rows]
    limit = math.gcd(*extents, *(patch.value for patch in region.attributes))

    def can_split(degree: int) -> bool:
        return not check_ranks(probe, reference, [region], degree, sorted({0, degree // 2, degree - 1}))

    largest = 1
    for prime in prime_factors(limit):
        degree = prime
        while limit % degree == 0 and can_split(largest * degree):
            degree *= prime
        largest *= degree // prime
    return largest


def place_gathers(probe: Probe, reference: ReferenceRun, regions: Sequence[Region]) -> tuple[Region, ...] | str:
    """Return the regions with the place where each gathers tokens, or why tokens cannot be split."""
    shape = probe.hidden.shape
    if probe.hidden.dim() != 3 or any(output.shape != shape for output in reference.outputs):
        return "its hidden states are not all [batch, tokens, hidden]"
    if shape[1] < 2 or shape[1] % 2:
        return f"{shape[1]} tokens cannot be halved to check it"
    reason = ""
    for places in islice(product(*(list(_gather_places(reference, region)) for region in regions)), MAX_GATHERS):
        placed = tuple(replace(region, gather=place) for region, place in zip(regions, places, strict=True))
        failure = _check_halves(probe, reference, placed)
        if not failure:
            return placed
        reason = reason or failure
    return reason


def _gather_places(reference: ReferenceRun, region: Region) -> Iterator[TokenGather | None]:
    """The columns, then modules around them that read the same tensor, innermost first.

    If columns read different tensors (attention to another sequence), only the columns: a module around them would have
    a tensor whose gradient is not summed by the gather. Outputs of feeders do not count as different: each device has a
    part of their gradient, and so of that of the feeders' input.
    """
    yield None
    readers = entry_linears(reference, region)
    tensor = _input_of(reference, readers[0])
    if any(_input_of(reference, path) is not tensor for path in readers):
        return
    path = readers[0].rpartition(".")[0]
    while path:
        argument = _argument_holding(reference, path, tensor)
        if argument is not None and all(reader.startswith(f"{path}.") for reader in readers):
            yield TokenGather(path, argument)
        path = path.rpartition(".")[0]


def entry_linears(reference: ReferenceRun, region: Region) -> list[str]:
    """Return the linears that read the input of a region: its feeders, and columns that read no feeder's output."""
    sources_of_tensors = (_sources([_input_of(reference, column.path)])[0] for column in region.columns)
    return [
        *region.feeders,
        *(
            column.path
            for column, feeders in zip(region.columns, sources_of_tensors, strict=True)
            if not (feeders and feeders <= set(region.feeders))
        ),
    ]


def _input_of(reference: ReferenceRun, path: str) -> Tensor:
    return reference.calls[path][0][0]


def _argument_holding(reference: ReferenceRun, path: str, tensor: Tensor) -> int | str | None:
    """Position or keyword of the argument of the module at ``path``, called once, that is this tensor."""
    calls = reference.arguments.get(path, [])
    if len(calls) != 1:
        return None
    args, kwargs = calls[0]
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    keys = [key for key, value in named if value is tensor]
    nested = sum(item is tensor for _, value in named for item in tensors_of(value))
    return keys[0] if len(keys) == 1 and nested == 1 else None


def _check_halves(probe: Probe, reference: ReferenceRun, regions: Sequence[Region]) -> str:
    half = probe.hidden.shape[1] // 2
    for start in (0, half):
        hooks = [
            _gather_hook(
                probe.block, _input_of(reference, entry_linears(reference, region)[0]), region.gather, start, half
            )
            for region in regions
            if region.gather is not None
        ]
        handlers: dict[str, Handler] = {}
        for region in regions:
            for column in region.columns:
                full = _input_of(reference, column.path)
                handlers[column.path] = partial(_column_of_half, full, region.gather is None, start, half)
            for row in region.rows:
                handlers[row] = partial(_row_of_half, *reference.calls[row][0], start, half)
        try:
            outputs = probe.run(handlers, probe.hidden.narrow(1, start, half))
            for output, expected in zip(outputs, reference.outputs, strict=True):
                _expect(output, expected.narrow(1, start, half))
        except Exception as error:  # the block is the user's code: any error means that it cannot run this way
            return str(error) if isinstance(error, Mismatch) else describe(error)
        finally:
            for hook in hooks:
                hook.remove()
    return ""


def _gather_hook(block: nn.Module, full: Tensor, gather: TokenGather, start: int, length: int) -> Any:
    """Replace the argument of a module around the region by that with all tokens."""

    def replace_argument(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: Any = kwargs if isinstance(gather.argument, str) else args
        _expect(values[gather.argument], full.narrow(1, start, length))
        if isinstance(gather.argument, str):
            return args, {**kwargs, gather.argument: full}
        return (*args[: gather.argument], full, *args[gather.argument + 1 :]), kwargs

    return block.get_submodule(gather.path).register_forward_pre_hook(replace_argument, with_kwargs=True)


def _column_of_half(full: Tensor, gathers: bool, start: int, length: int, weight: LowRank, tensor: Tensor) -> Tensor:
    _expect(tensor, full.narrow(1, start, length) if gathers else full)
    return weight(full)


def _row_of_half(full: Tensor, output: Tensor, start: int, length: int, _weight: LowRank, tensor: Tensor) -> Tensor:
    _expect(tensor, full)
    return output.narrow(1, start, length)


def _expect(tensor: Tensor, expected: Tensor) -> None:
    if not _close(tensor, expected):
        raise Mismatch("outside the sharded regions it does not work token by token")
