"""What the capture proxy adds to a model call, and what planning a call costs as its context grows.

`python tools/bench/proxy.py [--json]`: 64 sessions hold conversations of 30,000 tokens in each wire format, over an
engine that answers after a fixed time. Baseline: a bare HTTP server that reads the same bodies and answers after the
same time. Then one session plans turns at 1,000, 10,000 and 100,000 tokens of context. Baseline: rendering that
context whole.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from conversation import DIALECTS, Said, call_text
from tokenizers import Tokenizer

from lego.capture.server import Proxy
from lego.capture.session import Limits, Session
from lego.chat.messages import Message, Tool
from lego.chat.render import Renderer
from lego.engine.scripted import ScriptedEngine
from lego.records import Sampling

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "tools" / "demo_policy" / "policy"
SESSIONS, CONTEXT, TURNS = 64, 30_000, 6
ENGINE_S = 2.0
BARS_MS = {"chat/completions": 5.0, "responses": 15.0, "messages": 15.0}
PLAN_SIZES = (1_000, 10_000, 100_000)
PLAN_BAR = 2.0
PLAN_TURNS = 20
SAMPLING = Sampling(max_tokens=1000)


@dataclass(frozen=True, kw_only=True)
class Added:
    """Milliseconds that a call takes beyond the engine's own time."""

    dialect: str
    p50_ms: float
    p99_ms: float
    bare_p50_ms: float
    bare_p99_ms: float
    bar_ms: float


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Milliseconds to plan a call."""

    context: int
    plan_ms: float
    render_ms: float


def prose(renderer: Renderer, tokens: int) -> list[str]:
    """About so many tokens of this repository's own source, in pieces of some 500."""
    source = itertools.cycle("".join(path.read_text() for path in sorted(ROOT.glob("lego/**/*.py"))))
    share = len(renderer.render([Message("user", "".join(itertools.islice(source, 20_000)))], ())) / 20_000
    piece = int(500 / share)
    return ["".join(itertools.islice(source, piece)) for _ in range(max(1, tokens // 500))]


# Calls over HTTP


async def drive(plan: dict) -> list[float]:
    """Holds all conversations at once; the seconds of each call but the first of a session."""
    seconds: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for number, url in enumerate(plan["urls"]):
            group.create_task(_converse(http, url, plan, number, seconds))
    return seconds


async def _converse(http: aiohttp.ClientSession, url: str, plan: dict, number: int, seconds: list[float]) -> None:
    await asyncio.sleep(ENGINE_S * number / SESSIONS)
    user, said = [f"{number}", *plan["pieces"]], []
    for turn in range(TURNS):
        body = json.dumps(DIALECTS[plan["dialect"]]("You fix bugs.", user, said)).encode()
        start = time.perf_counter()
        async with http.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            answer = await response.read()
        if turn:
            seconds.append(time.perf_counter() - start)
        if response.status != 200:
            raise SystemExit(f"{url}: {response.status} {answer[:300]!r}")
        said.append(Said(json.loads(answer), plan["pieces"][turn % len(plan["pieces"])]))


async def _driven(urls: Sequence[str], dialect: str, pieces: Sequence[str]) -> list[float]:
    """Runs `drive` in a process of its own: a client must not take the server's time."""
    plan = json.dumps({"urls": list(urls), "dialect": dialect, "pieces": list(pieces)})
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--drive", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate(plan.encode())
    if child.returncode:
        raise SystemExit(child.returncode)
    return [1000 * (second - ENGINE_S) for second in json.loads(out)]


@asynccontextmanager
async def bare(answer: bytes) -> AsyncIterator[str]:
    """A server that only reads its request and waits."""

    async def handle(request: web.BaseRequest) -> web.Response:
        await request.read()
        await asyncio.sleep(ENGINE_S)
        return web.Response(body=answer, content_type="application/json")

    runner = web.ServerRunner(web.Server(handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def added(renderer: Renderer, dialect: str) -> Added:
    """One wire format."""
    pieces = prose(renderer, CONTEXT)
    proxy = Proxy(engine=_engine(ENGINE_S), renderer=renderer, sampling=SAMPLING, limits=Limits(context_tokens=10**6))
    async with proxy.open(), AsyncExitStack() as stack:
        handles = [await stack.enter_async_context(proxy.session(str(n))) for n in range(SESSIONS)]
        ours = await _driven([f"{handle.url}/v1/{dialect}" for handle in handles], dialect, pieces)
        assert all(turn.drift != "edited" for handle in handles for turn in handle.session.turns)
        answer = await _one_answer(handles[0].url, dialect)
        async with bare(answer) as url:
            theirs = await _driven([url] * SESSIONS, dialect, pieces)
    return Added(
        dialect=dialect,
        p50_ms=_quantile(ours, 0.5),
        p99_ms=_quantile(ours, 0.99),
        bare_p50_ms=_quantile(theirs, 0.5),
        bare_p99_ms=_quantile(theirs, 0.99),
        bar_ms=BARS_MS[dialect],
    )


async def _one_answer(url: str, dialect: str) -> bytes:
    body = DIALECTS[dialect]("S", ["U"], [])
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/{dialect}", json=body) as response:
        return await response.read()


def _engine(seconds: float = 0.0) -> ScriptedEngine:
    answer = Tokenizer.from_file(str(POLICY / "tokenizer.json")).encode(call_text("sed -n 1,80p lego/loop.py")).ids
    return ScriptedEngine(lambda prompt: answer, experts=None, seconds=seconds)


def _quantile(values: Sequence[float], share: float) -> float:
    return round(float(np.quantile(values, share)), 2)


# Planning


def planning(renderer: Renderer, context: int) -> Planning:
    """Plans turns of one conversation of `context` tokens, each with the same new text; medians."""
    session = Session("bench", renderer, Limits(context_tokens=10**7, max_turns=10**6))
    engine = _engine()
    tools = (Tool("bash", json.dumps({"type": "function", "function": {"name": "bash", "parameters": {}}})),)
    start, *long = _cut("".join(prose(renderer, context)), PLAN_TURNS)
    short = [long[0][:200]] * PLAN_TURNS
    history, plans, renders = [Message("user", start)], [], []
    for piece in [*long, *short]:
        told = tuple(map(_told_again, history))
        began = time.perf_counter()
        plan = session.plan(told, tools)
        planned = time.perf_counter()
        renderer.render((*told, Message("user", f"{began}")), tools)
        plans.append(planned - began)
        renders.append(time.perf_counter() - planned)
        made = asyncio.run(engine.generate(plan.prompt_ids, SAMPLING, session="bench"))
        answer = session.answers[session.add(plan, made, sampling=SAMPLING).index].message
        history += [answer, Message("tool", piece, call_id=answer.calls[0].id)]
    return Planning(
        context=len(plan.prompt_ids),
        plan_ms=round(1000 * statistics.median(plans[len(long) + 1 :]), 3),
        render_ms=round(1000 * statistics.median(renders[len(long) + 1 :]), 3),
    )


def _told_again(message: Message) -> Message:
    """The message as a new request would bring it: equal, but not the same objects."""
    return replace(message, text=message.text[:1] + message.text[1:])


def _cut(text: str, pieces: int) -> list[str]:
    size = len(text) // pieces
    return [text[i * size : (i + 1) * size] for i in range(pieces)]


def report(calls: Sequence[Added], plans: Sequence[Planning]) -> dict[str, object]:
    """The wire format nearest to its bar, and whether all bars hold."""
    worst = max(calls, key=lambda added: added.p50_ms / added.bar_ms)
    growth = plans[-1].plan_ms / plans[0].plan_ms
    return {
        "name": f"proxy added ms p50, {worst.dialect}",
        "value": worst.p50_ms,
        "baseline": worst.bare_p50_ms,
        "ratio": round(worst.p50_ms / worst.bare_p50_ms, 2),
        "bar": worst.bar_ms,
        "ok": all(added.p50_ms <= added.bar_ms for added in calls) and growth <= PLAN_BAR,
        "calls": [asdict(added) for added in calls],
        "planning": [asdict(plan) for plan in plans],
        "planning_growth": round(growth, 2),
        "planning_bar": PLAN_BAR,
    }


def table(calls: Sequence[Added], plans: Sequence[Planning]) -> None:
    print(f"{SESSIONS} sessions, {CONTEXT} tokens of context, an engine of {ENGINE_S} s")
    print(f"{'format':<18} {'added p50 ms':>13} {'p99':>7} {'bare server p50':>16} {'p99':>7} {'bar':>6}")
    for a in calls:
        row = f"{a.p50_ms:>13.2f} {a.p99_ms:>7.2f} {a.bare_p50_ms:>16.2f} {a.bare_p99_ms:>7.2f} {a.bar_ms:>6.1f}"
        print(f"{a.dialect:<18} {row}")
    print(f"{'context tokens':<18} {'plan ms':>13} {'whole render ms':>16}")
    for p in plans:
        print(f"{p.context:<18} {p.plan_ms:>13.3f} {p.render_ms:>16.3f}")
    print(f"planning grows {plans[-1].plan_ms / plans[0].plan_ms:.2f} times, bar {PLAN_BAR}")


def main() -> int:
    parser = argparse.ArgumentParser(description="What the capture proxy adds to a model call.")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        print(json.dumps(asyncio.run(drive(json.load(sys.stdin)))))
        return 0
    renderer = Renderer.load(POLICY)
    plans = [planning(renderer, context) for context in PLAN_SIZES]
    calls = [asyncio.run(added(renderer, dialect)) for dialect in DIALECTS]
    if options.json:
        print(json.dumps(report(calls, plans)))
    else:
        table(calls, plans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
