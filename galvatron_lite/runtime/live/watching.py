"""Training that is seen, or not, as it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from galvatron_lite.errors import InputError

if TYPE_CHECKING:
    from galvatron_lite.profiler.schema import Profile
    from galvatron_lite.runtime.live.options import ObserverOptions
    from galvatron_lite.runtime.live.recorder import RecordWriter


def watch_training(model: Any, seen: ObserverOptions | None, profile: Profile | None = None) -> RecordWriter | None:
    """Have a model's steps seen from now on; all ranks call it together.

    Args:
        model: the model; None: one that is not trained on the launched world.
        seen: what is wanted; None: nothing.
        profile: what the plan was made from, where it is known.

    Returns:
        What writes and shows it; None: nothing does.

    Raises:
        InputError: a model that does not train, or a folder that cannot be written.
    """
    if seen is None:
        return None
    if model is None:
        option = "live" if seen.log is None else "log"
        raise InputError(option, seen.log or True, "There are no training steps to see: it is for training alone.")
    from galvatron_lite.runtime.live.door import open_run

    return open_run(model, seen, profile)
