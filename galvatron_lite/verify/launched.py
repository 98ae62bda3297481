"""Verify a plan at launch, in a fork of rank 0.

A process that has run a backward pass beside a GPU, or whose threads have shared work, must not fork. So ``Verifier``
forks rank 0 before it joins the world. All ranks get the verdict of the fork, and go on or raise together.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from galvatron_lite.errors import LOG, LaunchError, VerificationError
from galvatron_lite.model.batch import LossFn
from galvatron_lite.plans.schema import Plan
from galvatron_lite.verify.schema import Check, Verdict
from galvatron_lite.verify.source import ModelSource, module_source

TIMEOUT = 600.0
"""Seconds that a verification may take; ranks that wait for it in a collective give up no sooner."""

Verify = Callable[[ModelSource, Plan], Sequence[Check]]


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this process and return its process id.

    The fork ends without Python's exit handlers, because gloo's threads may abort a normal exit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    return pid


class ForkedServer:
    """A fork of this process that answers requests.

    Args:
        answer: called in the fork with a request, and with a function that returns whether the request is cancelled.
    """

    def __init__(self, answer: Callable[[Any, Callable[[], bool]], Any]) -> None:
        self._connection, server_end = Pipe()

        def serve() -> None:
            self._connection.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the pipe
            while True:
                try:
                    request = server_end.recv()
                except (EOFError, OSError):
                    return
                server_end.send(answer(request, server_end.poll))

        self._pid = fork(serve)
        server_end.close()

    def ask(self, request: Any, timeout: float) -> Any:
        """Return the answer to a request.

        Raises:
            TimeoutError: it takes more than ``timeout`` seconds.
            OSError, EOFError: the fork has ended.
        """
        self._connection.send(request)
        if not self._connection.poll(timeout):
            raise TimeoutError(f"it takes more than {timeout:g} seconds.")
        return self._connection.recv()

    def close(self, *, kill: bool = False) -> None:
        """End the fork; ``kill`` ends it even while it works on an answer."""
        self._connection.close()
        if kill:
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Verifier:
    """Verifies one plan for a model on rank 0; every rank creates one before it joins the world."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, verify: Verify) -> None:
        self.seconds = 0.0
        source = module_source(model, batch, loss_fn)

        def answer(plan: Plan, _cancelled: Callable[[], bool]) -> str | list[Check]:
            try:
                with without_world():
                    return list(verify(source, plan))
            except Exception as error:
                return f"{type(error).__name__}: {error}."

        self._server = ForkedServer(answer) if _rank() == 0 else None

    def check(self, plan: Plan) -> None:
        """Verify the plan, and raise the same error on every rank unless it passes; all ranks call it, once.

        Raises:
            VerificationError: a check failed.
            LaunchError: there was no verdict.
        """
        start = time.monotonic()
        broadcast: list[Any] = [None if self._server is None else self._answer(self._server, plan)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(broadcast)
        self.seconds = time.monotonic() - start
        answer: str | Sequence[Check] = broadcast[0]
        if isinstance(answer, str):
            raise LaunchError(f"The plan could not be verified: {answer} Leave out verify, or mend what it says.")
        failed = [check for check in answer if check.verdict is Verdict.FAILED]
        if failed:
            raise VerificationError([(check.name, check.said) for check in failed])
        if _rank() == 0:
            LOG.info(_summary(answer, self.seconds))

    @staticmethod
    def _answer(server: ForkedServer, plan: Plan) -> str | Sequence[Check]:
        try:
            answer: str | Sequence[Check] = server.ask(plan, TIMEOUT)
        except TimeoutError as error:
            answer = str(error)
        except (EOFError, OSError):
            answer = "the process that does it ended."
        server.close(kill=True)
        return answer


def _summary(checks: Sequence[Check], seconds: float) -> str:
    passed = sum(check.verdict is Verdict.PASSED for check in checks)
    others = [
        f"{check.name}: {check.verdict.value}. {check.said}" for check in checks if check.verdict is not Verdict.PASSED
    ]
    return " ".join([f"plan verified in {seconds:.0f} s: {passed} of {len(checks)} checks passed.", *others])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


@contextmanager
def without_world() -> Iterator[None]:
    """Hide the default process group; for forks only, in which it does not work.

    torch has no public function to unset a default process group: destroying it waits for threads that a fork does not
    have. This is the only use of the private one. The group is kept alive, so that nothing destroys it.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        yield
        return
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(group)
