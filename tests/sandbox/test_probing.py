"""What `probe` says is what a host does, also where it does less."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import bubble
from sandbox.base import Sandbox
from sandbox.bubble import Bubblewrap
from sandbox.cgroup import Hierarchy
from sandbox.probing import _version
from tests.sandbox.conftest import Backend

ROOT = os.geteuid() == 0


async def test_probe_is_quick_and_tells_what_an_ordinary_user_lacks(sandbox: Sandbox, backend: Backend):
    begun = time.monotonic()
    found = sandbox.probe()
    assert time.monotonic() - begun < 15  # a second or two on an idle machine
    assert found.overlay and found.netns and found.pids and found.rootless != ROOT
    assert found.memory == found.cpus == (found.cgroup != "none")
    assert found.disk == ROOT
    begun = time.monotonic()
    assert sandbox.probe() == found and time.monotonic() - begun < 0.1


def test_probe_works_without_a_running_loop(state: Path):
    assert Bubblewrap(state=state).probe().overlay


@pytest.mark.skipif(not bubble.hierarchy().folders, reason="this host has no control groups to take away")
async def test_a_limit_that_is_set_but_does_not_hold_is_told(state: Path, monkeypatch: pytest.MonkeyPatch):
    here = bubble.hierarchy()
    without_cpu = {name: folder for name, folder in here.folders.items() if name != "cpu"}
    monkeypatch.setattr(bubble, "hierarchy", lambda: replace(here, folders=without_cpu))
    found = Bubblewrap(state=state / "1").probe()
    assert (found.cpus, found.memory, found.cgroup) == (False, True, here.version)
    monkeypatch.setattr(bubble, "hierarchy", lambda: Hierarchy(version="none"))
    monkeypatch.setattr("sandbox.state._mounted", lambda space, disk_mib: False)
    found = Bubblewrap(state=state / "2").probe()
    assert (found.cpus, found.memory, found.disk, found.cgroup) == (False, False, False, "none")


def test_the_version_of_control_groups_is_read_from_their_names():
    assert _version("9:memory:/x\n3:cpu,cpuacct:/\n0::/\n") == "v1"
    assert _version("1:name=systemd:/\n0::/user.slice\n") == "v2"
