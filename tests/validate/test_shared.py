"""Published runs whose devices share pixels or filters: the same figures as the oracle's, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.oracle.pricing import machine_of, row_of
from galvatron_lite.oracle.request import graph_named
from galvatron_lite.oracle.rows import Method
from galvatron_lite.oracle.strategies import RowQuestion
from galvatron_lite.stacks.catalog import match_stack
from galvatron_lite.validate.predict import Predictor, question_of
from galvatron_lite.validate.results import SkipError
from galvatron_lite.validate.rows import PublishedRun

from .runs import predicted

RUN = PublishedRun(
    family="made-up", run_id="made-up-1", framework="Chainer/ChainerMN", model="resnet50", arch="cnn", image_size=224,
    gpu="V100-SXM2-16GB", gpus_per_node=4, intra_link="NVLink2", inter_net="2x InfiniBand EDR 100Gb (ABCI)",
    inter_node_gbps=200, n_gpus=16, dp=4, tp=1, pp=1, cp=1, micro_batch=64, global_batch=256, grad_accum=1,
    act_ckpt="none", precision="fp32", flash_attn=False, spatial=4, quality="A",
)  # fmt: skip


@pytest.mark.parametrize(("spatial", "filters", "kind"), [(4, 1, Method.DATA_SPATIAL), (1, 4, Method.DATA_FILTER)])
def test_as_the_oracle_says(spatial: int, filters: int, kind: Method) -> None:
    """Only the cluster is put together from the row's words, not from a file."""
    found = predicted(replace(RUN, spatial=spatial, filter=filters))
    machine = machine_of(graph_named("resnet50", "fp32"), "abci", 16, "fp32", 64, match_stack(RUN.framework))
    row = row_of(machine, RowQuestion(kind, 16, 64, 256))
    assert found.step_seconds == pytest.approx(row.iteration, rel=0.05)
    assert found.time.total == pytest.approx(found.step_seconds)


def test_shared_pixels_take_less_memory_and_filters_do_not() -> None:
    whole = predicted(replace(RUN, spatial=1, n_gpus=4)).device_memory
    assert predicted(RUN).device_memory < whole / 2
    assert predicted(replace(RUN, spatial=1, filter=4)).device_memory == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"n_gpus": 4, "dp": 1, "global_batch": 64}, Method.SPATIAL),
        ({"n_gpus": 4, "dp": 1, "global_batch": 64, "spatial": 1, "filter": 4}, Method.FILTER),
    ],
)
def test_one_group_is_alone(changes: dict[str, int], kind: Method) -> None:
    question = question_of(replace(RUN, **changes))  # type: ignore[arg-type]
    assert (question.kind, question.batch, question.width) == (kind, 64, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter": 2}, "pixels and filters shared at once"),
        ({"n_gpus": 18}, "degrees do not multiply to the number of GPUs"),
        ({"pp": 2}, "degrees do not multiply to the number of GPUs"),
        ({"global_batch": 250}, "batch does not divide"),
        ({"grad_accum": 2}, "batch does not divide"),
        ({"model": "vit_base_patch16_224", "arch": "vit"}, "spatial or filter parallelism"),
    ],
)
def test_what_is_not_priced(changes: dict[str, int], reason: str) -> None:
    found = Predictor(load_calibration()).predict(replace(RUN, **changes))  # type: ignore[arg-type]
    assert isinstance(found, SkipError)
    assert found.reason == reason
