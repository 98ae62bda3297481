"""The memory figures of a layer on one device, in bytes, of one strategy or (then as arrays) of many.

Autocast makes copies of weights in the precision of compute (``Profile.copied_bytes`` an item). Without recomputation
they last from the first forward of a step to its last backward; a pass that recomputes makes its own. Parameters that
are in that precision already (ZeRO-1 with float32 masters) need none.
"""

from __future__ import annotations

from galvatron_lite.arrays import Flag, Real, Whole, is_option, largest, least, up, where
from galvatron_lite.cost.points import LayerFigures
from galvatron_lite.model.graph import LayerKind, OperatorClass, Recompute
from galvatron_lite.parallelism.base import LayerWork
from galvatron_lite.parallelism.data.cost import bucket_of
from galvatron_lite.parallelism.ranks import Either, sharded_items
from galvatron_lite.parallelism.zero.cost import sent_bucket
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.units import ITEM_BYTES, activation_bytes

_CAST = frozenset({OperatorClass.MATMUL, OperatorClass.CONVOLUTION})
"""Operators whose weights autocast casts; embeddings are looked up uncast."""


def layer_bytes(
    profile: Profile,
    kind: LayerKind,
    work: LayerWork,
    figures: LayerFigures,
    strategy: Either,
    model_gradients: int,
    *,
    grouped: bool,
) -> dict[str, Whole]:
    """Return the fields of ``LayerCost`` that are bytes.

    Args:
        profile: has the precisions, and the memory that other software needs besides.
        kind: of the layer.
        work: what the device computes and holds for it.
        figures: of the layer on the device.
        strategy: of the layer, or many.
        model_gradients: bytes of the gradients of the model.
        grouped: see ``ParameterSharing``.
    """
    optimizer = profile.optimizer
    gather_width, reduce_width = ITEM_BYTES[profile.gather_precision], ITEM_BYTES[profile.reduce_precision]
    width = ITEM_BYTES[profile.parameter_precision]
    gradient_width = reduce_width + where(strategy.token_degree > 1, profile.bucket_bytes, 0)
    gradients = up(work.gradient_items * gradient_width)
    lasting_gradients = up(work.lasting_gradient_items * gradient_width)
    reduced_items = where(profile.unbuffered, 0.0, work.reduce_items)
    transient_items = where(profile.unbuffered, 0.0, work.transient_items)
    full_gradients, used_items = up(reduced_items * gather_width), work.gathered_items + transient_items
    gathered = used_items * gather_width + full_gradients if grouped else work.gathered_items * gather_width
    updated_items = work.state_items - work.host_items
    narrow = strategy.keeps_masters  # parameters are in the precision of compute
    copies, frozen_copies, pass_copies = _weight_copies(profile, kind, work, strategy, narrow)
    largest_gradient, new_gradient, cast_gradient = _largest_gradient(profile, kind, work, strategy, narrow)
    offloaded = work.host_kept > 0
    return {
        "parameters": up(work.parameter_items * width - work.narrow_items * (width - profile.copied_bytes))
        + kind.buffer_bytes,
        "gradients": where(work.gradients_persist, gradients, lasting_gradients),
        "formed_gradients": where(work.gradients_persist, 0, gradients - lasting_gradients),
        "states": up(updated_items * optimizer.state_bytes + work.master_items * width),
        "kept": where(offloaded, 0, figures.kept),
        "offloaded": where(offloaded, figures.kept, 0),
        "gathered": up(gathered),
        "transient_parameters": 0 if grouped else up(transient_items * gather_width),
        "gather_buffer": up(used_items * gather_width),
        "full_gradients": 0 if grouped else full_gradients,
        "reduce_buffer": up(reduced_items * reduce_width),
        "working": largest(figures.working, figures.kept) + pass_copies,
        "forward_working": figures.forward_working + pass_copies,
        "passing_gradients": up(work.gradient_items * profile.passing_bytes),
        "accumulated": largest(up(work.reduce_items * reduce_width) - gradients, 0) if profile.accumulates else 0,
        "weight_copies": copies,
        "frozen_copies": frozen_copies,
        "new_gradient": new_gradient,
        "cast_gradient": cast_gradient,
        "bucket_copy": _bucket_copy(profile, strategy, largest_gradient, model_gradients),
        # a block needs most memory in the backward of a matmul, the head of a model in the loss
        "weight_working": largest(figures.working if Recompute.FULL in kind.kept else 0, figures.kept)
        + (0 if profile.copied_bytes else largest_gradient),
        "optimizer_working": up(updated_items * optimizer.working_bytes * optimizer.working_share),
    }


def _bucket_copy(profile: Profile, strategy: Either, largest_gradient: Whole, model_gradients: int) -> Whole:
    """Bytes of a bucket on its way to the ranks that shard optimizer states (ZeRO-1), and of this rank's part of the
    sum. The gradient that fills a bucket goes beyond its size."""
    if profile.unbuffered:
        return 0
    return up(sent_bucket(strategy, least(bucket_of(model_gradients) + largest_gradient, model_gradients)))


def _weight_copies(
    profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either, narrow: Flag
) -> tuple[Whole, Whole, Whole]:
    """Bytes of copies of weights in the precision of compute: those held through a step, those among them without
    gradient, and those that each pass makes for itself."""
    if not profile.copied_bytes:
        return 0, 0, 0
    wrapped = strategy.parameter_shards > 1  # FSDP gathers in the precision of compute
    unsharded, frozen_share = work.parameters - sharded_items(work, strategy), _frozen_share(kind)
    cast = _cast_items(profile, kind, work, strategy)
    beside_masters = cast * frozen_share + work.parameters - work.frozen_items - work.narrow_items
    items = where(wrapped, unsharded, where(narrow, beside_masters, cast))
    frozen = where(wrapped, unsharded, cast) * frozen_share
    lasting, copies = is_option(work.recompute, Recompute.NONE), up(items * profile.copied_bytes)
    return where(lasting, copies, 0), where(lasting, up(frozen * profile.copied_bytes), 0), where(lasting, 0, copies)


def _frozen_share(kind: LayerKind) -> float:
    """Share of a layer's cast weights that get no gradient."""
    cast = [operator for operator in kind.operators if operator.kind in _CAST]
    total = sum(operator.weight_bytes for operator in cast)
    return sum(operator.weight_bytes for operator in cast if operator.frozen) / total if total else 0.0


def _cast_items(profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either) -> Whole:
    """Items of weights that are cast.

    Weights that the layer reads beyond its parameters belong to another layer, and are split over the tensor group
    alone; or calls of one module read the same weights (a recurrence).
    """
    item, total = activation_bytes(profile.graph.precision), kind.parameters.total
    read = [operator for operator in kind.operators if operator.kind in _CAST]
    cast = sum(operator.weight_bytes for operator in read) / item
    if 0 < cast <= total:
        return cast * (work.parameters / total)
    return sum(operator.weight_bytes / operator.count for operator in read) / item / strategy.weight_slices


def _largest_gradient(
    profile: Profile, kind: LayerKind, work: LayerWork, strategy: Either, narrow: Flag
) -> tuple[Whole, Whole, Whole]:
    """Bytes of the largest gradient of one weight: in the precision of the gradient buffer; in that of its parameter;
    and together with the gradient in the precision of compute that it is cast from.

    Gradients of embeddings, and of parameters in the precision of compute, are not cast. Without copies of weights
    nothing is, and only the first figure counts.
    """
    if profile.unbuffered or (profile.stack and not profile.copied_bytes):
        return 0, 0, 0
    item, total = activation_bytes(profile.graph.precision), kind.trainable
    width = ITEM_BYTES[profile.parameter_precision]
    trained = [operator for operator in kind.operators if operator.weight_bytes and not operator.frozen]
    largest_weight = max([operator.weight_bytes / operator.count / item for operator in trained], default=0.0)
    embedding = total - sum(operator.weight_bytes for operator in trained) / item
    wrapped = strategy.parameter_shards > 1

    def on_device(items: float) -> Real:
        if items <= 0:  # a layer without weights
            return 0.0
        shared = work.gradient_items * (items / total) if items <= total else items / strategy.weight_slices
        return where(wrapped, 0.0, shared)

    table, weight = on_device(embedding), on_device(largest_weight)
    items = largest(table, weight)
    if not profile.copied_bytes:
        return up(items * width), 0, 0
    cast = largest(table * width, weight * (width + profile.copied_bytes))
    copied = items * profile.copied_bytes
    return up(items * width), up(where(narrow, copied, items * width)), up(where(narrow, copied, cast))
