"""Why the default model is far from a measured row: what its neighbours say, else what is known of its software."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scored:
    """A measured row and how near each kind of formulas comes; None where one has no figure."""

    source: str  # the table or logs it is from
    strategy: str  # the oracle's word
    name: str  # for people
    galvatron: float | None  # accuracy
    paradl: float | None
    # model, device, precision, batch of a replica: what rows of the same experiment have in common
    setting: tuple[object, ...]
    devices: int  # how many
    seconds: float  # measured, of an iteration or epoch
    batch: int  # samples a device, 0 where devices share them
    ratio: float  # predicted / measured
    note: str = ""  # what the row says of itself


SLOWER = 1.2
"""A row that takes so many times longer than one on more devices, with as many samples a device, was held up."""


def reason_of(one: Scored, rows: Sequence[Scored]) -> str:
    """The reason of a row's error, for people."""
    held_up = [
        other
        for other in rows
        if (other.source, _group(other), other.setting) == (one.source, _group(one), one.setting)
        and other.devices > one.devices
        and one.seconds > SLOWER * other.seconds
        and one.batch
    ]
    if held_up:
        best = min(held_up, key=lambda other: other.seconds)
        return f"the same on {best.devices} GPUs took {best.seconds:.3g} s, this {one.seconds:.3g} s"
    found = next((why for wanted, why in _REASONS if _meets(one, wanted)), "")
    return found or ("predicted too slow" if one.ratio > 1 else "predicted too fast") + ", cause not known"


def _group(one: Scored) -> str:
    """Its strategy; one GPU is data parallelism on one."""
    return "data" if one.strategy == "serial" else one.strategy


def _meets(one: Scored, wanted: dict[str, str]) -> bool:
    """Whether a row is of a source, a strategy, a name with these words, and predicted ``slow`` or ``fast``."""
    if wanted.get("sign", side := "slow" if one.ratio > 1 else "fast") != side:
        return False
    named = all(word in one.name for word in wanted.get("words", "").split(","))
    return (
        named
        and wanted.get("source", one.source) == one.source
        and wanted.get("strategy", one.strategy) == one.strategy
    )


_SHARED = "layer-wise collectives over adapters"
_REASONS: tuple[tuple[dict[str, str], str], ...] = (
    (
        {"words": "cosmoflow-512"},
        "a sample needs 60 GB by the authors' formula, a V100 has 16; what was moved out of it is not known",
    ),
    ({"words": "cosmoflow-256"}, "early layers only are split, and reading volumes is not counted"),
    (
        {"source": "report", "strategy": "data+spatial", "words": "vgg16"},
        "2.07 s of communication an iteration: messages (0.2 s) and 0.55 GB of gradients (0.2 s) explain a fifth",
    ),
    (
        {"source": "logs", "strategy": "data+spatial", "words": "vgg16"},
        "2.5 s in one node: 0.55 GB of gradients went over MPI at 0.4 GB/s, where ResNet-50's took at most 0.1 s; "
        "software of an early run",
    ),
    (
        {"strategy": "data+spatial", "words": "resnet50", "source": "logs"},
        "3 ms for each message is the report's; this run says about 2 ms",
    ),
    (
        {"strategy": "data+spatial", "words": "resnet50"},
        "the report's compute is no whole iteration; one process of a node reads for all, which is not counted",
    ),
    (
        {"strategy": "data+filter", "source": "logs"},
        "all-gathers by MPI, counted with as many messages as a ring has; fewer were needed",
    ),
    (
        {"strategy": "data+filter", "sign": "slow"},
        "four sums side by side reach 4 GB/s each here, 2.5 GB/s are counted (two adapters without GPUDirect)",
    ),
    (
        {"strategy": "data+filter"},
        "sums between nodes slow down by two thirds from 32 to 256 GPUs, more than the tree of switches says",
    ),
    (
        {"strategy": "filter", "words": "vgg16"},
        f"{_SHARED}: 1.8 GB/s, where ResNet-50's on the same 32 GPUs reach 12 GB/s; one link cannot give both",
    ),
    (
        {"strategy": "filter"},
        f"{_SHARED}: 12 GB/s on 32 GPUs, half of it on 64; the printed parts of the latter do not add up",
    ),
    (
        {"strategy": "channel", "words": "vgg16"},
        "1.2 s of compute, five times what filters took and as much as five GPUs' work of a whole model; not explained",
    ),
    ({"strategy": "channel"}, f"{_SHARED}: all-reduces faster than gradients' on the same adapters"),
    (
        {"source": "dle-cnn", "words": "resnet50v1.5,amp"},
        "32 samples a GPU: 5 ms of host time a step is counted, graph mode with XLA needs less",
    ),
    (
        {"source": "dle-cnn", "words": "resnext101,amp"},
        "grouped convolutions of 4 channels: kernels of V100 are faster than those of the fit (RTX 3090)",
    ),
    (
        {"source": "dle-cnn", "words": "resnext101"},
        "grouped convolutions of 4 channels: one rate for all devices and precisions",
    ),
    (
        {"source": "dle-cnn", "words": "ssd300,fp32"},
        "measured at 12.9 TFLOP/s of direct convolution on 15.7: Winograd's gain is taken as 1.5 everywhere",
    ),
    (
        {"source": "dle-cnn", "words": "efficientnet,amp", "sign": "slow"},
        "V100 channels last, B4 above all: depthwise rates are those of an RTX 3090",
    ),
    (
        {"source": "dle-cnn", "words": "efficientnet,amp", "sign": "fast"},
        "likely reading pictures holds all GPUs of a node up: a GPU alone is faster by a quarter",
    ),
    (
        {"source": "dle-cnn", "words": "efficientnet"},
        "depthwise convolutions channels first in TF32: rates are those of 16 bits on an RTX 3090",
    ),
    (
        {"source": "dle-cnn", "words": "nnunet-3d", "sign": "fast"},
        "convolutions of volumes are counted at the rate of pictures'; no constant was chosen on this network",
    ),
    (
        {"source": "dle-cnn", "words": "unet_medical", "sign": "fast"},
        "TensorFlow 1 without XLA, small batches; no constant was chosen on this network",
    ),
    (
        {"source": "dle-cnn", "words": "nnunet-2d", "sign": "fast"},
        "instance normalisation as one kernel, likely several; no constant was chosen on this network",
    ),
    ({"strategy": "data", "words": "vgg16, 4 GPUs"}, "50 ms beyond one GPU, of which NVLink explains 7"),
    ({"strategy": "data", "source": "logs"}, "reading ImageNet is part of the iteration"),
    ({"source": "torchgpipe"}, "the most uneven balance of layers, which the partition's own recomputation depends on"),
)
"""Source, strategy and words of a row's name, and the reason; the first that fits counts."""
