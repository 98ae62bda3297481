"""Exported files through the tools' own parsers, where they are installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from galvatron_lite.plans.export.settings import stage_blocks
from galvatron_lite.plans.export.tools import export
from tests.plans.export.plans import BATCH, BLOCKS, PLANS

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
        assert math.prod(read.parallelism_config.values()) * strategy.spatial == plan.devices


@pytest.mark.skipif(_missing("megatron.core"), reason="Megatron Core is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_megatron_core_takes_the_settings(name: str) -> None:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    # Megatron-Bridge's file has the settings of Megatron-LM's flags, by section and by their names.
    data: dict[str, dict[str, Any]] = yaml.safe_load(export(PLANS[name], "nemo").text)
    plan = PLANS[name]
    experts = {"num_moe_experts": 8} if "expert_model_parallel_size" in data["model"] else {}
    shape = {"num_layers": BLOCKS, "hidden_size": 64, "num_attention_heads": 4, "pipeline_dtype": torch.bfloat16}
    read = TransformerConfig(**shape, **experts, **data["model"])
    DistributedDataParallelConfig(**data.get("ddp", {}))
    OptimizerConfig(**data.get("optimizer", {}))
    if plan.pipeline > 1:
        stages = read.pipeline_model_parallel_layout.layout
        flat = [stage for column in zip(*stages, strict=True) for stage in column]
        assert [sum(layer.name == "decoder" for layer in stage) for stage in flat] == [
            one.blocks for one in stage_blocks(plan)
        ]


@pytest.mark.skipif(_missing("megatron.core"), reason="Megatron Core is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_megatron_flags_are_settings_of_its_dataclasses(name: str) -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    parts = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    known = {one.name for part in parts for one in fields(part)} | {"micro_batch_size", "global_batch_size"}
    words = shlex.split(export(PLANS[name], "megatron").text, comments=True)
    flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert flags <= known


@pytest.mark.parametrize("name", EVERY)
def test_megatron_bridge_has_every_section_and_key(name: str) -> None:
    try:
        files = importlib.metadata.files("megatron-bridge") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("Megatron-Bridge is not installed")
    (file,) = (one for one in files if str(one).endswith("bridge/training/config.py"))
    tree = ast.parse(Path(str(file.locate())).read_text())
    sections = {
        part.name: {one.target.id for one in part.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]
        for part in tree.body
        if isinstance(part, ast.ClassDef)
    }
    data = yaml.safe_load(export(PLANS[name], "nemo").text)
    assert set(data) <= sections["ConfigContainer"]
    assert set(data["train"]) <= sections["TrainingConfig"]


@pytest.mark.skipif(_missing("torchtitan"), reason="torchtitan is not installed")
@pytest.mark.parametrize("name", EVERY)
def test_torchtitan_parses_the_options(name: str) -> None:
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

    exported, plan = export(PLANS[name], "torchtitan"), PLANS[name]
    options = shlex.split(exported.text, comments=True)
    read = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *options])
    parallel, strategy = read.parallelism, plan.stages[0].runs[1].strategy
    degrees = (
        parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree, parallel.context_parallel_degree,
        parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree,
    )  # fmt: skip
    assert math.prod(degrees) * strategy.spatial == plan.devices
    assert read.training.global_batch_size == BATCH
    if plan.pipeline > 1 and not exported.left_out:
        ends = parallel.pipeline_parallel_first_stage_less_layers, parallel.pipeline_parallel_last_stage_less_layers
        parts = _generate_llm_fqn_per_model_part(len(plan.stages), BLOCKS, *ends)
        blocks = [sum(module.startswith("layers.") for module in part) for part in parts]
        assert blocks == [stage.blocks for stage in stage_blocks(plan)]
