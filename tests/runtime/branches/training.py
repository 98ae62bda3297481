"""Jobs that train a model with branches, and the same in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from galvatron_lite.runtime.branches.engine import BranchedModel
from galvatron_lite.runtime.parameters.full_state import full_gradients
from tests.runtime.branches.networks import Case, layers_of, make_batch, make_model, make_plan
from tests.runtime.training import ADAMW, Trained, train_plainly


def make_branched(case: Case, **options: Any) -> BranchedModel:
    model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(model, make_plan(case, layers), layers, make_batch(case), device="cpu", **options)


def train(case: Case, steps: int = 2) -> Trained:
    """Gradients of the first step, losses of all, the state after the last."""
    parallel = make_branched(case, max_grad_norm=case.max_grad_norm)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch = make_batch(case)
    state = parallel.full_state_dict()
    parallel.backward_step(batch)
    gradients = full_gradients(parallel)
    optimizer.zero_grad()
    parallel.load_full_state_dict(state)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, parallel.full_state_dict())


def train_each(cases: Mapping[str, Case]) -> dict[str, Trained]:
    """The same of several cases, one after another in the same processes."""
    return {name: train(case) for name, case in cases.items()}


def train_alone(case: Case, steps: int = 2) -> Trained:
    """One process, plain torch."""
    return train_plainly(make_model(case), make_batch(case), case.max_grad_norm, steps)
