"""The two runs that every harness is tried with: a plain one, and one that begins with a bad call."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harnesses.base import Harness
from lego.chat.render import Renderer
from lego.drill.script import Finish, Malformed, Shell, Step
from lego.drill.stage import Drill, Drilled
from sandbox.base import Change
from sandbox.bubble import Bubblewrap

TASK = "add() in calc.py subtracts. Fix it."
FILES: Mapping[str, str] = {
    "README.md": "# calc\n\nAdds numbers.\n",
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
FIXED = b"def add(a, b):\n    return a + b\n"
LIST = Shell("ls -a", "I list the files.\n", loose=True)
# qwen-code refuses `sed -i` on a file that it has not read.
EDIT = Shell("sed 's/a - b/a + b/' calc.py > fixed.py && mv fixed.py calc.py")
WORK: Sequence[Step] = (LIST, EDIT, Finish())


def lay_out(folder: Path) -> Path:
    """Writes the repository of three files, one of them wrong."""
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


def solved(changes: Sequence[Change]) -> bool:
    """Whether the fix, and nothing but the fix and what Python caches, was made."""
    rest = {str(c.path): c.content for c in changes if "__pycache__" not in c.path.parts}
    return rest == {"calc.py": FIXED}


async def exercise(harness: Harness, cache: Path, policy: Path) -> tuple[Drilled, Drilled]:
    """Both runs. Raises HarnessNotFetched, SandboxError, UsageError."""
    with tempfile.TemporaryDirectory() as folder:
        base = lay_out(Path(folder))
        drill = Drill(sandbox=Bubblewrap(), cache=cache, base=base, renderer=Renderer.load(policy))
        return await drill.run(harness, WORK, TASK), await drill.run(harness, (Malformed(), *WORK), TASK)
