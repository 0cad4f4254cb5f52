"""A session on disk: requests, ids, logprobs, routing and timing in one .npz, enough to replay it.

Token arrays are binary. A request holds most of the one before it, so messages, items and tools lie in one pool.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lego.capture.journal import Event, Origin, Step
from lego.capture.session import Limits, Session
from lego.chat.render import Renderer
from lego.errors import UsageError
from lego.records import Drift, Generation, Ids, Sampling, Turn, VersionSpan

FORMAT = 1
# What numpy, zipfile and json raise for a file that is not ours, or not any more.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, EOFError, ArithmeticError, MemoryError, RuntimeError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All that went into a session, and what it made of it. `calls[i]` is the call of turn i."""

    uid: str
    model: str
    """Folder of the policy that rendered the prompts, by which `family` of renderer."""
    family: str
    thinking: bool
    limits: Limits
    origins: tuple[Origin, ...]
    events: tuple[Event, ...]
    turns: tuple[Turn, ...]
    calls: tuple[int, ...]
    trained: tuple[int, ...]
    """Trainable tokens of each segment."""


def record(session: Session, renderer: Renderer) -> Recording:
    """The session as it stands, and the renderer that it needs."""
    return Recording(
        uid=session.uid,
        model=str(renderer.folder.resolve()),
        family=renderer.name,
        thinking=renderer.thinking,
        limits=session.limits,
        origins=tuple(session.journal.origins),
        events=tuple(session.journal.events),
        turns=session.turns,
        calls=tuple(session.plan_of(turn.index).call for turn in session.turns),
        trained=trained(session),
    )


def trained(session: Session) -> tuple[int, ...]:
    """Trainable tokens of each segment."""
    return tuple(int(segment.mask_T.sum()) for segment in session.segments())


def write(recording: Recording, path: Path, *, routing: bool = False) -> None:
    """Writes the file whole or not at all; routing, most of the bytes, only when asked for."""
    turns = recording.turns
    pool = _Pool()
    text = {
        "format": FORMAT,
        "uid": recording.uid,
        "model": recording.model,
        "family": recording.family,
        "thinking": recording.thinking,
        "limits": asdict(recording.limits),
        "events": [[event.step.value, event.call] for event in recording.events],
        "origins": [_origin_text(origin, pool) for origin in recording.origins],
        "turns": [_turn_text(turn, call) for turn, call in zip(turns, recording.calls, strict=True)],
        "trained": list(recording.trained),
        "pool": pool.items,
    }
    arrays = {
        "text": np.frombuffer(json.dumps(text).encode(), np.uint8),
        "prompt_ids": _joined([turn.prompt_ids[len(_before(turns, turn.parent)) :] for turn in turns], np.int32),
        "output_ids": _joined([turn.generation.output_ids for turn in turns], np.int32),
        "logprobs": _joined([turn.generation.logprobs for turn in turns], np.float32),
    }
    if routing:
        rows = [turn.generation.routing for turn in turns if turn.generation.routing is not None]
        arrays["routing"] = np.concatenate(rows) if rows else np.zeros(0, np.uint8)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)
    part.rename(path)


def read(path: Path) -> Recording:
    """Reads what `write` wrote. Raises UsageError for anything else.

    Without routing in the file, its turns and limits are those of a session that captured none.
    """
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            return _recording({name: file[name] for name in file.files})
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except _UNREADABLE as error:
        raise UsageError(f"{path} is no session file of format {FORMAT}") from error


def _recording(arrays: Mapping[str, Any]) -> Recording:
    text = json.loads(arrays["text"].tobytes())
    if text["format"] != FORMAT:
        raise ValueError(f"format {text['format']}")
    limits = Limits(**text["limits"])
    for name, kind in {"prompt_ids": np.int32, "output_ids": np.int32, "logprobs": np.float32}.items():
        if arrays[name].dtype != kind or arrays[name].ndim != 1:
            raise ValueError(f"{name} of {arrays[name].dtype}")
    events = tuple(Event(step=Step(step), call=call) for step, call in text["events"])
    _check_order(events, {turn["call"] for turn in text["turns"]}, len(text["origins"]))
    return Recording(
        uid=text["uid"],
        model=text["model"],
        family=text["family"],
        thinking=text["thinking"],
        limits=limits if "routing" in arrays else replace(limits, experts=None),
        origins=tuple(_origin(origin, text["pool"]) for origin in text["origins"]),
        events=events,
        turns=tuple(_turns(text["turns"], arrays, [origin["asked"] for origin in text["origins"]])),
        calls=tuple(turn["call"] for turn in text["turns"]),
        trained=tuple(text["trained"]),
    )


def _check_order(events: Sequence[Event], settled: set[int], calls: int) -> None:
    """Each call is planned, then settled once if it became a turn, then lost at most."""
    planned = [event.call for event in events if event.step is Step.PLAN]
    ended = [event.call for event in events if event.step in (Step.ADD, Step.ABANDON)]
    lost = [event.call for event in events if event.step is Step.LOST]
    if planned != list(range(calls)) or sorted(ended) != sorted(settled) or not settled.issuperset(lost):
        raise ValueError("events that cannot be")


# Requests


class _Pool:
    """JSON values, each once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, item: Any) -> int:
        text = json.dumps(item)
        if text not in self._places:
            self._places[text] = len(self.items)
            self.items.append(item)
        return self._places[text]


def _origin_text(origin: Origin, pool: _Pool) -> dict[str, Any]:
    lists = {name: value for name, value in origin.body.items() if isinstance(value, list)}
    return {
        "dialect": str(origin.dialect),
        "hint": origin.hint.value,
        "asked": dict(origin.asked),
        "at": origin.at,
        "lists": {name: _runs([pool.place(item) for item in value]) for name, value in lists.items()},
        "rest": {name: value for name, value in origin.body.items() if name not in lists},
    }


def _origin(text: Mapping[str, Any], pool: Sequence[Any]) -> Origin:
    lists = {name: [item for run in runs for item in pool[slice(*run)]] for name, runs in text["lists"].items()}
    return Origin(
        dialect=text["dialect"],
        hint=Drift(text["hint"]),
        body=text["rest"] | lists,
        asked=text["asked"],
        at=text["at"],
    )


def _runs(places: Sequence[int]) -> list[list[int]]:
    """Neighbouring places as [start, stop)."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1][1] = place + 1
        else:
            runs.append([place, place + 1])
    return runs


# Turns


def _turn_text(turn: Turn, call: int) -> dict[str, Any]:
    made = turn.generation
    return {
        "call": call,
        "parent": turn.parent,
        "drift": turn.drift.value,
        "rejected": turn.rejected,
        "sampling": asdict(turn.sampling),
        "started": turn.started,
        "seconds": turn.seconds,
        "finish": made.finish,
        "versions": [asdict(span) for span in made.versions],
        "prompt": len(turn.prompt_ids),
        "echoed": made.prompt_len,
        "output": len(made.output_ids),
        "logprobs": len(made.logprobs),
        "routing_start": made.routing_start,
        "routing": None if made.routing is None else len(made.routing),
    }


def _turns(
    texts: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any], asked: Sequence[Mapping[str, object]]
) -> list[Turn]:
    prompts, outputs, logprobs = _Cut(arrays["prompt_ids"]), _Cut(arrays["output_ids"]), _Cut(arrays["logprobs"])
    routing = _Cut(arrays["routing"]) if "routing" in arrays else None
    turns: list[Turn] = []
    for index, text in enumerate(texts):
        before = _before(turns, text["parent"])
        made = Generation(
            prompt_len=text["echoed"],
            output_ids=outputs.next(text["output"]),
            logprobs=logprobs.next(text["logprobs"]),
            routing=routing.next(text["routing"]) if routing is not None and text["routing"] is not None else None,
            routing_start=text["routing_start"],
            versions=tuple(VersionSpan(**span) for span in text["versions"]),
            finish=text["finish"],
        )
        turns.append(
            Turn(
                index=index,
                parent=text["parent"],
                asked=asked[text["call"]],
                drift=Drift(text["drift"]),
                prompt_ids=np.concatenate([before, prompts.next(text["prompt"] - len(before))]),
                generation=made,
                sampling=Sampling(**text["sampling"]),
                rejected=text["rejected"],
                started=text["started"],
                seconds=text["seconds"],
            )
        )
    return turns


class _Cut:
    """Hands out an array piece by piece."""

    def __init__(self, array: Any) -> None:
        self._array, self._at = array, 0

    def next(self, length: int) -> Any:
        piece = self._array[self._at : self._at + length]
        if len(piece) != length:
            raise ValueError(f"{length} values wanted, {len(piece)} left")
        self._at += length
        return piece


def _before(turns: Sequence[Turn], parent: int | None) -> Ids:
    """The ids that a child of this turn begins with."""
    if parent is None:
        return np.zeros(0, np.int32)
    return np.concatenate([turns[parent].prompt_ids, turns[parent].generation.output_ids])


def _joined(pieces: Sequence[Any], kind: Any) -> Any:
    return np.concatenate([np.zeros(0, kind), *pieces])
