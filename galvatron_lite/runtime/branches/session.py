"""One forward pass of a model with branches on a rank: calls of branches, deferred, run where they live, and joined.

A call of a branch sends what this rank has of its arguments to the branch's ranks, and returns pending tensors. The
first value that is needed runs this rank's own branches, in the order of their calls, and starts to receive what the
others return. So no rank waits for another branch before its own has run.
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
    Foreseen,
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
"""By identity of a tensor of this rank's share of the batch: itself, and the same of the complete micro-batch."""


@dataclass(slots=True)
class RankBranch:
    """A branch, as a rank sees it."""

    part: PlacedPart  # its layers and ranks
    foreseen: Mapping[str, Foreseen]  # what its entrances return, by path
    runtime: StageRuntime | None  # trains it; None on other ranks
    stream: Stream  # its random numbers


@dataclass(slots=True)
class PassSetting:
    """What all passes of a model share."""

    channel: BranchChannel
    trunk: PlacedPart  # its layers and ranks
    runtime: StageRuntime = field(init=False)  # trains it
    branches: dict[str, RankBranch] = field(default_factory=dict)  # by path of their entrances
    session: BranchSession | None = None  # the pass under way
    shapes: dict[object, Any] = field(default_factory=dict)  # results of functions of pending tensors' shapes
    # what moves of a call, by identity of its template, which the branch keeps
    returned: dict[int, list[TensorMove]] = field(default_factory=dict)

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an entrance; raises InputError outside of a pass."""
        if self.session is None:
            remedy = "Use the object that auto_parallelize returned; other ranks must run along."
            raise InputError("call of", stand_in.path, remedy)
        return self.session.call(stand_in, args, kwargs)


class BranchSession:
    """See the module."""

    def __init__(self, setting: PassSetting, rows: int, origins: Origins) -> None:
        self.setting, self.rows, self.origins = setting, rows, origins
        self.trunk_rows = rows // setting.trunk.layout.batch  # samples that the trunk has on this rank
        self.device, self.shapes = setting.channel.device, setting.shapes
        self.applied: list[DeferredFunction] = []
        self.calls: list[DeferredCall] = []
        self._waiting: list[DeferredCall] = []
        setting.channel.finish()

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """Defer a call of a branch, and start what it needs of this rank."""
        call = DeferredCall(self, self.setting.branches[stand_in.path], stand_in, args, kwargs)
        self.calls.append(call)
        self._waiting.append(call)
        return pending(call, call.template.resized(self.trunk_rows))

    def flush(self) -> None:
        """Run what was called of this rank's own branches, and start to send and receive what branches return."""
        calls, self._waiting = self._waiting, []
        for call in calls:
            if not call.consumed:
                call.announce()
        for call in calls:
            call.run_here()

    def settle(self, loss: Tensor) -> Tensor:
        """The loss, such that backward reaches, on every rank, all that the branches sent and received."""
        self.flush()
        loss = resolved(loss)
        ends = [call for call in self.calls if call.exit is not None]
        tied = [tensor for call in ends for tensor in tensors_of(call.value()) if tensor.requires_grad]
        awaited = list(dict.fromkeys(transfer for call in ends for transfer in call.awaited()))
        if not awaited:
            return loss
        settled: Tensor = _Tie.apply(loss, awaited, *tied)  # type: ignore[no-untyped-call]
        return settled

    def deliver(self, outputs: Any) -> Any:
        """Outputs of the model, once all that branches returned has arrived."""
        self.flush()
        for call in self.calls:
            if call.exit is not None:
                call.value()
        return outputs


class _Tie(torch.autograd.Function):
    """The loss, made to depend on what arrived, without gradients for it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, awaited: list[BranchTransfer], *arrived: Tensor) -> Tensor:
        ctx.awaited, ctx.arrived = awaited, len(arrived)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        for transfer in ctx.awaited:
            transfer.back.expect()
        return gradient, None, *[None] * ctx.arrived


@dataclass(frozen=True, slots=True, eq=False)
class BranchInput:
    """A tensor that travels into a branch."""

    tensor: Tensor  # as the trunk has it
    piece: RankPiece  # this rank's; of a tensor without samples, which is there once a share of the trunk
    target: AxisSplit  # how it lies in the branch
    sampled: bool  # whether it holds samples


class DeferredCall:
    """A call of a branch, deferred.

    Attributes:
        template: what it will return.
        consumed: whether a later call of the same branch takes what it returns.
        exit: the move of what it returned to the trunk.
        local: what it returned, as the branch has it; on the branch's ranks, once it ran.
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
        self.template: Template = branch.foreseen[stand_in.path](*inputs, run.rows, self._like, stand_in.training)
        self._chain: dict[DeferredCall, None] = {}  # itself and all calls of the branch that it depends on, ordered
        for node in nodes_of(inputs):
            if isinstance(node, DeferredCall):
                node.consumed = True
                self._chain |= node._chain
        self._chain[self] = None
        self._moved: list[BranchInput] = []
        self._replicated: list[tuple[Tensor, Tensor]] = []  # tensors of the batch, which every rank has in full
        self._sort_inputs()
        self._entry: BranchTransfer | None = None
        # tokens of its moves on this rank, none or one each
        self._entry_departed, self._entry_arrived, self._exit_departed = (list[Tensor]() for _ in range(3))
        if self._moved:
            self._enter()

    # what goes in

    def _admitted(self, tensor: Tensor) -> Tensor:
        """An argument: pending where the branch itself makes it, else here."""
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
        theirs, ours = self.run.rows // self.branch.part.layout.batch, self.run.trunk_rows
        if theirs == ours or not isinstance(tensor.node, DeferredFunction):
            return True
        functions = [node for node in nodes_of(tensor) if isinstance(node, DeferredFunction)]
        if any(ours in _numbers((function.args, function.kwargs)) for function in functions):
            return False
        try:
            there = tuple(self._like(tensor, theirs).shape)
        except Exception:
            return False
        here = tuple(tensor.shape)
        return there == here or (there[1:] == here[1:] and here[:1] == (ours,) and there[:1] == (theirs,))

    def _like(self, tensor: Tensor, rows: int) -> Tensor:
        if isinstance(tensor, PendingTensor):
            node = tensor.node
            if isinstance(node, DeferredCall):
                return pick(node.template.resized(rows), tensor.place)
            assert isinstance(node, DeferredFunction)
            return pick(meta_of(node.func, node.args, node.kwargs, lambda one: self._like(one, rows)), tensor.place)
        like = template_of(tensor)
        return with_rows(like, rows) if self.run.setting.runtime.traffic.piece(tensor) is not None else like

    def _sort_inputs(self) -> None:
        run, part, traffic = self.run, self.branch.part, self.run.setting.runtime.traffic
        trunk, nests = run.setting.trunk.layout, [(self._args, self._kwargs)]
        nests += [(node.args, node.kwargs) for node in nodes_of(nests[0]) if isinstance(node, DeferredFunction)]
        for tensor in {id(one): one for one in tensors_of(nests) if not isinstance(one, PendingTensor)}.values():
            piece = traffic.piece(tensor)
            if id(tensor) in run.origins:
                self._replicated.append((tensor, run.origins[id(tensor)][1]))
            elif piece is not None:
                self._moved.append(BranchInput(tensor, piece, part.entering(piece.shape), sampled=True))
            elif tensor.requires_grad:
                loose, shape = traffic.loose(tensor, trunk).unsqueeze(0), (self._shares(), *tensor.shape)
                piece = RankPiece(loose, trunk.samples(shape), shape)
                self._moved.append(BranchInput(tensor, piece, part.layout.samples(shape), sampled=False))

    def _shares(self) -> int:
        """The trunk's shares of the samples; a tensor without samples is given, and returned, once a share."""
        trunk, shares = self.run.setting.trunk.layout.batch, self.branch.part.layout.batch
        if trunk % shares:
            remedy = f"It is given or returns a tensor without samples; their shares, {shares}, must divide {trunk}."
            raise InputError("branch", self.branch.part.name, remedy)
        return trunk

    def _enter(self) -> None:
        setting, part, world = self.run.setting, self.branch.part, self.run.setting.channel.world
        grad, moves = torch.is_grad_enabled(), list[TensorMove]()
        for piece, target in ((one.piece, one.target) for one in self._moved):
            before = setting.trunk.boxes(piece.split, piece.shape, world)
            after, differentiable = part.boxes(target, piece.shape, world), grad and piece.tensor.requires_grad
            moves.append(TensorMove.of(piece.tensor.dtype, before, after, differentiable, setting.channel.rank))
        self._entry = BranchTransfer(setting.channel, f"what branch {part.name} is given", moves)
        self._entry_departed = [self._entry.depart([one.piece.tensor for one in self._moved])]
        if self.branch.runtime is not None:
            self._entry.there.expect()

    def _entered(self, runtime: StageRuntime) -> dict[int, Tensor]:
        """What entered, by identity of what the trunk has, as the branch's code is given it."""
        traffic, place = runtime.traffic, runtime.meshes.index_in_stage
        entered: dict[int, Tensor] = {}
        for tensor, full in self._replicated:
            shape = tuple(full.shape)
            split = self.branch.part.entering(shape)
            part = cut_box(full, split.box(place, shape)).to(self.run.device).contiguous()
            entered[id(tensor)] = traffic.hand(RankPiece(part, split, shape))
        arrived = list[Tensor]()
        if self._entry is not None:
            arrived, token = self._entry.arrive(self._entry_departed)
            self._entry_arrived = [token]
        for one, part in zip(self._moved, arrived, strict=True):
            piece = RankPiece(part, one.target, one.piece.shape)
            entered[id(one.tensor)] = traffic.hand(piece) if one.sampled else part[0]
        return entered

    # what comes out

    def announce(self) -> None:
        """Start receiving what it returns."""
        setting = self.run.setting
        if id(self.template) not in setting.returned:
            setting.returned[id(self.template)] = self._moves()
        what = f"what branch {self.branch.part.name} returns"
        with self._around():  # what asks for a value may do so under no_grad
            self.exit = BranchTransfer(setting.channel, what, setting.returned[id(self.template)])
        self.exit.there.expect()

    def _moves(self) -> list[TensorMove]:
        setting, part, world = self.run.setting, self.branch.part, self.run.setting.channel.world
        moves = []
        for place, like in places(self.template.nest):
            shape = tuple(like.shape) if place in self.template.sampled else (self._shares(), *like.shape)
            before = part.boxes(part.layout.samples(shape), shape, world)
            after = setting.trunk.boxes(self._arriving(place, shape), shape, world)
            moves.append(TensorMove.of(like.dtype, before, after, like.requires_grad, setting.channel.rank))
        return moves

    def _arriving(self, place: str, shape: tuple[int, ...]) -> AxisSplit:
        setting = self.run.setting
        if place in self.template.sampled:
            return setting.runtime.traffic.target(shape)
        return setting.trunk.layout.samples(shape)

    def run_here(self) -> None:
        """Run it, on the branch's ranks, and start sending what it returned."""
        runtime = self.branch.runtime
        if runtime is None:
            return
        runtime.traffic.begin(self.run.rows)
        with self.branch.stream.active(), self._around():
            entered = self._entered(runtime)
            args, kwargs = map_tensors((self._args, self._kwargs), lambda one: self._inside(one, entered, {}))
            self.local = self._stand_in.stands_for(*args, **kwargs)
        runtime.traffic.end()
        if self.exit is not None:
            self._send(runtime)

    def _inside(self, tensor: Tensor, entered: Mapping[int, Tensor], outputs: dict[int, Any]) -> Tensor:
        if not isinstance(tensor, PendingTensor):
            return entered.get(id(tensor), tensor)
        node = tensor.node
        if isinstance(node, DeferredCall):
            return pick(node.local, tensor.place)
        assert isinstance(node, DeferredFunction)
        if id(node) not in outputs:
            outputs[id(node)] = node.of(lambda one: self._inside(one, entered, outputs))
        return pick(outputs[id(node)], tensor.place)

    def _send(self, runtime: StageRuntime) -> None:
        assert self.exit is not None
        with self._around():
            returned = dict(places(self.local))
            outputs = [
                self._leaving(place, like, returned.get(place), runtime) for place, like in places(self.template.nest)
            ]
            tokens = [token for call in self._chain for token in call._entry_arrived]
            self._exit_departed = [self.exit.depart(outputs, tokens)]

    def _leaving(self, place: str, like: Tensor, tensor: Tensor | None, runtime: StageRuntime) -> Tensor:
        """A tensor that it returned, complete but for the samples."""
        part, traffic = self.branch.part, runtime.traffic
        if tensor is None:
            raise InputError(f"output {place} of branch", part.name, "It is there for some values only.")
        if place not in self.template.sampled:
            shares = self._shares() // part.layout.batch
            return traffic.loose(tensor, part.layout).to(like.dtype).expand(shares, *like.shape)
        piece, shape = traffic.piece(tensor), tuple(like.shape)
        if piece is None or piece.shape != shape:
            raise InputError(f"output {place} of branch", part.name, f"Its shape is not {shape}, as was foreseen.")
        return traffic.mover(piece.tensor.to(like.dtype), piece.split, part.layout.samples(shape), shape)

    def awaited(self) -> list[BranchTransfer]:
        """Moves whose gradients come back: of what it returned, and of all that it depends on."""
        if self.exit is None or not self.exit.anchored:
            return []
        return [self.exit, *(call._entry for call in self._chain if call._entry is not None)]

    def value(self) -> Any:
        """What it returned, as the trunk has it."""
        if not self._has_value:
            self.run.flush()
            if self.exit is None:
                self.announce()
                if self.branch.runtime is not None:
                    self._send(self.branch.runtime)
            self._value, self._has_value = self._arrived(), True
        return self._value

    def _arrived(self) -> Any:
        assert self.exit is not None
        traffic = self.run.setting.runtime.traffic
        with self._around():
            tokens = [token for call in self._chain for token in call._entry_departed]
            tensors = iter(self.exit.arrive([*tokens, *self._exit_departed])[0])

            def show(place: str, like: Tensor) -> Tensor:
                part, shape = next(tensors), tuple(like.shape)
                if place not in self.template.sampled:
                    return part[0]
                return traffic.show(RankPiece(part, self._arriving(place, shape), shape))

            return map_places(self.template.nest, show)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, Mapping):
        yield from _numbers(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
