"""The batch and the loss: how a model is called and what training minimises.

A batch is a mapping (``model(**batch)``), a tuple or list (``model(*batch)``) or one tensor (``model(batch)``). The
samples lie along dim 0 of its tensors. The loss is a mean over samples. Entries that ``forward`` does not take, such as
the labels of ``loss_fn(output, batch)``, are not passed to the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.trace.meta import left_to_the_plan

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, batch)`` returns the scalar mean loss of a model's output."""

ITEMS = "num_items_in_batch"
"""The entry of a batch with the number of labels that count, for losses of transformers' models."""


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run a model on a batch: ``model(**batch)``, ``model(*batch)`` or ``model(batch)``.

    The model's own checkpoints do not recompute (see ``trace.meta.left_to_the_plan``).
    """
    inputs = model_inputs(model, batch)
    with left_to_the_plan():
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return model(*inputs)
        return model(inputs)


def model_inputs(model: nn.Module, batch: Any) -> Any:
    """Return the entries of a batch that the model's ``forward`` takes; only ``loss_fn`` reads the others."""
    kind, parameters = inspect.Parameter, inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if isinstance(batch, Mapping) and kind.VAR_KEYWORD not in kinds:
        named = (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)
        names = {parameter.name for parameter in parameters if parameter.kind in named}
        return {key: value for key, value in batch.items() if key in names}
    if isinstance(batch, (tuple, list)) and kind.VAR_POSITIONAL not in kinds:
        placed = (kind.POSITIONAL_OR_KEYWORD, kind.POSITIONAL_ONLY)
        return batch[: sum(parameter.kind in placed for parameter in parameters)]
    return batch


def check_entries(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> None:
    """Refuse entries of a batch that neither the model nor a loss function takes.

    Raises:
        InputError: names them; without this check, a misspelled entry would be ignored silently.
    """
    inputs = model_inputs(model, batch)
    if loss_fn is not None or inputs is batch or len(inputs) == len(batch):
        return
    surplus = (
        [key for key in batch if key not in inputs] if isinstance(batch, Mapping) else range(len(inputs), len(batch))
    )
    remedy = "Rename the entry, or pass loss_fn, which is called with the output and the batch."
    raise InputError(
        "batch", ", ".join(map(str, surplus)), f"{type(model).__name__}.forward takes no such entry. {remedy}"
    )


def batch_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the batch of a call: ``parallel(batch)``, ``parallel(x, y)`` or ``parallel(x=x, y=y)``."""
    return args[0] if len(args) == 1 and not kwargs else (kwargs or args)


def loss_of(output: Any, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """Return the scalar loss of a model's output.

    Args:
        output: of the model.
        batch: passed on to ``loss_fn``.
        loss_fn: computes the loss; by default it is a scalar output itself, else ``.loss``, else ``["loss"]``.

    Raises:
        InputError: no scalar tensor can be found.
    """
    if loss_fn is not None:
        loss: Any = loss_fn(output, batch)
    elif isinstance(output, Tensor):
        loss = output
    else:
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    remedy = "Return a scalar tensor (or an output with .loss), give the labels in the batch, or pass loss_fn."
    returned = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
    raise InputError("loss", returned, remedy)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a nest of mappings, tuples, lists and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy a nest of mappings, tuples, lists and dataclasses with each tensor replaced by ``change(tensor)``.

    Named tuples and dataclasses (including mappings that are dataclasses: transformers' outputs) keep their type; other
    mappings become dicts. Dataclasses without tensors are not copied.
    """
    return map_places(value, lambda _, tensor: change(tensor))


def map_places(value: Any, change: Callable[[str, Tensor], Tensor], place: str = "") -> Any:
    """``map_tensors`` with ``change(place, tensor)``: the path to the tensor, keys and indices with dots between."""
    if isinstance(value, Tensor):
        return change(place, value)
    if isinstance(value, Mapping):
        items = {key: map_places(item, change, f"{place}.{key}") for key, item in value.items()}
        return type(value)(**items) if is_dataclass(value) else items
    if isinstance(value, (tuple, list)):
        mapped = [map_places(item, change, f"{place}.{index}") for index, item in enumerate(value)]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if is_dataclass(value) and any(True for _ in tensors_of(value)):
        changed: Any = copy(value)
        for field in fields(value):
            item = map_places(getattr(value, field.name), change, f"{place}.{field.name}")
            object.__setattr__(changed, field.name, item)  # it may be frozen
        return changed
    return value


def places(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in a nest with their paths; see ``map_places``."""
    tensors: list[tuple[str, Tensor]] = []

    def note(place: str, tensor: Tensor) -> Tensor:
        tensors.append((place, tensor))
        return tensor

    map_places(value, note)
    return iter(tensors)


def batch_size(batch: Any) -> int:
    """Samples in a batch: dim 0 of its first tensor that has dims."""
    for tensor in tensors_of(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise InputError("batch", type(batch).__name__, "Give at least one tensor whose dim 0 runs over the samples.")


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop`` of a batch, in the memory of the batch.

    Tensors whose dim 0 is the batch size are sliced; everything else passes through. A model may write into its slice
    while others, which share no version counter with it, wait for their backward.
    """
    samples = batch_size(batch)
    if not 0 <= start <= stop <= samples:
        raise InputError("samples", (start, stop), f"The batch has {samples} samples; take a range inside it.")

    def rows(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != samples:
            return tensor
        part = tensor[start:stop]
        return part if part.requires_grad else part.data

    return map_tensors(batch, rows)


def with_share_of_items(batch: Any, share: float) -> Any:
    """Scale ``num_items_in_batch`` of a part of a batch, so that the mean of the parts' losses is the batch's loss.

    Models of transformers divide the sum of their tokens' losses by this entry, the number of labels that count in the
    batch, whichever part they are in.

    Args:
        batch: the part; only a mapping may have such an entry.
        share: of the batch's samples that are in the part.
    """
    count = batch.get(ITEMS) if isinstance(batch, Mapping) else None
    return batch if count is None else {**batch, ITEMS: count * share}


def resize_batch(batch: Any, samples: int) -> Any:
    """Return a batch on the meta device, shaped like the example, with another number of samples."""
    size = batch_size(batch)

    def resized(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == size:
            shape[0] = samples
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return map_tensors(batch, resized)


def move_batch(batch: Any, device: torch.device | str) -> Any:
    """Copy all tensors of a batch to another device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def sequence_length(batch: Any) -> int:
    """Tokens per sample: dim 1 of the batch's first integer tensor of two dims; 1 if there is none."""
    integer: Sequence[Tensor] = [t for t in tensors_of(batch) if t.dim() == 2 and not t.is_floating_point()]
    return integer[0].shape[1] if integer else 1
