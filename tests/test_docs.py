"""The programs in the docs run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = [
    (page.name, code)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


PRINTED = {
    "add-a-harness.md": "/opt/mine/mine",
    "capture.md": "Fidelity(sampled=3, trained=3",
    "sandboxes.md": "0 [b'one', b'two'] ['a.txt']",
    "trainer.md": "",
}


def test_the_docs_hold_programs():
    assert {page for page, _ in PROGRAMS} == set(PRINTED)


@pytest.mark.parametrize(("page", "code"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_a_program_in_the_docs_runs_and_prints_what_it_says(page: str, code: str):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert PRINTED[page] in done.stdout
