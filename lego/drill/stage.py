"""One run of a real harness in a real box against the real proxy, the model being a script: tries it without a GPU."""

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

from harnesses.base import End, Endpoint, Harness
from lego.capture.server import Handle, Proxy
from lego.capture.session import Limits, Session
from lego.chat.render import Renderer
from lego.chat.vocabulary import Vocabulary
from lego.drill.script import SUMMARY, Broken, Late, Step, asks_for_summary, spoken
from lego.engine.base import Progress
from lego.engine.scripted import ScriptedEngine
from lego.errors import EngineError
from lego.observe.memory import PeakMemory
from lego.records import Floats, Generation, Ids, Sampling
from sandbox.base import Box, BoxSpec, Change, ExecResult, Mount, Sandbox
from sandbox.base import Limits as BoxLimits

PORT = 4000
LOOK_S = 0.2
COUNTERS = ("cat", "/proc/1/stat", "/proc/net/snmp")
TICKS = 100
"""The unit of /proc/PID/stat on Linux."""

Serve = Callable[[Handle, socket], AbstractAsyncContextManager[object]]


class Actor(ScriptedEngine):
    """Plays a script, its last step for ever, as the harness on stage needs it; summaries come beside the script."""

    def __init__(self, vocabulary: Vocabulary, harness: str, script: Sequence[Step], chunk_seconds: float) -> None:
        super().__init__(self._answer, experts=None, chunks=(8,), chunk_seconds=chunk_seconds)
        self._vocabulary, self._harness, self._script = vocabulary, harness, script
        self._text, self._steps = "", 0
        self.session: Session | None = None
        self.sampled: list[int] = []
        """Tokens of each call, whether anybody waited for them or not."""

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str,
        routing_start: int = 0,
        progress: Progress | None = None,
    ) -> Generation:
        assert self.session is not None, "on stage before the session is known"
        call, asked = len(self.sampled), self.session.journal.origins[-1]
        self.sampled.append(0)
        step = SUMMARY if asks_for_summary(self._harness, asked.body) else self._next()
        if isinstance(step, Late):
            await asyncio.sleep(step.seconds)
            step = step.step
        if isinstance(step, Broken):
            raise EngineError("the script has the engine fail here")
        self._text = spoken(step, self._harness, asked)

        def counted(ids: Ids, logprobs: Floats) -> None:
            self.sampled[call] = len(ids)
            if progress is not None:
                progress(ids, logprobs)

        return await super().generate(
            prompt_ids, sampling, session=session, routing_start=routing_start, progress=counted
        )

    def _next(self) -> Step:
        self._steps += 1
        return self._script[min(self._steps, len(self._script)) - 1]

    def _answer(self, prompt_ids: Ids) -> Sequence[int]:
        return self._vocabulary.encode(self._text)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the processes of the box used."""

    cpu_s: float
    memory_mib: float
    """Peak of the sum over processes; what they share counts once for each, so it errs upward."""
    outbound: int
    """Datagrams sent and packets without a way out: tries to reach, or to look up, something else than the model."""


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """How one run came out."""

    harness: str
    session: Session
    engine: Actor
    end: End
    result: ExecResult
    changes: tuple[Change, ...]
    cost: Cost
    left: tuple[str, ...] = ()
    """Programs that the harness left running when it had ended."""


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Where harnesses are tried: boxes on a base folder, the cache that holds the programs, and a policy's renderer."""

    sandbox: Sandbox
    cache: Path
    base: Path
    renderer: Renderer
    timeout_s: float = 120.0
    memory_gib: float = 3.0
    context_tokens: int = 200_000
    output_tokens: int = 4096
    max_turns: int = 30
    beat_s: float = 10.0
    chunk_seconds: float = 0.0
    serve: Serve = field(default=Handle.serve)
    """What answers in the box; the proxy itself, or something that disturbs it."""

    async def run(self, harness: Harness, script: Sequence[Step], instruction: str) -> Drilled:
        """Runs `harness` on `instruction` in a fresh box, its model being `script`."""
        engine = Actor(Vocabulary(self.renderer.folder), harness.name, script, self.chunk_seconds)
        proxy = Proxy(
            engine=engine,
            renderer=self.renderer,
            sampling=Sampling(max_tokens=self.output_tokens),
            limits=Limits(context_tokens=self.context_tokens, max_turns=self.max_turns),
            beat_s=self.beat_s,
        )
        limits = BoxLimits(memory_gib=self.memory_gib, deadline_s=self.timeout_s + 60)
        with tempfile.TemporaryDirectory() as folder:
            mounts = (*harness.mounts(self.cache), _names_are_looked_up(Path(folder)))
            spec = BoxSpec(base=self.base, mounts=mounts, limits=limits)
            async with proxy.open(), proxy.session("drill") as handle, self.sandbox.open(spec) as box:
                engine.session = handle.session
                return await self._in_box(harness, instruction, handle, box, engine)

    async def _in_box(self, harness: Harness, instruction: str, handle: Handle, box: Box, engine: Actor) -> Drilled:
        command = harness.command(instruction, self._endpoint(handle))
        for path, content in command.files.items():
            await box.put(path, content)
        memory = PeakMemory()
        memory.look()
        before = memory.peak_gib
        async with self.serve(handle, await box.listen(PORT)), asyncio.TaskGroup() as group:
            watch = group.create_task(memory.watch(LOOK_S))
            result = await box.exec(command.argv, env=command.env, stdin=command.stdin, timeout_s=self.timeout_s)
            watch.cancel()
        left = await _running(box)
        await box.kill()
        return Drilled(
            harness=harness.name,
            session=handle.session,
            engine=engine,
            end=harness.ended(result),
            result=result,
            changes=await box.changes(),
            cost=await _cost(box, (memory.peak_gib - before) * 1024),
            left=left,
        )

    def _endpoint(self, handle: Handle) -> Endpoint:
        return Endpoint(
            url=f"http://127.0.0.1:{PORT}",
            key=handle.key,
            model="policy",
            context_tokens=self.context_tokens,
            output_tokens=self.output_tokens,
        )


def _names_are_looked_up(folder: Path) -> Mount:
    """What makes a look-up of a name send a datagram, which is counted; a box by itself looks in its files only."""
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    return Mount(source=folder / "nsswitch.conf", target=Path("/etc/nsswitch.conf"))


async def _running(box: Box) -> tuple[str, ...]:
    """Names of the programs in the box, without its first process and those that look."""
    script = 'for f in /proc/[0-9]*; do [ "${f#/proc/}" -gt 1 ] && cat "$f/comm"; done 2>/dev/null; true'
    names = (await box.exec(("/bin/sh", "-c", script))).stdout.decode(errors="replace").split("\n")
    return tuple(name for name in names if name and name not in ("sh", "cat"))


async def _cost(box: Box, memory_mib: float) -> Cost:
    """Read inside the box, when all that ran in it is dead and so on the account of its first process."""
    text = (await box.exec(COUNTERS)).stdout.decode()
    stat, _, network = text.partition("\n")
    # Fields 16 and 17, counted from 1: user and system time of all children that were waited for.
    user, system = stat.rpartition(")")[2].split()[13:15]
    found = dict(_counters(network))
    outbound = found.get("Udp.OutDatagrams", 0) + found.get("Ip.OutNoRoutes", 0)
    return Cost(cpu_s=(int(user) + int(system)) / TICKS, memory_mib=max(memory_mib, 0.0), outbound=outbound)


def _counters(snmp: str) -> Iterator[tuple[str, int]]:
    """`Protocol.Name` and its value, from pairs of lines: names, then values."""
    lines = [line.split() for line in snmp.splitlines() if line]
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        yield from ((f"{names[0][:-1]}.{n}", int(v)) for n, v in zip(names[1:], values[1:], strict=True))


def share(session: Session) -> float:
    """Trainable tokens of those sampled; not a number if none were."""
    fidelity = session.fidelity()
    return fidelity.trained / fidelity.sampled if fidelity.sampled else math.nan
