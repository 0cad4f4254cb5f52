import asyncio
import errno
import time
from pathlib import Path

import pytest

from sandbox.base import BoxSpec, Sandbox, SandboxError
from sandbox.bubble import Bubblewrap
from tests.sandbox.conftest import Backend, process_count


async def test_exit_codes_and_streams_are_exact_and_apart(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        for code in (0, 1, 32, 137):
            result = await box.exec(["sh", "-c", f"echo out; echo err >&2; exit {code}"])
            assert (result.code, result.stdout, result.stderr) == (code, b"out\n", b"err\n")
            assert not (result.timed_out or result.truncated or result.oom)
        assert (await box.exec(["sh", "-c", "kill -TERM $$"])).code == 128 + 15
        assert (await box.exec(["no-such-program"])).code == 127
        assert (await box.exec(["/repo/README"])).code == 126
        lost = await box.exec(["true"], cwd=Path("/gone"))
        assert lost.code != 0 and b"/gone" in lost.stderr
        assert (await box.exec(["/repo/run.sh"])).stdout == b"ran\n"


async def test_output_that_is_no_text_or_has_no_newline_is_kept(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        assert (await box.exec(["printf", r"\377\000\200"])).stdout == b"\xff\x00\x80"
        line = await box.exec(["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x"])
        assert line.stdout == b"x" * 1_000_000


async def test_output_above_the_cap_is_dropped_but_never_blocks_the_program(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        result = await box.exec(["sh", "-c", "head -c 20000000 /dev/zero; echo done >&2"], max_output=1000)
        assert (len(result.stdout), result.stderr, result.code, result.truncated) == (1000, b"done\n", 0, True)


async def test_a_large_input_reaches_a_program_that_writes_before_it_reads(sandbox: Sandbox, spec: BoxSpec):
    data = bytes(range(256)) * 20_000
    async with sandbox.open(spec) as box:
        result = await box.exec(["cat"], stdin=data, max_output=len(data))
        assert result.stdout == data and not result.truncated
        assert (await box.exec(["true"], stdin=data)).code == 0
        assert (await box.exec(["cat"])).stdout == b""


async def test_environment_and_folder_are_what_the_caller_says(sandbox: Sandbox, spec: BoxSpec, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "1")
    async with sandbox.open(spec) as box:
        lines = (await box.exec(["env"], env={"MINE": "a=b\nc", "LANG": "C"})).stdout.decode()
        assert "HOST_SECRET" not in lines and "MINE=a=b\nc" in lines and "LANG=C\n" in lines
        assert "HOME=/home/agent\n" in lines
        assert (await box.exec(["pwd"])).stdout == b"/repo\n"
        assert (await box.exec(["pwd"], cwd=Path("/repo/pkg"))).stdout == b"/repo/pkg\n"
        with pytest.raises(ValueError, match="env"):
            await box.exec(["true"], env={"A=B": "x"})


async def test_a_timeout_kills_the_whole_tree_and_the_box_goes_on(sandbox: Sandbox, spec: BoxSpec, backend: Backend):
    tree = 'echo partial; sleep 300 & (setsid sleep 300 &) ; trap "" TERM; while :; do :; done'
    async with sandbox.open(spec) as box:
        quiet = await process_count(box)
        for _ in range(50 if backend.name in ("podman", "docker") else 6):
            begun = time.monotonic()
            result = await box.exec(["sh", "-c", tree], timeout_s=0.4)
            assert time.monotonic() - begun < 5
            assert (result.code, result.timed_out, result.stdout) == (None, True, b"partial\n")
            assert await process_count(box) == quiet


async def test_what_a_command_leaves_running_lives_until_kill(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        quiet = await process_count(box)
        result = await box.exec(["sh", "-c", "(setsid sleep 300 &); sleep 300 & echo ready"], timeout_s=30)
        assert (result.stdout, result.code) == (b"ready\n", 0)
        assert await process_count(box) == quiet + 2
        await box.kill()
        assert await process_count(box) == quiet


async def test_orphans_do_not_stay_as_zombies(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        quiet = await process_count(box)
        await box.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (true &) ; done; sleep 0.2"])
        assert await process_count(box) == quiet


async def test_commands_asked_for_at_once_run_one_after_the_other(sandbox: Sandbox, spec: BoxSpec):
    script = "test ! -e busy && touch busy && sleep 0.05 && rm busy"
    async with sandbox.open(spec) as box:
        results = await asyncio.gather(*(box.exec(["sh", "-c", script]) for _ in range(4)))
        assert [result.code for result in results] == [0] * 4


async def test_a_command_inherits_nothing_but_its_three_streams(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["true"])
        script = "for n in $(seq 3 64); do test -e /proc/$$/fd/$n && echo $n; done"
        assert (await box.exec(["sh", "-c", script])).stdout == b""


async def test_files_go_in_and_come_out(sandbox: Sandbox, spec: BoxSpec):
    data = bytes(range(256)) * 5000
    async with sandbox.open(spec) as box:
        await box.put(Path("/home/agent/new/folder/tool"), data, 0o755)
        assert await box.get(Path("/home/agent/new/folder/tool")) == data
        assert (await box.exec(["stat", "-c", "%a", "/home/agent/new/folder/tool"])).stdout == b"755\n"
        await box.put(Path("/repo/README"), b"")
        assert await box.get(Path("/repo/README")) == b""
        assert (await box.exec(["ls", "-A", "/home/agent/new/folder"])).stdout == b"tool\n"
        with pytest.raises(ValueError, match="larger"):
            await box.get(Path("/home/agent/new/folder/tool"), max_bytes=len(data) - 1)
        with pytest.raises(SandboxError, match="Read-only"):
            await box.put(Path("/usr/new"), b"x")
        with pytest.raises(ValueError, match="absolute"):
            await box.put(Path("new"), b"x")


async def test_a_link_or_folder_in_the_way_of_a_put_is_replaced_and_not_followed(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", "ln -sf pkg/a.py t1; mkdir -p t2/x/y; touch t2/x/y/z; chmod 0 t2/x"])
        await box.put(Path("/repo/t1"), b"one")
        await box.put(Path("/repo/t2"), b"two")
        assert (await box.get(Path("/repo/t1")), await box.get(Path("/repo/t2"))) == (b"one", b"two")
        assert await box.get(Path("/repo/pkg/a.py")) == b"A = 1\n"


async def test_what_is_no_readable_file_is_reported_missing_and_does_not_block(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        await box.exec(["sh", "-c", "mkfifo pipe; ln -s loop loop; touch dark; chmod 0 dark"])
        for name in ("none", "pipe", "loop", "pkg", "dark", "README/x"):
            with pytest.raises(FileNotFoundError, match=name):
                await box.get(Path("/repo", name))


async def test_a_missing_file_is_missing_for_a_reason(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(plain) as box:
        await box.exec(["ln", "-s", "loop", "loop"])
        for name, code in (("none", errno.ENOENT), ("pkg", errno.EISDIR), ("loop", errno.ELOOP)):
            with pytest.raises(FileNotFoundError) as caught:
                await box.get(Path("/repo", name))
            assert caught.value.errno == code


async def test_a_child_that_keeps_the_streams_open_holds_nobody_up(sandbox: Sandbox, spec: BoxSpec):
    async with sandbox.open(spec) as box:
        begun = time.monotonic()
        result = await box.exec(["sh", "-c", "setsid sleep 300 & echo said; exit 3"], timeout_s=30)
        assert time.monotonic() - begun < 5
        assert (result.code, result.stdout, result.timed_out) == (3, b"said\n", False)
        assert (await box.exec(["echo", "next"])).stdout == b"next\n"


async def test_a_bubblewrap_box_has_no_root(bubblewrap: Bubblewrap, plain: BoxSpec):
    async with bubblewrap.open(plain) as box:
        with pytest.raises(ValueError, match="user='root'"):
            await box.exec(["true"], user="root")
