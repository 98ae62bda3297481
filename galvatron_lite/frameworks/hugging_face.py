"""``transformers.Trainer`` around a model that is split."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.engine import ParallelModel


class SplitModel(nn.Module):
    """A split model as the Trainer calls it: with a batch's entries; it returns ``{"loss": loss}``.

    Attributes:
        parallel: from ``auto_parallelize``.
        config: of the user's model, for callbacks; None where it has none.
        accepts_loss_kwargs: told to the Trainer: the loss is a mean over the samples of the batch.
    """

    accepts_loss_kwargs = False

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel, self.config = parallel, getattr(parallel.module, "config", None)

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        """The mean loss of a batch."""
        return {"loss": self.parallel(inputs)}


class Trainer(transformers.Trainer):
    """A Trainer for what ``auto_parallelize`` returns; every process runs it alike (``frameworks.one_process``).

    Gradients are clipped by the norm of the whole model's, and what is saved is the whole model, by rank 0. Checkpoints
    to go on from are not the Trainer's: ``parallel.save(folder, trainer.optimizer)``.

    Args:
        model: from ``auto_parallelize``.
        args: with ``save_strategy="no"`` and ``remove_unused_columns=False``.
        options: as for ``transformers.Trainer``.

    Raises:
        InputError: the model is not split, or an argument is one that a split model cannot have.
    """

    def __init__(self, model: ParallelModel, args: transformers.TrainingArguments, **options: Any) -> None:
        _check(model, args)
        self.parallel = model
        super().__init__(SplitModel(model), args, **options)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's own optimizer, over this rank's shares."""
        is_new = self.optimizer is None
        made: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            made.register_step_post_hook(lambda *_: self.parallel.publish())
        return made

    # The Trainer has no public method for it; tests/frameworks compares clipped runs with those of one process.
    def _clip_grad_norm(self, model: nn.Module) -> Tensor:  # noqa: ARG002
        return self.parallel.clip_grad_norm(float(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:  # noqa: ARG002
        return float(self.parallel.clip_grad_norm(float("inf")) if grad_norm is None else grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        state = self.parallel.full_state_dict()
        if dist.get_rank() == 0:
            super()._save(output_dir, {name: tensor.contiguous() for name, tensor in state.items()})
        dist.barrier()


def _check(model: object, args: transformers.TrainingArguments) -> None:
    if not isinstance(model, ParallelModel):
        raise InputError("model", type(model).__name__, "Give what auto_parallelize(model, batch) returns.")
    if args.save_strategy != "no":
        remedy = 'Set "no", and save with parallel.save(folder, trainer.optimizer), which all processes call.'
        raise InputError("save_strategy", str(args.save_strategy), remedy)
    if args.remove_unused_columns:
        raise InputError("remove_unused_columns", True, "Set it to False: the model takes all entries of a batch.")
    if args.gradient_accumulation_steps != 1:
        remedy = "Give the whole batch at once: the plan has micro-batches of its own."
        raise InputError("gradient_accumulation_steps", args.gradient_accumulation_steps, remedy)
