"""Wrappers that a strategy puts around the modules of a split layer, and rules for functions inside them."""

from __future__ import annotations

from torch import nn

from galvatron_lite.parallelism.context.rules import rules_of
from galvatron_lite.parallelism.offload.apply import ActivationOffloader, offload_activations
from galvatron_lite.parallelism.recompute.apply import apply_recompute
from galvatron_lite.parallelism.sharded.tensor import Rules
from galvatron_lite.parallelism.spatial.rules import PIXELS_RULES
from galvatron_lite.parallelism.strategy import Strategy


def wrap_forward(module: nn.Module, strategy: Strategy, offloader: ActivationOffloader | None = None) -> None:
    """Make a module recompute and offload its saved activations, in place. Its hooks stay outside.

    Args:
        module: of a layer.
        strategy: of the layer.
        offloader: copies activations to host memory; None: nothing is offloaded.
    """
    apply_recompute(module, strategy.recompute)
    if strategy.offloads_activations and offloader is not None:
        offload_activations(module, offloader)


def rules_under(strategy: Strategy) -> Rules:
    """Return the rules of functions on sharded tokens or pixels."""
    return rules_of(strategy) if strategy.context > 1 else PIXELS_RULES
