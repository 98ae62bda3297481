"""Runs of layers of about equal time, for pipelines. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from galvatron_lite.errors import InputError
from galvatron_lite.oracle.layers import Network, OracleLayer

Stages = list[list[OracleLayer]]


def balanced(network: Network, devices: int) -> Stages:
    """Layers in as many runs as devices, whose slowest takes the least time (forward and backward).

    Raises:
        InputError: more devices than layers.
    """
    layers = network.layers
    if devices > len(layers):
        raise InputError(
            "--gpus", devices, f"{network.name} has {len(layers)} layers; a pipeline takes at most one each."
        )
    seconds = [network.seconds_of(one) for one in layers]
    sizes = least_runs(seconds, devices)
    ends = [sum(sizes[: number + 1]) for number in range(devices)]
    return [list(layers[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def least_runs(weights: Sequence[float], runs: int) -> list[int]:
    """Lengths of non-empty consecutive runs, of which the heaviest is as light as can be.

    Halves the interval that holds the least limit until no number lies between.
    """
    low, high = max(weights), sum(weights)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if len(_filled(weights, middle, runs)) <= runs else (middle, high)
    return _filled(weights, high if len(_filled(weights, low, runs)) > runs else low, runs)


def _filled(weights: Sequence[float], limit: float, runs: int) -> list[int]:
    """Runs up to the limit each, cut sooner where what is left would not give every run a member."""
    sizes, held = [0], 0.0
    for place, weight in enumerate(weights):
        left = len(weights) - place
        if sizes[-1] and (held + weight > limit or left <= runs - len(sizes)):
            sizes, held = [*sizes, 0], 0.0
        sizes[-1] += 1
        held += weight
    return sizes
