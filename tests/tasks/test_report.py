"""Only an explicit pass counts, and only if the exit status says the same."""

import pytest

from lego.tasks.report import parse, resolved

REQUIRED = ("t::a", "t::b")


def junit(*cases: str) -> bytes:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


def case(name: str, mark: str = "") -> str:
    return f'<testcase classname="t" name="{name}">{mark}</testcase>'


FAIL, SKIP, ERROR = '<failure message="x"/>', '<skipped type="pytest.xfail"/>', '<error message="x"/>'


@pytest.mark.parametrize(
    ("cases", "code", "solved"),
    [
        ((case("a"), case("b")), 0, True),
        ((case("a"), case("b", "<system-out>x</system-out>")), 0, True),
        ((case("a"),), 0, False),
        ((case("a"), case("b", SKIP)), 0, False),
        ((case("a"), case("b", ERROR)), 1, False),
        ((case("a"), case("b"), case("b"), case("b", FAIL)), 1, False),
        ((case("a"), case("b"), case("other", FAIL)), 1, True),
        ((case("a"), case("b"), case("other", FAIL)), 0, False),
        ((case("a"), case("b")), 1, False),
        ((case("a"), case("b")), None, False),
        ((), 5, False),
    ],
)
def test_solved_means_every_required_test_passed_and_the_status_agrees(cases, code, solved):
    assert resolved(parse(junit(*cases)), code, REQUIRED) is solved


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<testsuites>",
        b"\xff\xfe",
        b"not xml",
        b'<?xml version="1.0" encoding="no-such"?><a/>',
        b"<!DOCTYPE a><a/>",
    ],
)
def test_what_is_no_report_proves_nothing(content):
    assert parse(content) is None
    assert not resolved(None, 0, REQUIRED)


def test_no_required_test_is_never_solved():
    assert not resolved(parse(junit(case("a"))), 0, ())
