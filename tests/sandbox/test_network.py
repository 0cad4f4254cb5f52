"""A box reaches the model's listener and nothing else: each probe is shown to work from a process in no box."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.podman import Podman
from tests.sandbox.conftest import DOCKER, HOST, PODMAN

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=[HOST, PODMAN, DOCKER])
def seen(request: pytest.FixtureRequest, tmp_path: Path, base: Path) -> dict[str, dict[str, str]]:
    """What is reached from where, on one backend."""
    if os.geteuid() != 0:
        pytest.skip("only root can make the network namespaces of this test")
    if shutil.which("ip") is None:
        pytest.skip("ip is missing: apt-get install iproute2")
    storage = []
    if request.param == "podman":
        podman: Podman = request.getfixturevalue("podman_sandbox")
        storage = [str(podman.storage)]
    driver = ["unshare", "--net", sys.executable, "-m", "tests.sandbox.network_driver"]
    done = subprocess.run(
        [*driver, request.param, str(tmp_path), str(base), *storage], cwd=ROOT, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_box_reaches_the_model_and_nothing_of_host_outside_or_other_boxes(seen: dict[str, dict[str, str]]):
    assert set(seen["host"].values()) == {"open"} and len(seen["host"]) == 10, seen["host"]
    assert set(seen["other box"].values()) == {"open"} and len(seen["other box"]) == 3, seen["other box"]
    assert seen["model"] == {"model": "open"}
    assert set(seen["box"]) == {*seen["host"], *seen["other box"]}
    reached = {name: said for name, said in seen["box"].items() if not said.startswith("closed:")}
    assert reached == {}
