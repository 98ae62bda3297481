"""Which layers read what others made, as the model's own code passes it on: what must travel between stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import TraceError
from galvatron_lite.model.batch import call_model, map_tensors, resize_batch, tensors_of
from galvatron_lite.model.graph import Layer, Role
from galvatron_lite.model.trace_meta import meta_copy
from galvatron_lite.model.trace_run import explaining

OUTPUT = ""
"""Stands for what the model returns, among readers."""
Reads = Mapping[str, Collection[str]]
"""By path of a layer's module (or ``OUTPUT``), the modules of layers whose results it reads, directly or through code
between layers."""


def reads_of(model: nn.Module, layers: Sequence[Layer], batch: Any) -> Reads:
    """What reads what, seen by running a copy without storages, of two samples; only what takes gradients.

    Returns:
        Nothing where the model cannot be run this way.
    """
    twin, found, names = meta_copy(model), dict[str, set[str]](), dict[int, str]()
    kept: list[Tensor] = []

    def note(path: str, value: Any) -> None:
        sources = (id(leaf) for tensor in tensors_of(value) for leaf in _leaves(tensor))
        found.setdefault(path, set()).update(names[leaf] for leaf in sources if leaf in names)

    def entered(path: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        note(path, (args, kwargs))

    def left(path: str, _module: nn.Module, _args: Any, output: Any) -> Any:
        def fresh(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            leaf = tensor.detach().requires_grad_()
            kept.append(leaf)
            names[id(leaf)] = path
            # no leaf itself: code behind may change it in place
            return leaf * 1

        return map_tensors(output, fresh)

    for path in (path for layer in layers for path in layer.modules):
        module = twin.get_submodule(path)
        module.register_forward_pre_hook(partial(entered, path), with_kwargs=True)
        module.register_forward_hook(partial(left, path))
    try:
        with torch.device("meta"), torch.enable_grad(), explaining("", twin):
            note(OUTPUT, call_model(twin, resize_batch(batch, 2)))
    except TraceError:
        return {}
    return found


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """What a tensor was computed from."""
    seen, waiting = set[Any](), [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(waiting)


def carried(layers: Sequence[Layer], stages: Sequence[Sequence[str]], reads: Reads) -> list[tuple[str, ...]]:
    """For each stage the modules before it whose results must arrive.

    Nothing where what the layer before it returns (or, at the first block, what enters that) is all it needs.

    Args:
        layers: of the model.
        stages: names of each stage's layers.
        reads: see ``Reads``.
    """
    starts = [0, *accumulate(len(names) for names in stages)][:-1]
    return [_arriving(layers[:start], layers[start:], reads) for start in starts]


def _arriving(before: Sequence[Layer], behind: Sequence[Layer], reads: Reads) -> tuple[str, ...]:
    made = [path for layer in before for path in layer.modules]
    readers = [path for layer in behind for path in layer.modules]
    if not before:
        return ()

    def read_by(some: Sequence[str]) -> set[str]:
        return {path for reader in (*some, OUTPUT) for path in reads.get(reader, ())} & set(made)

    needed = read_by(readers)
    enough = not read_by(readers[1:]) if before[-1].role is Role.BEFORE else needed <= {before[-1].modules[-1]}
    return () if enough else tuple(path for path in made if path in needed)
