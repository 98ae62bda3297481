"""Published runs of image networks: their graphs, and their steps against measurements that nothing was fitted to."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from galvatron_lite.model.graph import ModelGraph, Operator, OperatorClass
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.model import image_model, layer_balance
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun, read_runs, run_from_data

from .runs import predicted as outcome
from .runs import skipped

RUN = PublishedRun(
    family="made-up", run_id="made-up-1", framework="timm benchmark.py (PyTorch 1.12, cu113)", model="resnet50",
    arch="vit/cnn", image_size=224, gpu="RTX 3090", gpus_per_node=1, n_gpus=1, dp=1, tp=1, pp=1, cp=1, micro_batch=64,
    global_batch=64, grad_accum=1, act_ckpt="none", precision="amp-fp16", flash_attn=False, optimizer="sgd (momentum)",
    quality="A", notes="layout nchw",
)  # fmt: skip

# Name, side, batch, layout, seconds of a step: github.com/huggingface/pytorch-image-models,
# results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv; of the half of the models that no constant of
# roofline_convolution was fitted on (odd CRC-32 of the name).
MEASURED = [
    ("mobilenetv2_100", 224, 512, "nchw", 0.279455),
    ("regnety_032", 224, 384, "nchw", 0.551265),
    ("resnet152", 224, 192, "nchw", 0.518807),
    ("convnext_base_in22ft1k", 224, 128, "nchw", 0.378967),
    ("seresnet152d", 256, 96, "nchw", 0.396285),
    ("resnetrs270", 256, 64, "nchw", 0.526749),
    ("mobilenetv2_100", 224, 512, "nhwc", 0.221348),
    ("resnet152", 224, 192, "nhwc", 0.382897),
]


def run(**changes: Any) -> PublishedRun:
    return replace(RUN, **changes)


def graph_of(given: PublishedRun) -> ModelGraph:
    graph = image_model(given, match_stack(given.framework))
    assert isinstance(graph, ModelGraph)
    return graph


def convolutions(graph: ModelGraph) -> list[bool]:
    operators = [operator for kind in graph.kinds.values() for operator in kind.operators]
    return [operator.channels_last for operator in operators if operator.kind is OperatorClass.CONVOLUTION]


def predicted(name: str, side: int, batch: int, layout: str) -> float:
    changes = {"image_size": side, "micro_batch": batch, "global_batch": batch, "notes": f"layout {layout}"}
    return outcome(run(model=name, **changes)).step_seconds


def test_measured_steps_are_met() -> None:
    errors = [abs(predicted(*point[:4]) / point[4] - 1) for point in MEASURED]
    assert median(errors) < 0.1
    assert max(errors) < 0.35


def test_the_faster_layout_is_reported() -> None:
    """Dense networks gain from channels last; grouped ones without kernels of their own lose."""
    assert predicted("resnet152", 224, 192, "nhwc") < 0.85 * predicted("resnet152", 224, 192, "nchw")
    assert predicted("regnety_032", 224, 384, "nhwc") > predicted("regnety_032", 224, 384, "nchw")


def test_the_layout_is_read_from_notes_or_the_software() -> None:
    assert not any(convolutions(graph_of(run())))
    assert all(convolutions(graph_of(run(notes="layout nhwc; 12 ms"))))
    assert all(convolutions(graph_of(run(framework="TensorFlow", notes=None))))
    assert not any(convolutions(graph_of(run(framework="TensorFlow", notes=None, precision="fp32"))))


@pytest.mark.parametrize(
    ("precision", "item_bytes"), [("amp-fp16", 2), ("bf16", 2), (None, 2), ("fp32", 4), ("tf32", 4)]
)
def test_items_have_the_size_of_the_precision(precision: str | None, item_bytes: int) -> None:
    graph = graph_of(run(precision=precision))
    assert graph.kinds["before"].input_bytes == 3 * 224 * 224 * item_bytes


def test_an_unknown_name_is_taken_from_its_totals() -> None:
    given = run(
        model="made_up_net", params_b=0.02, notes="layout nhwc; fwd GMACs 4.100, M-activations 11.10 at this size"
    )
    graph = graph_of(given)
    assert sum(graph.kind_of(layer).flops for layer in graph.layers) == pytest.approx(2 * 4.1e9, rel=0.01)
    assert all(convolutions(graph))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"model": "made_up_net"},
        {"model": "made_up_net", "notes": "fwd GMACs 4.1, M-activations 11.1"},
        {"model": "made_up_net", "params_b": 0.1, "notes": "fwd GMACs 0.000, M-activations 0.00"},
    ],
)
def test_what_cannot_be_represented_is_skipped(changes: dict[str, Any]) -> None:
    given = run(**changes)
    with pytest.raises(SkipError):
        image_model(given, match_stack(given.framework))


def test_equal_runs_share_their_graph() -> None:
    assert graph_of(run()) is graph_of(run(run_id="made-up-2", micro_batch=32))


GPIPE = replace(
    RUN, framework="torchgpipe 0.0.5 (PyTorch 1.3)", model="amoebanet-d-L18-D256", arch="cnn", gpu="Tesla P40-24GB",
    gpus_per_node=8, intra_link="PCIe 3.0", pp_schedule="gpipe", act_ckpt="full except last micro-batch",
    precision="fp32", optimizer="sgd",
)  # fmt: skip

# GPUs, chunks, samples of a chunk, layers a partition, images a second: Kim et al. 2020 (arXiv:2004.09910), table 2,
# github.com/kakaobrain/torchgpipe, docs/benchmarks.rst.
PARTITIONED = [
    (2, 4, 64, "[9, 15]", 41.133), (2, 32, 40, "[9, 15]", 47.386), (4, 32, 36, "[3, 6, 7, 8]", 72.412),
    (8, 4, 120, "[2, 2, 2, 3, 3, 4, 4, 4]", 70.065), (8, 32, 40, "[2, 2, 2, 3, 3, 4, 4, 4]", 132.413),
]  # fmt: skip


def piped(gpus: int, chunks: int, samples: int, balance: str) -> PublishedRun:
    return replace(
        GPIPE, n_gpus=gpus, pp=gpus, micro_batch=samples, global_batch=chunks * samples, grad_accum=chunks,
        notes=f"flattened-sequential layer balance {balance}; ",
    )  # fmt: skip


@pytest.mark.parametrize(("gpus", "chunks", "samples", "balance", "rate"), PARTITIONED)
def test_pipelines_of_partitions_are_met(gpus: int, chunks: int, samples: int, balance: str, rate: float) -> None:
    """What was run fits: of a chunk that waits only what enters its partition is kept."""
    found = outcome(piped(gpus, chunks, samples, balance))
    assert found.step_seconds == pytest.approx(chunks * samples / rate, rel=0.2)
    assert 0.4 * found.capacity < found.device_memory < found.capacity


def test_a_balance_is_one_block_a_partition() -> None:
    graph = graph_of(piped(4, 4, 90, "[3, 6, 7, 8]"))
    assert [layer.name for layer in graph.layers[1:-1]] == [f"partitions.{place}" for place in range(4)]
    assert len(graph_of(replace(GPIPE, notes=None)).layers) == 24


@pytest.mark.parametrize(
    ("said", "balance"),
    [("layer balance [9, 15]; x", (9, 15)), ("layer balance [24]", (24,)), ("layer balance none", ()), ("", ())],
)
def test_balances_are_read(said: str, balance: tuple[int, ...]) -> None:
    assert layer_balance(said) == balance


def test_what_is_made_once_a_batch_does_not_grow_with_it() -> None:
    """Swin V2's positions: 12 blocks x 144^2 pairs x 384 of the published 161 million activations."""
    given = run(
        model="swinv2_cr_tiny_384", image_size=384, params_b=0.0283,
        notes="layout nchw; fwd gmacs 15.340, m-activations 161.01",
    )  # fmt: skip
    graph = graph_of(given)
    outputs = sum(operator.moved for operator in _convolutions_of(graph)) / 4
    assert outputs / 1e6 == pytest.approx(161.01 - 12 * 144**2 * 384 / 1e6, rel=0.01)


def _convolutions_of(graph: ModelGraph) -> list[Operator]:
    kinds = [graph.kind_of(layer) for layer in graph.layers]
    return [operator for kind in kinds for operator in kind.operators if operator.kind is OperatorClass.CONVOLUTION]


@pytest.mark.parametrize(
    ("model", "side", "batch", "more"),
    [
        ("resnet50", 224, 512, None), ("vgg19", 224, 384, None), ("vit_large_patch14_224", 224, 48, 64),
        ("convnext_large", 224, 96, 128), ("efficientnet_b5", 456, 32, 48),
    ],
)  # fmt: skip
def test_the_largest_batch_that_ran_is_predicted_to_fit_and_the_next_not_to(
    model: str, side: int, batch: int, more: int | None
) -> None:
    """What did not run out of 24 GB (results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv), and what did."""
    for samples, fits in ((batch, True), (more, False)):
        if samples is not None:
            found = outcome(run(model=model, image_size=side, micro_batch=samples, global_batch=samples))
            assert (found.device_memory <= found.capacity) is fits
            assert found.device_memory > 0.6 * found.capacity


SUBMITTED = read_runs(Path(__file__).parents[2] / "profiles" / "published" / "mlperf.jsonl")


@pytest.mark.parametrize(("family", "count"), [("mlperf-resnet50", 23), ("mlperf-unet3d", 14)])
def test_submissions_to_mlperf_that_nothing_was_fitted_to(family: str, count: int) -> None:
    runs = [given for given in SUBMITTED if given.family == family]
    assert len(runs) == count
    errors = [abs(outcome(given).step_seconds / (given.iter_time_s or 0) - 1) for given in runs]
    assert fmean(errors) < 0.2


@pytest.mark.parametrize(
    ("left_out", "changes"),
    [
        ({"dp", "micro_batch"}, {"model": "3D U-Net", "framework": "NGC MXNet 22.04"}),
        ({"arch", "image_size"}, {"model": "UNet-3D", "precision": "float16", "gpu": "NVIDIA A100-SXM4-80GB (400W)"}),
    ],
)
def test_submissions_in_other_spellings_are_predicted_alike(left_out: set[str], changes: dict[str, Any]) -> None:
    for given in (SUBMITTED[23], SUBMITTED[29]):  # data parallel, and with samples split over devices
        stated = {name: value for name, value in asdict(given).items() if value is not None and name not in left_out}
        respelled = run_from_data(stated | changes)
        assert outcome(respelled).step_seconds == pytest.approx(outcome(given).step_seconds)


def test_why_submissions_are_not_scored() -> None:
    counted_too = run_from_data(asdict(replace(SUBMITTED[25], n_gpus=72, dp=None, micro_batch=None)))
    assert "global_batch: 56" in skipped(counted_too).detail
    assert "only evaluate" in skipped(counted_too).detail
    assert "model: 'resnet' cannot be used" in skipped(run(model="resnet")).detail


def test_parameters_of_mlperfs_u_net() -> None:
    """Two convolutions a level without bias, norms of two figures a channel, transposed convolutions with bias."""
    widths = (32, 64, 128, 256, 320, 320)
    pairs = [(1, 32), (32, 32)]
    for above, below in pairwise(widths):
        pairs += [(above, below), (below, below), (2 * above, above), (above, above)]
    convolved = sum(27 * inputs * outputs + 2 * outputs for inputs, outputs in pairs)
    up = sum((8 * below + 1) * above for above, below in pairwise(widths))
    graph = graph_of(run(model="unet3d", arch="unet"))
    assert graph.parameters == convolved + up + 32 * 3 + 3
