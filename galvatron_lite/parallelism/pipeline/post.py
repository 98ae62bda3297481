"""What goes between a rank's stages and those of other groups of devices, in the order of the table."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from galvatron_lite.model.batch import tensors_of
from galvatron_lite.parallelism.pipeline.schedule import Action, Pass
from galvatron_lite.parallelism.pipeline.table import Link, RankSchedule, receiver, sender
from galvatron_lite.parallelism.pipeline.transfer import Incoming, PipelineGroups, Receiver, Sender, Value, template_of

Template = tuple[Value, Any]
"""What must be known of a value that travels: itself with tensors on the meta device, and what its sender adds."""


@dataclass(slots=True)
class StepMail:
    """The messages of one step."""

    programme: RankSchedule  # what this rank's group does
    kind: Hashable  # what templates are kept by: shapes of a micro-batch, and whether gradients will flow
    # shapes of the gradients that will come for an action whose forward pass is done
    gradients: Callable[[Action], list[Tensor] | None]
    # by link: actions whose messages were not asked for yet
    due: dict[Link, deque[Action]] = field(default_factory=dict)
    arriving: dict[Action, Incoming] = field(default_factory=dict)  # by action: what was asked for

    def __post_init__(self) -> None:
        """Everything is due."""
        self.due = {link: deque(actions) for link, actions in self.programme.arriving.items()}


class P2PChannel:
    """Sends what passes make to where it is needed, and receives what they need.

    Messages of a link are received in the order they are sent, whichever is needed first. Shapes are announced with the
    first message of a kind.

    Args:
        groups: process groups.
        index: number of this rank's group of devices.
        device: where tensors live.
    """

    def __init__(self, groups: PipelineGroups, index: int, device: torch.device) -> None:
        self._groups, self._index, self._device = groups, index, device
        self._senders: dict[Link, Sender] = {}
        self._receivers: dict[Link, Receiver] = {}
        self._templates: dict[Hashable, Template] = {}
        self._announced: set[Hashable] = set()

    def template(self, box: StepMail, action: Action) -> Template:
        """What is known of the value that arrived for a forward pass."""
        return self._templates[action.chunk, box.kind]

    def arrived(self, box: StepMail, action: Action) -> list[Tensor]:
        """What was sent for a pass, once it is here; empty where nothing comes in."""
        self._expect(box, action, waits=True)
        incoming = box.arriving.pop(action, None)
        return incoming.wait() if incoming is not None else []

    def foresee(self, box: StepMail, action: Action | None) -> None:
        """Start receiving what a later pass needs, as far as shapes are known; it takes one more buffer."""
        if action is not None:
            self._expect(box, action, waits=False)

    def send(self, box: StepMail, action: Action, value: Value, knowledge: Any = None) -> None:
        """Send the result of a pass: a value whose template the receiver needs, or gradients it has the shapes of."""
        target = receiver(box.programme.course, self._index, action)
        assert target is not None
        group, wanted = target
        tensors = list(tensors_of(value))
        if group == self._index:
            self._keep(box, wanted, value, tensors, knowledge)
            return
        link = action.what, self._index, group
        if link not in self._senders:
            self._senders[link] = Sender(self._groups.between(*link), group, self._device)
        known = wanted.chunk, group, box.kind
        told = action.what is not Pass.FORWARD or known in self._announced
        self._announced.add(known)
        self._senders[link].send(tensors, box.programme.room, None if told else (template_of(value), knowledge))

    def finish(self) -> None:
        """Wait for every send under way."""
        for one in self._senders.values():
            one.finish()

    def _keep(self, box: StepMail, wanted: Action, value: Value, tensors: list[Tensor], knowledge: Any) -> None:
        """For a stage of this rank: a copy, as code there may change it in place."""
        if wanted.what is Pass.FORWARD:
            self._templates[wanted.chunk, box.kind] = template_of(value), knowledge
        box.arriving[wanted] = Incoming([tensor.detach().clone() for tensor in tensors], [])

    def _expect(self, box: StepMail, action: Action, *, waits: bool) -> None:
        source = sender(box.programme.course, self._index, action)
        if source is None or source == self._index:
            return
        link = action.what, source, self._index
        while action not in box.arriving and self._has_shapes(box, link, waits):
            following = box.due[link].popleft()
            box.arriving[following] = self._receivers[link].receive(self._likes(box, following))

    def _has_shapes(self, box: StepMail, link: Link, waits: bool) -> bool:
        """Whether the shapes of the next message are known."""
        if link not in self._receivers:
            self._receivers[link] = Receiver(self._groups.between(*link), link[1], self._device)
        following = box.due[link][0]
        if following.what is Pass.BACKWARD:
            return waits or box.gradients(following) is not None
        key = following.chunk, box.kind
        if key not in self._templates and waits:
            self._templates[key] = self._receivers[link].announced()
        return key in self._templates

    def _likes(self, box: StepMail, action: Action) -> list[Tensor]:
        if action.what is Pass.FORWARD:
            return list(tensors_of(self.template(box, action)[0]))
        shapes = box.gradients(action)
        assert shapes is not None, f"{action} comes before its forward pass"
        return shapes
