"""``transformers.Trainer`` around a parallel model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.utils.generic import find_labels

from galvatron_lite.errors import InputError
from galvatron_lite.runtime.engine import ParallelModel

_ONE_PROCESS_REMEDY = (
    "The Trainer would share out batches and wrap the model by itself: call galvatron_lite.as_one_process() in the "
    "script's first lines, before TrainingArguments are made."
)


_LOSS_REMEDY = (
    "The parallel model computes the loss: give it to auto_parallelize(model, batch, loss_fn=...), which takes the "
    "model's output and the batch."
)
_NEEDED: Mapping[str, tuple[object, str]] = {
    "save_strategy": ("no", 'Set "no", and save with parallel.save(folder, trainer.optimizer), on all processes.'),
    "remove_unused_columns": (False, "Set it to False: the model takes all entries of a batch."),
    "gradient_accumulation_steps": (1, "Give the whole batch at once: the plan has micro-batches of its own."),
    "gradient_checkpointing": (False, "The plan says which layers recompute: plan with --fix recompute=full."),
    "label_smoothing_factor": (0.0, _LOSS_REMEDY),
    "neftune_noise_alpha": (None, "Add the noise in the model's forward."),
}
"""Training arguments that have one value here, and what to do instead of setting another."""


class SplitModel(nn.Module):
    """Adapts a parallel model to the Trainer's calls with a batch's entries.

    With gradients it returns ``{"loss": loss}``, without them the outputs of the user's model, gathered on every rank.

    Attributes:
        parallel: from ``auto_parallelize``.
        config: configuration of the user's model, for callbacks; None if it has none.
        accepts_loss_kwargs: tells the Trainer whether the user's model takes the number of labels that count.
        loss_type: tells the Trainer which labels of the user's model count; None if the model does not say.
        returns_loss_only: whether the model returns the loss only without gradients, too.
    """

    def __init__(self, parallel: ParallelModel) -> None:
        super().__init__()
        self.parallel, self.config = parallel, getattr(parallel.module, "config", None)
        # the Trainer's rule: the model's attribute, else whether its forward takes any keyword
        parameters = inspect.signature(type(parallel.module).forward).parameters.values()
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.accepts_loss_kwargs = bool(getattr(parallel.module, "accepts_loss_kwargs", takes_any_keyword))
        self.loss_type = getattr(parallel.module, "loss_type", None)
        self.returns_loss_only = False

    def forward(self, **inputs: Any) -> Any:
        """Return the mean loss of a batch in training, the outputs of the user's model in evaluation."""
        one_stage = len(self.parallel.plan.stages) == 1
        if torch.is_grad_enabled() or (self.returns_loss_only and one_stage):
            return {"loss": self.parallel(inputs)}
        outputs = self.parallel.outputs(inputs)
        return {"loss": outputs["loss"]} if self.returns_loss_only else outputs


class Trainer(transformers.Trainer):
    """A Trainer for the model that ``auto_parallelize`` returns; all processes run it (``frameworks.one_process``).

    It clips gradients by the norm over the full model. Rank 0 saves the full model with its configuration, for
    ``from_pretrained``, and alone shows progress. Resume from ``parallel.save(folder, trainer.optimizer)``, not from
    the Trainer's checkpoints.

    Args:
        model: from ``auto_parallelize``.
        args: with ``save_strategy="no"`` and ``remove_unused_columns=False``; gradient checkpointing, label smoothing,
            noise in embeddings and gradient accumulation are not the Trainer's to do, and raise an error.
        options: as for ``transformers.Trainer``, without ``compute_loss_func``.

    Raises:
        InputError: the model is not parallel, a training argument is not supported, or the Trainer sees the other
            processes.
    """

    def __init__(self, model: ParallelModel, args: transformers.TrainingArguments, **options: Any) -> None:
        _check(model, args, options)
        self.parallel = model
        self._split = SplitModel(model)
        super().__init__(self._split, args, **options)
        if args.label_names is None:  # the Trainer expects a loss from batches with these entries
            self.label_names = find_labels(type(model.module))  # type: ignore[no-untyped-call]
        if self.accelerator.num_processes > 1:
            raise InputError("processes", self.accelerator.num_processes, _ONE_PROCESS_REMEDY)
        if dist.get_rank():
            for callback in list(self.callback_handler.callbacks):
                shown = type(callback).__module__.startswith("transformers.integrations")
                if shown or isinstance(callback, (PrinterCallback, ProgressCallback)):
                    self.remove_callback(callback)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **more: Any
    ) -> Any:
        """Run the Trainer's step; outputs are gathered only if they are needed."""
        self._split.returns_loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **more)
        finally:
            self._split.returns_loss_only = False

    # The Trainer has no public hook for clipping; tests/frameworks compares clipped runs with those of one process.
    def _clip_grad_norm(self, model: nn.Module) -> Tensor:  # noqa: ARG002
        return self.parallel.clip_grad_norm(float(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:  # noqa: ARG002
        return float(self.parallel.clip_grad_norm(float("inf")) if grad_norm is None else grad_norm)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
        state = self.parallel.full_state_dict()
        if dist.get_rank() == 0:
            first = self.parallel.entries.names  # tied weights are there once, as from_pretrained expects them
            tensors = {name: tensor.contiguous() for name, tensor in state.items() if first.get(name, name) == name}
            super()._save(output_dir, tensors)
            model, folder = self.parallel.module, output_dir or str(self.args.output_dir)
            if isinstance(model, transformers.PreTrainedModel):  # what ``from_pretrained`` reads beside the weights
                config = copy.deepcopy(model.config)
                config.architectures = [type(model).__name__]
                config.save_pretrained(folder)
                if model.can_generate():
                    model.generation_config.save_pretrained(folder)
        dist.barrier()


def _check(model: object, args: transformers.TrainingArguments, options: Mapping[str, Any]) -> None:
    if not isinstance(model, ParallelModel):
        raise InputError("model", type(model).__name__, "Give what auto_parallelize(model, batch) returns.")
    for name, (needed, remedy) in _NEEDED.items():
        if (value := getattr(args, name, needed)) != needed:
            raise InputError(name, str(value), remedy)
    if options.get("compute_loss_func") is not None:
        raise InputError("compute_loss_func", options["compute_loss_func"], _LOSS_REMEDY)
