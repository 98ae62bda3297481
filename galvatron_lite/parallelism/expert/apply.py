"""Spread the experts of a mixture over ranks, or slice them, in place, with exchanges of tokens around them.

Each copy of a token (one for each expert that it visits) goes to the rank of the expert; the results are weighted and
summed (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2). Without a capacity, experts process all copies.

With a capacity, an expert accepts at most ceil(factor x copies of the rank / experts) copies from each rank. The others
are dropped and add nothing to the output of their token. First choices go before second choices, and earlier tokens
before later ones (algorithm 1 there), so which copies are dropped depends on the tokens that a rank processes together.
"""

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

Forward = Callable[..., Tensor]
Run = Callable[[Tensor, Tensor], Tensor]
"""This rank's experts: from rows (rows, hidden) and the local index of each row's expert to outputs (rows, hidden)."""


class RowExchange(Protocol):
    """Ranks that exchange rows."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        ...

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows without autograd: ``sent`` and ``received`` count those to and from each rank, in rank
        order."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessExchange(Processes):
    """Processes of ``torch.distributed``."""

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See ``RowExchange``. Rows travel as bytes, since gloo does not support all dtypes."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        item = rows.element_size() * rows[:1].numel() if rows.shape[0] else result.element_size() * result[:1].numel()
        dist.all_to_all_single(
            result.view(-1).view(torch.uint8), rows.contiguous().view(-1).view(torch.uint8),
            [count * item for count in received], [count * item for count in sent], group=self.process_group,
        )  # fmt: skip
        return result


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """The ranks of the experts of a mixture."""

    experts: int  # of the full mixture
    line: RowExchange | None = None  # ranks that they are spread over evenly, in order; None: this rank has all
    slices: RowExchange | None = None  # ranks with slices of the same experts and other tokens; None: no slices
    # copies that an expert accepts from a rank, over an even share of the rank's copies; None: all copies
    capacity: float | None = None


def mixed(hidden: Tensor, index: Tensor, weights: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """Compute the weighted sum of the outputs of the experts that the router chose for each token.

    Args:
        hidden: (tokens, hidden).
        index: (tokens, choices) indices of experts, best first.
        weights: (tokens, choices), with gradients.
        spread: the ranks of the experts.
        run: the experts of this rank.

    Returns:
        (tokens, hidden), in the dtype of ``hidden``.
    """
    choices = index.shape[-1]
    order = _sorted_copies(index, spread)
    rows = hidden[order // choices]
    outputs = _visit(rows, index.reshape(-1)[order], spread, run)
    # index_copy would keep the outputs until backward
    copies = outputs.new_zeros(index.numel(), outputs.shape[-1]).index_put((order,), outputs)
    weighted = copies.view(*index.shape, outputs.shape[-1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


def _sorted_copies(index: Tensor, spread: ExpertSpread) -> Tensor:
    """Indices of copies (token x choices + choice), sorted by expert, without dropped copies."""
    if spread.capacity is None:
        return torch.argsort(index.reshape(-1), stable=True)
    tokens, choices = index.shape
    by_choice = torch.argsort(index.t().reshape(-1), stable=True)
    copies = by_choice % tokens * choices + by_choice // tokens
    experts = index.reshape(-1)[copies]
    first = torch.searchsorted(experts, experts)
    most = ceil(spread.capacity * index.numel() / spread.experts)
    return copies[torch.arange(len(copies), device=index.device) - first < most]


def _visit(rows: Tensor, experts: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    """Return the experts' outputs for rows that are sorted by expert."""
    if spread.line is None:
        return _run_local(rows, experts, spread, run)
    line, local = spread.line, spread.experts // spread.line.size
    bounds = torch.arange(spread.experts + 1, device=experts.device)
    counts = torch.searchsorted(experts.contiguous(), bounds).diff()
    even = [local] * line.size
    arriving = line.swap(counts, even, even)
    sent, received = torch.stack([counts, arriving]).view(2, line.size, local).sum(-1).tolist()
    local_experts = torch.arange(local, device=experts.device).repeat(line.size).repeat_interleave(arriving)
    outputs = _run_local(_exchanged(rows, line, sent, received), local_experts, spread, run)
    return _exchanged(outputs, line, received, sent)


def _run_local(rows: Tensor, experts: Tensor, spread: ExpertSpread, run: Run) -> Tensor:
    if spread.slices is None:
        return _linked(run(rows, experts), rows)
    line, count = spread.slices, len(rows)
    counts = line.swap(torch.full((line.size,), count, device=rows.device), [1] * line.size, [1] * line.size).tolist()
    sent = [count] * line.size
    all_rows = _exchanged(rows.repeat(line.size, 1), line, sent, counts)
    parts = _linked(run(all_rows, line.swap(experts.repeat(line.size), sent, counts)), all_rows)
    return _exchanged(parts, line, counts, sent).view(line.size, count, parts.shape[-1]).sum(0)


def _linked(tensor: Tensor, rows: Tensor) -> Tensor:
    """Connect outputs to rows in autograd: all ranks must exchange gradients, also if no row reached their experts."""
    if tensor.requires_grad or not rows.requires_grad:
        return tensor
    return tensor + 0 * rows


def _exchanged(rows: Tensor, line: RowExchange, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    forward, backward = (
        partial(line.swap, sent=sent, received=received),
        partial(line.swap, sent=received, received=sent),
    )
    return linear_map(rows, forward, backward)


# How a tensor group slices the experts of a mixture is found by trying, on a small copy of their module.
#
# A slice of an expert is a slice of each of its weights along the inner width, which may be two fused extents (gate and
# up). The copy has a few narrow experts with extents in proportion, random weights and the module's code. A slicing is
# accepted if the outputs of two slices add up to the output of the copy.


FEW, UNIT, ROWS, CHOICES = 3, 8, 12, 2
"""Experts of the copy, items of the greatest common divisor of all extents, tokens, and experts that a token visits."""
WIDEST = 4096
"""Widest extent of a copy that is run."""
ALIGNED = 8
"""The width of a slice is a multiple of this: grouped matmuls need rows of a multiple of 16 bytes, in bf16 too."""
TRIALS = 512
"""Most slicings that are tried."""
CLOSE = 1e-4


def find_slices(block: nn.Module, mixture: BlockMixture, hidden: int) -> ExpertSlices | str:
    """Find out how a mixture's experts can be sliced, or why they cannot.

    Args:
        block: on any device; it is neither changed nor run.
        mixture: of the block.
        hidden: width of its tokens.
    """
    module = block.get_submodule(mixture.path)
    extents = [extent for name in mixture.parameters for extent in module.get_parameter(name).shape[1:]]
    unit = math.gcd(hidden, *extents)
    if max(extents) // unit * UNIT > WIDEST:
        return f"{mixture.path}: a small copy cannot keep the proportions of its widths"
    try:
        return _try_all(_SmallCopy(module, mixture, hidden, unit), module, mixture)
    except Exception as error:  # any error of the user's code means that the copy cannot run
        return f"{mixture.path}: a small copy of it does not run ({type(error).__name__}: {error})"


class _SmallCopy:
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
        """Run the module with these parameters."""
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


def _try_all(small: _SmallCopy, module: nn.Module, mixture: BlockMixture) -> ExpertSlices | str:
    expected = small.run(small.values)
    options = product(*(list(_slicings(name, module.get_parameter(name).shape)) for name in mixture.parameters))
    for slicing in islice(options, TRIALS):
        halves = [{parameter.name: small.half(parameter, rank) for parameter in slicing} for rank in range(2)]
        if all(value.numel() for half in halves for value in half.values()) and _add_up(small, halves, expected):
            width = math.gcd(*(length for parameter in slicing for length in parameter.parts))
            degree = width // ALIGNED if width % ALIGNED == 0 else 1
            narrow = f"{mixture.path}: slices of a width of {width} would be no multiples of {ALIGNED}"
            return ExpertSlices(mixture.path, slicing, degree) if degree > 1 else narrow
    return f"{mixture.path}: no way to slice its experts gives outputs that add up"


def _slicings(name: str, shape: tuple[int, ...]) -> Iterator[SlicedParameter]:
    """The slicings of a parameter along each dim but that of the experts, as one part or two fused parts."""
    for dim in range(1, len(shape)):
        yield SlicedParameter(name, dim, (shape[dim],))
        if shape[dim] % 2 == 0:
            yield SlicedParameter(name, dim, (shape[dim] // 2,) * 2)


def _add_up(small: _SmallCopy, halves: list[dict[str, Tensor]], expected: Tensor) -> bool:
    try:
        total = small.run(halves[0]) + small.run(halves[1])
    except Exception:  # extents that do not fit together
        return False
    return total.shape == expected.shape and bool((total - expected).abs().max() <= CLOSE)


def sum_slices(module: nn.Module, group: TensorGroup, sequence_parallel: bool) -> None:
    """Make a module of sliced experts return the sum over the tensor group, in place.

    ``sequence_parallel``: whether devices call it with different tokens, equally many on each.
    """
    forward = module.forward

    def run(hidden: Tensor, index: Tensor, weights: Tensor, **options: Any) -> Tensor:
        if sequence_parallel:
            gathered = (gather_tokens(tensor, group, 0) for tensor in (hidden, index, weights))
            return reduce_scatter_tokens(forward(*gathered, **options), group, 0)
        output = forward(copy_to_group(hidden, group), index, copy_to_group(weights, group), **options)
        return reduce_from_group(output, group)

    module.forward = run


def spread_experts(
    block: nn.Module, line: RowExchange | None, slices: RowExchange | None = None, capacity: float | None = None
) -> dict[str, ParameterShard]:
    """Spread the experts of all mixtures of a block evenly over ranks, in place.

    Their modules are called as before, with this rank's tokens, and return the output of the full mixture.

    Args:
        block: with values, not split yet.
        line: ranks that experts are spread over, in order; None: each rank has all experts, only with a ``capacity``.
        slices: ranks with other tokens that share each expert's matmuls; see ``ExpertSpread``.
        capacity: see ``ExpertSpread``.

    Returns:
        The shard of each parameter of experts, by its name in the block.

    Raises:
        InputError: the experts cannot be spread over this many ranks.
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
    """Run the experts of a block on the local part of sharded tokens, in place.

    Args:
        block: split in all other ways already, since the outermost wrapper sees the sharded tensors.
        mixtures: of ``find_mixtures``, before it was split.
    """
    for mixture in mixtures:
        if not mixture.reason:
            module = block.get_submodule(mixture.path)
            module.forward = partial(_on_shares, module.forward)


def _on_shares(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor, **options: Any) -> Tensor:
    cuts = specs_of(hidden)
    by_tokens = all([cut.dim for cut in specs_of(tensor)] == [0] for tensor in (hidden, index, weights))
    if not isinstance(hidden, ShardedTensor) or not by_tokens:
        return forward(hidden, index, weights, **options)
    output: Tensor = wrap_locals(forward(*map(to_local, (hidden, index, weights)), **options), cuts, hidden.rules)
    return output


def _keep_share(module: nn.Module, mixture: BlockMixture, line: RowExchange | None) -> dict[str, ParameterShard]:
    """Keep this rank's experts in the same parameters, and divide attributes that count experts."""
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
    """The new forward of a module of experts; its original forward runs rows that each visit one expert."""

    def run(rows: Tensor, experts: Tensor) -> Tensor:
        ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=rows.device)
        return forward(rows, experts.unsqueeze(1), ones, **options)

    if hidden.dim() != 2 or index.shape != weights.shape or index.shape[:1] != hidden.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (hidden, index, weights)]
        remedy = "Experts that are spread take (tokens, hidden), and (tokens, choices) twice. Plan it with expert=1."
        raise InputError("call of experts", shapes, remedy)
    return mixed(hidden, index, weights, spread, run)
