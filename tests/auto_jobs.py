"""What ``test_auto.py`` runs on every rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from galvatron_lite import auto_parallelize
from galvatron_lite.files import to_data
from galvatron_lite.model.zoo import build
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler import measure
from galvatron_lite.profiler.timing import TimingRule

QUICK = TimingRule(warmup=1, least=2, most=2, seconds=0.02)


def hugging_face() -> torch.nn.Module:
    """A tiny Llama of transformers, from its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def made(name: str) -> torch.nn.Module:
    """The model of a test, the same on every rank."""
    torch.manual_seed(0)
    return hugging_face() if name == "llama-of-transformers" else build(name, layers=2, hidden=96, sequence=16)


def of_few_samples(name: str) -> torch.nn.Module:
    """The same model, whose own example is of two samples: what is measured grows with their number."""
    from galvatron_lite.model.example import example_batch

    model = made(name)
    batch = example_batch(model, 2)
    model.example_batch = lambda _: batch  # type: ignore[assignment]
    return model


@contextmanager
def measuring_briefly(**limits: Any) -> Iterator[None]:
    """What ``auto_parallelize`` measures is measured with few repetitions; ``limits``: of ``measure_profile``."""
    with patch.object(measure, "measure_profile", partial(measure.measure_profile, rule=QUICK, **limits)):
        yield


def with_nothing_else(name: str, folder: str, steps: int) -> tuple[Any, list[float], float]:
    """``auto_parallelize(model)``, some steps on one batch; the plan, the losses, and when the profile was written."""
    from galvatron_lite.model.example import example_batch

    model = of_few_samples(name)
    batch = example_batch(model)
    with measuring_briefly():
        parallel = auto_parallelize(model, folder=Path(folder))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    written = next(Path(folder).glob("*/*.yaml")).stat().st_mtime_ns
    return to_data(parallel.plan), losses, written


def alone(name: str, steps: int) -> list[float]:
    """The same steps of the same model on one process."""
    from galvatron_lite.model.batch import call_model, loss_of
    from galvatron_lite.model.example import example_batch

    model = of_few_samples(name)
    batch = example_batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = loss_of(call_model(model, batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def error_of(plan: Plan | str | None, mem: str, profile: str | None = None) -> str:
    """The message of the error that ``auto_parallelize`` raises; empty where it raises none."""
    from galvatron_lite.errors import GalvatronError

    try:
        auto_parallelize(made("gpt-tiny"), plan=plan, mem=mem, profile=profile)
    except GalvatronError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def warnings_of(profile: str) -> list[str]:
    """The warnings of running from a profile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        auto_parallelize(made("gpt-tiny"), profile=profile)
    return [str(warning.message) for warning in caught]


def pinned_runs(folder: str, pipeline: int) -> list[tuple[Any, list[float], bool]]:
    """A run that measures and one that reads, pinned, on shares; the plan, losses, whether random states stayed."""
    import random

    import numpy
    from torch import distributed as dist

    from galvatron_lite.model.batch import slice_batch
    from galvatron_lite.model.example import example_batch

    found = []
    for _ in range(2):
        model = of_few_samples("gpt-tiny")
        rank, batch = dist.get_rank(), example_batch(model)
        torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
        before = torch.get_rng_state(), numpy.random.random(), random.random()
        torch.manual_seed(5), numpy.random.seed(5), random.seed(5)
        share = slice_batch(batch, rank, rank + 1)
        with measuring_briefly(tensor_degrees=[1]):
            parallel = auto_parallelize(
                model, share, folder=Path(folder), fix={"pp": pipeline}, forbid=("tp", "zero"), local_batch=True
            )
        stayed = torch.equal(torch.get_rng_state(), before[0])
        stayed &= (numpy.random.random(), random.random()) == before[1:]
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
        losses = [float(parallel.train_step(share, optimizer)) for _ in range(2)]
        found.append((to_data(parallel.plan), losses, stayed))
    return found


def refused(folder: str, plan: str) -> list[str]:
    """What is said of a folder that cannot be written to, and of pins beside a plan."""
    from galvatron_lite.errors import InputError

    said = []
    for options in ({"folder": Path(folder)}, {"plan": plan, "fix": "pp=2"}):
        try:
            auto_parallelize(made("gpt-tiny"), **options)
        except InputError as error:
            said.append(str(error))
    return said


def notes_of(plan: Plan, name: str) -> list[str]:
    """What is logged of running a plan that the user gives."""
    from galvatron_lite.errors import LOG

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    LOG.addHandler(handler)
    try:
        auto_parallelize(build(name), plan=plan, check=False)
    finally:
        LOG.removeHandler(handler)
    return lines
