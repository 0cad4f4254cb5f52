"""What the record of a test run proves. Pure: the witness's lines in, the set of tests that surely passed out.

A line is `NONCE NUMBER EVENT`, the event a JSON array: start CANARY; test I NODE, …; collected N; for each test in
order its phases (phase I WHEN SEEN SAID); finish STATUS; between them altered WHAT. The first line is written before
code of the agent can run, so its nonce is the witness's. Who cannot read that cannot add a line, nobody can take one
back, and whatever does not fit in is tampering.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MANY = 10
"""Complaints that are kept."""
LINE_BYTES = 1 << 16
"""No line of the witness is longer."""
PHASES = ("setup", "call", "teardown")


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tests by `module.Class::name`, in the order they ran; skipped ones (and expected failures) are in neither."""

    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    canary: str = "missing"
    """What the test that must fail did: `failed`, `passed`, `skipped`, `missing`."""
    status: int | None = None
    """pytest's own exit status; None where the record ends before it."""
    tampering: tuple[str, ...] = ()
    """What in the record the witness and pytest cannot have written."""

    @property
    def whole(self) -> bool:
        """Whether the record can be believed: complete, untouched, and the canary failed."""
        # The canary fails, so pytest's status is 1 whatever else happened.
        return self.status == 1 and not self.tampering and self.canary == "failed"


def read(record: bytes) -> Report | None:
    """The report; None where the record does not even begin, so no code under test ran."""
    first, *lines, rest = record.split(b"\n") if b"\n" in record else (b"", b"")
    begun = re.fullmatch(rb'(\w+) 0 \["start", "(\w+)"\]', first)
    if begun is None:
        return None
    reader = _Reader(nonce=begun[1], canary=begun[2].decode())
    for line in lines:
        reader.line(line)
    if rest:
        reader.complain("a line without an end")
    return reader.report()


def resolved(report: Report | None, code: int | None, required: tuple[str, ...]) -> bool:
    """Whether every required test passed and the exit status tells the same story as the record."""
    return believed(report, code) and bool(required) and set(required) <= set(report.passed if report else ())


def believed(report: Report | None, code: int | None) -> bool:
    """Whether the record is whole and agrees with the exit status of the process."""
    return report is not None and report.whole and code == report.status


def name_of(node: str) -> str:
    """The `module.Class::name` of pytest's `path/module.py::Class::name`."""
    path, bracket, values = node.partition("[")
    names = path.split("::")
    names[0] = re.sub(r"\.py$", "", names[0].replace("/", "."))
    names[-1] += bracket + values
    return f"{'.'.join(names[:-1])}::{names[-1]}"


@dataclass
class _Reader:
    nonce: bytes
    canary: str
    count: int = 1
    collected: bool = False
    status: int | None = None
    nodes: list[str] = field(default_factory=list)
    phases: dict[int, dict[str, str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def complain(self, what: str) -> None:
        if len(self.complaints) < MANY:
            self.complaints.append(what)

    def line(self, line: bytes) -> None:
        """Takes one line in, or complains about it."""
        head, _, rest = line.partition(b" ")
        number, _, event = rest.partition(b" ")
        if head != self.nonce or len(line) > LINE_BYTES:
            self.complain("a line that is not the witness's")
        elif number != b"%d" % self.count:
            self.complain("a line out of order")
        else:
            self.count += 1
            try:
                self.event(*json.loads(event))
            except (ValueError, TypeError, RecursionError):
                self.complain("a line that means nothing")

    def event(self, kind: str, *given: Any) -> None:
        if self.status is not None:
            raise ValueError(kind)
        if kind == "altered":
            self.complain(f"replaced: {given[0]}")
        elif kind == "finish":
            self.status = int(given[0])
        elif kind == "phase":
            self.phase(*given)
        elif self.collected:
            raise ValueError(kind)
        elif kind == "test":
            self.test(*given)
        elif kind == "collected" and given[0] == len(self.nodes):
            self.collected = True
        else:
            raise ValueError(kind)

    def test(self, number: int, node: str) -> None:
        if number != len(self.nodes) or "::" not in node:
            raise ValueError(node)
        self.nodes.append(node)

    def phase(self, number: int, when: str, seen: str, said: str) -> None:
        """One phase of the test whose turn it is; a phase that raised and is reported as passed was tampered with."""
        if not self.collected or not 0 <= number < len(self.nodes) or (self.phases and number < max(self.phases)):
            raise ValueError(number)
        phases = self.phases.setdefault(number, {})
        if when == "subtest":
            phases[when] = "failed" if "failed" in (said, phases.get(when)) else said
            return
        if when in phases or any(PHASES.index(earlier) > PHASES.index(when) for earlier in phases if earlier in PHASES):
            raise ValueError(when)
        lie = seen != "clean" and said in ("passed", "xpassed")
        if lie:
            self.complain(f"a {when} that did not end cleanly is reported as {said}")
        phases[when] = "failed" if lie else said

    def report(self) -> Report:
        outcomes: dict[str, set[str]] = {}
        own = "missing"
        for number, node in enumerate(self.nodes):
            outcome = _outcome(self.phases.get(number, {}))
            if node.rpartition("::")[2] == self.canary:
                own = outcome
            else:
                outcomes.setdefault(name_of(node), set()).add(outcome)
        return Report(
            passed=tuple(name for name, seen in outcomes.items() if seen == {"passed"}),
            failed=tuple(name for name, seen in outcomes.items() if "failed" in seen),
            canary=own,
            status=self.status,
            tampering=tuple(self._tampering(own)),
        )

    def _tampering(self, canary: str) -> Iterator[str]:
        yield from self.complaints
        if self.collected and self.nodes and canary == "passed":
            yield "the test that must fail is reported as passed"


def _outcome(phases: dict[str, str]) -> str:
    """passed, failed, skipped or missing, of one test."""
    if not phases:
        return "missing"
    if "failed" in phases.values():
        return "failed"
    if all(phases.get(when) == "passed" for when in PHASES) and set(phases.values()) == {"passed"}:
        return "passed"
    return "skipped"
