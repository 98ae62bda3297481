"""Options that several commands share: the profile, the model, the budget, and pins."""

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
    """Complete the name of a model, for the shell."""
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
    Path,
    typer.Argument(
        help="Plan file: of `galvatron plan`, written by hand (docs/evaluate.md), or JSON of Hetu-Galvatron."
    ),
]
OurPlan = Annotated[Path, typer.Argument(help="Plan file written by `galvatron plan -o`.")]
Model = Annotated[
    str | None,
    _option("--model", "Model name (llama2-7b) or YAML file. Its costs are estimated.", autocompletion=complete_models),
]
Cluster = Annotated[
    str | None,
    _option(
        "--cluster", "Cluster name (a100-80gb) or YAML file. Required with --model.", autocompletion=_complete_clusters
    ),
]
Sequence = Annotated[int | None, _option("--seq", "Sequence length in tokens (for a model given by name).")]
Precision = Annotated[
    str | None,
    _option("--precision", "Compute precision: bf16, fp16, fp32, or fp8 in estimates (for a model given by name)."),
]
Trainable = Annotated[
    str | None,
    _option("--trainable", "What trains in a model given by name: all, or LoRA adapters: lora:r=16,targets=q+v."),
]
Freeze = Annotated[
    list[str] | None,
    _option("--freeze", "Freeze these layers of a model given by name: before, layers.[0-9].*. Repeatable."),
]
Profile = Annotated[
    Path | None, _option("--profile", "Profile to predict from. Default: the one the plan was made from.")
]
Gpus = Annotated[int | None, _option("--gpus", "Number of GPUs to use. Default: all of the cluster.")]
Batch = Annotated[int | None, _option("--batch", "Global batch size in samples. Default: the plan's.")]
Memory = Annotated[
    str | None, _option("--mem", "Memory budget per GPU: 40GB, 40GiB or 80%. Default: that of the (first) plan.")
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Also print the memory of every stage, all runners-up and all notes.")
]
Json = Annotated[bool, _option("--json", "Print the result as JSON.")]
Folder = Annotated[Path, _option("--folder", "Folder of profiles.")]
PROFILES = Path("profiles")
Plot = Annotated[Path | None, _option("--plot", "Draw the result to this SVG file.")]


def _output(text: str) -> Any:
    return typer.Option("-o", "--output", help=text)


Output = Annotated[Path | None, _output("Write the result to this file.")]
ProfileOutput = Annotated[
    Path | None, _output("Write the profile to this file. Default: the folder of profiles, as the most recent one.")
]


def _estimate_with(context: typer.Context, folder: Path | None) -> Path | None:
    if folder is not None:
        from galvatron_lite.calibration.store import chosen_calibration

        context.with_resource(chosen_calibration(folder))
    return folder


Calibration = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        callback=_estimate_with,
        help="Folder of constants that `galvatron calibrate` wrote, for estimates.",
    ),
]


def arguments(options: Mapping[str, object]) -> PlanArguments:
    """The options that are set and that are arguments of ``api.plan``."""
    from galvatron_lite.request import PlanArguments

    names = PlanArguments.__annotations__
    return cast("PlanArguments", {name: options[name] for name in names if options.get(name) is not None})


_pin = partial(_option, panel="Restrict the search")
ask = partial(typer.Option, rich_help_panel="Ask another question (one at a time)")
shape = partial(typer.Option, rich_help_panel="Describe the model by its shape (instead of --model)")

Fix = Annotated[list[str] | None, _pin("--fix", "Fix choices: --fix pp=4 zero=3 layers.3.recompute=full.")]
Forbid = Annotated[list[str] | None, _pin("--forbid", "Exclude a choice: tp, pipeline, recompute … Repeatable.")]
_EXAMPLES = ", ".join(dict.fromkeys((DEFAULT_SCHEDULE, *schedules()[:1])))
Schedule = Annotated[list[str] | None, _pin("--schedule", f"Pipeline schedules to consider: {_EXAMPLES} … Repeatable.")]
Backend = Annotated[
    str, _pin("--backend", "What runs the plan: galvatron, deepspeed, or any (whatever can be priced).")
]
For = Annotated[
    str | None,
    _pin(
        "--for",
        "Plan for other software: megatron, nemo, torchtitan, deepspeed or accelerate. -o writes its settings.",
        autocompletion=_complete_tools,
    ),
]
Mode = Annotated[str, _pin("--mode", "training, or inference (forward passes only).")]
AllowDelay = Annotated[
    bool,
    _pin(
        "--allow-delay",
        "Allow cyclic data parallelism: gradients arrive one step late, which changes the training rule.",
    ),
]
