"""Only an explicit pass in a whole record counts, and only if the exit status says the same."""

import json

import pytest

from lego.tasks.report import Report, name_of, read, resolved

NONCE, CANARY = "5ecret", "test_bird"
REQUIRED = ("t::a", "t::b")
GOOD = {"setup": "passed", "call": "passed", "teardown": "passed"}
FAILED = GOOD | {"call": "failed"}


def events(*tests: tuple[str, dict[str, str]], status: int | None = 1) -> list[tuple]:
    """What the witness tells of tests with these phases, after a canary that failed."""
    run = [(CANARY, FAILED), *tests]
    told: list[tuple] = [("start", CANARY)]
    told += [("test", number, f"t.py::{name}") for number, (name, _) in enumerate(run)]
    told += [("collected", len(run))]
    for number, (_, phases) in enumerate(run):
        for when, said in phases.items():
            told.append(("phase", number, when, "raised" if said in ("failed", "skipped") else "clean", said))
    return told if status is None else [*told, ("finish", status)]


def record(told: list[tuple]) -> bytes:
    return b"".join(f"{NONCE} {number} {json.dumps(event)}\n".encode() for number, event in enumerate(told))


def seen(told: list[tuple]) -> Report:
    report = read(record(told))
    assert report is not None
    return report


A, B = ("a", GOOD), ("b", GOOD)


def b(**phases: str) -> tuple[str, dict[str, str]]:
    return "b", GOOD | phases


@pytest.mark.parametrize(
    ("tests", "status", "code", "solved"),
    [
        ([A, B], 1, 1, True),
        ([A, B, ("other", FAILED)], 1, 1, True),
        ([A, B, ("other", {"setup": "skipped", "teardown": "passed"})], 1, 1, True),
        ([A], 1, 1, False),
        ([A, b(call="failed")], 1, 1, False),
        ([A, ("b", {"setup": "failed", "teardown": "passed"})], 1, 1, False),
        ([A, b(teardown="failed")], 1, 1, False),
        ([A, ("b", {"setup": "skipped", "teardown": "passed"})], 1, 1, False),
        ([A, b(call="skipped")], 1, 1, False),
        ([A, b(call="xfailed")], 1, 1, False),
        ([A, b(call="xpassed")], 1, 1, False),
        ([A, b(subtest="failed")], 1, 1, False),
        ([A, ("b", {"setup": "passed", "call": "passed"})], 1, 1, False),
        ([A, ("b", {"setup": "passed", "teardown": "passed"})], 1, 1, False),
        ([A, ("b", {})], 1, 1, False),
        ([A, B, B, b(call="failed")], 1, 1, False),
        ([A, B, ("b", {})], 1, 1, False),
        ([A, B], 0, 0, False),
        ([A, B], 1, 0, False),
        ([A, B], 0, 1, False),
        ([A, B], 2, 2, False),
        ([A, B], None, 1, False),
        ([A, B], 1, None, False),
        ([], 1, 1, False),
    ],
)
def test_solved_means_every_required_test_passed_and_the_status_agrees(tests, status, code, solved):
    assert resolved(seen(events(*tests, status=status)), code, REQUIRED) is solved


def at(told: list[tuple], place: int, *more: tuple) -> list[tuple]:
    return [*told[:place], *more, *told[place:]]


ALL = events(A, B)
END = len(ALL)


@pytest.mark.parametrize(
    "told",
    [
        at(ALL, END, ("finish", 1)),
        at(ALL, END, ("phase", 2, "call", "clean", "passed")),
        at(ALL, END - 1, ("phase", 2, "call", "clean", "passed")),
        at(ALL, END - 1, ("phase", 1, "call", "clean", "passed")),
        at(ALL, END - 1, ("phase", 3, "setup", "clean", "passed")),
        at(ALL, END - 1, ("test", 3, "t.py::c")),
        at(ALL, END - 1, ("collected", 3)),
        at(ALL, END - 1, ("altered", "builtins.min")),
        at(ALL, END - 1, ("nonsense",)),
        at(ALL, END - 1, ()),
        at(ALL, 1, ("start", CANARY)),
        at(ALL, 1, ("phase", 0, "setup", "clean", "passed")),
        at(ALL, 2, ("test", 5, "t.py::c")),
        [*ALL[:4], ("collected", 2), *ALL[5:]],
        [*ALL[:-2], ("phase", 2, "teardown", "raised", "passed"), ALL[-1]],
        [*ALL[:-2], ("phase", 2, "teardown", "", "passed"), ALL[-1]],
        [*ALL[:6], ("phase", 0, "call", "raised", "passed"), *ALL[7:]],
    ],
)
def test_a_record_with_a_line_that_does_not_fit_is_tampered_with(told):
    report = seen(told)
    assert report.tampering and not resolved(report, 1, REQUIRED)


def test_a_line_out_of_order_or_of_another_nonce_is_tampering():
    lines = record(ALL).splitlines(keepends=True)
    last = lines[-1].replace(b" 14 ", b" 15 "), lines[-1].replace(NONCE.encode(), b"forged")
    assert lines[-1] not in last
    for line in last:
        report = read(b"".join([*lines[:-1], line]))
        assert report is not None and report.tampering
        assert not resolved(report, 1, REQUIRED)


def test_a_canary_that_passes_or_is_gone_makes_the_record_worthless():
    passed = seen([e if e[:3] != ("phase", 0, "call") else (*e[:3], "clean", "passed") for e in ALL])
    assert passed.canary == "passed" and passed.tampering and not resolved(passed, 1, REQUIRED)
    gone = read(record([("start", "test_other_bird"), *ALL[1:]]))
    assert gone is not None and gone.canary == "missing" and not resolved(gone, 1, REQUIRED)


@pytest.mark.parametrize(
    "junk",
    [
        b"x",
        b"\n",
        b"\xff\xfe\n",
        b'0 99 ["finish", 1]\n',
        b'5ecret 3 ["finish", 1]\n',
        b"5ecret 16 " + b"[" * 3000 + b"\n",
        b"5ecret 16 1\n",
        b'5ecret 16 {"a": 1}\n',
        b"y" * (1 << 17) + b"\n",
    ],
)
@pytest.mark.parametrize("place", ["early", "late"])
def test_junk_on_the_stream_is_tampering(junk: bytes, place: str):
    first, rest = record(ALL).split(b"\n", 1)
    if place == "early" and not junk.endswith(b"\n"):
        junk += b"\n"
    report = read(first + b"\n" + junk + rest if place == "early" else first + b"\n" + rest + junk)
    assert report is not None
    assert report.tampering and not resolved(report, 1, REQUIRED)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"<testsuites>", b"x\n" + record(ALL), record(ALL[1:])])
def test_a_record_that_does_not_begin_is_none(content: bytes):
    assert read(content) is None
    assert not resolved(None, 1, REQUIRED)


def test_a_record_cut_off_anywhere_is_not_solved():
    whole = record(ALL)
    for end in range(len(whole)):
        assert not resolved(read(whole[:end]), 1, REQUIRED)


def test_no_required_test_is_never_solved():
    assert not resolved(seen(ALL), 1, ())


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("tests/test_toy.py::test_a", "tests.test_toy::test_a"),
        ("test_toy.py::TestA::TestB::test_a[x/y.py::z]", "test_toy.TestA.TestB::test_a[x/y.py::z]"),
    ],
)
def test_names_are_those_of_a_junit_report(node: str, name: str):
    assert name_of(node) == name
