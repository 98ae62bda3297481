"""Importing DeepSpeed on demand, checking its configuration, and the optimizer that users get for its engine."""

from __future__ import annotations

import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import LaunchError

INSTALL = "pip install 'deepspeed>=0.16'"


def load(device: torch.device) -> ModuleType:
    """Import ``deepspeed`` and set it up on the default process group; raise ``LaunchError`` if it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed
    except ImportError as error:
        remedy = f"The plan's backend is deepspeed, which is not installed here ({error}). Do: {INSTALL}"
        raise LaunchError(remedy) from error
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    if device.type == "cpu":
        import deepspeed.ops

        # Otherwise the first start compiles collectives through shared memory (about 100 s). There is no public
        # option: ``deepspeed.comm.torch`` reads this table, which is created when it is first read.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), dist_init_required=False)
    library: ModuleType = deepspeed
    return library


def check_engine(engine: Any, config: Mapping[str, Any]) -> None:
    """Raise ``LaunchError`` for the first setting of the engine that differs from the configuration."""
    actual = {
        "zero_optimization.stage": int(engine.zero_optimization_stage()),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "train_batch_size": engine.train_batch_size(),
        "gradient_clipping": engine.gradient_clipping(),
        "bf16.enabled": engine.bfloat16_enabled(),
        "fp16.enabled": engine.fp16_enabled(),
        "zero_optimization.offload_optimizer.device": "cpu" if engine.zero_use_cpu_optimizer() else None,
    }
    for name, value in actual.items():
        if value != config.get(name):
            raise LaunchError(
                f"DeepSpeed runs with {name} = {value}, but the plan asks for {config.get(name)}. Use another version."
            )


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer that users get: it has the groups of the inner optimizer, and its ``step`` steps the engine.

    Args:
        inner: optimizer over the model's parameters, which the engine steps.
        update: makes the engine update the parameters.
        drop: drops gradients of the engine that no update has used.
        factory, options: ``factory(parameters, **options)`` created ``inner``; None: the user created it.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        update: Callable[[], None],
        drop: Callable[[], None],
        factory: Callable[..., torch.optim.Optimizer] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.factory, self.options = factory, dict(options or {})
        # the base class is not initialized: groups and states are those of the inner one, which DeepSpeed flattens
        self.inner, self._update, self._drop = inner, update, drop
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of the inner optimizer, for DeepSpeed's flat shards."""
        return self.inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # type: ignore[override]
        """Update the parameters with the gradients of the last backward pass."""
        loss: Tensor | None = None if closure is None else closure()
        self._update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Drop gradients that no step has used; the engine drops others after the update."""
        self._drop()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's flat shards. To save all states, use the model's ``save``."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of this rank's flat shards."""
        self.inner.load_state_dict(state_dict)

    def __repr__(self) -> str:
        """Describe the inner optimizer."""
        return f"EngineOptimizer({self.inner!r})"
