"""The model that a plan is verified for: built when it is needed, whole and without storages, or small and real."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.errors import GalvatronError, InputError
from galvatron_lite.model.batch import LossFn, resize_batch
from galvatron_lite.model.example import example_batch
from galvatron_lite.verify.named import build_named

ModelParts = tuple[nn.Module, Any, LossFn | None]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be built again and again."""

    name: str  # for people
    # builds the model on the current default device, with an example batch and its ``loss_fn(output, batch)``; None
    # for what it has not: a model without a batch makes its own
    make: Callable[[], ModelParts]
    configured: bool = False  # whether it is known that the model is made of its ``config`` alone

    def on_meta(self) -> ModelParts:
        """What ``make`` gives, the model without storages.

        The batch may be without values, too. Where the factory needs values (of files, say) it is called as it is.
        """
        try:
            with torch.device("meta"):
                model, batch, loss_fn = self.make()
        except GalvatronError:
            raise
        except Exception:  # whatever a user's function does that there are no shapes for
            model, batch, loss_fn = self.make()
        return emptied(model), batch, loss_fn


def emptied(model: nn.Module) -> nn.Module:
    """The model with its storages dropped, in place; what is shared stays shared, which ``Module.to`` would end."""
    fresh: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                bare = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                setattr(module, name, fresh.setdefault(id(parameter), bare))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, fresh.setdefault(id(buffer), torch.empty_like(buffer, device="meta")))
    return model


def example_of(parts: ModelParts, samples: int | None = None) -> Any:
    """An example batch of a model: the one that came with it, or its own; resized, then without storages."""
    model, batch, _ = parts
    found = example_batch(model) if batch is None else batch
    return found if samples is None else resize_batch(found, samples)


def named_source(name: str, sequence: int | None = None) -> ModelSource:
    """A model of the zoo or of ``configs/models``; see ``named.build_named``."""
    return ModelSource(name, lambda: (build_named(name, sequence), None, None), configured=True)


def factory_source(factory: Callable[[], Any], name: str = "the model") -> ModelSource:
    """What a user's function returns: a model, (model, batch) or (model, batch, loss_fn)."""

    def make() -> ModelParts:
        made = factory()
        model, batch, loss_fn = (*made, None, None)[:3] if isinstance(made, tuple) else (made, None, None)
        if not isinstance(model, nn.Module):
            raise InputError("MODEL", name, f"It returned {type(model).__name__}, not an nn.Module.")
        return model, batch, loss_fn

    return ModelSource(name, make)


def module_source(model: nn.Module, batch: Any = None, loss_fn: LossFn | None = None) -> ModelSource:
    """A model that is there already; it is copied and not changed. Without storages, none of its values is touched."""

    def make() -> ModelParts:
        bare = torch.get_default_device().type == "meta"
        return _meta_copy(model) if bare else copy.deepcopy(model), batch, loss_fn

    return ModelSource(type(model).__name__, make)


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no storages, made without reading any."""
    fresh: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for one in model.parameters():
        fresh[id(one)] = nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
    return copy.deepcopy(model, fresh)
