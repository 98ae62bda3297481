"""Plans of a perception backbone on 1 to 8 GPUs, with and without recomputation; run by ``scripts/perception``.

Six cameras of 720 x 1280 pixels are the six samples of a step through ConvNeXt-XL, in fp32 with Adam, as in PyTorch's
multi-GPU example (LayerNorm in steps).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galvatron_lite import plan
from galvatron_lite.cluster.catalog import load_cluster
from galvatron_lite.cost.layer import LayerPricer
from galvatron_lite.cost.stage import Shape
from galvatron_lite.cost.step import price_stages
from galvatron_lite.errors import InfeasibleError
from galvatron_lite.model.graph import Recompute, Role
from galvatron_lite.model.shapes import load_model
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import LayerRun, Plan
from galvatron_lite.profiler.estimate import estimate_profile
from galvatron_lite.profiler.schema import Profile

CAMERAS, HEIGHT, WIDTH = 6, 720, 1280
GIB = 2**30
COUNTED = {Recompute.NONE: {1: 62.2, 2: 33.7, 4: 19.5, 8: 12.3}, Recompute.FULL: {1: 13.0, 2: 9.1, 4: 7.2, 8: 6.2}}
"""GiB of tensors on a GPU from a list of what autograd saves, of which each of so many GPUs has an even share; with
recomputation approximate."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan."""

    gpus: int  # that it takes
    again: bool  # whether every block is computed again
    found: Plan | None  # the plan; None: nothing fits


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="a100-80gb", help="name or YAML file")
    parser.add_argument("--mem", default="95%", help="budget of a GPU")
    parser.add_argument("--gpus", type=int, default=8, help="the most GPUs")
    parser.add_argument("--backend", default="any", help="what runs the plans")
    return parser.parse_args(arguments)


def profile_of(cluster: str, gpus: int) -> Profile:
    """The estimated profile of the backbone on so many GPUs."""
    sizes: dict[str, object] = {"image_height": HEIGHT, "image_width": WIDTH, "fused_norm": False}
    graph = load_model("convnext-xl", overrides=sizes, precision="fp32")
    return estimate_profile(graph, load_cluster(cluster, gpus), precision="fp32", name=graph.name, optimizer="adam")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    """The quickest plan of each number of GPUs, without recomputation and with all of it."""
    for again in (False, True):
        for gpus in range(1, asked.gpus + 1):
            pins = {"fix": ("recompute=full",)} if again else {"forbid": ("recompute", "offload")}
            pins |= {"forbid": ("offload",)} if again else {}
            known = profile_of(asked.cluster, gpus)
            try:
                found = plan(known, mem=asked.mem, batch=CAMERAS, backend=asked.backend, runners_up=0, **pins)
            except InfeasibleError:
                found = None
            yield Row(gpus, again, found)


def shared_evenly(known: Profile, gpus: int, again: Recompute) -> float:
    """GiB of tensors on a GPU where all columns are shared and weights, gradients and Adam's moments are whole."""
    layers = known.graph.layers
    strategies = [
        Strategy(width=gpus, recompute=again if layer.role is Role.BLOCK else Recompute.NONE) for layer in layers
    ]
    (stage,) = price_stages(LayerPricer(known), Shape(gpus, 1, 1, CAMERAS), [len(layers)], strategies)
    return (stage.memory.total - stage.memory.context) / GIB


def described(found: Plan) -> str:
    """What the layers do, stage by stage."""
    stages = ("; ".join(_run(run) for run in stage.runs) for stage in found.stages)
    parts = f", {found.microbatches} micro-batches" if found.microbatches > 1 else ""
    return " | ".join(stages) + parts


def _run(run: LayerRun) -> str:
    name = run.first if run.count == 1 else f"{run.first} … {run.last}"
    return f"{name}: {run.strategy}"


def main() -> None:
    """Print two tables in Markdown."""
    asked = options()
    print("| GPUs | recomputation | GiB a GPU | step | strategies |\n|---:|---|---:|---:|---|")
    for row in rows(asked):
        again = "every block" if row.again else "none"
        if row.found is None or row.found.prediction is None:
            print(f"| {row.gpus} | {again} | – | – | nothing fits |")
            continue
        predicted = row.found.prediction
        figures = f"{predicted.peak_memory / GIB:.1f} | {predicted.step_seconds * 1e3:.0f} ms"
        print(f"| {row.gpus} | {again} | {figures} | {described(row.found)} |")
    print("\n| recomputation | GPUs | predicted, GiB of tensors | counted |\n|---|---:|---:|---:|")
    known = profile_of(asked.cluster, 8)
    for choice, counted in COUNTED.items():
        for gpus, size in counted.items():
            print(f"| {choice.value} | {gpus} | {shared_evenly(known, gpus, choice):.1f} | {size} |")


if __name__ == "__main__":
    main()
