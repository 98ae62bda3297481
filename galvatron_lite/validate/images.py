"""Published runs of image networks as graphs: layer by layer where the name tells the network, else from totals."""

from __future__ import annotations

import re
from functools import lru_cache

from galvatron_lite.model.graph import ModelGraph
from galvatron_lite.model.kernels import Kernels
from galvatron_lite.model.shapes.images.fusion import fused_norms
from galvatron_lite.model.shapes.images.layout import channels_last
from galvatron_lite.model.shapes.images.names import (
    builder_of,
    canonical,
    normalises_inplace,
    once_a_batch,
    shape_of_name,
    works_on_tokens,
)
from galvatron_lite.model.shapes.images.partition import partitioned
from galvatron_lite.model.shapes.images.summary import ImageTotals, summary_graph
from galvatron_lite.model.shapes.registry import build_graph, load_model
from galvatron_lite.stacks.schema import Stack
from galvatron_lite.units import ITEM_BYTES
from galvatron_lite.validate.results import Skipped
from galvatron_lite.validate.rows import PublishedRun

_TOTALS = re.compile(r"fwd gmacs ([\d.]+), m-activations ([\d.]+)")
_BALANCE = re.compile(r"layer balance \[(\d+(?:, *\d+)*)\]")
_LAST = re.compile(r"\bnhwc\b|channels[ _-]last")

_LAST_STACKS = ("tensorflow", "mxnet", "paddle", "oneflow", "pytorch-ddp", "mxnet-ngc")
"""Software whose mixed-precision recipes keep pictures channels last: NVIDIA DeepLearningExamples (``--memory-format
nhwc``, ``--data-layout NHWC``, MXNet's NHWC input layout) and TensorFlow's layout optimizer on tensor cores."""


_SHIPPED = ("alexnet",)
"""Networks of ``configs/models`` that no rule of names knows."""

_LAST_RECIPES = (("pytorch-ddp", "ssd300_resnet50"),)
"""Recipes that keep pictures channels last in every precision (DeepLearningExamples, PyTorch/Detection/SSD, main.py:
``--data-layout`` is ``channels_last``)."""

_FIRST_RECIPES = (("pytorch-ddp", "nnunet_2d"), ("pytorch-ddp", "nnunet_3d"))
"""Recipes that keep them channels first in every precision (PyTorch/Segmentation/nnUNet: PyTorch's own layout)."""

_PARTITIONING = ("torchgpipe",)
"""Software that recomputes a partition of its pipeline as a whole (``partitioned``)."""


def image_model(run: PublishedRun, stack: Stack) -> ModelGraph | Skipped:
    """The graph of a run's network, or why there is none."""
    if not run.model:
        return Skipped("no model named")
    precision = _item_precision(run.precision)
    side = run.image_size or 224
    last = _LAST.search(run.remarks) is not None or (precision == "fp16" and stack.name in _LAST_STACKS)
    recipe = (stack.name, canonical(run.model))
    last = (last or recipe in _LAST_RECIPES) and recipe not in _FIRST_RECIPES
    graph = _named(canonical(run.model), side, precision, stack.kernels, last)
    if graph is not None and ("xla" in run.remarks or (stack.fuses_norms and last and precision == "fp16")):
        graph = _together(graph)
    if graph is not None and stack.name in _PARTITIONING and (balance := layer_balance(run.remarks)):
        return _partitioned(canonical(run.model), side, precision, stack.kernels, last, balance)
    found = _TOTALS.search(run.remarks)
    if graph is None and found and run.params_b:
        totals = (float(found[1]) * 1e9, float(found[2]) * 1e6, run.params_b * 1e9)
        graph = _summed(canonical(run.model), totals, side, precision, last) if min(totals) > 0 else None
    if graph is None:
        return Skipped("image network known neither by name nor by totals")
    return graph


def layer_balance(notes: str) -> tuple[int, ...]:
    """Layers a stage where a run says so (``layer balance [9, 15]``); empty where it does not."""
    found = _BALANCE.search(notes)
    return tuple(int(count) for count in found[1].split(",")) if found else ()


def _item_precision(text: str | None) -> str:
    """A precision of the same item size as the run's: activations of TF32 runs are fp32."""
    said = (text or "bf16").lower()
    return "fp16" if re.search("fp16|bf16|fp8", said) or "32" not in said else "fp32"


@lru_cache(maxsize=2048)
def _named(name: str, side: int, precision: str, kernels: Kernels, last: bool) -> ModelGraph | None:
    if last:
        graph = _named(name, side, precision, kernels, False)
        return None if graph is None else channels_last(graph)
    if (shape := shape_of_name(name, side)) is not None:
        return build_graph(shape, precision=precision, kernels=kernels)
    if name in _SHIPPED:
        return load_model(name, overrides={"image_size": side}, precision=precision)
    builder = builder_of(name)
    return builder(side, 1000, precision, ITEM_BYTES[precision]) if builder else None


_FUSED: dict[int, tuple[ModelGraph, ModelGraph]] = {}


def _together(graph: ModelGraph) -> ModelGraph:
    if id(graph) not in _FUSED:
        _FUSED[id(graph)] = (graph, fused_norms(graph))
    return _FUSED[id(graph)][1]


@lru_cache(maxsize=512)
def _partitioned(
    name: str, side: int, precision: str, kernels: Kernels, last: bool, balance: tuple[int, ...]
) -> ModelGraph | Skipped:
    graph = _named(name, side, precision, kernels, last)
    return Skipped("unknown network") if graph is None else partitioned(graph, balance)


@lru_cache(maxsize=2048)
def _summed(name: str, totals: tuple[float, float, float], side: int, precision: str, last: bool) -> ModelGraph:
    macs, activations, parameters = totals
    once = once_a_batch(name, side)
    activations, macs = max(activations - once[0], activations / 10), max(macs - once[1], macs / 10)
    shape = ImageTotals(
        name=name, macs=macs, activations=activations, parameters=parameters, image_size=side, channels_last=last,
        tokens=works_on_tokens(name), inplace=normalises_inplace(name),
    )  # fmt: skip
    return summary_graph(shape, precision, ITEM_BYTES[precision])
