"""The pi coding agent (MIT): a small Node program with a short prompt, speaks all three formats."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from harnesses import node
from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts
from harnesses.packages import NpmTree, Part, locate
from harnesses.reading import exit_error, milliseconds
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/pi")
CONFIG_HOME = HOME / ".pi/agent"
FIRST_WAIT_MS = 500
KEY = "LEGO_MODEL_KEY"
CLI = "node_modules/@mariozechner/pi-coding-agent/dist/cli.js"
FILES_SHA256 = {"0.73.1": "c7f0aba7f37097ca3b88a9077e346376ce967cb921d14e88979b0fdc222344e9"}
LOCK_SHA256 = {"0.73.1": "3c9a77a0e4bdf45c03ec92726dcc756bfae07054de3b96dd1d0c56bba6720f48"}

Api = Literal["openai-completions", "openai-responses", "anthropic-messages"]
Tool = Literal["bash", "read", "edit", "write", "grep", "find", "ls"]


@dataclass(frozen=True, kw_only=True)
class Pi:
    """The pi agent, driven through its own command line."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions", "responses", "messages"),
        quirks=(
            "Headless it would end while it summarises, so it never does: a full context ends the run.",
            "Names its session, by `session_id`, in the Responses format only.",
        ),
    )

    version: str = "0.73.1"
    """Release; only those with a pinned lock file."""
    instructions: str | None = None
    """The system text, to which pi adds the date and the folder; None is pi's own."""
    tools: tuple[Tool, ...] = ("read", "bash", "edit", "write")
    """Which of its tools the model gets."""
    api: Api = "openai-completions"
    """The wire format it speaks to the model."""
    retries: int = 4
    """Further tries of a model request that failed."""
    silence_s: float = 600.0
    """Longest wait for the start of an answer."""

    def __post_init__(self) -> None:
        if self.version not in LOCK_SHA256:
            raise ValueError(f"version: no lock file for pi {self.version!r}, there is {', '.join(LOCK_SHA256)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for pi's own")
        if not self.tools:
            raise ValueError("tools: none, an agent needs at least one, as bash")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries}, must be 0 or more")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "pi"

    @property
    def parts(self) -> tuple[Part, ...]:
        tree = NpmTree(
            name="@mariozechner/pi-coding-agent",
            version=self.version,
            lock=f"pi-{self.version}.json",
            sha256=LOCK_SHA256[self.version],
            files_sha256=FILES_SHA256[self.version],
            drop=("*.map", "*.d.ts", "*.d.mts", "*.d.cts"),
        )
        return (node.NODE, tree)

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(node.node(folders[0])), str(folders[1] / CLI), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        runtime, program = locate(self, cache)
        return (node.mount(runtime), Mount(source=program, target=TARGET))

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        flags = ["-p", "--no-session", "--provider", "lego", "--model", endpoint.model]
        flags += ["--tools", ",".join(self.tools), "-ne", "-ns", "-np", "-nc", "--no-themes"]
        if self.instructions is not None:
            flags += ["--system-prompt", self.instructions]
        return Command(
            argv=(str(node.TARGET), str(TARGET / CLI), *flags),
            env={"HOME": str(HOME), "PI_OFFLINE": "1", KEY: endpoint.key},
            files={
                CONFIG_HOME / "models.json": json.dumps(self._models(endpoint)).encode(),
                CONFIG_HOME / "settings.json": json.dumps(self._settings()).encode(),
            },
            # As an argument, a prompt that starts with @ or - would read as a file or a flag.
            stdin=instruction.encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the exit status: in text mode pi leaves with 1 and the cause when its last answer was an error."""
        return End(error=exit_error(result))

    def _models(self, endpoint: Endpoint) -> dict:
        # The Anthropic client adds /v1 itself.
        url = endpoint.url if self.api == "anthropic-messages" else f"{endpoint.url}/v1"
        size = {"contextWindow": endpoint.context_tokens, "maxTokens": endpoint.output_tokens}
        model = {"id": endpoint.model, "reasoning": False, **size}
        return {"providers": {"lego": {"baseUrl": url, "api": self.api, "apiKey": KEY, "models": [model]}}}

    def _settings(self) -> dict:
        retry = {"enabled": self.retries > 0, "maxRetries": self.retries, "baseDelayMs": FIRST_WAIT_MS}
        # The client library's own tries would multiply with these.
        provider = {"maxRetries": 0, "timeoutMs": milliseconds(self.silence_s)}
        # Headless pi exits while it still compacts, with status 0: without, a full context is an error it reports.
        return {"compaction": {"enabled": False}, "retry": {**retry, "provider": provider}}
