"""Which engine of several gets a call: the one its session was at, else the least busy. Pure."""

import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from lego.records import Ids

SESSIONS_KEPT = 65_536
"""A session that was not heard of for longest is forgotten; should it speak again, it is placed anew."""


@dataclass(frozen=True)
class Place:
    """Where a session is, and what that engine has seen of it."""

    replica: int
    cache: int = 0
    """Which filling of the engine's cache saw it; another number means an emptied cache."""
    tokens: int = 0
    """Length of the session's last prompt there."""
    digest: int = 0


class Places:
    """The engine of every session."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, Place] = OrderedDict()
        self.moved = 0
        """How often a session was put at another engine than before."""

    def choose(self, session: str, loads: Mapping[int, int]) -> int:
        """One of the engines in `loads`, calls by engine, which must not be empty."""
        place = self._of.get(session)
        if place is not None and place.replica in loads:
            return place.replica
        return min(loads, key=lambda replica: (loads[replica], replica))

    def put(self, session: str, replica: int, cache: int, prompt_ids: Ids) -> None:
        """Keeps where a call of the session went and with which prompt."""
        before = self._of.pop(session, None)
        self.moved += before is not None and before.replica != replica
        self._of[session] = Place(replica, cache, len(prompt_ids), _digest(prompt_ids))
        if len(self._of) > SESSIONS_KEPT:
            self._of.popitem(last=False)

    def hit_share(self, session: str, replica: int, cache: int, prompt_ids: Ids) -> float:
        """Share of the prompt that the engine saw as the session's last one.

        Not seen: whether the engine has thrown it out since, or what of it other sessions share.
        """
        place = self._of.get(session)
        if place is None or (place.replica, place.cache) != (replica, cache) or place.tokens > len(prompt_ids):
            return 0.0
        return place.tokens / len(prompt_ids) if _digest(prompt_ids[: place.tokens]) == place.digest else 0.0


def _digest(ids: Ids) -> int:
    return zlib.crc32(ids.tobytes())
