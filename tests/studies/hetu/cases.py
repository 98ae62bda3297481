"""The shipped profiles and recorded searches, read once."""

from functools import cache
from pathlib import Path

from galvatron_lite.peers.hetu.model import HetuHardware, HetuModel
from studies.hetu.recorded import RecordedSearch, read_searches

FOLDER = Path(__file__).parents[3] / "profiles" / "hetu"
SEARCHES = tuple(read_searches(FOLDER / "searches.jsonl"))
FOUND = tuple(search for search in SEARCHES if search.status == "ok")


@cache
def profiles(place: int) -> tuple[HetuModel, HetuHardware]:
    """The profiles that a search with a plan was given."""
    return FOUND[place].profiles(FOLDER)


def found(model: str, engine: str = "main", nodes: int = 1) -> tuple[RecordedSearch, HetuModel, HetuHardware]:
    """The first search of a model that found a plan, with its profiles."""
    wanted = (model, engine, nodes)
    place = next(i for i, one in enumerate(FOUND) if (one.model, one.engine, one.nodes) == wanted)
    return FOUND[place], *profiles(place)
