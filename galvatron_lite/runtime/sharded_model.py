"""A model whose parameters are split over ranks, between its steps: parameters, gradients and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.checkpoint.saving import Saving
from galvatron_lite.runtime.monitor.notes import StepPhase
from galvatron_lite.runtime.monitor.observer import Observable
from galvatron_lite.runtime.optimizer import OptimizerSteps, fused_on_host, split_groups
from galvatron_lite.runtime.parameters.full_state import full_state_dict, load_full_state_dict
from galvatron_lite.runtime.parameters.managed import ManagedParameter, multiply_gradients
from galvatron_lite.runtime.parameters.use import ParameterCopies, moved_error
from galvatron_lite.runtime.stages import StageRuntime
from galvatron_lite.runtime.steps import clip_factor, sum_over_world
from galvatron_lite.runtime.user_names import UserNames

if TYPE_CHECKING:
    import weakref

    from galvatron_lite.runtime.monitor.watch import Watch
    from galvatron_lite.runtime.parameters.pieces import Entries

OptimizerFactory = Callable[..., torch.optim.Optimizer]


class ShardedModel(Saving, Observable, UserNames):
    """The parameters, gradients and state of a split model, as a training loop uses them."""

    module: nn.Module  # the user's model
    device: torch.device  # of this rank
    plan: Plan
    entries: Entries  # of the full model's state
    sum_dtype: torch.dtype  # of losses and norms: float32, or float64 where a parameter of the model has it
    runtimes: Sequence[StageRuntime]  # this rank's stages or branches, ready to train
    runtime: StageRuntime  # the first of them
    copies: nn.ModuleList  # the model's structure once more for each other runtime
    averages: list[weakref.ref[ParameterCopies]]  # copies of its parameters, see ``__deepcopy__``
    watch: Watch  # tracks the phase of the step on this rank, and explains why a step fails
    _optimizers: OptimizerSteps

    @property
    def managed(self) -> list[ManagedParameter]:
        """The parameters of this rank."""
        return [parameter for runtime in self.runtimes for parameter in runtime.owned]

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer updates on this rank, by name: shards, rows under ZeRO-1, copies in host memory."""
        updated = {managed.parameter: managed.updated for managed in self.managed}
        by_name = {name: managed.updated for managed in self.managed for name in managed.names}
        first_names = {} if self.runtime.shared is None else self.runtime.shared.first_names
        for name, parameter in super().named_parameters("", *args, **kwargs):
            # while FSDP has gathered a layer, its modules hold other tensors, by the same names
            first_name = ".".join(filter(None, (prefix, first_names.get(name, name))))
            yield first_name, updated.get(parameter, by_name.get(name, parameter))

    def param_groups(self, groups: Any = None) -> list[dict[str, Any]]:
        """Parameter groups for any torch optimizer: shards of different kinds are in separate groups.

        Args:
            groups: parameters or groups with options, as an optimizer takes them; default: all parameters.
        """
        return split_groups(self.parameters() if groups is None else groups)

    def optimizer(self, factory: OptimizerFactory, **options: Any) -> torch.optim.Optimizer:
        """An optimizer over this rank's shards: ``parallel.optimizer(torch.optim.AdamW, lr=1e-3)``; all ranks call it.

        Raises:
            InputError: its update of an element depends on other elements (Adafactor, LAMB, Muon), which are on other
                ranks under the plan.
        """
        groups = self.param_groups()
        if self.device.type != "cpu":  # on a machine without an accelerator the host is the device
            groups = fused_on_host(groups, factory, options)
        optimizer = factory(groups, **options)
        self._optimizers.check(optimizer, lambda groups: factory(groups, **options))
        return optimizer

    def publish(self) -> None:
        """Send updated parameters to the ranks that compute with them. All ranks call it.

        Call it after something other than a torch optimizer updated parameters, before they are read; a call of the
        model does it, too.
        """
        for runtime in self.runtimes:
            runtime.updates.publish()

    def has_gradients(self) -> bool:
        """Whether parameters on this rank have gradients."""
        return any(managed.gradient is not None for managed in self.managed)

    def gradient_norm(self) -> Tensor:
        """The norm of the full model's gradient, the same on every rank; all ranks call it."""
        return sum_over_world(self, [])[-1].sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of this rank by a number."""
        for runtime in self.runtimes:
            multiply_gradients(runtime.owned, factor)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the full model's gradient to a norm, after backward. All ranks call it.

        Returns:
            The norm before clipping.
        """
        norm = self.gradient_norm()
        self.scale_gradients(clip_factor(norm, max_norm))
        return norm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add up gradients on this rank only; the first one outside sums them over the ranks.

        Layers under ZeRO reduce at every backward pass.
        """
        with ExitStack() as stack:
            for runtime in self.runtimes:
                stack.enter_context(runtime.reducer.no_sync())
            yield

    def full_state_dict(self) -> dict[str, Tensor]:
        """The full model's ``state_dict()`` on the CPU of every rank, under the user's own names; all ranks call it.

        The unsplit model can load it, and so can every other plan. See ``runtime.parameters.full_state``.
        """
        with self._watched():
            return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set this rank's shares from a full state, of any plan or of the unsplit model; every rank passes all of it.

        Raises:
            InputError: an entry this rank needs is missing, or has another shape.
        """
        load_full_state_dict(self, state)

    def __deepcopy__(self, _memo: dict[int, Any]) -> ParameterCopies:
        """Copies of this rank's parameters, as ``torch.optim.swa_utils.AveragedModel(parallel)`` takes them.

        ``averaged.module.full_state_dict()`` returns the full averages; all ranks call it.
        """
        return ParameterCopies(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002
        """Handle ``to``, ``half``, ``cuda`` and the like: do nothing if parameters have that device and dtype already.

        Raises:
            InputError: another device or dtype.
        """
        for dtype in {parameter.dtype for parameter in self.parameters()}:
            wanted = fn(torch.empty(0, dtype=dtype, device=self.device))
            if (wanted.dtype, wanted.device) != (dtype, self.device):
                raise moved_error(wanted.dtype, wanted.device)
        return self

    def release_gathered(self) -> None:
        """Release the parameters that a pass left gathered: FSDP would use them again in the next one.

        A pass without gradients leaves those of ZeRO-2, and of the outermost modules. Meanwhile the training loop may
        have changed, loaded or frozen the shards.
        """
        for runtime in self.runtimes:
            for module in runtime.sharded.zero_modules:
                module.reshard()

    def _show_parameters(self) -> None:
        """Between uses of the model, let the training loop read parameters, or refuse it."""
        for runtime in self.runtimes:
            runtime.updates.show()

    def _watched(self, phase: StepPhase = StepPhase.SAVING) -> AbstractContextManager[None]:
        return self.watch.explained(self.step, self.plan, self.runtime.meshes.stage_index, phase)
