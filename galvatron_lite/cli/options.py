"""Options that commands share: what plans are priced with, questions of ``plan``, pins, models by shape."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from galvatron_lite.errors import InputError
from galvatron_lite.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from galvatron_lite.analysis.answers import Answer
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.profiler.schema import Profile as ProfileData
    from galvatron_lite.request import PlanArguments


Model = Annotated[str | None, typer.Option("--model", help="Name (llama2-7b) or YAML file; its costs are estimated.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Name (a100-80gb) or YAML file; needed with --model.")]
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens a sample, with --model.")]
Precision = Annotated[str | None, typer.Option("--precision", help="Of compute, with --model.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Profile to price with; the one the plan names if not given.")
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Devices of the cluster; all if not given.")]
Memory = Annotated[
    str | None, typer.Option("--mem", help="Budget a device: 40GB, 40GiB or 80%; the (first) plan's if not given.")
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print memory of every stage, all runner-ups and all notes.")
]


def _ask(name: str, text: str, panel: str = "Other questions (one at a time)") -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


_keep = partial(_ask, panel="What is not left to the search")
_shape = partial(_ask, panel="Model by shape (instead of --model)")

BestBatch = Annotated[bool, _ask("--best-batch", "Which batch has the greatest throughput?")]
MaxBatch = Annotated[int | None, _ask("--max-batch", "With --best-batch: the largest; 64 a device if not given.")]
Fewest = Annotated[bool, _ask("--fewest", "How few GPUs, up to --gpus, fit the model?")]
Step = Annotated[str | None, _ask("--step", "How few GPUs take so long a step? 2s, 300ms.")]
Rate = Annotated[str | None, _ask("--rate", "How few GPUs train so many samples/s? 1000, 2K.")]
Tokens = Annotated[str | None, _ask("--tokens", "How few GPUs train so many tokens/s? 1M.")]
Price = Annotated[float | None, _ask("--price", "How many GPUs are cheapest at so much a GPU-hour?")]
TokensTotal = Annotated[str | None, _ask("--tokens-total", "With --price: tokens of the run; 1M if not given.")]
SamplesTotal = Annotated[str | None, _ask("--samples-total", "With --price: samples of the run.")]
Steps = Annotated[str | None, _ask("--steps", "With --price: steps of the run, of --batch samples.")]
Within = Annotated[str | None, _ask("--within", "With --price: the run must end in this time: 30d.")]
Pareto = Annotated[bool, _ask("--pareto", "Which is the fastest plan for every budget below --mem?")]
MemoryStep = Annotated[
    str | None, _ask("--memory-step", "With --pareto: least step of the budget; 1/32 of it if not given.")
]
Plot = Annotated[Path | None, _ask("--plot", "Draw the answer of any of these (SVG).")]
Phases = Annotated[Path | None, _ask("--phases", "Plan every phase of a run (docs/adapting.md).")]
Fix = Annotated[
    list[str] | None, _keep("--fix", "Keep this: pp=4, zero=3, layers.3.recompute=full; may be given again.")
]
Forbid = Annotated[list[str] | None, _keep("--forbid", "Do without: tp, pipeline, recompute …; may be given again.")]
Schedule = Annotated[list[str] | None, _keep("--schedule", "Of the pipeline: 1f1b, gpipe …; may be given again.")]
Backend = Annotated[str, _keep("--backend", "What runs the plan: galvatron, deepspeed, or any: all that is priced.")]
Mode = Annotated[str, _keep("--mode", "training, or inference: forward passes only.")]
AllowDelay = Annotated[
    bool, _keep("--allow-delay", "Gradients may come a step late (cyclic data parallelism): the training rule changes.")
]

_BELONG = {
    "max_batch": ("best_batch",),
    "tokens_total": ("price",), "samples_total": ("price",), "steps": ("price",), "within": ("price",),
    "memory_step": ("pareto",),
    "plot": ("best_batch", "fewest", "step", "rate", "tokens", "price", "pareto"),
}  # fmt: skip
"""Options that say more about a question, and the questions."""
_ASK = _BELONG["plot"]
_ALIKE = ("fewest", "step", "rate", "tokens")


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """The options of this module as they were given, by their names."""

    best_batch: bool
    max_batch: int | None
    fewest: bool
    step: str | None
    rate: str | None
    tokens: str | None
    price: float | None
    tokens_total: str | None
    samples_total: str | None
    steps: str | None
    within: str | None
    pareto: bool
    memory_step: str | None
    plot: Path | None

    @property
    def question(self) -> str:
        """The one question that is asked, by its option; empty: the fastest plan."""
        given = self._set()
        # --fewest beside a target says the same as the target alone.
        asked = [name for name in _ASK if name in given and not (name == "fewest" and given.keys() & set(_ALIKE[1:]))]
        if len(asked) > 1:
            raise InputError(_flag(asked[1]), given[asked[1]], f"{_flag(asked[0])} asks something else: ask one thing.")
        for name, questions in _BELONG.items():
            if name in given and not set(asked) & set(questions):
                raise InputError(_flag(name), given[name], f"It belongs to {' or '.join(map(_flag, questions))}.")
        return asked[0] if asked else ""

    def ask(self, profile_of: Callable[[int | None], ProfileData], setup: PlanArguments) -> Answer:
        """The answer."""
        from galvatron_lite import api

        question = self.question
        if question == "best_batch":
            return api.best_batch(profile_of, max_batch=self.max_batch, **setup)
        if question == "pareto":
            gap = None if self.memory_step is None else parse_bytes(self.memory_step, "--memory-step")
            return api.pareto_front(profile_of, memory_step=gap, **setup)
        if question == "price":
            within = None if self.within is None else parse_seconds(self.within, "--within")
            totals = {"samples": self.samples_total, "tokens": self.tokens_total, "steps": self.steps}
            sizes = {name: parse_count(text, _total(name)) for name, text in totals.items() if text is not None}
            return api.cheapest(profile_of, price=self.price or 0.0, within=within, **sizes, **setup)
        step = None if self.step is None else parse_seconds(self.step, "--step")
        samples = None if self.rate is None else parse_count(self.rate, "--rate")
        tokens = None if self.tokens is None else parse_count(self.tokens, "--tokens")
        return api.fewest_devices(profile_of, step=step, samples=samples, tokens=tokens, **setup)

    def _set(self) -> Mapping[str, object]:
        every = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in every.items() if value is not None and value is not False}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _total(name: str) -> str:
    return "--steps" if name == "steps" else f"--{name}-total"


_TRANSFORMERS = ("decoder", "encoder", "moe")

Layers = Annotated[int | None, _shape("--layers", "Repeated blocks.")]
Hidden = Annotated[int | None, _shape("--hidden", "Hidden size.")]
Heads = Annotated[int | None, _shape("--heads", "Attention heads.")]
KvHeads = Annotated[int | None, _shape("--kv-heads", "Key-value heads.")]
Ffn = Annotated[int | None, _shape("--ffn", "Hidden size of the MLP.")]
Vocab = Annotated[int | None, _shape("--vocab", "Vocabulary size.")]
Arch = Annotated[str | None, _shape("--arch", "decoder (default), encoder, moe, vit …")]
Experts = Annotated[int | None, _shape("--experts", "Experts, for moe.")]
Topk = Annotated[int | None, _shape("--topk", "Experts a token takes, for moe.")]
Tied = Annotated[bool, _shape("--tied", "Head shares the embedding.")]
Gated = Annotated[bool, _shape("--gated", "Gated MLP, as in Llama.")]


def set_flags(**flags: object) -> dict[str, str]:
    """The flags that were given, by name, as text."""
    return {name: str(value).lower() for name, value in flags.items() if value not in (None, False)}


def pictured(model: str | None, image: str, precision: str) -> ModelGraph:
    """The model by its name, with pictures of a size."""
    from galvatron_lite.model.shapes import load_model, load_shape
    from galvatron_lite.model.shapes.fields import sizes_of

    if model is None:
        raise InputError("--image", image, "Name the model with --model.")
    sizes = sizes_of(load_shape(model), model, image)
    return load_model(model, overrides=sizes, precision=precision)


def graph(flags: dict[str, str], precision: str) -> ModelGraph:
    """The model that the flags describe."""
    from galvatron_lite.model.shapes import build_graph, shape_from_flags

    needed = ("layers", "hidden", "heads", "vocab", "seq") if flags.get("arch", "decoder") in _TRANSFORMERS else ()
    missing = ", ".join(f"--{name}" for name in needed if name not in flags)
    if missing:
        raise InputError(missing, None, "A model by its shape needs --layers, --hidden, --heads, --vocab and --seq.")
    return build_graph(shape_from_flags(flags), precision=precision)
