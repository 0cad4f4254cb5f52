"""A launcher as small as can be: two guarded children, the proxy, one box with a busy agent; runs until it is ended.

python -m tests.endings_driver FOLDER ENGINE_PORT PROXY_PORT SANDBOX SPEC NAP
"""

import asyncio
import os
import signal
import sys
from pathlib import Path, PosixPath  # noqa: F401 - SANDBOX and SPEC are told as Python
from typing import Any

from lego.capture.server import Proxy
from lego.capture.session import Limits as SessionLimits
from lego.child import Child
from lego.cli import guarded
from lego.engine.scripted import ScriptedEngine
from lego.records import Sampling
from sandbox.base import BoxSpec, FolderImage, Limits, Sandbox, StoredImage  # noqa: F401
from sandbox.bubble import Bubblewrap  # noqa: F401
from sandbox.docker import Docker  # noqa: F401
from sandbox.podman import Podman  # noqa: F401

ENGINE = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pause()
"""
TRAINER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
AGENT = "trap '' TERM INT; setsid sleep {nap} & sleep {nap} & touch begun; wait; sleep {nap}"


class Boom(Exception):
    """What a bug would raise."""


async def run(folder: Path, ports: tuple[int, int], sandbox: Sandbox, spec: BoxSpec, nap: str) -> None:
    """Opens all in the order of a run, and waits; a file `boom` in the folder is a bug in the middle of it."""
    await sandbox.reap()
    renderer: Any = None
    proxy = Proxy(
        engine=ScriptedEngine(lambda prompt: [1]), renderer=renderer, sampling=Sampling(), limits=SessionLimits()
    )
    engine = [sys.executable, "-c", ENGINE, str(ports[0]), str(folder)]
    trainer = [sys.executable, "-c", TRAINER, str(folder)]
    async with (
        Child(engine, env=os.environ, log=folder / "engine.log", grace_s=1.0),
        Child(trainer, env=os.environ, log=folder / "trainer.log", grace_s=1.0),
        proxy.open(port=ports[1]) as proxy,
        proxy.session("trial") as session,
        sandbox.open(spec) as box,
        session.serve(await box.listen(4000)),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(box.exec(["sh", "-c", AGENT.format(nap=nap)]))
        group.create_task(_bug(folder / "boom"))


async def _bug(sign: Path) -> None:
    while not sign.exists():  # noqa: ASYNC110 - no event tells it
        await asyncio.sleep(0.05)
    raise Boom


def main() -> None:
    folder, engine_port, proxy_port, sandbox, spec, nap = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it deaf to Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # as lego.train does
    asyncio.run(run(Path(folder), (int(engine_port), int(proxy_port)), eval(sandbox), eval(spec), nap))


if __name__ == "__main__":
    guarded(main)
