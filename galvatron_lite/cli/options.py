"""Options that commands share: what plans are priced with, questions of ``plan``, pins, models by shape."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from galvatron_lite.errors import InputError
from galvatron_lite.units import parse_bytes, parse_count, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from galvatron_lite.analysis.answers import Answer
    from galvatron_lite.model.graph import ModelGraph
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.request import PlanArguments


Model = Annotated[str | None, typer.Option("--model", help="Name (llama2-7b) or YAML file; its costs are estimated.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Name (a100-80gb) or YAML file; needed with --model.")]
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens a sample, with --model.")]
Precision = Annotated[str | None, typer.Option("--precision", help="Of compute, with --model.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Print memory of every stage, all runner-ups and all notes.")
]


ASK = "Other questions (one at a time)"
KEEP = "What is not left to the search"

BestBatch = Annotated[
    bool, typer.Option("--best-batch", help="Which batch has the greatest throughput?", rich_help_panel=ASK)
]
MaxBatch = Annotated[
    int | None,
    typer.Option("--max-batch", help="With --best-batch: the largest; 64 a device if not given.", rich_help_panel=ASK),
]
Fewest = Annotated[
    bool, typer.Option("--fewest", help="How few GPUs, up to --gpus, fit the model?", rich_help_panel=ASK)
]
Step = Annotated[
    str | None, typer.Option("--step", help="How few GPUs take so long a step? 2s, 300ms.", rich_help_panel=ASK)
]
Rate = Annotated[
    str | None, typer.Option("--rate", help="How few GPUs train so many samples/s? 1000, 2K.", rich_help_panel=ASK)
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="How few GPUs train so many tokens/s? 1M.", rich_help_panel=ASK)
]
Price = Annotated[
    float | None,
    typer.Option("--price", help="How many GPUs are cheapest at so much a GPU-hour?", rich_help_panel=ASK),
]
TokensTotal = Annotated[
    str | None,
    typer.Option("--tokens-total", help="With --price: tokens of the run; 1M if not given.", rich_help_panel=ASK),
]
SamplesTotal = Annotated[
    str | None, typer.Option("--samples-total", help="With --price: samples of the run.", rich_help_panel=ASK)
]
Steps = Annotated[
    str | None, typer.Option("--steps", help="With --price: steps of the run, of --batch samples.", rich_help_panel=ASK)
]
Within = Annotated[
    str | None, typer.Option("--within", help="With --price: the run must end in this time: 30d.", rich_help_panel=ASK)
]
Pareto = Annotated[
    bool, typer.Option("--pareto", help="Which is the fastest plan for every budget below --mem?", rich_help_panel=ASK)
]
MemoryStep = Annotated[
    str | None,
    typer.Option(
        "--memory-step", help="With --pareto: least step of the budget; 1/32 of it if not given.", rich_help_panel=ASK
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw the answer of any of these (SVG).", rich_help_panel=ASK)
]
Phases = Annotated[
    Path | None,
    typer.Option("--phases", help="Plan every phase of a run (docs/adapting.md).", rich_help_panel=ASK),
]
Fix = Annotated[
    list[str] | None,
    typer.Option(
        "--fix", help="Keep this: pp=4, zero=3, layers.3.recompute=full; may be given again.", rich_help_panel=KEEP
    ),
]
Forbid = Annotated[
    list[str] | None,
    typer.Option("--forbid", help="Do without: tp, pipeline, recompute …; may be given again.", rich_help_panel=KEEP),
]
Schedule = Annotated[
    list[str] | None,
    typer.Option("--schedule", help="Of the pipeline: 1f1b, gpipe …; may be given again.", rich_help_panel=KEEP),
]
Backend = Annotated[
    str,
    typer.Option(
        "--backend", help="What runs the plan: galvatron, deepspeed, or any: all that is priced.", rich_help_panel=KEEP
    ),
]
Mode = Annotated[
    str,
    typer.Option("--mode", help="training, or inference: forward passes only.", rich_help_panel=KEEP),
]
AllowDelay = Annotated[
    bool,
    typer.Option(
        "--allow-delay",
        help="Gradients may come a step late (cyclic data parallelism): the training rule changes.",
        rich_help_panel=KEEP,
    ),
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

    def ask(self, profile_of: Callable[[int | None], Profile], setup: PlanArguments) -> Answer:
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
PANEL = "Model by shape (instead of --model)"

Layers = Annotated[int | None, typer.Option("--layers", help="Repeated blocks.", rich_help_panel=PANEL)]
Hidden = Annotated[int | None, typer.Option("--hidden", help="Hidden size.", rich_help_panel=PANEL)]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads.", rich_help_panel=PANEL)]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", help="Key-value heads.", rich_help_panel=PANEL)]
Ffn = Annotated[int | None, typer.Option("--ffn", help="Hidden size of the MLP.", rich_help_panel=PANEL)]
Vocab = Annotated[int | None, typer.Option("--vocab", help="Vocabulary size.", rich_help_panel=PANEL)]
Arch = Annotated[
    str | None, typer.Option("--arch", help="decoder (default), encoder, moe, vit …", rich_help_panel=PANEL)
]
Experts = Annotated[int | None, typer.Option("--experts", help="Experts, for moe.", rich_help_panel=PANEL)]
Topk = Annotated[int | None, typer.Option("--topk", help="Experts a token takes, for moe.", rich_help_panel=PANEL)]
Tied = Annotated[bool, typer.Option("--tied", help="Head shares the embedding.", rich_help_panel=PANEL)]
Gated = Annotated[bool, typer.Option("--gated", help="Gated MLP, as in Llama.", rich_help_panel=PANEL)]


def set_flags(**flags: object) -> dict[str, str]:
    """The flags that were given, by name, as text."""
    return {name: str(value).lower() for name, value in flags.items() if value not in (None, False)}


def pictured(model: str | None, image: str, precision: str) -> ModelGraph:
    """The model by its name, with pictures of a size."""
    from galvatron_lite.model.shapes import load_model, load_shape
    from galvatron_lite.model.shapes.picture_fields import sizes_of

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
