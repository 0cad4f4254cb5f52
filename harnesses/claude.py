"""Anthropic's Claude Code (not open source, its own terms): one binary, speaks the Messages format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts, Label
from harnesses.packages import NpmTarball, Part, locate
from harnesses.reading import exit_error, failed_result, milliseconds, plain
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/claude")
INSTRUCTIONS = HOME / ".claude/instructions.md"
SHA512 = {"2.1.328": "KuzL+dBHgDCFTHJxwW+xuBJdVKfBsesGx2BBcTOG9sYDGoAD7b1hUV8rsTS4xjoJsB2SmeGraGjBiFuhrYuC9w=="}

Tool = Literal["Bash", "Edit", "Read", "Write", "Glob", "Grep", "Agent"]

# Nothing but the model can be reached, and a task's repository brings no settings, hooks or servers of its own.
ALONE = ("--setting-sources", "user", "--strict-mcp-config", "--no-session-persistence")
ALONE_ENV: Mapping[str, str] = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    # A request that failed as a stream would else be asked once more without.
    "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
}
EXACT: Mapping[str, str] = {
    # A hash of the task in the system text, and marks that move from one message to the next.
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_PROMPT_CACHING": "1",
    # Fields of the request that only Anthropic's own service knows.
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "MAX_THINKING_TOKENS": "0",
}


@dataclass(frozen=True, kw_only=True)
class Claude:
    """The Claude Code agent, driven through its own command line."""

    facts: ClassVar[Facts] = Facts(
        wires=("messages",),
        session=Label(header="x-claude-code-session-id"),
        subagent=Label(header="x-claude-code-agent-id"),
        summary="words",
        quirks=(
            "Deletes an empty answer, and asks once more in the message before it.",
            "Its sub-agents run beside it, not in its place.",
        ),
    )

    version: str = "2.1.328"
    """Release; only those with a pinned hash."""
    instructions: str | None = None
    """The system text; None is Claude Code's own."""
    tools: tuple[Tool, ...] = ("Bash", "Edit", "Read", "Write")
    """Which of its tools the model gets; Agent is the sub-agent."""
    stock: bool = False
    """Leaves out the settings under which each request is the last one and more, to the byte."""
    compact: bool = True
    """Summarises a history 13,000 tokens before an answer would not fit; without, a full context ends the run."""
    retries: int = 4
    """Further tries of a model request that failed."""
    silence_s: float = 600.0
    """Longest wait for the start of an answer; its next event is waited for as long, but 300 s at least."""

    def __post_init__(self) -> None:
        if self.version not in SHA512:
            raise ValueError(f"version: no pinned hash for Claude Code {self.version!r}, there is {', '.join(SHA512)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for Claude Code's own")
        if not self.tools:
            raise ValueError("tools: none, an agent needs at least one, as Bash")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries}, must be 0 or more")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "claude"

    @property
    def parts(self) -> tuple[Part, ...]:
        program = NpmTarball(
            name="@anthropic-ai/claude-code-linux-x64",
            version=self.version,
            sha512=SHA512[self.version],
            keep=("claude -> claude",),
            machine="x86_64",
        )
        return (program,)

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "claude"), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return (Mount(source=locate(self, cache)[-1], target=TARGET),)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        flags = ["-p", "--model", endpoint.model, "--output-format", "stream-json", "--verbose"]
        flags += ["--dangerously-skip-permissions", *ALONE, "--tools", ",".join(self.tools)]
        files = {}
        if self.instructions is not None:
            flags += ["--system-prompt-file", str(INSTRUCTIONS)]
            files[INSTRUCTIONS] = self.instructions.encode()
        return Command(
            argv=(str(TARGET / "claude"), *flags),
            env={"HOME": str(HOME), **ALONE_ENV, **({} if self.stock else EXACT), **self._env(endpoint)},
            files=files,
            # As an argument, a prompt could read as a flag, and has a size limit.
            stdin=plain(instruction),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the JSON lines: the last is of type `result` and says whether the run failed."""
        return End(error=failed_result(result.stdout) or exit_error(result))

    def _env(self, endpoint: Endpoint) -> Mapping[str, str]:
        wait = str(milliseconds(self.silence_s))
        return {
            # The client adds /v1 itself.
            "ANTHROPIC_BASE_URL": endpoint.url,
            "ANTHROPIC_API_KEY": endpoint.key,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.output_tokens),
            "CLAUDE_CODE_MAX_RETRIES": str(self.retries),
            "API_TIMEOUT_MS": wait,
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": wait,
            **({} if self.compact else {"DISABLE_COMPACT": "1"}),
        }
