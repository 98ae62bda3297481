"""Finds regions of a block that may be split, and proves or drops each by running shares of its double.

Candidates come from autograd: linears (columns) whose outputs reach one other linear (row), or several with the same
columns (a row and its adapter), and nothing else. The proof of a region: with its columns cut to a rank's share and its
attributes divided, the tensor that reaches a row equals that rank's slice of the unsplit one, so the row's partial
products add up to the unsplit product; and with the unsplit product passed on, the block's output is unchanged. The
proof that tokens can be shared: run on half of the tokens, with all tokens inside the regions, the block gives that
half of its output. Inputs and weights are random, so that equality at one point is equality everywhere, gradients
included.
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
"""Most combinations of fused parts and attributes that are tried for one region."""
MAX_PATCHED = 4
"""Most attributes that are divided together."""
MAX_GATHERS = 64
"""Most combinations of gathering places that are tried."""
_INPUT = ""
"""Label of the block's input."""


class Mismatch(Exception):  # noqa: N818
    """A rank's share does not do its part."""


@dataclass
class ReferenceRun:
    """A run of the unsplit double."""

    # of each linear, in running order: (input [..., inputs], output [..., outputs]) of each call
    calls: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)  # tensors the block returned
    # positional and keyword inputs of every module call, by path
    arguments: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    integers: set[tuple[str, str]] = field(default_factory=set)  # (path, name) of integer attributes the code read


def run_reference(probe: Probe) -> ReferenceRun:
    """Run the unsplit double once and record it."""
    reference = ReferenceRun()

    def record(path: str, weight: LowRank, tensor: Tensor) -> Tensor:
        output = weight(tensor)
        reference.calls.setdefault(path, []).append((tensor, output.detach()))
        return _labelled(output if output.requires_grad else output.requires_grad_(), path)

    def note(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reference.arguments.setdefault(path, []).append((args, kwargs))

    modules = list(probe.block.named_modules())
    hooks = [m.register_forward_pre_hook(partial(note, path), with_kwargs=True) for path, m in modules if path]
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
    """Give the module a subclass, for the run, that records which of its own integers are read."""
    original = type(module)

    def read(self: nn.Module, name: str) -> Any:
        value = original.__getattribute__(self, name)
        if type(value) is int and name in vars(self):
            reference.integers.add((path, name))
        return value

    try:
        module.__class__ = type(original.__name__, (original,), {"__getattribute__": read})
    except TypeError:  # a class that cannot be derived from, such as a scripted module's
        return


class _Label(Function):
    """Identity that leaves its label in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, label: str) -> Tensor:
        ctx.label = label
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise NotImplementedError("the graph is only looked at")


def _labelled(tensor: Tensor, label: str) -> Tensor:
    result: Tensor = _Label.apply(tensor, label)  # type: ignore[no-untyped-call]
    return result


def _sources(tensors: Iterable[Tensor]) -> tuple[set[str], set[int]]:
    """The nearest labels, and identities of the parameters behind them, that tensors were computed from."""
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
    """Linears that may form a region, unproven."""

    columns: tuple[str, ...]  # paths of linears whose outputs reach only the rows
    rows: tuple[str, ...]  # paths of the linears that take in all columns and nothing else
    inner: tuple[str, ...]  # names of parameters used between them
    sources: tuple[int, ...]  # which tensor each column takes in
    feeders: tuple[str, ...]  # paths of linears whose outputs reach only columns


def find_candidates(probe: Probe, reference: ReferenceRun) -> tuple[list[Candidate], list[str]]:
    """Candidates, those with the largest weights first, and why linears that almost are such a group are not."""
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
            continue  # the block's input reaches it past all linears, or it was seen
        others = [reach for path, reach in reached.items() if path not in rows] + [result]
        ordered = tuple(path for path in reference.calls if path in columns)
        if any(columns & labels or inner & parameters for labels, parameters in others):
            why = "what they compute is also used elsewhere in the block, or returned"
        elif not columns <= once or tied & {*rows, *columns}:
            why = "a weight is used more than once"
        else:
            tensors = list(dict.fromkeys(id(_input_of(reference, path)) for path in ordered))
            sources = tuple(tensors.index(id(_input_of(reference, path))) for path in ordered)
            feeders = _feeders(columns, reached, result[0]) & once - tied
            ends = (tuple(sorted(names[key] for key in inner)), sources, tuple(sorted(feeders)))
            candidates.append(Candidate(ordered, rows, *ends))
            continue
        dropped.append(f"{', '.join(ordered)} → {', '.join(rows)} cannot be split: {why}")
    return sorted(candidates, key=lambda one: -items_of(probe, (*one.columns, *one.rows))), dropped


def _feeders(columns: Set[str], reached: Mapping[str, tuple[set[str], set[int]]], returned: Set[str]) -> set[str]:
    """Linears that these columns take in and nothing else does."""
    taken = set().union(*(reached[path][0] for path in columns)) & reached.keys()
    elsewhere = set(returned).union(*(labels for path, (labels, _) in reached.items() if path not in columns))
    return taken - elsewhere


def items_of(probe: Probe, paths: Iterable[str]) -> int:
    """Items of the weights of these linears."""
    return sum(probe.weights[path].inputs * probe.weights[path].outputs for path in paths)


def _modules_with_tied_parameters(block: nn.Module) -> set[str]:
    owners: dict[int, list[str]] = {}
    for name, parameter in block.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {path for paths in owners.values() if len(paths) > 1 for path in paths}


def prove_region(probe: Probe, reference: ReferenceRun, candidate: Candidate) -> tuple[Region, int] | str:
    """The region and the largest degree it allows, or why it cannot be split.

    Every divisor of the degree is legal. Degrees are tested, the smallest with all ranks.
    """
    extents = [probe.weights[path].outputs for path in candidate.columns]
    extents += [probe.weights[path].inputs for path in candidate.rows]
    why = f"its features {extents} have no common divisor"
    for prime in prime_factors(math.gcd(*extents)):
        region = _prove_at(probe, reference, candidate, prime)
        if isinstance(region, Region):
            return region, _largest_degree(probe, reference, region)
        why = region
    return why


def prime_factors(number: int) -> list[int]:
    """Distinct prime factors in rising order."""
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
    """Why some rank's share of the regions, all split together, is wrong; empty where all are right."""
    for rank in ranks:
        handlers: dict[str, Handler] = {}
        for region in regions:
            for column in region.columns:
                handlers[column.path] = partial(_share_of_columns, column, degree, rank)
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


def _share_of_columns(column: Column, degree: int, rank: int, weight: LowRank, tensor: Tensor) -> Tensor:
    return weight.columns(column.parts, degree, rank)(tensor)


def _compare_row(reference: ReferenceRun, path: str, degree: int, rank: int, weight: LowRank, tensor: Tensor) -> Tensor:
    """Compare the row's input with the rank's slice of the reference, and pass the unsplit product on."""
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
    """The regions' attributes divided by the degree, for a while."""
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
    """The candidate with the fused parts and attributes that make all ranks right at this degree."""
    fused = [_possible_parts(probe, candidate, path, degree) for path in candidate.columns]
    patches = _possible_patches(probe, reference, candidate, degree)
    subsets = [chosen for size in range(MAX_PATCHED + 1) for chosen in combinations(patches, size)]
    why = ""
    for parts, chosen in islice(product(product(*fused), subsets), MAX_TRIALS):
        columns = tuple(starmap(Column, zip(candidate.columns, parts, candidate.sources, strict=True)))
        region = Region(columns, candidate.rows, chosen, candidate.inner, candidate.feeders)
        wrong = check_ranks(probe, reference, [region], degree, range(degree))
        if not wrong:
            return region
        why = why or wrong
    return why or f"its features cannot be shared by {degree}"


def _possible_parts(probe: Probe, candidate: Candidate, path: str, degree: int) -> list[tuple[int, ...]]:
    """Ways in which projections may be fused in a column: not, in equal parts, or query with fewer key-values."""
    outputs, inner = probe.weights[path].outputs, probe.weights[candidate.rows[0]].inputs
    options: list[tuple[int, ...]] = [(outputs,)]
    options += [(outputs // count,) * count for count in (2, 3) if outputs % count == 0]
    rest, odd = divmod(outputs - inner, 2)
    if rest > 0 and not odd and rest != inner:
        options.append((inner, rest, rest))
    return [parts for parts in options if all(part % degree == 0 for part in parts)]


def _possible_patches(probe: Probe, reference: ReferenceRun, candidate: Candidate, degree: int) -> list[AttributePatch]:
    """Integers that the code read and that can be divided; those of modules near the region and heads first."""
    near = {path.rpartition(".")[0] for path in (*candidate.columns, *candidate.rows)}
    near |= {path.rpartition(".")[0] for path in near if "." in path}  # around an adapter's module
    patches = []
    for path, name in reference.integers:
        value = getattr(probe.block.get_submodule(path), name)
        if path not in probe.weights and value > 1 and value % degree == 0:
            patches.append(AttributePatch(path, name, value))
    return sorted(patches, key=lambda patch: (patch.path not in near, "head" not in patch.name, patch.path, patch.name))


def _largest_degree(probe: Probe, reference: ReferenceRun, region: Region) -> int:
    """Product of the largest powers of primes that the region can be split by."""
    extents = [part for column in region.columns for part in column.parts]
    extents += [probe.weights[path].inputs for path in region.rows]
    limit = math.gcd(*extents, *(patch.value for patch in region.attributes))

    def holds(degree: int) -> bool:
        return not check_ranks(probe, reference, [region], degree, sorted({0, degree // 2, degree - 1}))

    largest = 1
    for prime in prime_factors(limit):
        degree = prime
        while limit % degree == 0 and holds(largest * degree):
            degree *= prime
        largest *= degree // prime
    return largest


def place_gathers(probe: Probe, reference: ReferenceRun, regions: Sequence[Region]) -> tuple[Region, ...] | str:
    """The regions with the place where each gathers tokens, or why tokens cannot be shared."""
    shape = probe.hidden.shape
    if probe.hidden.dim() != 3 or any(output.shape != shape for output in reference.outputs):
        return "its hidden states are not all [batch, tokens, hidden]"
    if shape[1] < 2 or shape[1] % 2:
        return f"{shape[1]} tokens cannot be halved to check it"
    why = ""
    for places in islice(product(*(list(_gather_places(reference, region)) for region in regions)), MAX_GATHERS):
        placed = tuple(replace(region, gather=place) for region, place in zip(regions, places, strict=True))
        wrong = _check_halves(probe, reference, placed)
        if not wrong:
            return placed
        why = why or wrong
    return why


def _gather_places(reference: ReferenceRun, region: Region) -> Iterator[TokenGather | None]:
    """The columns themselves, then modules around them that take in the same tensor, innermost first.

    Only the columns where these take in unlike tensors, as attention to another sequence does: a module around them
    then has a tensor whose gradient the gathering of tokens would not sum. What feeders make of the same tensor is
    none: each device has a part of its gradient, and so of the tensor's.
    """
    yield None
    inside = taking_in(reference, region)
    tensor = _input_of(reference, inside[0])
    if any(_input_of(reference, path) is not tensor for path in inside):
        return
    path = inside[0].rpartition(".")[0]
    while path:
        argument = _argument_holding(reference, path, tensor)
        if argument is not None and all(one.startswith(f"{path}.") for one in inside):
            yield TokenGather(path, argument)
        path = path.rpartition(".")[0]


def taking_in(reference: ReferenceRun, region: Region) -> list[str]:
    """Feeders of a region, and its columns that take in what no feeder makes."""
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
    """Position or keyword at which the module at ``path``, called once, takes in this very tensor."""
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
            _gather_hook(probe.block, _input_of(reference, taking_in(reference, region)[0]), region.gather, start, half)
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


def _gather_hook(block: nn.Module, everything: Tensor, gather: TokenGather, start: int, length: int) -> Any:
    """Give a module around the region all tokens."""

    def give(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: Any = kwargs if isinstance(gather.argument, str) else args
        _expect(values[gather.argument], everything.narrow(1, start, length))
        if isinstance(gather.argument, str):
            return args, {**kwargs, gather.argument: everything}
        return (*args[: gather.argument], everything, *args[gather.argument + 1 :]), kwargs

    return block.get_submodule(gather.path).register_forward_pre_hook(give, with_kwargs=True)


def _column_of_half(
    everything: Tensor, gathers: bool, start: int, length: int, weight: LowRank, tensor: Tensor
) -> Tensor:
    _expect(tensor, everything.narrow(1, start, length) if gathers else everything)
    return weight(everything)


def _row_of_half(
    everything: Tensor, output: Tensor, start: int, length: int, _weight: LowRank, tensor: Tensor
) -> Tensor:
    _expect(tensor, everything)
    return output.narrow(1, start, length)


def _expect(tensor: Tensor, expected: Tensor) -> None:
    if not _close(tensor, expected):
        raise Mismatch("outside the sharded regions it does not work token by token")
