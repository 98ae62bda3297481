"""A plan verified where it is about to be trained: by a fork of rank 0 that has no part in the launched world.

The fork is made before this process joins the world, so that it holds no connection of it; it does nothing until it is
given a plan. What it finds is told to all ranks, which go on or raise together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from galvatron_lite.errors import LaunchError, VerificationError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.plans.schema import Plan
from galvatron_lite.saying import say
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource, module_source

TIMEOUT = 600.0
"""Seconds that a verification may take; ranks that wait for it in a collective give up no sooner."""

Verify = Callable[[ModelSource, Plan], Sequence[Check]]


class Verifier:
    """Verifies one plan for a model, on rank 0; made on every rank before the world is joined."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, verify: Verify) -> None:
        self._connection: Connection | None = None
        self._pid, self.seconds = 0, 0.0
        if _rank() != 0:
            return
        self._connection, theirs = Pipe()
        source = module_source(model, batch, loss_fn)
        self._pid = _fork(lambda: _serve(theirs, source, verify))
        theirs.close()

    def check(self, plan: Plan) -> None:
        """Go on where the plan is as it should be; all ranks call it, once.

        Raises:
            VerificationError: a check failed; on every rank.
            LaunchError: there was no verdict; on every rank.
        """
        begun = time.monotonic()
        box: list[Any] = [None if self._connection is None else self._answer(plan)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(box)
        self.seconds = time.monotonic() - begun
        answer: str | Sequence[Check] = box[0]
        if isinstance(answer, str):
            raise LaunchError(f"The plan could not be verified: {answer} Leave out verify, or mend what it says.")
        failed = [check for check in answer if check.verdict is Verdict.FAILED]
        if failed:
            raise VerificationError([(check.name, check.said) for check in failed])
        if _rank() == 0:
            say(_summary(answer, self.seconds))

    def _answer(self, plan: Plan) -> str | Sequence[Check]:
        """What the fork found, or why it found nothing."""
        assert self._connection is not None
        answer: str | Sequence[Check]
        try:
            self._connection.send(plan)
            ended = self._connection.poll(TIMEOUT)
            answer = self._connection.recv() if ended else f"it takes more than {TIMEOUT:g} seconds."
        except (EOFError, OSError):
            answer = "the process that does it ended."
        self._connection.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        return answer


def _summary(checks: Sequence[Check], seconds: float) -> str:
    """What came of checks none of which failed."""
    passed = sum(check.verdict is Verdict.PASSED for check in checks)
    others = [
        f"{check.name}: {check.verdict.value}. {check.said}" for check in checks if check.verdict is not Verdict.PASSED
    ]
    return " ".join([f"plan verified in {seconds:.0f} s: {passed} of {len(checks)} checks passed.", *others])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _fork(work: Callable[[], None]) -> int:
    """Do something in a fork of this process, which then ends without the interpreter's last steps."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return pid


def _serve(connection: Connection, source: ModelSource, verify: Verify) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        plan = connection.recv()
    except (EOFError, OSError):
        return
    answer: str | list[Check]
    try:
        with without_world():
            answer = list(verify(source, plan))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}."
    connection.send(answer)


class without_world:  # noqa: N801 - reads as what it is: a context
    """As if no world had been joined; only in a fork, whose copy of the world's group is dead.

    torch has no public way to forget a default process group: destroying it waits for threads that a fork does not
    have. This is the only place that relies on a private one. The group is kept, so that nothing destroys it.
    """

    def __enter__(self) -> None:
        self._group = dist.group.WORLD if dist.is_initialized() else None
        if self._group is not None:
            distributed_c10d._update_default_pg(None)

    def __exit__(self, *_: object) -> None:
        if self._group is not None:
            distributed_c10d._update_default_pg(self._group)
