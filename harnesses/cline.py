"""The Cline agent (Apache-2.0): one binary with its own JavaScript runtime, speaks chat completions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts
from harnesses.packages import NpmTarball, Part, locate
from harnesses.reading import events, exit_error
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/cline")
SETTINGS = HOME / ".cline/data/settings"
FLAGS_FILE = HOME / ".cline/data/cache/feature-flags.json"
PROMPT = HOME / ".cline/prompt"
LEAD = "Your task: "
"""In JSON mode a prompt of two words is wanted as an argument, and what is piped in comes after it."""
PROVIDER = "openai-compatible"
SHA512 = {"3.0.65": "YRDt0eNj/XEMB7DeMeOeE92jQFf7DyKGCysStxrk+mIKdO0GVPugDG4yxsmKtBouBnaRVteW3NwYEnSq2kah8A=="}

Tool = Literal["read_files", "search_codebase", "run_commands", "editor", "spawn_agent", "teams"]
# To deny a group by its one name has no effect.
TEAMS = ("team_spawn_teammate", "team_shutdown_teammate", "team_status", "team_task", "team_run_task")
TEAMS += ("team_cancel_run", "team_list_runs", "team_await_runs", "team_send_message", "team_broadcast")
TEAMS += ("team_read_mailbox", "team_mission_log", "team_cleanup", "team_create_outcome")
TEAMS += ("team_attach_outcome_fragment", "team_review_outcome_fragment", "team_finalize_outcome", "team_list_outcomes")
OFFERED = ("ask_question", "fetch_web_content", "skills", *get_args(Tool))

ALONE: Mapping[str, Any] = {"telemetryOptOut": True, "autoUpdateEnabled": False}
# Which features are switched on, as asked for in the year 2100: it asks again when that is an hour old.
FLAGS: Mapping[str, Any] = {"version": 2, "updatedAt": 4102444800000, "userId": None, "flagsPayload": {}}
ALONE_ENV: Mapping[str, str] = {
    "CLINE_NO_AUTO_UPDATE": "1",
    # Its sessions would else live in a daemon that outlives the command.
    "CLINE_SESSION_BACKEND_MODE": "local",
}


@dataclass(frozen=True, kw_only=True)
class Cline:
    """The Cline agent, driven through its own command line.

    Tries of a failed request (6) and its patience with a silent model (300 s) are fixed.
    """

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions",),
        summary="words",
        quirks=(
            "Puts the text of an answer that was cut before the one sampled in its place.",
            "Gives up on a model that is silent for 300 s, and after `mistakes` bad calls in a row, which ends well.",
        ),
    )

    version: str = "3.0.65"
    """Release; only those with a pinned hash."""
    instructions: str | None = None
    """The system text; None is Cline's own."""
    tools: tuple[Tool, ...] = ("read_files", "search_codebase", "run_commands", "editor")
    """Which of its tools the model gets; spawn_agent is the sub-agent, teams are sixteen more to manage several."""
    compact: bool = True
    """Summarises a history that no longer fits; without, a full context ends the run."""
    mistakes: int = 6
    """Bad calls in a row after which it gives up."""

    def __post_init__(self) -> None:
        if self.version not in SHA512:
            raise ValueError(f"version: no pinned hash for Cline {self.version!r}, there is {', '.join(SHA512)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for Cline's own")
        if not self.tools:
            raise ValueError("tools: none, an agent needs at least one, as run_commands")
        if self.mistakes < 1:
            raise ValueError(f"mistakes: {self.mistakes}, must be 1 or more")

    @property
    def name(self) -> str:
        return "cline"

    @property
    def parts(self) -> tuple[Part, ...]:
        program = NpmTarball(
            name="@cline/cli-linux-x64",
            version=self.version,
            sha512=SHA512[self.version],
            keep=("bin/cline -> bin/cline",),
            machine="x86_64",
        )
        return (program,)

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "bin/cline"), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return (Mount(source=locate(self, cache)[-1], target=TARGET),)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        flags = ["--json", "--auto-approve", "true", "--provider", PROVIDER, "--model", endpoint.model]
        flags += ["--retries", str(self.mistakes), "--compaction", "agentic" if self.compact else "off"]
        if self.instructions is not None:
            flags += ["--system", self.instructions]
        return Command(
            argv=("/bin/sh", "-c", 'cat "$0" | "$@"', str(PROMPT), str(TARGET / "bin/cline"), *flags, LEAD),
            env={"HOME": str(HOME), **ALONE_ENV},
            files={
                SETTINGS / "providers.json": json.dumps(self._providers(endpoint)).encode(),
                SETTINGS / "global-settings.json": json.dumps(self._settings()).encode(),
                FLAGS_FILE: json.dumps(FLAGS).encode(),
                # As an argument, a prompt could read as a flag, and has a size limit; of what comes through a
                # socket, which standard input may be, Cline reads nothing.
                PROMPT: instruction.encode(),
            },
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the JSON lines: the last `run_result` says how the run ended.

        That the model made too many mistakes, which is `aborted`, also ends well: its work is there to be judged.
        """
        last = next((e for e in reversed(list(events(result.stdout))) if e.get("type") == "run_result"), {})
        if last.get("finishReason") == "error":
            return End(error=str(last.get("text") or "an error without a message"))
        return End(error=exit_error(result))

    def _settings(self) -> Mapping[str, Any]:
        denied = [tool for tool in OFFERED if tool not in self.tools]
        denied += () if "teams" in self.tools else TEAMS
        return {**ALONE, "disabledTools": denied}

    def _providers(self, endpoint: Endpoint) -> Mapping[str, Any]:
        settings = {
            "provider": PROVIDER,
            "apiKey": endpoint.key,
            "model": endpoint.model,
            "baseUrl": f"{endpoint.url}/v1",
            "contextWindow": endpoint.context_tokens,
        }
        stamped = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
        return {"version": 1, "lastUsedProvider": PROVIDER, "modes": {}, "providers": {PROVIDER: stamped}}
