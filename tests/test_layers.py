"""Imports point down: sandbox <- harnesses <- lego; in lego, rollout and learn meet only in records."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(p for package in ("sandbox", "harnesses", "lego") for p in (ROOT / package).rglob("*.py"))
ONE_FILE = {
    "podman": {"sandbox/wire.py"},
    "aiodocker": {"sandbox/docker.py"},
    "litellm": {"lego/capture/dialects.py"},
    "renderers": {"lego/chat/render.py"},
    "jinja2": {"lego/chat/template.py"},
    "tokenizers": {"lego/chat/vocabulary.py"},
    "zmq": {"lego/learn/client.py", "lego/learn/worker.py"},
    "rich": {"lego/observe/terminal.py"},
    "tensorboard": {"lego/observe/tensorboard.py"},
    "psutil": {"lego/observe/memory.py"},
    "torchtitan": {str(p.relative_to(ROOT)) for p in (ROOT / "lego/learn").glob("titan*.py")},
}


def imported(path: Path) -> set[str]:
    """Full names of the modules a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def forbidden(path: Path) -> tuple[str, ...]:
    """Packages of ours that a file may not import."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "sandbox":
        return ("lego", "harnesses")
    if parts[0] == "harnesses":
        return ("lego",)
    return {"rollout": ("lego.learn",), "learn": ("lego.rollout",)}.get(parts[1], ())


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path):
    bad = [n for n in imported(path) for f in forbidden(path) if n == f or n.startswith(f + ".")]
    assert not bad, f"{path.relative_to(ROOT)} imports {bad}"


@pytest.mark.parametrize("library", sorted(ONE_FILE))
def test_an_outside_library_lives_in_few_files(library: str):
    users = {str(p.relative_to(ROOT)) for p in MODULES if library in {n.split(".")[0] for n in imported(p)}}
    assert users, f"nothing imports {library}: take it out of this table"
    assert users <= ONE_FILE[library], f"{library} is imported by {sorted(users - ONE_FILE[library])}"


def test_few_files_import_vllm():
    users = {str(p.relative_to(ROOT)) for p in MODULES if "vllm" in {n.split(".")[0] for n in imported(p)}}
    assert users <= {f"lego/engine/{name}.py" for name in ("plugin", "weights", "vllmcli", "gloo", "direct")}
