"""Graphs of image networks from totals: multiply-adds, activations, parameters.

The graph has equal layers, each a dense convolution with normalisation and activation, whose multiply-adds, outputs and
weights add up to the totals. Multiply-adds over activations is the inner extent of the mean convolution (each output of
a convolution costs its inner extent in multiply-adds), so the arithmetic intensity is that of the network. Other work
(residual sums, gates, pooling, copies, softmax) counts as passes over the activations.

Radosavovic et al. 2020 (arXiv:2003.13678, section 3.3 and figure 12) show that activations, the outputs of all
convolutions, predict run time better than multiply-adds; here both enter through the rooflines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from galvatron_lite.errors import InputError
from galvatron_lite.files import Strict
from galvatron_lite.limits import Name
from galvatron_lite.model.graph import ModelGraph, Operator, OperatorClass
from galvatron_lite.model.shapes.images.flow import ImageFlow
from galvatron_lite.model.shapes.images.network import NetworkBuilder, classify
from galvatron_lite.model.shapes.records import ShapeCall
from galvatron_lite.model.shapes.tape import memory_operator

LAYERS = 50  # convolutions of a typical network; only launches depend on it

WIDTH = 256  # output channels of the mean convolution: tile padding is small from here on

BESIDE = (3, 4)
"""[Empirical] times that everything besides convolution, norm and activation reads or writes the activations, forward
and backward: residual sums, gates, pooling, copies, depthwise kernels' repeated reads."""


KEPT_BY_NORMS = {"batch": 1.0, "layer": 0.8, "inplace": 0.0}
"""Share of outputs that are kept twice, also as the next layer's input, by the norm that follows. Batch normalisation
keeps its input; networks on tokens normalise and activate only some outputs [Empirical: the largest share with which
all runs that fit into 24 GB do fit, results/benchmark-train-amp-*-rtx3090 of pytorch-image-models]; activated batch
normalisation in place keeps only its output (Rota Bulo et al. 2018, arXiv:1712.02616)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTotals(Strict):
    """Totals of an image network for one sample."""

    arch: Literal["image"] = "image"
    name: Name = ""  # name, source: for people
    source: str = ""
    macs: float  # multiply-adds of forward
    activations: float  # outputs of all convolutions and linear layers
    parameters: float  # items
    image_size: int = 224  # pixels along each side
    channels_last: bool = False  # whether pictures are channels last in memory
    tokens: bool = False  # whether layers are linear over tokens, not convolutions, so that no layout is converted
    inplace: bool = False  # whether normalisation and activation work in place


def summary_graph(totals: ImageTotals, precision: str) -> ModelGraph:
    """Return equal layers that add up to the totals, between an empty stem and a classifier.

    Raises:
        InputError: a total is not above 0.
    """
    for field in ("macs", "activations", "parameters"):
        if getattr(totals, field) <= 0:
            raise InputError(field, getattr(totals, field), "Give the network's total, above 0.")
    outputs = max(WIDTH, int(totals.activations / LAYERS))
    net = NetworkBuilder(totals.name, precision, WIDTH, (1, max(1, outputs // WIDTH)))
    net.stem(lambda _: None)
    for _ in range(LAYERS):
        net.block(_mean_layer, totals=totals)
    return net.end(classify)


def _mean_layer(flow: ImageFlow, totals: ImageTotals) -> None:
    tape, x = flow.tape, flow.value
    inner = max(1, round(totals.macs / totals.activations))
    out = tape.value(x.items)
    weight = max(1, round(totals.parameters / LAYERS))
    tape.count(weight)
    flops = 2 * round(totals.macs / LAYERS)
    shape = (inner, WIDTH, 1, *flow.extent, 1, 1, 1, 1)
    operator = Operator(
        "conv", OperatorClass.CONVOLUTION, shape, 1, flops, 2 * flops, 2 * x.bytes, 4 * x.bytes,
        weight * tape.item_bytes, channels_last=totals.channels_last or totals.tokens,
    )  # fmt: skip
    flow.value = tape.record(ShapeCall((x,), out, saved=(x,), anchor=(out,)), operator)
    flow.normalise()
    share = KEPT_BY_NORMS["inplace" if totals.inplace else "layer" if totals.tokens else "batch"]
    call, operator = tape.records[-1]
    kept = tape.value(round(flow.value.items * share))
    tape.records[-1] = (replace(call, saved=(kept,)), operator)
    flow.activate()
    tape.extra(memory_operator("beside", flow.value, *(times * flow.value.bytes for times in BESIDE)))
