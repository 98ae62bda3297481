"""Run a training script as the workers of a Ray Train job.

``python -m galvatron_lite.launch.ray_job --workers N --each M -- SCRIPT ARGUMENTS``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from galvatron_lite.errors import LaunchError
from galvatron_lite.launch.commands import PLAN_VARIABLE, THREADS


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers and wait for their end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--each", type=int, required=True, help="workers of a node")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(arguments)
    try:
        train, torch = import_module("ray.train"), import_module("ray.train.torch")
    except ImportError as error:
        raise LaunchError("Ray Train is not installed. pip install 'ray[train]', or launch another way.") from error
    ray: Any = import_module("ray")
    if not ray.is_initialized():
        ray.init()
    gpus = bool(ray.cluster_resources().get("GPU", 0))
    carried = {name: os.environ[name] for name in (PLAN_VARIABLE, THREADS) if name in os.environ}
    settings = {"program": options.program, "environment": carried, "folder": os.getcwd()}
    shape = train.ScalingConfig(num_workers=options.workers, use_gpu=gpus, placement_strategy="PACK")
    torch.TorchTrainer(run_program, train_loop_config=settings, scaling_config=shape).fit()


def run_program(settings: dict[str, Any]) -> None:
    """Run the script in a worker, as torchrun does; Ray Train sets RANK, WORLD_SIZE and the other variables."""
    os.environ.update(settings["environment"])
    os.chdir(settings["folder"])
    program = settings["program"]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(program)
    sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
