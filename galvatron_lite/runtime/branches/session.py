"""One forward pass of a model with branches on a rank: calls of branches, put off, run where they live, and joined.

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
from galvatron_lite.runtime.border import RankPiece
from galvatron_lite.runtime.branches.parts import PlacedPart
from galvatron_lite.runtime.branches.pending import (
    Applied,
    PendingTensor,
    Surroundings,
    meta_of,
    nodes_of,
    pending,
    pick,
    resolved,
    template_of,
)
from galvatron_lite.runtime.branches.post import BranchChannel
from galvatron_lite.runtime.branches.randomness import Stream
from galvatron_lite.runtime.branches.stand_in import StandIn
from galvatron_lite.runtime.branches.templates import Foreseen, Template, with_rows
from galvatron_lite.runtime.branches.transfer import Cargo, Transfer, TransferManifest
from galvatron_lite.runtime.layout import AxisSplit
from galvatron_lite.runtime.redistribute import cut_box
from galvatron_lite.runtime.setup import StageRuntime

Origins = Mapping[int, tuple[Tensor, Tensor]]
"""By identity of a tensor of this rank's share of the batch: itself, and the same of the whole micro-batch."""


@dataclass(slots=True)
class RankBranch:
    """A branch, as a rank knows it."""

    part: PlacedPart  # its layers and ranks
    foreseen: Mapping[str, Foreseen]  # what its entrances return, by path
    runtime: StageRuntime | None  # what trains it; None on other ranks
    stream: Stream  # what it draws random numbers from


@dataclass(slots=True)
class PassSetting:
    """What all passes of a model share."""

    trunk: PlacedPart  # its layers and ranks
    runtime: StageRuntime  # what trains it
    branches: Mapping[str, RankBranch]  # by path of their entrances
    post: BranchChannel  # sends and receives
    session: BranchSession | None = None  # the pass under way
    shapes: dict[object, Any] = field(default_factory=dict)  # what functions of pending tensors make of shapes
    # what moves of a call, by identity of its template, which the branch keeps
    returned: dict[int, TransferManifest] = field(default_factory=dict)

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """A call of an entrance.

        Raises:
            InputError: outside a pass.
        """
        if self.session is None:
            remedy = "Use the object that auto_parallelize returned; other ranks must run along."
            raise InputError("call of", stand_in.path, remedy)
        return self.session.call(stand_in, args, kwargs)


class BranchSession:
    """See the module.

    Args:
        setting: of the model.
        rows: samples of the micro-batch, over the world.
        origins: what is known of the batch's tensors.
    """

    def __init__(self, setting: PassSetting, rows: int, origins: Origins) -> None:
        self.setting, self.rows, self.origins = setting, rows, origins
        self.device, self.shapes = setting.post.device, setting.shapes
        self.applied: list[Applied] = []
        self.calls: list[DeferredCall] = []
        self.departed: list[Transfer] = []
        self._waiting: list[DeferredCall] = []
        setting.post.finish()

    @property
    def own_rows(self) -> int:
        """Samples that the trunk has on this rank."""
        return self.rows // self.setting.trunk.layout.batch

    def call(self, stand_in: StandIn, args: Any, kwargs: dict[str, Any]) -> Any:
        """Put off a call of a branch, and start what it needs of this rank."""
        made = DeferredCall(self, self.setting.branches[stand_in.path], stand_in, args, kwargs)
        self.calls.append(made)
        self._waiting.append(made)
        return pending(made, made.template.resized(self.own_rows))

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
        arrived = [tensor for call in self.calls if call.exit is not None for tensor in tensors_of(call.value())]
        tied = [tensor for tensor in arrived if tensor.requires_grad]
        if not torch.is_grad_enabled() or not self.departed:
            return loss
        made: Tensor = _Tie.apply(loss, self, *tied)  # type: ignore[no-untyped-call]
        return made

    def deliver(self, outputs: Any) -> Any:
        """Outputs of the model, once all that branches returned has arrived."""
        self.flush()
        for call in self.calls:
            if call.exit is not None:
                call.value()
        return outputs

    def expect_gradients(self) -> None:
        """Start receiving the gradients of everything that departed from here."""
        for transfer in self.departed:
            transfer.back.expect()

    def depart(self, transfer: Transfer, tensors: list[Tensor]) -> Tensor:
        """Start sending; the token of ``Transfer.depart``."""
        self.departed.append(transfer)
        return transfer.depart(tensors)


class _Tie(torch.autograd.Function):
    """The loss, made of what arrived as well, without gradients for it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, session: BranchSession, *arrived: Tensor) -> Tensor:
        ctx.session, ctx.arrived = session, len(arrived)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.session.expect_gradients()
        return gradient, None, *[None] * ctx.arrived


@dataclass(frozen=True, slots=True, eq=False)
class BranchInput:
    """A tensor that travels into a branch."""

    tensor: Tensor  # as the trunk has it
    own: Tensor  # this rank's part
    shape: tuple[int, ...]  # of the whole; what holds no samples is once a share of the trunk
    source: AxisSplit  # how it lies in the trunk
    target: AxisSplit  # how it lies in the branch
    sampled: bool  # whether it holds samples


@dataclass(slots=True)
class Entering:
    """What a call is given, by kind."""

    moved: list[BranchInput] = field(default_factory=list)  # tensors that travel
    known: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # tensors of the batch, which every rank has whole


class DeferredCall:
    """A call of a branch, put off.

    Args:
        run: the pass it is of.
        branch: what is called.
        stand_in: where.
        args: of the call.
        kwargs: the same.

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
        self._around = Surroundings()
        self._args, self._kwargs = map_tensors((args, kwargs), self._admitted)
        self.consumed = False
        self.exit: Transfer | None = None
        self.local: Any = None
        self._value: Any = None
        self._known = self._ran = False
        foreseen, given = branch.foreseen[stand_in.path], (self._args, self._kwargs)
        self.template: Template = foreseen(*given, run.rows, self._like, stand_in.training)
        for node in nodes_of(given):
            if isinstance(node, DeferredCall):
                node.consumed = True
        self._entering = self._sorted()
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
        """Whether put-off functions may run on the branch's share of the samples instead of the trunk's."""
        theirs, ours = self.run.rows // self.branch.part.layout.batch, self.run.own_rows
        if theirs == ours or not isinstance(tensor.node, Applied):
            return True
        functions = [node for node in nodes_of(tensor) if isinstance(node, Applied)]
        if any(ours in _numbers((one.args, one.kwargs)) for one in functions):
            return False
        try:
            found = tuple(self._like(tensor, theirs).shape)
        except Exception:
            return False
        here = tuple(tensor.shape)
        return found == here or (found[1:] == here[1:] and here[:1] == (ours,) and found[:1] == (theirs,))

    def _like(self, tensor: Tensor, rows: int) -> Tensor:
        """An argument's stand-in for so many samples."""
        if isinstance(tensor, PendingTensor):
            node = tensor.node
            if isinstance(node, DeferredCall):
                return pick(node.template.resized(rows), tensor.place)
            assert isinstance(node, Applied)
            return pick(meta_of(node.func, node.args, node.kwargs, lambda one: self._like(one, rows)), tensor.place)
        like = template_of(tensor)
        return with_rows(like, rows) if self.run.setting.runtime.traffic.piece(tensor) is not None else like

    def _reals(self) -> Iterator[Tensor]:
        """Every tensor that is here, among the arguments and in functions put off."""
        seen = set[int]()
        nests = [(self._args, self._kwargs)]
        nests += [(node.args, node.kwargs) for node in nodes_of(nests[0]) if isinstance(node, Applied)]
        for tensor in tensors_of(nests):
            if not isinstance(tensor, PendingTensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def _sorted(self) -> Entering:
        run, part, found = self.run, self.branch.part, Entering()
        for tensor in self._reals():
            piece = run.setting.runtime.traffic.piece(tensor)
            if id(tensor) in run.origins:
                found.known.append((tensor, run.origins[id(tensor)][1]))
            elif piece is not None:
                source, target = piece.split, part.entering(piece.shape)
                found.moved.append(BranchInput(tensor, piece.tensor, piece.shape, source, target, True))
            elif tensor.requires_grad:
                own = run.setting.runtime.traffic.loose(tensor, run.setting.trunk.layout).unsqueeze(0)
                shape = (self._shares(), *tensor.shape)
                source, target = run.setting.trunk.layout.samples(shape), part.layout.samples(shape)
                found.moved.append(BranchInput(tensor, own, shape, source, target, False))
        return found

    def _shares(self) -> int:
        """The trunk's shares of the samples; what holds none is given, and returned, once a share."""
        trunk, own = self.run.setting.trunk.layout.batch, self.branch.part.layout.batch
        if trunk % own:
            remedy = f"It is given or returns a tensor without samples; their shares, {own}, must divide {trunk}."
            raise InputError("branch", self.branch.part.name, remedy)
        return trunk

    def _enter(self) -> None:
        setting, moved = self.run.setting, self._entering.moved
        self._token: list[Tensor] = []
        self._entry: Transfer | None = None
        if not moved:
            return
        trunk, part, world = setting.trunk, self.branch.part, setting.post.world
        grad = torch.is_grad_enabled()
        cargo = [
            Cargo(
                one.own.dtype, trunk.boxes(one.source, one.shape, world), part.boxes(one.target, one.shape, world),
                grad and one.own.requires_grad,
            )
            for one in moved
        ]  # fmt: skip
        self._entry = Transfer(
            setting.post, f"what branch {part.name} is given", TransferManifest.of(cargo, setting.post.rank)
        )
        self._token = [self.run.depart(self._entry, [one.own for one in moved])]
        if self.branch.runtime is not None:
            self._entry.there.expect()

    def _entered(self) -> dict[int, Tensor]:
        """What entered, by identity of what the trunk has, as the branch's code is given it."""
        runtime = self.branch.runtime
        assert runtime is not None
        place, traffic = runtime.meshes.index_in_stage, runtime.traffic
        found: dict[int, Tensor] = {}
        for tensor, whole in self._entering.known:
            shape = tuple(whole.shape)
            split = self.branch.part.entering(shape)
            own = cut_box(whole, split.box(place, shape)).to(self.run.device).contiguous()
            found[id(tensor)] = traffic.hand(RankPiece(own, split, shape))
        arrived = self._entry.arrive(self._token) if self._entry is not None else []
        for one, own in zip(self._entering.moved, arrived, strict=True):
            found[id(one.tensor)] = traffic.hand(RankPiece(own, one.target, one.shape)) if one.sampled else own[0]
        return found

    # what comes out

    def announce(self) -> None:
        """Start receiving what it returns."""
        setting = self.run.setting
        if id(self.template) not in setting.returned:
            setting.returned[id(self.template)] = self._manifest()
        what = f"what branch {self.branch.part.name} returns"
        self.exit = Transfer(setting.post, what, setting.returned[id(self.template)])
        self.exit.there.expect()

    def _manifest(self) -> TransferManifest:
        """What moves of what it returns."""
        setting, part, world = self.run.setting, self.branch.part, self.run.setting.post.world
        cargo = []
        for place, like in places(self.template.nest):
            shape = tuple(like.shape) if place in self.template.sampled else (self._shares(), *like.shape)
            before = part.boxes(part.layout.samples(shape), shape, world)
            after = setting.trunk.boxes(self._arriving(place, shape), shape, world)
            cargo.append(Cargo(like.dtype, before, after, like.requires_grad))
        return TransferManifest.of(cargo, setting.post.rank)

    def _arriving(self, place: str, shape: tuple[int, ...]) -> AxisSplit:
        """How an output lies in the trunk."""
        setting = self.run.setting
        if place in self.template.sampled:
            return setting.runtime.traffic.target(shape)
        return setting.trunk.layout.samples(shape)

    def run_here(self) -> None:
        """Run it, on the branch's ranks, and start sending what it returned."""
        if self._ran:
            return
        self._ran = True
        runtime = self.branch.runtime
        if runtime is None:
            return
        runtime.traffic.begin(self.run.rows)
        with self.branch.stream.active(), self._around():
            entered = self._entered()
            args, kwargs = map_tensors((self._args, self._kwargs), lambda one: self._inside(one, entered, {}))
            self.local = self._stand_in.stands_for(*args, **kwargs)
        runtime.traffic.end()
        if self.exit is not None:
            self._send()

    def _inside(self, tensor: Tensor, entered: Mapping[int, Tensor], outputs: dict[int, Any]) -> Tensor:
        """An argument as the branch has it."""
        if not isinstance(tensor, PendingTensor):
            return entered.get(id(tensor), tensor)
        node = tensor.node
        if isinstance(node, DeferredCall):
            return pick(node.local, tensor.place)
        assert isinstance(node, Applied)
        if id(node) not in outputs:
            outputs[id(node)] = node.of(lambda one: self._inside(one, entered, outputs))
        return pick(outputs[id(node)], tensor.place)

    def _send(self) -> None:
        assert self.exit is not None
        with self._around():
            found = dict(places(self.local))
            tensors = [self._leaving(place, like, found) for place, like in places(self.template.nest)]
            self._token = [*self._token, self.run.depart(self.exit, tensors)]

    def _leaving(self, place: str, like: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor that it returned, whole but for the samples."""
        part, runtime = self.branch.part, self.branch.runtime
        assert runtime is not None
        tensor = tensors.get(place)
        if tensor is None:
            raise InputError(f"output {place} of branch", part.name, "It is there for some values only.")
        if place not in self.template.sampled:
            shares = self._shares() // part.layout.batch
            return runtime.traffic.loose(tensor, part.layout).to(like.dtype).expand(shares, *like.shape)
        piece, shape = runtime.traffic.piece(tensor), tuple(like.shape)
        if piece is None or piece.shape != shape:
            raise InputError(f"output {place} of branch", part.name, f"Its shape is not {shape}, as was foreseen.")
        target = part.layout.samples(shape)
        return runtime.traffic.mover(piece.tensor.to(like.dtype), piece.split, target, shape)

    def value(self) -> Any:
        """What it returned, as the trunk has it."""
        if not self._known:
            self.run.flush()
            if self.exit is None:
                self.announce()
                if self.branch.runtime is not None:
                    self._send()
            self._value, self._known = self._arrived(), True
        return self._value

    def _arrived(self) -> Any:
        assert self.exit is not None
        traffic = self.run.setting.runtime.traffic
        with self._around():
            tensors = iter(self.exit.arrive(self._token))

            def show(place: str, like: Tensor) -> Tensor:
                own, shape = next(tensors), tuple(like.shape)
                if place not in self.template.sampled:
                    return own[0]
                return traffic.show(RankPiece(own, self._arriving(place, shape), shape))

            return map_places(self.template.nest, show)


def _numbers(value: Any) -> Iterator[int]:
    """Every whole number in a nest."""
    if isinstance(value, Mapping):
        yield from _numbers(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
