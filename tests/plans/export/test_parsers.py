"""Exported files through the tools' own parsers, where they are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from galvatron_lite.plans.export.tools import export
from tests.plans.export.made import BATCH, PLANS

EVERY = sorted(PLANS)


def _missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


class _Replicas:
    """Tells DeepSpeed's parser how many devices share the samples, in place of a launched world."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


@pytest.mark.skipif(_missing("deepspeed"), reason="DeepSpeed is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_deepspeed_reads_it(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    monkeypatch.setattr(comm, "get_rank", lambda *_: 0)
    path = tmp_path / "ds.json"
    path.write_text(export(PLANS[name], "deepspeed").text)
    data, strategy = json.loads(path.read_text()), PLANS[name].stages[0].runs[1].strategy
    replicas = BATCH // (data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"])
    read = DeepSpeedConfig(str(path), mpu=_Replicas(replicas))
    assert replicas == strategy.batch_degree
    assert int(read.zero_optimization_stage) == strategy.zero_stage
    assert (read.train_batch_size, read.gradient_clipping) == (BATCH, 0.0)
    assert (read.bfloat16_config.enabled, read.float16_config.enabled) == (True, False)
    assert (read.zero_config.offload_optimizer is not None) == strategy.offloads_states
    assert data["zero_optimization"].keys() <= DeepSpeedZeroConfig.model_fields.keys()
    assert read.tensor_parallel_config.autotp_size == (strategy.tensor if strategy.tensor > 1 else 0)


@pytest.mark.skipif(_missing("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_accelerate_reads_it_and_its_launcher_knows_every_key(name: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils import DistributedType

    path, plan = tmp_path / "accelerate.yaml", PLANS[name]
    path.write_text(export(plan, "accelerate").text)
    read = load_config_from_file(str(path))
    strategy = plan.stages[0].runs[1].strategy
    assert read.num_processes == plan.devices
    assert read.mixed_precision == "bf16"
    known = vars(launch_command_parser().parse_args(["train.py"]))
    inside = {**read.fsdp_config, **read.deepspeed_config, **read.parallelism_config}
    assert set(inside) - {"gradient_accumulation_steps"} <= set(known)
    if read.distributed_type is DistributedType.DEEPSPEED:
        assert read.deepspeed_config["zero_stage"] == strategy.zero_stage
    if read.distributed_type is DistributedType.MULTI_GPU:
        assert strategy.zero_stage == 0
    if read.parallelism_config and plan.pipeline == 1:
        assert _product(read.parallelism_config) * strategy.spatial == plan.devices


def _product(degrees: dict[str, int]) -> int:
    made = 1
    for degree in degrees.values():
        made *= degree
    return made
