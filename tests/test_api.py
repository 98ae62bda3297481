"""The functions behind the command line: which precision costs are estimated in."""

from __future__ import annotations

from pathlib import Path

import pytest

from galvatron_lite import api
from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes import load_model


@pytest.mark.parametrize(("cluster", "best"), [("h100", "bf16"), ("t4", "fp16")])
def test_a_named_model_is_estimated_in_the_best_precision(tmp_path: Path, cluster: str, best: str) -> None:
    made = api.profile("gpt2", cluster=cluster, gpus=1, estimate=True, folder=tmp_path)
    assert made.graph.precision == best
    assert api.find_profile(model="gpt2", cluster=cluster, gpus=1) == made


def test_a_precision_that_is_asked_for_is_taken() -> None:
    assert api.find_profile(model="gpt2", cluster="h100", gpus=1, precision="fp8").graph.precision == "fp8"
    with pytest.raises(InputError, match="H100"):
        api.find_profile(model="gpt2", cluster="h100", gpus=1, precision="fp64")


def test_a_captured_model_keeps_its_precision_and_is_refused_where_no_device_has_it() -> None:
    captured = load_model("gpt2", precision="bf16")
    assert api.find_profile(model=captured, cluster="a100-80gb", gpus=1).graph.precision == "bf16"
    with pytest.raises(InputError, match="Precisions of V100-SXM2-32GB: fp32, fp16") as refused:
        api.find_profile(model=captured, cluster="v100", gpus=1)
    assert (refused.value.field, refused.value.value) == ("--precision", "bf16")


def test_a_step_is_no_faster_in_a_precision_that_is_not_the_default() -> None:
    def step(precision: str | None) -> float:
        found = api.plan(model="gpt2", cluster="v100", gpus=1, batch=8, precision=precision).prediction
        assert found is not None
        return found.step_seconds

    assert step(None) == step("fp16") < step("fp32")


def test_the_precision_needs_a_place() -> None:
    with pytest.raises(InputError, match="--cluster is missing"):
        api.precision_on(None, "bf16")
