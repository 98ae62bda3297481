"""Gives a rank its share of a mixture's experts, in place, and has tokens exchanged around them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from math import ceil
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.expert.find import BlockMixture, find_mixtures
from galvatron_lite.parallelism.process_groups import Processes
from galvatron_lite.parallelism.sharded.collectives import linear_map
from galvatron_lite.parallelism.sharded.tensor import ShardedTensor, specs_of, to_local, wrap_locals
from galvatron_lite.parallelism.tensor.functions import (
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    reduce_scatter_tokens,
)
from galvatron_lite.parallelism.tensor.group import TensorGroup
from galvatron_lite.parallelism.tensor.regions import ExpertSlices, SlicedParameter
from galvatron_lite.parallelism.tensor.shards import ParameterShard, Placement, slice_full

# Tokens on their way to the experts that a router chose, wherever those are, and back.
#
# Every copy of a token (one for each expert it visits) goes to the rank that holds the expert; what comes back is
# weighted and summed (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2). Drop-less: an expert takes what comes.
#
# With a capacity an expert takes of each rank at most ceil(factor x copies of the rank / experts) of them; what is
# beyond is dropped, and adds nothing to the output of its token. First choices go before second ones, and earlier
# tokens before later ones (algorithm 1 there), so what is dropped depends on the tokens that a rank works on together.


Forward = Callable[..., Tensor]
Run = Callable[[Tensor, Tensor], Tensor]
"""The experts of this rank: rows (rows, hidden) and the local number of each row's expert to outputs (rows, hidden)."""


class RowExchange(Protocol):
    """Ranks that exchange rows."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """Place of this rank in the group."""
        ...

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows from all ranks, in order, for rows that go to them, in order; so many to and from each. No autograd."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessExchange(Processes):
    """Processes of ``torch.distributed``."""

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See ``RowExchange``. As bytes: gloo does not know every dtype."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        item = rows.element_size() * rows[:1].numel() if rows.shape[0] else result.element_size() * result[:1].numel()
        dist.all_to_all_single(
            result.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8),
            [count * item for count in received], [count * item for count in sent], group=self.process_group,
        )  # fmt: skip
        return result


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """How the experts of a mixture lie on ranks."""

    experts: int  # of the whole mixture
    line: RowExchange | None = None  # ranks over which they are spread evenly, in order; None: this rank has all
    # ranks that have slices of the same experts and other tokens; None: what a rank takes is its own
    slices: RowExchange | None = None
    # times an even share of its copies that each expert takes of a rank; None: all of them
    capacity: float | None = None


def mixed(hidden: Tensor, index: Tensor, weights: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """The outputs of the experts that the router chose for tokens, weighted and summed.

    Args:
        hidden: (tokens, hidden).
        index: (tokens, choices) numbers of experts, best first.
        weights: (tokens, choices), with gradients.
        spread: where the experts are.
        run: those of this rank.

    Returns:
        (tokens, hidden), in the dtype of ``hidden``.
    """
    choices = index.shape[-1]
    order = _sorted_copies(index, spread)
    rows = hidden[order // choices]
    back = _visit(rows, index.reshape(-1)[order], spread, run)
    # index_copy would keep what comes back until backward
    copies = back.new_zeros(index.numel(), back.shape[-1]).index_put((order,), back)
    weighted = copies.view(*index.shape, back.shape[-1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _sorted_copies(index: Tensor, spread: ExpertSpread) -> Tensor:
    """Copies of tokens (token x choices + choice) in the order of their experts, without those that are dropped."""
    if spread.capacity is None:
        return torch.argsort(index.reshape(-1), stable=True)
    tokens, choices = index.shape
    by_choice = torch.argsort(index.t().reshape(-1), stable=True)
    copies = by_choice % tokens * choices + by_choice // tokens
    numbers = index.reshape(-1)[copies]
    first = torch.searchsorted(numbers, numbers)
    most = ceil(spread.capacity * index.numel() / spread.experts)
    return copies[torch.arange(len(copies), device=index.device) - first < most]


def _visit(rows: Tensor, numbers: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """Outputs of rows that lie in the order of their experts' numbers."""
    if spread.line is None:
        return _run_here(rows, numbers, spread, run)
    line, here = spread.line, spread.experts // spread.line.size
    bounds = torch.arange(spread.experts + 1, device=numbers.device)
    counts = torch.searchsorted(numbers.contiguous(), bounds).diff()
    even = [here] * line.size
    arriving = line.swap(counts, even, even)
    sent, received = torch.stack([counts, arriving]).view(2, line.size, here).sum(-1).tolist()
    local = torch.arange(here, device=numbers.device).repeat(line.size).repeat_interleave(arriving)
    outputs = _run_here(_exchanged(rows, line, sent, received), local, spread, run)
    return _exchanged(outputs, line, received, sent)


def _run_here(rows: Tensor, numbers: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    if spread.slices is None:
        return _linked(run(rows, numbers), rows)
    line, count = spread.slices, len(rows)
    counts = line.swap(torch.full((line.size,), count, device=rows.device), [1] * line.size, [1] * line.size).tolist()
    sent = [count] * line.size
    every = _exchanged(rows.repeat(line.size, 1), line, sent, counts)
    parts = _linked(run(every, line.swap(numbers.repeat(line.size), sent, counts)), every)
    return _exchanged(parts, line, counts, sent).view(line.size, count, parts.shape[-1]).sum(0)


def _linked(tensor: Tensor, rows: Tensor) -> Tensor:
    """The same with a way back for gradients: where no row came, nothing may have been computed, but every rank must
    take part in the exchange of gradients."""
    if tensor.requires_grad or not rows.requires_grad:
        return tensor
    return tensor + 0 * rows


def _exchanged(rows: Tensor, line: RowExchange, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    there, back = partial(line.swap, sent=sent, received=received), partial(line.swap, sent=received, received=sent)
    return linear_map(rows, there, back)


# How the experts of a mixture are sliced by a tensor group: found by trying, on a small double of their module.
#
# A slice of every expert is a slice of each of its weights along the inner width, one extent or two fused side by side
# (gate and up). The double has few experts and narrow ones, all extents in their true proportion, random weights and
# the module's own code; a way to slice counts where the outputs of two slices add up to those of all.


FEW, UNIT, ROWS, CHOICES = 3, 8, 12, 2
"""Experts of the double, items of the greatest common divisor of all extents, tokens, and experts a token visits."""
WIDEST = 4096
"""Widest extent of a double that is run."""
ALIGNED = 8
"""Items by which a slice's width is divided: grouped matmuls take rows of a multiple of 16 bytes, in bf16 as well."""
TRIALS = 512
"""Most ways to slice that are tried."""
CLOSE = 1e-4


def find_slices(block: nn.Module, mixture: BlockMixture, hidden: int) -> ExpertSlices | str:
    """How a mixture's experts can be sliced, or why they cannot.

    Args:
        block: on any device; not changed and not run.
        mixture: one of its mixtures.
        hidden: width of its tokens.
    """
    module = block.get_submodule(mixture.path)
    extents = [extent for name in mixture.parameters for extent in module.get_parameter(name).shape[1:]]
    unit = math.gcd(hidden, *extents)
    if max(extents) // unit * UNIT > WIDEST:
        return f"{mixture.path}: a small copy cannot keep the proportions of its widths"
    try:
        return _try_all(_Double(module, mixture, hidden, unit), module, mixture)
    except Exception as error:  # the module is the user's code: any error means that it cannot run this way
        return f"{mixture.path}: a small copy of it does not run ({type(error).__name__}: {error})"


class _Double:
    """A small copy of a module of experts: ``unit`` items of an extent become ``UNIT``."""

    def __init__(self, module: nn.Module, mixture: BlockMixture, hidden: int, unit: int) -> None:
        self._unit, draw = unit, torch.Generator().manual_seed(0)
        shapes = {name: module.get_parameter(name).shape for name in mixture.parameters}
        self.values = {
            name: torch.randn((FEW, *map(self.scaled, shape[1:])), generator=draw) / 4 for name, shape in shapes.items()
        }
        memo: dict[int, Any] = {
            id(module.get_parameter(name)): nn.Parameter(value, requires_grad=False)
            for name, value in self.values.items()
        }
        self._module = copy.deepcopy(module, memo).eval()
        for name, value in vars(module).items():
            if type(value) is int and "expert" in name and value == mixture.experts:
                setattr(self._module, name, FEW)
            elif type(value) is int and any(value in shape[1:] for shape in shapes.values()):
                setattr(self._module, name, self.scaled(value))
        self._index = torch.rand(ROWS, FEW, generator=draw).topk(CHOICES).indices
        self._tokens = torch.randn(ROWS, self.scaled(hidden), generator=draw)
        self._weights = torch.rand(ROWS, CHOICES, generator=draw)

    def scaled(self, extent: int) -> int:
        return extent * UNIT // self._unit

    def run(self, values: Mapping[str, Tensor]) -> Tensor:
        """The module's output with these parameters."""
        for name, value in values.items():
            self._module.get_parameter(name).data = value
        with torch.no_grad():
            output: Tensor = self._module(self._tokens, self._index, self._weights)
        return output

    def half(self, parameter: SlicedParameter, rank: int) -> Tensor:
        value, pieces, start = self.values[parameter.name], [], 0
        for length in map(self.scaled, parameter.parts):
            pieces.append(value.narrow(parameter.dim, start + rank * (length // 2), length // 2))
            start += length
        return torch.cat(pieces, parameter.dim)


def _try_all(double: _Double, module: nn.Module, mixture: BlockMixture) -> ExpertSlices | str:
    expected = double.run(double.values)
    options = product(*(list(_slicings(name, module.get_parameter(name).shape)) for name in mixture.parameters))
    for slicing in islice(options, TRIALS):
        halves = [{one.name: double.half(one, rank) for one in slicing} for rank in range(2)]
        if all(value.numel() for half in halves for value in half.values()) and _add_up(double, halves, expected):
            width = math.gcd(*(length for one in slicing for length in one.parts))
            degree = width // ALIGNED if width % ALIGNED == 0 else 1
            narrow = f"{mixture.path}: slices of a width of {width} would be no multiples of {ALIGNED}"
            return ExpertSlices(mixture.path, slicing, degree) if degree > 1 else narrow
    return f"{mixture.path}: no way to slice its experts gives outputs that add up"


def _slicings(name: str, shape: tuple[int, ...]) -> Iterator[SlicedParameter]:
    """Along each dim but that of the experts, whole or as two fused parts."""
    for dim in range(1, len(shape)):
        yield SlicedParameter(name, dim, (shape[dim],))
        if shape[dim] % 2 == 0:
            yield SlicedParameter(name, dim, (shape[dim] // 2,) * 2)


def _add_up(double: _Double, halves: list[dict[str, Tensor]], expected: Tensor) -> bool:
    try:
        total = double.run(halves[0]) + double.run(halves[1])
    except Exception:  # extents that do not fit together
        return False
    return total.shape == expected.shape and bool((total - expected).abs().max() <= CLOSE)


def sum_slices(module: nn.Module, group: TensorGroup, sequence_parallel: bool) -> None:
    """Make a module whose experts are sliced return the sum over the tensor group, in place.

    ``sequence_parallel``: whether each device calls it with its own tokens, as many on each.
    """
    forward = module.forward

    def run(hidden: Tensor, index: Tensor, weights: Tensor, **options: Any) -> Tensor:
        if sequence_parallel:
            every, chosen, shares = (gather_tokens(one, group, 0) for one in (hidden, index, weights))
            return reduce_scatter_tokens(forward(every, chosen, shares, **options), group, 0)
        output = forward(copy_to_group(hidden, group), index, copy_to_group(weights, group), **options)
        return reduce_from_group(output, group)

    module.forward = run


def spread_experts(
    block: nn.Module, line: RowExchange | None, slices: RowExchange | None = None, capacity: float | None = None
) -> dict[str, ParameterShard]:
    """Spread the experts of every mixture of a block over ranks, in place.

    Each rank keeps as many, in order. Their module is called as before, with this rank's tokens, and returns what all
    experts make of them.

    Args:
        block: with values; not split in another way yet.
        line: ranks over which experts are spread; None: every rank has all, and ``capacity`` alone is to be kept to.
        slices: ranks with other tokens that share each expert's matmuls; see ``ExpertSpread``.
        capacity: see ``ExpertSpread``.

    Returns:
        How each parameter of an expert lies in the whole one, by its name in the block.

    Raises:
        InputError: experts that cannot be spread so many ways.
    """
    degree = 1 if line is None else line.size
    shards: dict[str, ParameterShard] = {}
    for mixture in find_mixtures(block):
        if mixture.reason:
            raise InputError("expert", degree, f"{mixture.reason}. Plan it with expert=1.")
        if mixture.experts % degree:
            raise InputError("expert", degree, f"Use a divisor of {mixture.experts}, the experts of {mixture.path}.")
        module = block.get_submodule(mixture.path)
        for name, shard in _keep_share(module, mixture, line).items():
            shards[f"{mixture.path}.{name}".lstrip(".")] = shard
        spread = ExpertSpread(mixture.experts, line, slices, capacity)
        module.forward = partial(_routed, module.forward, spread)
    return shards


def work_on_shares(block: nn.Module, mixtures: Iterable[BlockMixture]) -> None:
    """Have the experts of a block work on this rank's share of tokens that ranks share, in place.

    Args:
        block: split already: what is outermost sees the cut tensors.
        mixtures: found in it before.
    """
    for mixture in mixtures:
        if not mixture.reason:
            module = block.get_submodule(mixture.path)
            module.forward = partial(_on_shares, module.forward)


def _on_shares(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any) -> Tensor:
    cuts = specs_of(hidden)
    alike = all([cut.dim for cut in specs_of(one)] == [0] for one in (hidden, index, weights))
    if not isinstance(hidden, ShardedTensor) or not alike:
        return forward(hidden, index, weights, **options)
    output: Tensor = wrap_locals(forward(*map(to_local, (hidden, index, weights)), **options), cuts, hidden.rules)
    return output


def _keep_share(module: nn.Module, mixture: BlockMixture, line: RowExchange | None) -> dict[str, ParameterShard]:
    """Parameters stay the same objects and hold this rank's experts; whole numbers that count experts are divided."""
    if line is None:
        return {}
    shards: dict[str, ParameterShard] = {}
    for name in mixture.parameters:
        parameter = module.get_parameter(name)
        full_shape = tuple(parameter.shape)
        shard = ParameterShard(Placement.SHARDED, full_shape, line.size, line.rank, 0, (mixture.experts,))
        parameter.data = slice_full(parameter.data, shard).clone()
        parameter.grad = None
        shards[name] = shard
    for name, value in vars(module).items():
        if "expert" in name and type(value) is int and value == mixture.experts:
            setattr(module, name, mixture.experts // line.size)
    return shards


def _routed(
    forward: Forward, spread: ExpertSpread, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any
) -> Tensor:
    """The module's forward for any tokens; its own forward then works on rows that each visit one expert."""

    def run(rows: Tensor, numbers: Tensor) -> Tensor:
        ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
        return forward(rows, numbers.unsqueeze(1), ones, **options)

    if hidden.dim() != 2 or index.shape != weights.shape or index.shape[:1] != hidden.shape[:1]:
        shapes = [tuple(one.shape) for one in (hidden, index, weights)]
        remedy = "Experts that are spread take (tokens, hidden), and (tokens, choices) twice. Plan it with expert=1."
        raise InputError("call of experts", shapes, remedy)
    return mixed(hidden, index, weights, spread, run)
