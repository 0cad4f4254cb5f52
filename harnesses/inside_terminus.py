# pyright: reportMissingImports=false
"""Inside the box: harbor's Terminus-2 agent, which has no command line, on a terminal of the box it runs in.

Standard input holds the settings as JSON, as `harnesses/terminus.py` writes them; the last line of output is the end.
"""

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LOGS = Path("/tmp/terminus")


class Here:
    """What the agent takes for its environment: the box that this program is in."""

    default_user = None
    trial_paths = SimpleNamespace(agent_dir=LOGS)

    async def exec(self, command: str, timeout_sec: float | None = None, **_: Any) -> SimpleNamespace:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=-1
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise
        text = {"stdout": out.decode(errors="replace"), "stderr": errors.decode(errors="replace")}
        return SimpleNamespace(return_code=process.returncode, **text)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(source_path, target_path)


async def work(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Runs the agent to its end; its own account of the run."""
    from harbor.agents.terminus_2.terminus_2 import Terminus2
    from harbor.models.agent.context import AgentContext

    agent, environment, context = Terminus2(logs_dir=LOGS, **job["agent"]), Here(), AgentContext()
    try:
        await agent.setup(environment)
        await agent.run(job["instruction"], environment, context)
    finally:
        await environment.exec("tmux kill-server")
    return context.metadata or {}


def main() -> None:
    job = json.load(sys.stdin)
    sys.path.append(job["packages"])
    if shutil.which("tmux") is None:
        raise SystemExit("Terminus-2 types into tmux, which this box does not have: install tmux in its image")
    logging.disable(logging.WARNING)
    LOGS.mkdir(exist_ok=True)
    told = asyncio.run(work(job))
    result = {"type": "result", "is_error": False, "episodes": told.get("n_episodes")}
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
