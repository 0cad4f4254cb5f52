"""The qwen-code agent (Apache-2.0): a Node program with a long prompt, speaks chat completions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from harnesses import node
from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts
from harnesses.packages import NpmTree, Part, locate
from harnesses.reading import exit_error, failed_result, milliseconds, plain
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/qwen")
SETTINGS = HOME / ".qwen/lego.json"
CLI = "node_modules/@qwen-code/qwen-code/cli.js"
LOCK_SHA256 = {"0.24.4": "d3f32902cbafc2464b67a6a168d8298f63e51c9d3984e993940bfb5d46c4efd2"}
FILES_SHA256 = {"0.24.4": "e6d23f462c00c06c1ba35c52365b9c170967e9c0feaaff1b755e7a5ee4755126"}

ALONE: Mapping[str, Any] = {
    "general": {"enableAutoUpdate": False, "chatRecording": False},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    # In the package, its copy of ripgrep is not executable.
    "tools": {"useRipgrep": False},
}


@dataclass(frozen=True, kw_only=True)
class Qwen:
    """The qwen-code agent, driven through its own command line."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions",),
        summary="words",
        quirks=(
            "Puts the text of an answer that was cut before the one sampled in its place.",
            "After a summary it puts words of its own into the model's last answer.",
        ),
    )

    version: str = "0.24.4"
    """Release; only those with a pinned lock file."""
    instructions: str | None = None
    """The system text; None is qwen-code's own."""
    silence_s: float = 600.0
    """Longest wait for the start of an answer, and for its next event."""

    def __post_init__(self) -> None:
        if self.version not in LOCK_SHA256:
            raise ValueError(f"version: no lock file for qwen-code {self.version!r}, there is {', '.join(LOCK_SHA256)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for qwen-code's own")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "qwen"

    @property
    def parts(self) -> tuple[Part, ...]:
        tree = NpmTree(
            name="@qwen-code/qwen-code",
            version=self.version,
            lock=f"qwen-{self.version}.json",
            sha256=LOCK_SHA256[self.version],
            files_sha256=FILES_SHA256[self.version],
        )
        return (node.NODE, tree)

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(node.node(folders[0])), str(folders[1] / CLI), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        runtime, program = locate(self, cache)
        return (node.mount(runtime), Mount(source=program, target=TARGET))

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        flags = ["--yolo", "--safe-mode", "--output-format", "stream-json", "--auth-type", "openai"]
        flags += ["--model", endpoint.model]
        if self.instructions is not None:
            flags += ["--system-prompt", self.instructions]
        return Command(
            # Node's second compiler takes 1.6 GB for the parser of shell commands, after a few of them.
            argv=(str(node.TARGET), "--liftoff-only", str(TARGET / CLI), *flags),
            env={
                "HOME": str(HOME),
                "OPENAI_BASE_URL": f"{endpoint.url}/v1",
                "OPENAI_API_KEY": endpoint.key,
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(endpoint.output_tokens),
                # Its second process would only collect garbage at will.
                "QWEN_CODE_NO_RELAUNCH": "true",
                # Of all settings files this one counts most, so a task's repository cannot change what it sets.
                "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(SETTINGS),
            },
            files={SETTINGS: json.dumps(self._settings(endpoint)).encode()},
            # As an argument, a prompt could read as a flag, and has a size limit.
            stdin=plain(instruction),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the JSON lines: the last is of type `result` and says whether the run failed."""
        return End(error=failed_result(result.stdout) or exit_error(result))

    def _settings(self, endpoint: Endpoint) -> Mapping[str, Any]:
        wait = milliseconds(self.silence_s)
        generation = {
            "contextWindowSize": endpoint.context_tokens,
            "timeout": wait,
            "streamIdleTimeoutMs": wait,
            # Around these it tries seven times in any case.
            "maxRetries": 0,
        }
        return {**ALONE, "model": {"generationConfig": generation}}
