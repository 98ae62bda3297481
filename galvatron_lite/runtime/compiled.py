"""``torch.compile`` for each block: its forward is replaced in place, its hooks do not change.

Conversion of activations, gathering of parameters (FSDP), recomputation and offload are outside of a block's forward,
and so outside of the compiled region; ``nn.Module.compile`` would include hooks. Before the first training pass of a
block of each kind, forward and backward run on the inputs of that pass as a trial, so that a block that does not
compile shows before anything depends on it; ``auto`` also times both.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_tensors, tensors_of
from galvatron_lite.model.graph import Role
from galvatron_lite.parallelism.lines import lines_of
from galvatron_lite.parallelism.recompute.apply import casting_anew
from galvatron_lite.plans.schema import Plan
from galvatron_lite.runtime.assignment import LayerAssignment
from galvatron_lite.runtime.mesh import Group, Meshes

Forward = Callable[..., Any]
AUTO, DEFAULT = "auto", "inductor"
_ROUNDS = 3
_FAILED = float("inf")


def check_compile(wanted: bool | str, plan: Plan | None = None) -> str:
    """Return how blocks are compiled: empty (they are not), ``auto``, or the name of a backend of ``torch.compile``.

    Raises:
        InputError: there is no such backend; or the plan has tensor parallelism, whose blocks torch before 2.12 trains
            wrong with backends that leave backward to autograd.
    """
    parts = () if plan is None else (*(stage.runs for stage in plan.stages), *(branch.runs for branch in plan.branches))
    is_traced = wanted in {True, AUTO, DEFAULT} or str(wanted).startswith("aot_")
    has_tensor = any(lines_of(run.strategy).matmuls.size > 1 for runs in parts for run in runs)
    if wanted and not is_traced and has_tensor and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        remedy = f"torch {torch.__version__} trains tensor parallel blocks wrong with it: use 2.12, or {DEFAULT}."
        raise InputError("compile", str(wanted), remedy)
    if isinstance(wanted, bool):
        return DEFAULT if wanted else ""
    backends = [AUTO, *torch.compiler.list_backends(exclude_tags=())] if wanted else [""]
    if wanted not in backends:
        raise InputError("compile", wanted, f"Give True, False or one of {', '.join(backends)}.")
    return wanted


@dataclass(slots=True)
class CompiledBlock:
    """A block whose forward may be compiled."""

    name: str  # of the layer
    module: nn.Module
    forward: Forward  # the original
    compiled: Forward  # compiled when it is first called
    kind: object  # equal for blocks that compile alike
    uses_compiled: dict[object, bool]  # whether blocks run compiled, by kind, once the first of a kind was tried
    group: Group  # ranks that run it together; the slowest decides
    measures: bool  # whether the faster forward is used, instead of the compiled one

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen forward."""
        return (self.compiled if self.uses_compiled.get(self.kind) else self.forward)(*args, **kwargs)

    def try_out(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pre-hook: before the first training pass, try whether the block compiles, and measure the gain."""
        if self.kind in self.uses_compiled or not torch.is_grad_enabled():
            return
        plain = self._seconds(self.forward, args, kwargs, _ROUNDS) if self.measures else 0.0
        reason = "it failed on another rank"
        try:
            seconds = self._seconds(self.compiled, args, kwargs, _ROUNDS if self.measures else 0)
        except Exception as error:
            reason, seconds = f"{type(error).__name__}: {str(error)[:300]}", _FAILED
        plain, seconds = _slowest([plain, seconds], self.group)
        self.uses_compiled[self.kind] = seconds != _FAILED and (not self.measures or seconds < plain)
        if seconds == _FAILED:
            warnings.warn(f"{self.name} does not compile, and runs as it is ({reason}).", stacklevel=2)
        elif self.measures and (not dist.is_initialized() or dist.get_rank() == 0):
            outcome = "is compiled" if self.uses_compiled[self.kind] else "is not compiled"
            warnings.warn(
                f"{self.name} and blocks like it: {1e3 * seconds:.3g} ms compiled, {1e3 * plain:.3g} ms not (measured, "
                f"forward and backward): it {outcome}.",
                stacklevel=2,
            )

    def _seconds(self, forward: Forward, args: Any, kwargs: Any, rounds: int) -> float:
        """The shortest of some forward and backward passes, after one to warm up."""
        times = [0.0]
        with _unchanged(self.module, args, kwargs):
            for _ in range(rounds + 1):
                start = _now()
                _pass(self.module, forward, args, kwargs)
                times.append(_now() - start)
        return min(times[2:], default=0.0)


def compile_blocks(model: nn.Module, stage: Sequence[LayerAssignment], meshes: Meshes, wanted: str) -> None:
    """Let a stage's blocks be compiled, in place. Call it before they are split, so that splitting is not compiled.

    Blocks that share tokens or pixels are not compiled: their inputs are sharded tensors, which cannot be traced
    (``parallelism.sharded``), and a trial on plain tensors would not show it.
    """
    uses_compiled: dict[object, bool] = {}
    backend = DEFAULT if wanted == AUTO else wanted
    for placed in stage if wanted else ():
        if placed.layer.role is not Role.BLOCK or placed.layout.tokens > 1 or placed.layout.splits_pixels:
            continue
        module, group = model.get_submodule(placed.layer.modules[0]), meshes.groups(placed.strategy).everyone
        parameters = tuple((name, tuple(one.shape), one.dtype) for name, one in module.named_parameters())
        kind, compiled = (type(module), parameters, placed.strategy), torch.compile(module.forward, backend=backend)
        block = CompiledBlock(
            placed.layer.name, module, module.forward, compiled, kind, uses_compiled, group, wanted == AUTO
        )
        module.forward = functools.wraps(block.forward)(functools.partial(CompiledBlock.run, block))
        module.register_forward_pre_hook(block.try_out, with_kwargs=True)


def _pass(module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> None:
    """Run forward and backward on copies of the arguments, and drop the gradients."""
    inputs: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        inputs.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return inputs[-1]

    args, kwargs = map_tensors((args, dict(kwargs)), copied)
    outputs = [output for output in tensors_of(forward(*args, **kwargs)) if output.requires_grad]
    leaves = [leaf for leaf in [*inputs, *module.parameters()] if leaf.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)


@contextmanager
def _unchanged(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """Restore a block's buffers and the random state after what runs inside."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    devices = {one.device for one in tensors_of((args, dict(kwargs))) if one.is_cuda}
    try:
        with torch.random.fork_rng(sorted(devices, key=str)), casting_anew():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _slowest(seconds: list[float], group: Group) -> list[float]:
    """The largest figures of all ranks, on every rank."""
    if group is None:
        return seconds
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    shared = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [float(one) for one in shared]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
