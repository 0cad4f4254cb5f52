"""The OpenCode agent (MIT): one binary with its own JavaScript runtime, speaks all three formats."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts, Label
from harnesses.packages import NpmTarball, Part, locate
from harnesses.reading import events, exit_error, milliseconds
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/opencode")
SEARCH_TARGET = Path("/opt/ripgrep")
PATH = f"{SEARCH_TARGET}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHA512 = {"1.18.33": "q/t/3p2CTxOT9y2kvjesb/LZab2+1eqlhhWA02Be6mjTtmYtNBcBsrI5yDo4Fw7ZSPBW2oyMIGMNRqiKQjiAWw=="}
# Its grep and glob tools run this program, and without one in PATH download it, which a box cannot.
SEARCH = NpmTarball(
    name="@vscode/ripgrep-linux-x64",
    version="1.18.0",
    sha512="mQ3bVrUpnD2vs7QT0vX90Lt0cnUq467uFtEktIdsJJmW296RoSULRGqWgzG1AKxyBpNDD6l4ZO4qKf6SgyC23Q==",
    keep=("bin/rg -> bin/rg",),
    machine="x86_64",
)

Sdk = Literal["@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"]
Tool = Literal["bash", "read", "edit", "grep", "glob", "task", "todowrite", "skill", "webfetch"]

ALONE: Mapping[str, Any] = {
    # Nothing but the model can be reached, and what the box keeps nobody reads.
    "autoupdate": False,
    "share": "disabled",
    "enabled_providers": ["lego"],
    "snapshot": False,
    "lsp": False,
    "formatter": False,
}
ALONE_ENV: Mapping[str, str] = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    # A task's repository could bring settings and plugins of its own.
    "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
}
# To have plugins compile, it would fetch this package into its folder of settings: so the folder says that it did.
FOLDER = HOME / ".config/opencode"
FETCHED: Mapping[Path, bytes] = {
    FOLDER / "package-lock.json": b'{"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}',
    FOLDER / "node_modules/.package-lock.json": b"{}",
}
# What it would ask a person, beside its tools: whether to leave the folder, and whether to go on repeating itself.
UNASKED: Mapping[str, str] = {"external_directory": "allow", "doom_loop": "allow"}


@dataclass(frozen=True, kw_only=True)
class OpenCode:
    """The OpenCode agent, driven through its own command line; its box needs 1 GiB of memory and more."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions", "responses", "messages"),
        session=Label(header="x-session-id"),
        subagent=Label(header="x-parent-session-id"),
        summary="words",
        quirks=(
            "Its own limit of steps is a sentence to the model, no limit.",
            "Renames a bad call to a tool `invalid`.",
            "After a summary the task's own words are gone from its history.",
        ),
    )

    version: str = "1.18.33"
    """Release; only those with a pinned hash."""
    instructions: str | None = None
    """The system text, to which OpenCode adds the model, the folder and the date; None is OpenCode's own."""
    tools: tuple[Tool, ...] = ("bash", "read", "edit", "grep", "glob", "task", "todowrite")
    """Which of its tools the model gets; edit brings write, task is the sub-agent."""
    sdk: Sdk = "@ai-sdk/openai-compatible"
    """Its client library, and so the wire format: chat completions, Responses or Messages."""
    compact: bool = True
    """Summarises a history that no longer fits; without, a full context ends the run."""
    silence_s: float = 600.0
    """Longest wait for the start of an answer, and for its next event."""

    def __post_init__(self) -> None:
        if self.version not in SHA512:
            raise ValueError(f"version: no pinned hash for OpenCode {self.version!r}, there is {', '.join(SHA512)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for OpenCode's own")
        if not self.tools:
            raise ValueError("tools: none, an agent needs at least one, as bash")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "opencode"

    @property
    def parts(self) -> tuple[Part, ...]:
        program = NpmTarball(
            name="opencode-linux-x64",
            version=self.version,
            sha512=SHA512[self.version],
            keep=("bin/opencode -> bin/opencode",),
            machine="x86_64",
        )
        return (SEARCH, program)

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "bin/opencode"), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        search, program = locate(self, cache)
        return (Mount(source=search, target=SEARCH_TARGET), Mount(source=program, target=TARGET))

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        # With a title given, the model is not asked for one.
        flags = ("--format", "json", "--title", "task", "--model", f"lego/{endpoint.model}")
        config = json.dumps(self._config(endpoint), ensure_ascii=False)
        return Command(
            argv=(str(TARGET / "bin/opencode"), "run", *flags),
            env={"HOME": str(HOME), "PATH": PATH, **ALONE_ENV, "OPENCODE_CONFIG_CONTENT": config},
            files=FETCHED,
            # As an argument, a prompt with spaces would reach the model in quotation marks.
            stdin=instruction.encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the JSON lines: an `error` that no further step followed is the end of the run.

        One that was overcome leaves status 1 all the same; then the last step tells whether the model had finished.
        """
        failure, failed, reason = None, False, None
        for event in events(result.stdout):
            if event.get("type") == "error":
                failure, failed = _message(event.get("error")), True
            elif event.get("type") == "step_finish":
                failure, reason = None, _reason(event)
        overcome = failed and failure is None and reason == "stop" and result.code == 1
        return End(error=None if overcome else failure or exit_error(result))

    def _config(self, endpoint: Endpoint) -> Mapping[str, Any]:
        config = {
            **ALONE,
            "provider": {"lego": self._provider(endpoint)},
            # The last rule that matches counts; a tool that is denied altogether is not offered.
            "permission": {"*": "deny", **UNASKED, **dict.fromkeys(self.tools, "allow")},
            "compaction": {"auto": self.compact, "prune": False},
        }
        if self.instructions is not None:
            config["agent"] = {"build": {"prompt": self.instructions}}
        return config

    def _provider(self, endpoint: Endpoint) -> Mapping[str, Any]:
        wait = milliseconds(self.silence_s)
        size = {"context": endpoint.context_tokens, "output": endpoint.output_tokens}
        return {
            "npm": self.sdk,
            "name": "lego",
            "options": {
                # Unlike Anthropic's own, its client for Messages does not add /v1.
                "baseURL": f"{endpoint.url}/v1",
                "apiKey": endpoint.key,
                "headerTimeout": wait,
                "chunkTimeout": wait,
            },
            "models": {endpoint.model: {"name": endpoint.model, "tool_call": True, "limit": size}},
        }


def _reason(step: Mapping[str, Any]) -> object:
    """Why a step ended: `stop` if with an answer, `tool-calls` if the model is to be asked again."""
    part = step.get("part")
    return part.get("reason") if isinstance(part, dict) else None


def _message(error: object) -> str:
    """What an error event says: the message in its data, else its name."""
    if not isinstance(error, dict):
        return "an error without a message"
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return str(message or error.get("message") or error.get("name") or "an error without a message")
