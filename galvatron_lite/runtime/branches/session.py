"""A forward pass of a model with branches on one rank.

A call of a branch sends this rank's shards of the arguments to the ranks of the branch, and returns pending tensors.
When the first value is needed, this rank runs its own branches in the order of their calls, and starts to receive the
outputs of the others. So no rank waits for another branch before it has run its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.errors import InputError
from galvatron_lite.model.batch import map_places, map_tensors, places, tensors_of
from galvatron_lite.runtime.activations.layout import AxisSplit, cut_box
from galvatron_lite.runtime.activations.traffic import RankPiece
from galvatron_lite.runtime.branches.parts import PlacedPart, StandIn, Stream
from galvatron_lite.runtime.branches.pending import (
    CallContext,
    DeferredFunction,
    OutputTemplates,
    PendingTensor,
    Template,
    meta_of,
    nodes_of,
    pending,
    pick,
    resolved,
    template_of,
    with_rows,
)
from galvatron_lite.runtime.branches.transfer import BranchChannel, BranchTransfer, TensorMove
from galvatron_lite.runtime.stages import StageRuntime

Origins = Mapping[int, tuple[Tensor, Tensor]]
"""Tensors of this rank's batch, by identity, each with the tensor of the full micro-batch that it belongs to."""


@dataclass(slots=True)
class RankBranch:
    """A branch, as seen by a rank."""

    part: PlacedPart  # layers and ranks
    templates: Mapping[str, OutputTemplates]  # of the outputs of its entrances, by path
    runtime: StageRuntime | None  # trains the branch; None on ranks without it
    stream: Stream  # of its random numbers


@dataclass(slots=True)
class PassSetting:
    """The state that all passes of a model share."""

    channel: BranchChannel
    trunk: PlacedPart  # layers and ranks
    runtime: StageRuntime = field(init=False)  # trains the trunk
    branches: dict[str, RankBranch] = field(default_factory=dict)  # by path of their entrances
    session: BranchSession | None = None  # the current pass
    shapes: dict[object, Any] = field(default_factory=dict)  # cached templates; see ``ModelRun``
    # moves of the output of a call, by identity of its template, which ``OutputTemplates`` keeps alive
    returned: dict[int, list[TensorMove]] = field(default_factory=dict)

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an entrance of a branch; raise ``InputError`` outside a pass."""
        if self.session is None:
            remedy = "Use the object that auto_parallelize returned; other ranks must run along."
            raise InputError("call of", stand_in.path, remedy)
        return self.session.call(stand_in, args, kwargs)


class BranchSession:
    """A forward pass of the model for a full micro-batch of ``rows`` samples."""

    def __init__(self, setting: PassSetting, rows: int, origins: Origins) -> None:
        self.setting, self.rows, self.origins = setting, rows, origins
        self.trunk_rows = rows // setting.trunk.layout.batch  # samples of the trunk on this rank
        self.device, self.shapes = setting.channel.device, setting.shapes
        self.applied: list[DeferredFunction] = []
        self.calls: list[DeferredCall] = []
        self._waiting: list[DeferredCall] = []
        setting.channel.finish()

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """Defer a call of a branch, and start sending the arguments of this rank."""
        call = DeferredCall(self, self.setting.branches[stand_in.path], stand_in, args, kwargs)
        self.calls.append(call)
        self._waiting.append(call)
        return pending(call, call.template.resized(self.trunk_rows))

    def flush(self) -> None:
        """Run the deferred calls of this rank's branches, and start to send and receive the outputs of all branches."""
        calls, self._waiting = self._waiting, []
        for call in calls:
            if not call.consumed:
                call.announce()
        for call in calls:
            call.run_here()

    def settle(self, loss: Tensor) -> Tensor:
        """Return the loss, from which backward reaches all transfers of the branches on every rank."""
        self.flush()
        loss = resolved(loss)
        returning = [call for call in self.calls if call.exit is not None]
        outputs = [tensor for call in returning for tensor in tensors_of(call.value()) if tensor.requires_grad]
        transfers = list(dict.fromkeys(transfer for call in returning for transfer in call.transfers()))
        if not transfers:
            return loss
        tied: Tensor = _Tie.apply(loss, transfers, *outputs)  # type: ignore[no-untyped-call]
        return tied

    def deliver(self, outputs: Any) -> Any:
        """Return the outputs of the model after the outputs of all branches have arrived."""
        self.flush()
        for call in self.calls:
            if call.exit is not None:
                call.value()
        return outputs


class _Tie(torch.autograd.Function):
    """Makes the loss depend on the outputs of branches, so that backward begins by starting to receive gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, transfers: list[BranchTransfer], *outputs: Tensor) -> Tensor:
        ctx.transfers, ctx.outputs = transfers, len(outputs)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for transfer in ctx.transfers:
            transfer.back.expect()
        return gradient, None, *[None] * ctx.outputs


@dataclass(frozen=True, slots=True, eq=False)
class BranchInput:
    """A tensor that is sent to a branch."""

    tensor: Tensor  # in the trunk
    piece: RankPiece  # of this rank; a tensor without samples is stacked, one copy for each share of the trunk's batch
    target: AxisSplit  # how the branch splits it
    sampled: bool  # whether it has samples along dim 0


class DeferredCall:
    """A call of a branch that runs later.

    Attributes:
        template: of the output.
        consumed: whether a later call of the same branch takes the output.
        exit: transfer of the output to the trunk.
        local: the output in the branch, after the call has run on the ranks of the branch.
    """

    def __init__(
        self, run: BranchSession, branch: RankBranch, stand_in: StandIn, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.run, self.branch, self._stand_in = run, branch, stand_in
        self._around = CallContext()
        self._args, self._kwargs = map_tensors((args, kwargs), self._admitted)
        self.consumed = False
        self.exit: BranchTransfer | None = None
        self.local: Any = None
        self._value: Any = None
        self._has_value = False
        inputs = self._args, self._kwargs
        self.template: Template = branch.templates[stand_in.path](*inputs, run.rows, self._like, stand_in.training)
        self._chain: dict[DeferredCall, None] = {}  # ordered: calls of the branch that it depends on, and itself
        for node in nodes_of(inputs):
            if isinstance(node, DeferredCall):
                node.consumed = True
                self._chain |= node._chain
        self._chain[self] = None
        self._moved: list[BranchInput] = []
        self._replicated: list[tuple[Tensor, Tensor]] = []  # tensors of the batch, which every rank has in full
        self._sort_inputs()
        self._entry: BranchTransfer | None = None
        # autograd tokens of the transfers on this rank: none or one each
        self._entry_departed, self._entry_arrived, self._exit_departed = (list[Tensor]() for _ in range(3))
        if self._moved:
            self._send_inputs()

    def _admitted(self, tensor: Tensor) -> Tensor:
        """An argument, which stays pending if it comes from the same branch."""
        if not isinstance(tensor, PendingTensor):
            return tensor
        sources: list[DeferredCall] = [node for node in nodes_of(tensor) if isinstance(node, DeferredCall)]
        others = [call.branch.part.name for call in sources if call.branch is not self.branch]
        if others:
            remedy = f"It reads what branch {others[0]} returned: they are not independent. Make them one branch."
            raise InputError("branch", self.branch.part.name, remedy)
        return tensor if self._commutes(tensor) else resolved(tensor)

    def _commutes(self, tensor: PendingTensor) -> bool:
        """Whether deferred functions may run on the branch's share of the samples instead of the trunk's."""
        branch_rows, trunk_rows = self.run.rows // self.branch.part.layout.batch, self.run.trunk_rows
        if branch_rows == trunk_rows or not isinstance(tensor.node, DeferredFunction):
            return True
        functions = [node for node in nodes_of(tensor) if isinstance(node, DeferredFunction)]
        if any(trunk_rows in _numbers((function.args, function.kwargs)) for function in functions):
            return False
        try:
            branch_shape = tuple(self._like(tensor, branch_rows).shape)
        except Exception:
            return False
        shape = tuple(tensor.shape)
        return branch_shape == shape or (
            branch_shape[1:] == shape[1:] and (shape[:1], branch_shape[:1]) == ((trunk_rows,), (branch_rows,))
        )

    def _like(self, tensor: Tensor, rows: int) -> Tensor:
        """The template of an argument for a number of samples."""
        if isinstance(tensor, PendingTensor):
            node = tensor.node
            if isinstance(node, DeferredCall):
                return pick(node.template.resized(rows), tensor.place)
            assert isinstance(node, DeferredFunction)
            return pick(meta_of(node.func, node.args, node.kwargs, lambda arg: self._like(arg, rows)), tensor.place)
        like = template_of(tensor)
        return with_rows(like, rows) if self.run.setting.runtime.traffic.piece(tensor) is not None else like

    def _sort_inputs(self) -> None:
        """Find the tensors that are sent to the branch, and those that its ranks take from the batch."""
        run, part, traffic = self.run, self.branch.part, self.run.setting.runtime.traffic
        trunk, nests = run.setting.trunk.layout, [(self._args, self._kwargs)]
        nests += [(node.args, node.kwargs) for node in nodes_of(nests[0]) if isinstance(node, DeferredFunction)]
        tensors = {id(tensor): tensor for tensor in tensors_of(nests) if not isinstance(tensor, PendingTensor)}
        for tensor in tensors.values():
            piece = traffic.piece(tensor)
            if id(tensor) in run.origins:
                self._replicated.append((tensor, run.origins[id(tensor)][1]))
            elif piece is not None:
                self._moved.append(BranchInput(tensor, piece, part.entering(piece.shape), sampled=True))
            elif tensor.requires_grad:
                loose, shape = traffic.unsampled_to_layer(tensor, trunk).unsqueeze(0), (self._copies(), *tensor.shape)
                piece = RankPiece(loose, trunk.samples(shape), shape)
                self._moved.append(BranchInput(tensor, piece, part.layout.samples(shape), sampled=False))

    def _copies(self) -> int:
        """The copies of a tensor without samples that are sent or returned: one for each share of the trunk's batch."""
        trunk, shares = self.run.setting.trunk.layout.batch, self.branch.part.layout.batch
        if trunk % shares:
            remedy = f"It is given or returns a tensor without samples; their shares, {shares}, must divide {trunk}."
            raise InputError("branch", self.branch.part.name, remedy)
        return trunk

    def _send_inputs(self) -> None:
        setting, part, world = self.run.setting, self.branch.part, self.run.setting.channel.world
        grad, moves = torch.is_grad_enabled(), list[TensorMove]()
        for moved in self._moved:
            piece = moved.piece
            before = setting.trunk.boxes(piece.split, piece.shape, world)
            after, differentiable = part.boxes(moved.target, piece.shape, world), grad and piece.tensor.requires_grad
            moves.append(TensorMove.of(piece.tensor.dtype, before, after, differentiable, setting.channel.rank))
        self._entry = BranchTransfer(setting.channel, f"what branch {part.name} is given", moves)
        self._entry_departed = [self._entry.depart([moved.piece.tensor for moved in self._moved])]
        if self.branch.runtime is not None:
            self._entry.there.expect()

    def _receive_inputs(self, runtime: StageRuntime) -> dict[int, Tensor]:
        """The inputs in the branch, by identity of the tensors in the trunk."""
        traffic, index = runtime.traffic, runtime.meshes.index_in_stage
        received: dict[int, Tensor] = {}
        for tensor, full in self._replicated:
            shape = tuple(full.shape)
            split = self.branch.part.entering(shape)
            items = cut_box(full, split.box(index, shape)).to(self.run.device).contiguous()
            received[id(tensor)] = traffic.lazy(RankPiece(items, split, shape))
        arrived = list[Tensor]()
        if self._entry is not None:
            arrived, token = self._entry.arrive(self._entry_departed)
            self._entry_arrived = [token]
        for moved, items in zip(self._moved, arrived, strict=True):
            piece = RankPiece(items, moved.target, moved.piece.shape)
            received[id(moved.tensor)] = traffic.lazy(piece) if moved.sampled else items[0]
        return received

    def announce(self) -> None:
        """Start receiving the output."""
        setting = self.run.setting
        if id(self.template) not in setting.returned:
            setting.returned[id(self.template)] = self._output_moves()
        name = f"what branch {self.branch.part.name} returns"
        with self._around():  # a value may be requested under no_grad
            self.exit = BranchTransfer(setting.channel, name, setting.returned[id(self.template)])
        self.exit.there.expect()

    def _output_moves(self) -> list[TensorMove]:
        setting, part, world = self.run.setting, self.branch.part, self.run.setting.channel.world
        moves = []
        for place, like in places(self.template.nest):
            shape = tuple(like.shape) if place in self.template.sampled else (self._copies(), *like.shape)
            before = part.boxes(part.layout.samples(shape), shape, world)
            after = setting.trunk.boxes(self._trunk_split(place, shape), shape, world)
            moves.append(TensorMove.of(like.dtype, before, after, like.requires_grad, setting.channel.rank))
        return moves

    def _trunk_split(self, place: str, shape: tuple[int, ...]) -> AxisSplit:
        """How the trunk splits an output with the full shape ``shape``."""
        setting = self.run.setting
        if place in self.template.sampled:
            return setting.runtime.traffic.target(shape)
        return setting.trunk.layout.samples(shape)

    def run_here(self) -> None:
        """Run the call and start sending the output; on ranks without the branch, do nothing."""
        runtime = self.branch.runtime
        if runtime is None:
            return
        runtime.traffic.begin(self.run.rows)
        with self.branch.stream.active(), self._around():
            inputs = self._receive_inputs(runtime)
            args, kwargs = map_tensors((self._args, self._kwargs), lambda arg: self._in_branch(arg, inputs, {}))
            self.local = self._stand_in.stands_for(*args, **kwargs)
        runtime.traffic.end()
        if self.exit is not None:
            self._send_outputs(runtime)

    def _in_branch(self, tensor: Tensor, inputs: Mapping[int, Tensor], outputs: dict[int, Any]) -> Tensor:
        """The argument of the call in the branch; ``outputs`` caches the results of deferred functions."""
        if not isinstance(tensor, PendingTensor):
            return inputs.get(id(tensor), tensor)
        node = tensor.node
        if isinstance(node, DeferredCall):
            return pick(node.local, tensor.place)
        assert isinstance(node, DeferredFunction)
        if id(node) not in outputs:
            outputs[id(node)] = node.of(lambda arg: self._in_branch(arg, inputs, outputs))
        return pick(outputs[id(node)], tensor.place)

    def _send_outputs(self, runtime: StageRuntime) -> None:
        assert self.exit is not None
        with self._around():
            returned, templates = dict(places(self.local)), places(self.template.nest)
            outputs = [self._output(place, like, returned.get(place), runtime) for place, like in templates]
            tokens = [token for call in self._chain for token in call._entry_arrived]
            self._exit_departed = [self.exit.depart(outputs, tokens)]

    def _output(self, place: str, like: Tensor, tensor: Tensor | None, runtime: StageRuntime) -> Tensor:
        """An output of the branch, split along the samples only."""
        part, traffic = self.branch.part, runtime.traffic
        if tensor is None:
            raise InputError(f"output {place} of branch", part.name, "It is there for some values only.")
        if place not in self.template.sampled:
            copies = self._copies() // part.layout.batch
            return traffic.unsampled_to_layer(tensor, part.layout).to(like.dtype).expand(copies, *like.shape)
        piece, shape = traffic.piece(tensor), tuple(like.shape)
        if piece is None or piece.shape != shape:
            raise InputError(f"output {place} of branch", part.name, f"Its shape is not {shape}, as was foreseen.")
        return traffic.mover(piece.tensor.to(like.dtype), piece.split, part.layout.samples(shape), shape)

    def transfers(self) -> list[BranchTransfer]:
        """Return the transfers with gradients: of the output, and of the inputs of all calls that it depends on."""
        if self.exit is None or not self.exit.anchored:
            return []
        return [self.exit, *(call._entry for call in self._chain if call._entry is not None)]

    def value(self) -> Any:
        """Return the output in the trunk."""
        if not self._has_value:
            self.run.flush()
            if self.exit is None:
                self.announce()
                if self.branch.runtime is not None:
                    self._send_outputs(self.branch.runtime)
            self._value, self._has_value = self._receive_outputs(), True
        return self._value

    def _receive_outputs(self) -> Any:
        assert self.exit is not None
        traffic = self.run.setting.runtime.traffic
        with self._around():
            tokens = [token for call in self._chain for token in call._entry_departed]
            tensors = iter(self.exit.arrive([*tokens, *self._exit_departed])[0])

            def show(place: str, like: Tensor) -> Tensor:
                items, shape = next(tensors), tuple(like.shape)
                if place not in self.template.sampled:
                    return items[0]
                return traffic.to_glue(RankPiece(items, self._trunk_split(place, shape), shape))

            return map_places(self.template.nest, show)


def _numbers(value: Any) -> Iterator[int]:
    """All integers in a nest."""
    if isinstance(value, Mapping):
        yield from _numbers(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
