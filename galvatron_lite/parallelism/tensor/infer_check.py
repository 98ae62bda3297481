"""Proves or drops candidate regions: runs each rank's share of the double and compares with the whole.

The proof of a region: with its columns cut to a rank's share and its attributes divided, the tensor that reaches the
row linear equals that rank's slice of the unsplit one, so the row's partial products add up to the unsplit product;
and with the unsplit product passed on, the block's output is unchanged. The inputs and weights are random, so that
equality at one point is equality everywhere, gradients included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, islice, product

from torch import Tensor, nn

from galvatron_lite.parallelism.shares import share
from galvatron_lite.parallelism.tensor.infer_flow import Candidate, ReferenceRun
from galvatron_lite.parallelism.tensor.infer_probe import Handler, LowRank, Probe, describe
from galvatron_lite.parallelism.tensor.regions import AttributePatch, Column, Region

TOLERANCE = 1e-4
"""Largest difference, relative to the largest value; blocks may compute parts of their work in float32."""
MAX_TRIALS = 600
"""Most combinations of fused parts and attributes that are tried for one region."""
MAX_PATCHED = 4
"""Most attributes that are divided together."""


class Mismatch(Exception):  # noqa: N818
    """A rank's share does not do its part of the whole."""


def prove_region(probe: Probe, reference: ReferenceRun, candidate: Candidate) -> tuple[Region, int] | str:
    """The region and the largest degree it allows, or why it cannot be split.

    Every divisor of the degree is legal. Degrees are tested, the smallest with all ranks.
    """
    extents = [probe.weights[path].outputs for path in candidate.columns] + [probe.weights[candidate.row].inputs]
    last = f"its features {extents} have no common divisor"
    for prime in prime_factors(math.gcd(*extents)):
        found = _search(probe, reference, candidate, prime)
        if isinstance(found, Region):
            return found, _largest_degree(probe, reference, found)
        last = found
    return last


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
            handlers |= {column.path: _columns(column, degree, rank) for column in region.columns}
            handlers[region.row] = _row(reference, region.row, degree, rank)
        try:
            with divided(probe.block, regions, degree):
                _compare_outputs(probe.run(handlers), reference.outputs)
        except Exception as error:  # the block is the user's code: any error means that it cannot run this way
            return str(error) if isinstance(error, Mismatch) else describe(error)
    return ""


def close(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in shape and, to the tolerance, in value."""
    if left.shape != right.shape:
        return False
    scale = float(right.detach().abs().max()) if right.numel() else 0.0
    return not right.numel() or float((left.detach() - right.detach()).abs().max()) <= TOLERANCE * scale


@contextmanager
def divided(block: nn.Module, regions: Sequence[Region], degree: int) -> Iterator[None]:
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


def _search(probe: Probe, reference: ReferenceRun, candidate: Candidate, degree: int) -> Region | str:
    """The candidate with the fused parts and attributes that make all ranks right at this degree."""
    fused = [_possible_parts(probe, candidate, path, degree) for path in candidate.columns]
    patches = _possible_patches(probe, reference, candidate, degree)
    subsets = [chosen for size in range(MAX_PATCHED + 1) for chosen in combinations(patches, size)]
    why = ""
    for parts, chosen in islice(product(product(*fused), subsets), MAX_TRIALS):
        columns = tuple(Column(path, split) for path, split in zip(candidate.columns, parts, strict=True))
        region = Region(columns, candidate.row, chosen, candidate.inner)
        wrong = check_ranks(probe, reference, [region], degree, range(degree))
        if not wrong:
            return region
        why = why or wrong
    return why or f"its features cannot be shared by {degree}"


def _possible_parts(probe: Probe, candidate: Candidate, path: str, degree: int) -> list[tuple[int, ...]]:
    """Ways in which projections may be fused in a column: not, in equal parts, or query with fewer key-values."""
    outputs, inner = probe.weights[path].outputs, probe.weights[candidate.row].inputs
    options: list[tuple[int, ...]] = [(outputs,)]
    options += [(outputs // count,) * count for count in (2, 3) if outputs % count == 0]
    if outputs > inner and (outputs - inner) % 2 == 0:
        rest = (outputs - inner) // 2
        options += [(inner, rest, rest)] if rest != inner else []
    return [parts for parts in options if all(part % degree == 0 for part in parts)]


def _possible_patches(probe: Probe, reference: ReferenceRun, candidate: Candidate, degree: int) -> list[AttributePatch]:
    """Integers that the code read and that can be divided; those of modules near the region and heads first."""
    near = {path.rpartition(".")[0] for path in (*candidate.columns, candidate.row)}
    patches = []
    for path, name in reference.integers - {(path, name) for path, name in reference.integers if path in probe.weights}:
        value = getattr(probe.block.get_submodule(path), name)
        if value > 1 and value % degree == 0:
            patches.append(AttributePatch(path, name, value))
    return sorted(patches, key=lambda patch: (patch.path not in near, "head" not in patch.name, patch.path, patch.name))


def _largest_degree(probe: Probe, reference: ReferenceRun, region: Region) -> int:
    """Product of the largest powers of primes that the region can be split by."""
    extents = [part for column in region.columns for part in column.parts]
    limit = math.gcd(*extents, probe.weights[region.row].inputs, *(patch.value for patch in region.attributes))
    largest = 1
    for prime in prime_factors(limit):
        degree = prime
        while limit % degree == 0 and _holds(probe, reference, region, largest * degree):
            degree *= prime
        largest *= degree // prime
    return largest


def _holds(probe: Probe, reference: ReferenceRun, region: Region, degree: int) -> bool:
    ranks = sorted({0, degree // 2, degree - 1})
    return not check_ranks(probe, reference, [region], degree, ranks)


def _columns(column: Column, degree: int, rank: int) -> Handler:
    def local(weight: LowRank, tensor: Tensor) -> Tensor:
        return weight.columns(column.parts, degree, rank)(tensor)

    return local


def _row(reference: ReferenceRun, path: str, degree: int, rank: int) -> Handler:
    """Compares what reaches the row with the rank's slice of the reference, and passes the whole product on."""
    call = reference.calls[path][0]

    def compare(weight: LowRank, tensor: Tensor) -> Tensor:
        start, length = share(weight.inputs, degree, rank)
        if not close(tensor, call.tensor.narrow(-1, start, length)):
            raise Mismatch("the shares, run one by one, do not add up to the whole")
        return call.output

    return compare


def _compare_outputs(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    if len(outputs) != len(expected) or not all(map(close, outputs, expected)):
        raise Mismatch("the block's output depends on more than the sum of the shares")
