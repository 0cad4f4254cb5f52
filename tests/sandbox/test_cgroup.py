import os
from pathlib import Path

import pytest

from sandbox.base import Limits, SandboxError
from sandbox.cgroup import Cgroup, Hierarchy, find_hierarchy, remove_groups

LIMITS = Limits(memory_gib=1.5, pids=10, cpus=0.5)


def mount_line(root: str, point: Path, kind: str, options: str) -> str:
    return f"31 23 0:28 {root} {point} rw,relatime shared:9 - {kind} {kind} rw,{options}\n"


def test_version_1_groups_are_made_below_our_own(tmp_path: Path):
    for path in ("memory/my/group", "pids/my", "cpu,cpuacct"):
        (tmp_path / path).mkdir(parents=True)
    mounts = "".join(mount_line("/", tmp_path / name, "cgroup", name) for name in ("memory", "pids", "cpu,cpuacct"))
    found = find_hierarchy(mounts, "9:name=systemd:/\n8:memory:/my/group\n7:pids:/my\n3:cpu,cpuacct:/\n0::/\n")
    assert found.version == "v1"
    assert found.folders == {
        "memory": tmp_path / "memory/my/group",
        "pids": tmp_path / "pids/my",
        "cpu": tmp_path / "cpu,cpuacct",
    }


def test_a_container_that_shows_only_its_part_of_the_hierarchy_is_understood(tmp_path: Path):
    (tmp_path / "memory" / "job").mkdir(parents=True)
    mounts = mount_line("/docker/abc", tmp_path / "memory", "cgroup", "memory")
    assert find_hierarchy(mounts, "4:memory:/docker/abc/job\n").folders["memory"] == tmp_path / "memory" / "job"
    assert find_hierarchy(mounts, "4:memory:/docker/abc\n").folders["memory"] == tmp_path / "memory"
    assert find_hierarchy(mounts, "4:memory:/elsewhere\n").folders["memory"] == tmp_path / "memory"


def test_version_2_groups_are_made_where_controllers_are_handed_down(tmp_path: Path):
    own = tmp_path / "user.slice" / "app"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("\n")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids io\n")
    mounts = mount_line("/", tmp_path, "cgroup2", "nsdelegate")
    found = find_hierarchy(mounts, "0::/user.slice/app\n")
    assert found.version == "v2" and set(found.folders.values()) == {own.parent}
    (own.parent / "cgroup.subtree_control").write_text("memory\n")
    assert find_hierarchy(mounts, "0::/user.slice/app\n") == Hierarchy(version="none")
    assert find_hierarchy("", "") == Hierarchy(version="none")


def test_version_2_limits_are_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    group = Cgroup(Hierarchy(version="v2", folders=dict.fromkeys(("memory", "pids", "cpu"), tmp_path)), "box-1")
    folder = tmp_path / "box-1"
    group.create(LIMITS)
    assert (folder / "memory.max").read_text() == str(3 << 29)
    assert (folder / "pids.max").read_text() == "11"
    assert (folder / "cpu.max").read_text() == "50000 100000"
    assert group.folders == [folder]
    (folder / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert group.oom_kills() == 3
    assert group.entrances() == [folder / "cgroup.procs"]


def test_without_groups_nothing_is_limited_or_counted():
    group = Cgroup(Hierarchy(version="none"), "box-1")
    group.create(LIMITS)
    assert group.entrances() == []
    assert (group.folders, group.oom_kills(), group.limits("pids")) == ([], 0, False)
    remove_groups([])


def test_a_limit_that_the_host_refuses_is_named(tmp_path: Path):
    group = Cgroup(Hierarchy(version="v1", folders={"pids": tmp_path / "none"}), "box-1")
    with pytest.raises(SandboxError, match=r"cannot make the control group .*box-1: No such file"):
        group.create(LIMITS)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user may make no groups here")
def test_removing_a_group_that_is_gone_is_no_error(tmp_path: Path):
    remove_groups([tmp_path / "box-none"])
