"""Infer how a layer can be split over a tensor-parallel group, without a list of models."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.parallelism.expert.apply import find_slices
from galvatron_lite.parallelism.tensor.infer_probe import (
    Probe,
    ProbeError,
    describe,
    find_hidden,
    make_probe,
    routed_experts,
)
from galvatron_lite.parallelism.tensor.infer_prove import (
    ReferenceRun,
    check_ranks,
    find_candidates,
    items_of,
    place_gathers,
    prime_factors,
    prove_region,
    run_reference,
)
from galvatron_lite.parallelism.tensor.regions import (
    ExpertSlices,
    Region,
    TensorPlan,
    holds_weight,
    is_linear,
    weight_of,
)

NOT_OFFERED = "; therefore tensor parallelism is not offered for this block"
MAX_INPUT_ITEMS = 1 << 22
"""Largest hidden state, in items, on which a block that cannot run on fewer tokens is checked."""
MANY_DIVISORS = 5040
"""Divisible by all numbers up to 10: if any degree is legal, the degrees offered are divisors of a multiple of it."""


def held_twice(model: nn.Module, layers: Sequence[Layer]) -> dict[str, frozenset[str]]:
    """Return, for each kind of block, names inside it of modules with parameters that other layers contain too."""
    inside = {
        layer.name: {part for path in layer.modules for part in model.get_submodule(path).modules()} for layer in layers
    }
    holders = Counter(part for parts in inside.values() for part in parts)
    names = defaultdict[str, set[str]](set)
    for layer in layers:
        for path in layer.modules if layer.role is Role.BLOCK else ():
            names[layer.kind].update(
                name
                for name, part in model.get_submodule(path).named_modules()
                if holders[part] > 1 and next(part.parameters(recurse=False), None) is not None
            )
    return {kind: frozenset(inner) for kind, inner in names.items()}


def infer_block(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Collection[str] = ()
) -> TensorPlan:
    """Infer how a block may be split: find column/row regions by data flow, and prove them by running.

    A small copy of the block runs on the CPU (see ``infer_probe``); the block is neither changed nor run. All plans are
    checked; a plan that splits nothing has the reason.

    Args:
        block: on any device, including meta.
        args: positional inputs, on any device.
        kwargs: keyword inputs.
        shared: names of modules that other layers contain too (``held_twice``), which are not split twice.
    """
    if name := next((name for name in sorted(shared) if is_linear(block.get_submodule(name))), ""):
        return TensorPlan(reason=f"Another layer holds its {name}, too{NOT_OFFERED}.")
    experts = _expert_slices(block, args, kwargs)
    if isinstance(experts, str):
        return TensorPlan(reason=f"{experts}{NOT_OFFERED}.")
    # the caller may have set meta as default device, or no gradients
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        try:
            probe, reference = _observe(block, args, kwargs)
        except ProbeError as error:
            return TensorPlan(reason=f"The block could not be examined: {error.reason}{NOT_OFFERED}.")
        return _with_experts(_plan(probe, reference), experts)


def infer_edge(modules: Mapping[str, nn.Module], model: nn.Module | None = None) -> TensorPlan:
    """Infer how the modules before or after the blocks may be split.

    Plain embeddings and linears whose weight has more than twice as many rows as columns (a vocabulary) are split over
    rows, embeddings with an all-reduce and heads with gathered outputs; each device runs other modules in full. The
    rule depends only on the weight, so tied weights are split alike in both layers. Rows that do not divide evenly are
    split unevenly, without padding. All degrees up to the vocabulary are legal.

    Args:
        modules: by path.
        model: the full model, to find shared weights; weights that a module of another type shares are not split.
    """
    blocked = {
        id(parameter)
        for module in (model or nn.ModuleList(modules.values())).modules()
        if not (is_plain_embedding(module) or is_linear(module))
        for parameter in module.parameters(recurse=False)
    }
    split = {
        f"{path}.{name}".strip("."): module
        for path, top in modules.items()
        for name, module in top.named_modules()
        if (is_plain_embedding(module) or is_linear(module))
        and id(weight_of(module)) not in blocked
        and _is_vocabulary(module)
    }
    if not split:
        reason = "nothing in it is split: every device of a tensor group does all of its work"
        return TensorPlan(max_degree=MANY_DIVISORS << 6, reason=reason)
    embeddings = tuple(path for path, module in split.items() if isinstance(module, nn.Embedding))
    heads = tuple(path for path in split if path not in embeddings)
    return TensorPlan((), embeddings, heads, _with_many_divisors(min(map(_vocabulary, split.values()))))


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding whose lookup can be split by rows."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return holds_weight(module) and not special


def _plan(probe: Probe, reference: ReferenceRun) -> TensorPlan:
    proven, dropped = _prove_all(probe, reference)
    if not proven:
        return TensorPlan(reason=_nothing_split_reason(probe, dropped))
    regions, degree = _agree(probe, proven)
    failure = check_ranks(probe, reference, regions, prime_factors(degree)[0], [0])
    if failure:
        return TensorPlan(reason=f"Its regions cannot be split together: {failure}{NOT_OFFERED}.")
    placed = place_gathers(probe, reference, regions)
    notes = [*dropped, *_unsplit_layers(probe, regions, dropped)]
    if isinstance(placed, str):
        notes.append(f"sequence parallelism is not offered: {placed}")
    final = regions if isinstance(placed, str) else placed
    return TensorPlan(final, max_degree=degree, sequence_parallel=not isinstance(placed, str), reason="; ".join(notes))


def _observe(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Probe, ReferenceRun]:
    """Make the block's small copy and its reference run, on few tokens if the block allows it."""
    sizes = [True] + [False] * (find_hidden(args, kwargs).numel() <= MAX_INPUT_ITEMS)
    for small in sizes:
        probe = make_probe(block, args, kwargs, small)
        try:
            reference = run_reference(probe)
        except Exception as error:  # any error of the user's code means that the copy cannot run
            reason = f"a copy of it does not run on its own ({describe(error)})"
            continue
        if all(bool(output.isfinite().all()) for output in reference.outputs):
            return probe, reference
        reason = "its output on random input is not finite"
    raise ProbeError(reason)


def _prove_all(probe: Probe, reference: ReferenceRun) -> tuple[list[tuple[Region, int]], list[str]]:
    """Return the proven regions with their largest degrees, and why other candidates were dropped."""
    proven: list[tuple[Region, int]] = []
    candidates, dropped = find_candidates(probe, reference)
    used: set[str] = set()
    for candidate in candidates:
        linears = {*candidate.rows, *candidate.columns}
        if used & linears:
            continue
        region = prove_region(probe, reference, candidate)
        if isinstance(region, str):
            ends = f"{', '.join(candidate.columns)} → {', '.join(candidate.rows)}"
            dropped.append(f"{ends} cannot be split: {region}")
        elif region[1] > 1:
            proven.append(region)
            used |= linears
    order = list(reference.calls)
    return sorted(proven, key=lambda pair: order.index(pair[0].rows[0])), dropped


def _agree(probe: Probe, proven: list[tuple[Region, int]]) -> tuple[tuple[Region, ...], int]:
    """Select regions with a common degree above 1, of those with the larger weights first."""

    def items(region: Region) -> int:
        return items_of(probe, (*(column.path for column in region.columns), *region.rows))

    kept, degree = [], 0
    for region, largest in sorted(proven, key=lambda pair: -items(pair[0])):
        if math.gcd(degree, largest) > 1:
            kept.append(region)
            degree = math.gcd(degree, largest)
    return tuple(region for region, _ in proven if region in kept), degree


def _unsplit_layers(probe: Probe, regions: Sequence[Region], dropped: Sequence[str]) -> list[str]:
    """Note the linears that are not split and not in ``dropped``."""
    used = {column.path for region in regions for column in region.columns} | {
        row for region in regions for row in region.rows
    }
    mentioned = set(" ".join(dropped).replace(",", " ").split())
    notes = [f"{path} stays whole" for path in probe.weights if path not in used | mentioned]
    fused = [path for path, module in probe.block.named_modules() if isinstance(module, nn.MultiheadAttention)]
    return notes + [f"{path} stays whole: nn.MultiheadAttention uses its weights directly" for path in fused]


def _nothing_split_reason(probe: Probe, dropped: list[str]) -> str:
    if dropped:
        return "; ".join(dropped) + NOT_OFFERED + "."
    if not probe.weights:
        return f"No linear layer runs in it{NOT_OFFERED}."
    return f"No group of linear layers feeds one other linear layer and nothing else{NOT_OFFERED}."


def _expert_slices(block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[ExpertSlices, ...] | str:
    """The slices of a block's experts (none without experts), or why they cannot be sliced."""
    mixtures = routed_experts(block)
    if not mixtures:
        return ()
    try:
        hidden = find_hidden(args, kwargs).shape[-1]
    except ProbeError as error:
        return f"The block could not be examined: {error.reason}"
    with torch.device("cpu"), torch.inference_mode(False):
        slices = [find_slices(block, mixture, hidden) for mixture in mixtures]
    reasons = [item for item in slices if isinstance(item, str)]
    return "; ".join(reasons) if reasons else tuple(item for item in slices if not isinstance(item, str))


def _with_experts(plan: TensorPlan, experts: tuple[ExpertSlices, ...]) -> TensorPlan:
    """Add sliced experts to the plan of a block's other modules, with a common degree."""
    if not experts or plan.max_degree == 1:
        return plan
    degree = math.gcd(plan.max_degree, *(item.max_degree for item in experts))
    if degree == 1:
        extents = ", ".join(f"{item.path} {item.max_degree}" for item in experts)
        return TensorPlan(reason=f"Its experts can be sliced by divisors of other numbers ({extents}) than the rest")
    return replace(plan, experts=experts, max_degree=degree)


def _is_vocabulary(module: nn.Module) -> bool:
    columns = weight_of(module).shape[1 if isinstance(module, (nn.Embedding, nn.Linear)) else 0]
    return _vocabulary(module) > 2 * columns


def _vocabulary(module: nn.Module) -> int:
    """Rows of an embedding or outputs of a linear, from its attributes, as a tied layer may have split the weight."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    rows: int = module.out_features if isinstance(module, nn.Linear) else module.nf  # type: ignore[assignment]
    return rows


def _with_many_divisors(rows: int) -> int:
    """A number up to ``rows`` with as many small divisors as possible."""
    if rows < MANY_DIVISORS:
        return 1 << (rows.bit_length() - 1)
    return MANY_DIVISORS << ((rows // MANY_DIVISORS).bit_length() - 1)
