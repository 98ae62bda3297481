"""The functions behind the command line: which precision costs are estimated in, and how arguments are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from galvatron_lite import api
from galvatron_lite.errors import InputError
from galvatron_lite.model.shapes import load_model


@pytest.mark.parametrize(("cluster", "best"), [("h100", "bf16"), ("t4", "fp16")])
def test_a_named_model_is_estimated_in_the_best_precision(tmp_path: Path, cluster: str, best: str) -> None:
    profile = api.profile("gpt2", cluster=cluster, gpus=1, estimate=True, folder=tmp_path)
    assert profile.graph.precision == best
    assert api.find_profile(model="gpt2", cluster=cluster, gpus=1) == profile


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


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (api.plan, {"gpu": 4}, "'gpu' is unknown. Did you mean gpus?"),
        (api.plan, {"memory": "2GB"}, "'memory' is unknown. Did you mean mem?"),
        (api.plan, {"seq": 512}, "Did you mean sequence?"),
        (api.cheapest, {"price": 1, "token": 5}, "Did you mean tokens?"),
        (api.fewest_devices, {"max_batch": 5}, "'max_batch' is unknown"),
        (api.best_batch, {"maxbatch": 5}, "Did you mean max_batch?"),
        (api.pareto_front, {"memory_steps": 5}, "Did you mean memory_step?"),
    ],
)
def test_an_unknown_argument_is_named_with_the_nearest(
    function: Callable[..., object], given: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        function(model="gpt2", cluster="a100-40gb", **given)


GPT2 = {"model": "gpt2", "cluster": "a100-40gb", "gpus": 2, "sequence": 128, "batch": 8}


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ({"fix": "pp=2"}, {"fix": ["pp=2"]}),
        ({"fix": {"pp": 2, "sequence": False}}, {"fix": ["pp=2", "sequence=off"]}),
        ({"forbid": "zero"}, {"forbid": ["zero"]}),
        ({"schedules": "gpipe"}, {"schedules": ["gpipe"]}),
        ({"mem": 0.5}, {"mem": "50%"}),
        ({"mem": 4e9}, {"mem": "4GB"}),
    ],
)
def test_arguments_are_read_as_the_command_line_reads_them(one: dict[str, object], same: dict[str, object]) -> None:
    assert api.plan(runners_up=0, **GPT2, **one) == api.plan(runners_up=0, **GPT2, **same)  # type: ignore[arg-type]


def test_figures_may_have_units() -> None:
    assert api.fewest_devices(step="1s", **GPT2) == api.fewest_devices(step=1.0, **GPT2)  # type: ignore[arg-type]
    answer = api.cheapest(price="2", tokens="1B", within="30d", **GPT2)  # type: ignore[arg-type]
    assert answer == api.cheapest(price=2.0, tokens=1e9, within=2592000.0, **GPT2)  # type: ignore[arg-type]
    front = api.pareto_front(memory_step="10GB", **GPT2)  # type: ignore[arg-type]
    assert front == api.pareto_front(memory_step=10**10, **GPT2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "given", "field"),
    [
        (api.plan, {"mem": 1.5}, "mem"), (api.plan, {"mem": None}, "mem"), (api.plan, {"fix": 3}, "fix"),
        (api.plan, {"forbid": [3]}, "forbid"), (api.plan, {"batch": "8"}, "batch"), (api.plan, {"gpus": 2.0}, "gpus"),
        (api.plan, {"model": 7}, "model"), (api.fewest_devices, {"step": []}, "step"),
        (api.fewest_devices, {"step": "130"}, "step"), (api.cheapest, {"price": 1, "tokens": "x"}, "tokens"),
        (api.pareto_front, {"memory_step": 0.5}, "memory_step"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(function: Callable[..., object], given: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as refused:
        function(**GPT2 | given)
    assert refused.value.field == field
