"""Groups on disk are the groups that were written, whole or not there."""

import json
import os
import random
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lego.errors import UsageError
from lego.records import CallKind, Fidelity, Outcome, Segment, Trajectory
from lego.rollout.stored import Stored
from tests.factories import segment, trajectory


def same(one: Segment, other: Segment) -> bool:
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(Segment)]
    return all(
        a is b is None or (np.array_equal(a, b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0)) for a, b in pairs
    )


def group() -> list[Trajectory]:
    routed = replace(segment(), kind=CallKind.SUBAGENT)
    plain = replace(segment(), routing_TLK=None)
    whole = replace(
        trajectory("task", 1.0),
        segments=(routed, plain),
        fidelity=Fidelity(sampled=9, trained=7, excluded={"side_request": 2}, turns=2, drift={"first": 1}),
        seconds={"trial": 1.5},
        patch="é\n",
        group=3,
        harness="pi",
    )
    empty = replace(trajectory("task", 1.0), segments=(), reward=None, outcome=Outcome.TIMEOUT, detail="late")
    return [whole, empty]


def assert_whole(found: tuple[Trajectory, ...]) -> None:
    for one, other in zip(found, group(), strict=True):
        assert replace(one, segments=()) == replace(other, segments=())
        assert len(one.segments) == len(other.segments)
        assert all(map(same, one.segments, other.segments))


def test_what_is_read_is_what_was_written(tmp_path: Path):
    stored = Stored(folder=tmp_path / "groups")
    stored.write(3, group())
    assert_whole(stored.read(3))
    stored.write(4, [])
    assert stored.read(4) == ()


def test_a_group_and_its_names_are_on_the_disk_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, folder = list[tuple[Path, bool]](), tmp_path / "groups"
    target = folder / "000003.safetensors"

    def fsync(handle: int) -> None:
        done.append((Path(f"/proc/self/fd/{handle}").readlink(), target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    Stored(folder=folder).write(3, group())
    assert done == [(folder / "000003.part", False), (folder, True), (tmp_path, True)]


@pytest.mark.parametrize("seed", range(8))
def test_a_byte_that_was_flipped_anywhere_is_found(tmp_path: Path, seed: int):
    stored, chance = Stored(folder=tmp_path), random.Random(seed)
    stored.write(3, group())
    path = tmp_path / "000003.safetensors"
    whole = path.read_bytes()
    arrays_from = 8 + int.from_bytes(whole[:8], "little")
    for start, stop in ((0, 8), (8, arrays_from), (arrays_from, len(whole))) * 8:
        damaged, place = bytearray(whole), chance.randrange(start, stop)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"000003\.safetensors: the group cannot be read.*wanted.*--fresh"):
            stored.read(3)


def test_arrays_that_changed_places_are_found(tmp_path: Path):
    stored = Stored(folder=tmp_path)
    stored.write(3, group())
    path = tmp_path / "000003.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    header["0.0.mask_T"], header["0.0.routed_T"] = header["0.0.routed_T"], header["0.0.mask_T"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    with pytest.raises(UsageError, match="it is not what was written"):
        stored.read(3)


def test_a_group_that_is_gone_or_damaged_is_named(tmp_path: Path):
    stored = Stored(folder=tmp_path)
    with pytest.raises(UsageError, match=r"000003\.safetensors"):
        stored.read(3)
    stored.write(3, group())
    path = tmp_path / "000003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="cannot be read"):
        stored.read(3)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("kinds", "kimds"), ("subagent", "subagemt"), ("timeout", "tineout"), ("fidelity", "fidelitx"), ("task", "tesk")],
)
def test_a_group_whose_text_is_damaged_is_named(tmp_path: Path, right: str, wrong: str):
    stored = Stored(folder=tmp_path)
    stored.write(3, group())
    path = tmp_path / "000003.safetensors"
    assert right.encode() in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(right.encode(), wrong.encode()))
    with pytest.raises(UsageError, match=r"000003\.safetensors: the group cannot be read"):
        stored.read(3)


def test_a_file_of_another_program_is_named(tmp_path: Path):
    (tmp_path / "000003.safetensors").write_bytes(save({"0.0.mask_T": np.ones(2)}))
    with pytest.raises(UsageError, match="cannot be read"):
        Stored(folder=tmp_path).read(3)


def test_only_the_groups_still_wanted_stay(tmp_path: Path):
    stored = Stored(folder=tmp_path)
    for number in range(3):
        stored.write(number, group())
    (tmp_path / "000007.part").write_bytes(b"cut off")
    stored.keep([1])
    assert [path.name for path in tmp_path.iterdir()] == ["000001.safetensors"]
