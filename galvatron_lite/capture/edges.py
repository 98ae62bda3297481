"""What runs before the first block and after the last one: the model's own forward with the blocks left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from galvatron_lite.model.batch import LossFn, call_model, loss_of, map_tensors, tensors_of
from galvatron_lite.model.trace_record import Recorder, Recording
from galvatron_lite.model.trace_run import BlockCall, RegionRun, entered, explaining, region_end, shapes_only


class _LeftOut:
    """Stands in for the blocks: gives what they gave, cut off from what they took, also to whom listens inside them."""

    def __init__(self, twin: nn.Module, recorder: Recorder, calls: Sequence[BlockCall], after: Recording) -> None:
        self.twin, self.recorder, self.calls, self.after = twin, recorder, list(calls), after
        self.entry: list[Tensor] = []
        self.exit: list[Tensor] = []
        self.numbers: tuple[int, ...] = ()
        self.earlier: list[int] = []
        self._done = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._done == 0:
            self.entry = [*tensors_of(args), *tensors_of(kwargs)]
        self.recorder.target = None
        call = self.calls[self._done]
        for inner in call.heard:
            self._tell(inner)
        leaves = map_tensors(call.output, _fresh)
        output = map_tensors(leaves, entered)
        self.earlier += self.numbers
        self.numbers = tuple(self.recorder.number(tensor) for tensor in tensors_of(output))
        self._done += 1
        if self._done == len(self.calls):
            self.exit += tensors_of(leaves)
            self.recorder.target = self.after
        return output

    def _tell(self, call: BlockCall) -> None:
        """Call a module inside a block that gives what it gave, so that the model's own hooks on it hear of it."""
        leaves = map_tensors(call.output, _fresh)
        output = map_tensors(leaves, entered)
        self.exit += tensors_of(leaves)
        self.earlier += [self.recorder.number(tensor) for tensor in tensors_of(output)]
        with _replaced([self.twin.get_submodule(call.path)], lambda *_args, **_kwargs: output):
            self.twin.get_submodule(call.path)(*call.args, **call.kwargs)


def _fresh(tensor: Tensor) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return twin.requires_grad_(tensor.requires_grad)


def _trained(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


@contextmanager
def _replaced(blocks: Sequence[nn.Module], stand_in: Callable[..., Any]) -> Iterator[None]:
    for block in blocks:
        block.forward = stand_in  # a module's own attribute comes before its class's method
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def run_edges(
    twin: nn.Module, batch: Any, calls: Sequence[BlockCall], loss_fn: LossFn | None, tail: Sequence[nn.Parameter]
) -> tuple[RegionRun, RegionRun]:
    """Run what lies before and after the blocks forward and backward on the meta device.

    Args:
        twin: the model on the meta device.
        batch: on the meta device.
        calls: the blocks' calls in order; without any, everything counts as before.
        loss_fn: how to get the loss.
        tail: parameters used after the blocks.

    Raises:
        TraceError: the model does not run.
        InputError: it gives no loss.
    """
    recorder, before, after = Recorder(), Recording(), Recording()
    blocks = {call.path: twin.get_submodule(call.path) for call in calls}
    stand_in = _LeftOut(twin, recorder, calls, after)
    with (
        explaining("", twin),
        shapes_only(recorder),
        recorder.watching(twin),
        _replaced(list(blocks.values()), stand_in),
    ):
        recorder.target = before
        given = tuple(recorder.number(tensor) for tensor in tensors_of(batch))
        loss = loss_of(call_model(twin, batch), batch, loss_fn)
        recorder.claim(loss, "")
        recorder.claim(stand_in.entry, "")
        last = after if calls else before
        recorder.start_backward(last)
        trained = _trained([*stand_in.exit, *tail] if calls else [*twin.parameters()])
        if trained and loss.requires_grad:
            torch.autograd.backward([loss], inputs=trained)
        recorder.finish(last, twin.parameters())
        end = region_end(stand_in.entry)
        if end is not None:
            recorder.start_backward(before)
            torch.autograd.backward([end])
            recorder.finish(before, twin.parameters())
        leaving = tuple(recorder.number(tensor) for tensor in stand_in.entry)
    return (
        RegionRun(before, given, (), leaving=leaving),
        RegionRun(after, (*stand_in.numbers, *stand_in.earlier, *given), (), handed=stand_in.numbers),
    )
