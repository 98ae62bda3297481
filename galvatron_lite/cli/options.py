"""Options, each declared once: what plans are priced with, pins, and the other questions of ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from galvatron_lite.parallelism.pipeline.schedule import DEFAULT_SCHEDULE, schedules

if TYPE_CHECKING:
    from galvatron_lite.request import PlanArguments


def complete_models(incomplete: str) -> list[str]:
    """Names of models that begin so, for the shell."""
    from galvatron_lite.model.shapes import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def _complete_clusters(incomplete: str) -> list[str]:
    from galvatron_lite.cluster.catalog import known_clusters

    return [name for name in known_clusters() if name.startswith(incomplete)]


def _complete_tools(incomplete: str) -> list[str]:
    from galvatron_lite.plans.export.tools import TOOLS

    return [name for name in sorted(TOOLS) if name.startswith(incomplete)]


def _option(name: str, text: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel, **more)


PlanFile = Annotated[
    Path, typer.Argument(help="Plan file: ours, written by hand (docs/evaluate.md), or Hetu-Galvatron's JSON.")
]
OurPlan = Annotated[Path, typer.Argument(help="Plan file of galvatron.")]
Model = Annotated[
    str | None,
    _option("--model", "Name (llama2-7b) or YAML file; its costs are estimated.", autocompletion=complete_models),
]
Cluster = Annotated[
    str | None,
    _option("--cluster", "Name (a100-80gb) or YAML file; needed with --model.", autocompletion=_complete_clusters),
]
Sequence = Annotated[int | None, _option("--seq", "Tokens a sample, for a model by name.")]
Precision = Annotated[str | None, _option("--precision", "Of compute: bf16, fp16, fp32; for a model by name.")]
Trainable = Annotated[
    str | None, _option("--trainable", "Of a model by name: all, or adapters alone: lora:r=16,targets=q+v.")
]
Freeze = Annotated[
    list[str] | None, _option("--freeze", "Of a model by name, no gradients of: before, layers.[0-9].*; repeatable.")
]
Profile = Annotated[Path | None, _option("--profile", "Profile to price with; default: the one the plan names.")]
Gpus = Annotated[int | None, _option("--gpus", "Devices of the cluster; default: all.")]
Batch = Annotated[int | None, _option("--batch", "Samples a step, in the plan's micro-batches; default: the plan's.")]
Memory = Annotated[
    str | None, _option("--mem", "Budget a device: 40GB, 40GiB or 80%; default: that of the (first) plan.")
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print memory of every stage, all runner-ups and all notes.")
]
Json = Annotated[bool, _option("--json", "Print the result as JSON.")]
Folder = Annotated[Path, _option("--folder", "Where profiles are kept.")]
PROFILES = Path("profiles")
Plot = Annotated[Path | None, _option("--plot", "Draw the result to this file (SVG).")]


def _output(text: str) -> Any:
    return typer.Option("-o", "--output", help=text)


Output = Annotated[Path | None, _output("Write the result to this file.")]
ProfileOutput = Annotated[Path | None, _output("Write it here; else among the profiles, as the last one.")]


def _estimate_with(context: typer.Context, folder: Path | None) -> Path | None:
    if folder is not None:
        from galvatron_lite.calibration.store import chosen_calibration

        context.with_resource(chosen_calibration(folder))
    return folder


Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration", callback=_estimate_with, help="Constants to estimate with: what galvatron calibrate wrote."
    ),
]


def arguments(options: Mapping[str, object]) -> PlanArguments:
    """Those options that were set and are arguments of ``api.plan``."""
    from galvatron_lite.request import PlanArguments

    names = PlanArguments.__annotations__
    return cast("PlanArguments", {name: options[name] for name in names if options.get(name) is not None})


_pin = partial(_option, panel="Restrict the search")
ask = partial(typer.Option, rich_help_panel="Ask another question (one at a time)")
shape = partial(typer.Option, rich_help_panel="Describe the model by its shape (instead of --model)")

Fix = Annotated[list[str] | None, _pin("--fix", "Keep this: pp=4, zero=3, layers.3.recompute=full; repeatable.")]
Forbid = Annotated[list[str] | None, _pin("--forbid", "Do without: tp, pipeline, recompute …; repeatable.")]
_SOME = ", ".join(dict.fromkeys((DEFAULT_SCHEDULE, *schedules()[:1])))
Schedule = Annotated[list[str] | None, _pin("--schedule", f"Of the pipeline: {_SOME} …; repeatable.")]
Backend = Annotated[str, _pin("--backend", "What runs the plan: galvatron, deepspeed, or any: all that is priced.")]
For = Annotated[
    str | None,
    _pin(
        "--for",
        "Plan for megatron, nemo, torchtitan, deepspeed or accelerate; -o writes its settings.",
        autocompletion=_complete_tools,
    ),
]
Mode = Annotated[str, _pin("--mode", "training, or inference: forward passes only.")]
AllowDelay = Annotated[
    bool, _pin("--allow-delay", "Gradients may come a step late (cyclic data parallelism): the training rule changes.")
]
