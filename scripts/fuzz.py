"""Mutated files of every kind through every command that reads them: only errors of our own, in 5 s and 500 MB each.

Every case has a number, from which it is drawn, so that a run can go on where it ended and one case can be run again
(``--first N --cases 1``). A child process runs cases one after another under limits of address space and processor
time; where a case ends it, the next begins with a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path

from galvatron_lite.errors import GalvatronError
from tests.fuzz.cases import BINARY, READERS, case

SECONDS, BYTES = 5, 500 * 10**6
OURS = ("passed", "refused")


def run(number: int, folder: Path) -> tuple[str, str]:
    """How a case ends, in a word, and what there is to say of it: ``passed``, ``refused``, ``raised`` or ``taken``."""
    from galvatron_lite.cli import main

    words, output = case(number, folder), io.StringIO()
    try:
        if words[0] in ("read", "refuse"):
            read = BINARY[words[1]] if words[1] in BINARY else READERS[words[1]][1]
            read(Path(words[2]))
            return ("passed", "") if words[0] == "read" else ("taken", " ".join(words))
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            sys.argv = ["galvatron", *words]
            main()
    except GalvatronError as error:
        if words[0] in ("read", "refuse"):
            return "refused", str(error)
        return "raised", " ".join(words) + "\n" + traceback.format_exc(limit=-8)
    except SystemExit as end:
        return ("passed" if not end.code else "refused"), ""
    except BaseException:
        return "raised", " ".join(words) + "\n" + traceback.format_exc(limit=-8)
    return "passed", ""


def work(requests: Connection) -> None:
    """Run the cases asked for, each within its limits."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    faulthandler.register(signal.SIGPROF, file=(folder / "stack").open("w"), chain=True)
    requests.send(str(folder))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    for number in iter(requests.recv, None):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        ending = run(number, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        requests.send(ending)


class Worker:
    """A child process that runs cases."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._folder = Path(self._pipe.recv())
        self.alive = True

    def run(self, number: int) -> tuple[str, str]:
        """How a case ends; ``slow`` or ``died`` where it takes the process with it."""
        self._pipe.send(number)
        try:
            ending: tuple[str, str] = self._pipe.recv() if self._pipe.poll(60 * SECONDS) else ("slow", "it waits")
        except EOFError:
            self._process.join()
            slow = self._process.exitcode == -signal.SIGPROF
            words = " ".join(case(number, self._folder))
            stack = (self._folder / "stack").read_text()
            ending = ("slow" if slow else f"died ({self._process.exitcode})", f"{words}\n{stack}")
        self.alive = self._process.is_alive()
        return ending

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=10_000, help="how many")
    options.add_argument("--first", type=int, default=0, help="number of the first, the seed of all that follow")
    options.add_argument("--state", type=Path, default=Path("build/fuzz.jsonl"), help="what to write to and go on from")
    asked = options.parse_args()
    asked.state.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if asked.state.exists():
        done = {line["case"]: line for line in map(json.loads, asked.state.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(30):  # what children share
            run(number, Path(folder))
    worker = Worker()
    with asked.state.open("a") as state:
        for number in range(asked.first, asked.first + asked.cases):
            if number in done:
                continue
            worker = worker if worker.alive else Worker()
            start = time.monotonic()
            ending, said = worker.run(number)
            done[number] = {"case": number, "ending": ending, "said": said, "seconds": time.monotonic() - start}
            state.write(json.dumps(done[number]) + "\n")
            state.flush()
            if ending not in OURS:
                print(f"case {number}: {ending}\n{said}", flush=True)
    worker.close()
    counts = Counter(line["ending"] for line in done.values())
    print(f"{len(done)} cases: " + ", ".join(f"{count} {ending}" for ending, count in counts.most_common()))
    return int(any(ending not in OURS for ending in counts))


if __name__ == "__main__":
    raise SystemExit(main())
