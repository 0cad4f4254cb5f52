"""What a test run's own report proves. Pure: JUnit XML in, the set of tests that surely passed out."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Tests by `module.Class::name`, in the order they ran; skipped ones (and expected failures) are in neither."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]


def parse(content: bytes) -> Report | None:
    """The report, or None where it is not one (absent, cut off, or with a document type of its own)."""
    if not content or b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        return None
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, LookupError, ValueError):
        return None
    marks: dict[str, set[str]] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        marks.setdefault(name, set()).update(child.tag for child in case)
    bad = {name for name, tags in marks.items() if tags & {"failure", "error"}}
    return Report(
        passed=tuple(name for name, tags in marks.items() if name not in bad and "skipped" not in tags),
        failed=tuple(name for name in marks if name in bad),
    )


def resolved(report: Report | None, code: int | None, required: tuple[str, ...]) -> bool:
    """Whether every required test passed and the exit status tells the same story as the report."""
    if report is None or not required:
        return False
    return code == (1 if report.failed else 0) and set(required) <= set(report.passed)
