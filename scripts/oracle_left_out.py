"""How the hand-chosen constants of image networks carry over: chosen again without each model, then tried on it.

The choices are those of ``CHOICES``, two each: what shipped before and what ships now. Runs are NVIDIA's
DeepLearningExamples'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

from rich.console import Console

from galvatron_lite.calibration.schema import Calibration
from galvatron_lite.calibration.store import load_calibration
from galvatron_lite.validate.predict import validate_runs
from galvatron_lite.validate.rows import read_runs

RUNS = Path(__file__).resolve().parent.parent / "profiles" / "published" / "runs.jsonl"
STACKS = ("tensorflow", "mxnet", "paddle", "pytorch-ddp")
CHOICES: Mapping[str, tuple[float, ...]] = {
    "pictures": (1.35, 1.2),
    "winograd": (1.0, 1.5),
    "sharing": (0.0, 0.02),
    "convolution": (0.62, 0.72),
}
"""``StackConstants.pictures`` of pytorch-ddp, ``winograd`` and ``sharing`` of all, the 16-bit share of V100."""
Scores = Mapping[str, list[float]]  # accuracy of every run, by model


def with_choice(base: Calibration, pictures: float, winograd: float, sharing: float, convolution: float) -> Calibration:
    own = {name: replace(base.stacks[name], winograd=winograd, sharing=sharing) for name in STACKS}
    own["pytorch-ddp"] = replace(own["pytorch-ddp"], pictures=pictures)
    old = base.devices["V100"]
    device = replace(old, convolution={**old.convolution, "bf16": convolution})
    return replace(base, stacks={**base.stacks, **own}, devices={**base.devices, "V100": device})


def scored(calibration: Calibration) -> Scores:
    runs = [run for run in read_runs(RUNS) if run.family == "dle-cnn"]
    found = defaultdict[str, list[float]](list)
    for one in validate_runs(runs, calibration):
        if one.time is not None:
            found[one.run.model or ""].append(1 - abs(one.time - 1))
    return found


def mean(scores: Scores, models: Iterator[str]) -> float:
    return fmean(value for model in models for value in scores[model])


def main() -> None:
    console, base = Console(highlight=False), load_calibration()
    every = {choice: scored(with_choice(base, *choice)) for choice in product(*CHOICES.values())}
    models = sorted(next(iter(every.values())))
    best = max(every, key=lambda choice: mean(every[choice], iter(models)))
    left = []
    for model in models:
        others = [other for other in models if other != model]
        chosen = max(every, key=lambda choice: mean(every[choice], iter(others)))
        left += every[chosen][model]
        console.print(
            f"without {model}: {dict(zip(CHOICES, chosen, strict=True))}: {100 * fmean(every[chosen][model]):.1f} %"
        )
    console.print(f"of all: {dict(zip(CHOICES, best, strict=True))}: {100 * mean(every[best], iter(models)):.1f} %")
    console.print(f"each model left out in turn: {100 * fmean(left):.1f} %")


if __name__ == "__main__":
    main()
