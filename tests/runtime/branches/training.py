"""Jobs that train a model with branches, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from galvatron_lite.runtime.branches.engine import BranchedModel
from tests.runtime.branches.networks import Case, layers_of, make_batch, make_model, make_plan
from tests.runtime.training import ADAMW, Trained


def make_branched(case: Case, **options: Any) -> BranchedModel:
    model = make_model(case)
    layers = layers_of(case, model)
    return BranchedModel(model, make_plan(case, layers), layers, make_batch(case), device="cpu", **options)


def train(case: Case, steps: int = 3) -> Trained:
    """Gradients of the first step, losses of all, the state after the last."""
    parallel = make_branched(case, max_grad_norm=case.max_grad_norm)
    optimizer = parallel.optimizer(torch.optim.AdamW, **ADAMW)
    batch = make_batch(case)
    state = parallel.full_state_dict()
    parallel.backward_step(batch)
    gradients = parallel.full_gradients()
    optimizer.zero_grad()
    parallel.load_full_state_dict(state)
    losses = [float(parallel.train_step(batch, optimizer)) for _ in range(steps)]
    return Trained(losses, gradients, parallel.full_state_dict())


def train_alone(case: Case, steps: int = 3) -> Trained:
    """One process, plain torch."""
    model, batch = make_model(case), make_batch(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(**batch).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    model.load_state_dict(state)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        if case.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, gradients, dict(model.state_dict()))
