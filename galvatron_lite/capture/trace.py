"""Model capture: trace a module with an example batch into a ``ModelGraph``.

Everything runs on a copy on the meta device, at two batch sizes, so no weight is read and no data is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.capture.kinds import LayerKinds
from galvatron_lite.capture.limits import check_replaced, dead_parameters, folded_argument, one_stage_reason
from galvatron_lite.capture.shared import find_owners, layer_needs, tensors_between_layers, ties_by_code
from galvatron_lite.errors import TraceError
from galvatron_lite.model.balancing import undivided_reason
from galvatron_lite.model.batch import (
    LossFn,
    batch_size,
    call_model,
    check_entries,
    loss_of,
    map_tensors,
    places,
    resize_batch,
    sequence_length,
    tensors_of,
)
from galvatron_lite.model.blocks import BlockNames, signature
from galvatron_lite.model.discover import Watched, kept_error, watch
from galvatron_lite.model.graph import Layer, ModelGraph, Role, dead_note
from galvatron_lite.model.trace.figures import SAMPLES
from galvatron_lite.model.trace.meta import check_model, dtype_of, meta_copy, precision_of
from galvatron_lite.model.trace.run import BlockCall, Observation, garbage_waits, observe
from galvatron_lite.parallelism.precision import narrow_norms
from galvatron_lite.parallelism.tensor.infer import held_twice


@garbage_waits()
def trace(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    blocks: BlockNames | None = None,
    precision: str | None = None,
    name: str | None = None,
    watched: Watched | None = None,
) -> ModelGraph:
    """Capture a model: its layers and, for one sample, what each computes, moves and keeps.

    Everything runs on a copy of the model on the meta device (shapes only): a 70B model takes seconds and no memory.
    Each kind of structurally equal layers is run in detail once, forward and backward, at two batch sizes, and so is
    one device's share of it under tensor parallelism.

    Operators are those that PyTorch runs on CPU, except that attention counts as a fused kernel, with or without
    dropout. What does not grow with the batch (causal masks, position tables) is left out of all figures.

    Args:
        model: on any device, the meta device included; it is not changed.
        batch: example batch (see ``model.batch``); only its shapes matter, and its number of samples does not.
        loss_fn: ``loss_fn(output, batch)``; by default the model's own loss.
        blocks: how to find the repeated blocks (see ``discover_layers``).
        precision: trace as if the model were cast to it (``bf16``); by default as the parameters are.
        name: of the graph; by default the model's class.
        watched: result of ``watch_model`` for the same model, batch and blocks, to continue from; it is used up.

    Raises:
        TraceError: the model or a block cannot be captured; names it and the cause.
        InputError: no loss can be found in the output.
    """
    check_model(model)
    check_entries(model, batch, loss_fn)
    if precision is not None:
        watched = None
    twin = meta_copy(model, precision) if watched is None else watched.twin
    batches = [_example(batch, samples, precision) for samples in SAMPLES]
    if precision_of(twin) in ("bf16", "fp16"):
        narrow_norms(twin)  # as in training
    try:
        watched = watched or watch(twin, batches[1], blocks)
        small_run = observe(twin, batches[0], watched.units())
    except TraceError as error:
        twin = meta_copy(model, precision)  # the run may have changed the other
        other = kept_error(model, batch) or error_of_fewer_samples(twin, batch, precision, blocks, error)
        if other is None:
            raise
        raise other from error
    check_replaced(model, twin)
    with watched.flow:
        outputs = _loss_or_outputs(watched.output, batches[1], loss_fn)
    runs = (small_run, watched.seen)
    layers = watched.arranged(_signatures(twin, watched.seen))
    calls = tuple(_block_calls(layers, run) for run in runs)
    sequence, owners = _sequence(batches[1], calls[1]), find_owners(twin, layers)
    ends = [_loss_or_outputs(run.output, example, loss_fn) for run, example in zip(runs, batches, strict=True)]
    needs = layer_needs(watched.flow, twin, layers, watched.flow.sources_of_tensors(outputs))
    layer_kinds = LayerKinds(twin, layers, owners, runs, calls, sequence, held_twice(twin, layers))
    kinds, passed = layer_kinds.build(batches, loss_fn, ends, needs)
    tensors = tensors_between_layers(layers, passed, needs, layer_kinds.output_bytes(), watched.forked)
    ties = owners.ties + (ties_by_code(watched.flow, twin, layers) if tensors else ())
    readers = {tie.second for tie in ties if tie.parameters}
    sharing = {layer.kind for layer in layers if layer.name in readers}
    dead = dead_parameters(twin, watched.flow, outputs if loss_fn is not None else watched.output)
    goal = "what the model returns" if loss_fn is None else "the loss"
    return ModelGraph(
        name=name or type(model).__name__,
        layers=layers,
        kinds={key: replace(kind, shares=key in sharing) for key, kind in kinds.items()},
        tensors=tensors,
        sequence=sequence,
        precision=precision_of(twin),
        ties=ties,
        notes=dead_note(dead, sum(p.numel() for p in twin.parameters()), goal),
        whole=one_stage_reason(twin, layers, small_run, ends[0], watched.flow),
        dead=dead,
        undivided=undivided_reason(model, batch),
        least_samples=_least_samples(twin, _example(batch, 1, precision)),
        folded=folded_argument(calls[0], calls[1], SAMPLES),
        compares="" if watched.flow.compared is None else watched.flow.compared or "the model",
    )


def _least_samples(twin: nn.Module, sample: Any) -> int:
    """Two if the model refuses one sample: batch normalisation of rows has no statistics of it."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in twin.modules()):
        return 1
    try:
        with torch.no_grad():
            call_model(twin, sample)
    except ValueError:
        return 2
    return 1


def _example(batch: Any, samples: int, precision: str | None) -> Any:
    """The batch on the meta device with another number of samples, its floating tensors cast to the precision."""
    resized = resize_batch(batch, samples)
    if precision is None:
        return resized
    dtype = dtype_of(precision)
    return map_tensors(resized, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def error_of_fewer_samples(
    twin: nn.Module, batch: Any, precision: str | None, blocks: BlockNames | None, error: TraceError
) -> TraceError | None:
    """The error of a model that runs on all samples of the batch and not on fewer; None if it runs on neither."""
    rows = batch_size(batch)
    try:
        watch(twin, _example(batch, rows, precision), blocks)
    except TraceError:
        return None
    entries = batch.items() if isinstance(batch, Mapping) else ()
    lists = [name for name, value in entries if isinstance(value, (list, tuple)) and len(value) == rows]
    if lists:
        remedy = (
            f"It is a list with an item for each of the {rows} samples, of which no share can be taken. Give tensors "
            "with a row for each sample instead, padded to one shape."
        )
        return TraceError("batch", ", ".join(lists), remedy)
    names = [place.lstrip(".") for place, tensor in places(batch) if tensor.dim() and tensor.shape[0] == rows]
    remedy = (
        f"The batch has {rows} samples, so tensors whose first dimension is {rows} are taken to have a row for each. "
        f"With fewer rows the model does not run. {error.remedy.removesuffix('.')}. Give a tensor without samples a "
        "first dimension of 1, or the example batch another number of samples; make lists of samples tensors."
    )
    return TraceError("batch", ", ".join(names), remedy)


def _signatures(twin: nn.Module, run: Observation) -> dict[str, Hashable]:
    """What equal blocks have in common, by path: structure, shapes of inputs, and parameters shared with other blocks.

    For blocks with frozen parameters also whether gradients flow to their inputs.
    """
    holders: dict[int, set[str]] = {}
    for path in {call.path for call in run.calls}:
        for parameter in twin.get_submodule(path).parameters():
            holders.setdefault(id(parameter), set()).add(path)
    keys: dict[str, Hashable] = {}
    for call in run.calls:
        block = twin.get_submodule(call.path)
        frozen = any(not parameter.requires_grad for parameter in block.parameters())
        shapes = tuple((tuple(input_.shape), input_.dtype, frozen and input_.requires_grad) for input_ in call.inputs)
        shared = tuple(name for name, p in block.named_parameters() if len(holders[id(p)]) > 1)
        keys.setdefault(call.path, (signature(block), shapes, shared))
    return keys


def _sequence(batch: Any, calls: Sequence[BlockCall]) -> int:
    """Tokens per sample: of the batch, or of the first block's input (samples, tokens, channels)."""
    tokens = sequence_length(batch)
    hidden = [
        input_ for call in calls[:1] for input_ in call.inputs if input_.dim() == 3 and input_.is_floating_point()
    ]
    return hidden[0].shape[1] if tokens == 1 and hidden else tokens


def _block_calls(layers: Sequence[Layer], run: Observation) -> tuple[BlockCall, ...]:
    """The calls of blocks, in order."""
    names = dict.fromkeys(layer.name for layer in layers if layer.role is Role.BLOCK)
    calls = tuple(call for call in run.calls if call.path in names)
    ran = {call.path for call in calls}
    if unused := next((name for name in names if name not in ran), ""):
        remedy = "It never runs on this batch; give a batch that uses it, or name the blocks yourself (blocks=)."
        raise TraceError("block", unused, remedy)
    return calls


def _loss_or_outputs(output: Any, batch: Any, loss_fn: LossFn | None) -> list[Tensor]:
    """The loss; all output tensors if it cannot be computed (the user's function may need data)."""
    try:
        with torch.device("meta"):
            return [loss_of(output, batch, loss_fn)]
    except Exception:
        return list(tensors_of(output))
