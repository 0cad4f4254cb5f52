"""OpenAI's Codex command line (Apache-2.0): one static binary, speaks the Responses format."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts, Label
from harnesses.packages import NpmTarball, Part, locate
from harnesses.reading import events, exit_error, milliseconds
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/codex")
CONFIG_HOME = HOME / ".codex"
KEY = "LEGO_MODEL_KEY"
VENDOR = "vendor/x86_64-unknown-linux-musl"
SHA512 = {"0.169.0": "o05NyAOCDygSPRo1yinzxvkRSdmsZyBD9E7mbpmjRanSfM8lypqWtQgEo4XfNkwhuCR2aFu8mlGOsQGFXVbVww=="}

Value = str | bool | int | list[str] | Mapping[str, "Value"]

ALONE: Mapping[str, Value] = {
    # The box is the sandbox, nobody answers questions, and nothing but the model can be reached.
    "approval_policy": "never",
    "sandbox_mode": "danger-full-access",
    "check_for_update_on_startup": False,
    "web_search": "disabled",
    "allow_login_shell": False,
    "analytics": {"enabled": False},
    "feedback": {"enabled": False},
    "history": {"persistence": "none"},
    "shell_environment_policy": {"exclude": [KEY]},
}
LEAN: Mapping[str, Value] = {
    "include_permissions_instructions": False,
    "include_apps_instructions": False,
    "include_environment_context": False,
    "project_doc_max_bytes": 0,
    "hide_agent_reasoning": True,
    "skills": {"include_instructions": False, "bundled": {"enabled": False}},
    "agents": {"enabled": False},
}
FEATURES_ALONE: Mapping[str, Value] = {"plugins": False, "apps": False, "unbounded_connection_retries": False}
FEATURES_LEAN: Mapping[str, Value] = {
    "goals": False,
    "view_image": False,
    "unified_exec": False,
    "skill_search": False,
    "default_mode_request_user_input": False,
    "hooks": False,
    "shell_snapshot": False,
}


@dataclass(frozen=True, kw_only=True)
class Codex:
    """The Codex agent, driven through its own command line."""

    facts: ClassVar[Facts] = Facts(
        wires=("responses",),
        glibc=False,
        session=Label(header="session-id"),
        subagent=Label(header="x-openai-subagent"),
        summary=Label(header="x-codex-turn-metadata", holds='"request_kind":"compaction"'),
        quirks=(
            "Waits for ever for the first byte of an answer; signs of life in comments are none to it.",
            "A full context ends its run: it summarises before, not after.",
        ),
    )

    version: str = "0.169.0"
    """Release; only those with a pinned hash."""
    instructions: str | None = None
    """The system text; None is Codex's own."""
    lean: bool = True
    """Leaves out what changes from run to run and the tools beside the shell: short prompts, shared by all trials."""
    ask_user: bool = True
    """Offers the tool that asks a person, who is never there."""
    retries: int = 4
    """Further tries of a model request that failed."""
    silence_s: float = 600.0
    """Longest wait for the next event of an answer."""

    def __post_init__(self) -> None:
        if self.version not in SHA512:
            raise ValueError(f"version: no pinned hash for Codex {self.version!r}, there is {', '.join(SHA512)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for Codex's own")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries}, must be 0 or more")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "codex"

    @property
    def parts(self) -> tuple[Part, ...]:
        return (
            NpmTarball(
                name="@openai/codex",
                version=f"{self.version}-linux-x64",
                sha512=SHA512[self.version],
                keep=(
                    f"{VENDOR}/bin/codex -> bin/codex",
                    f"{VENDOR}/codex-path/rg -> codex-path/rg",
                    f"{VENDOR}/codex-package.json -> codex-package.json",
                ),
                machine="x86_64",
            ),
        )

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return (str(folders[-1] / "bin/codex"), "--version")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return (Mount(source=locate(self, cache)[-1], target=TARGET),)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        files = {CONFIG_HOME / "config.toml": toml(self._config(endpoint)).encode()}
        if self.instructions is not None:
            files[CONFIG_HOME / "instructions.md"] = self.instructions.encode()
        flags = ("--strict-config", "--json", "--ephemeral", "--skip-git-repo-check")
        return Command(
            argv=(str(TARGET / "bin/codex"), "exec", *flags, "--dangerously-bypass-approvals-and-sandbox", "-"),
            env={"HOME": str(HOME), "CODEX_HOME": str(CONFIG_HOME), KEY: endpoint.key},
            files=files,
            # The prompt goes through standard input: as an argument it could read as a flag, and has a size limit.
            stdin=instruction.encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the JSON lines: items of type `error` are warnings, a `turn.failed` is the end of the run."""
        failure = None
        for event in events(result.stdout):
            if event.get("type") == "turn.failed":
                failure = str(event.get("error", {}).get("message") or "turn.failed without a message")
            elif event.get("type") == "turn.completed":
                failure = None
        return End(error=failure or exit_error(result))

    def _config(self, endpoint: Endpoint) -> Mapping[str, Value]:
        """The whole of `config.toml`."""
        room = max(endpoint.context_tokens - endpoint.output_tokens, endpoint.context_tokens // 2)
        config: dict[str, Value] = {
            "model": endpoint.model,
            "model_provider": "lego",
            "model_context_window": endpoint.context_tokens,
            "model_auto_compact_token_limit": room,
        }
        if self.instructions is not None:
            config["model_instructions_file"] = str(CONFIG_HOME / "instructions.md")
        config |= {**ALONE, **(LEAN if self.lean else {})}
        if not self.ask_user:
            config["tools"] = {"experimental_request_user_input": {"enabled": False}}
        config["features"] = {**FEATURES_ALONE, **(FEATURES_LEAN if self.lean else {})}
        config["model_providers"] = {"lego": self._provider(endpoint)}
        return config

    def _provider(self, endpoint: Endpoint) -> Mapping[str, Value]:
        return {
            "name": "lego",
            "base_url": f"{endpoint.url}/v1",
            "env_key": KEY,
            "wire_api": "responses",
            # The two limits multiply, so one of them is enough.
            "request_max_retries": 0,
            "stream_max_retries": self.retries,
            "stream_idle_timeout_ms": milliseconds(self.silence_s),
        }


def toml(table: Mapping[str, Value]) -> str:
    """`table` as TOML, the plain values of each table before its sub-tables."""
    return "\n".join(_lines(table, ())) + "\n"


def _lines(table: Mapping[str, Value], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"[{'.'.join(_string(part) for part in path)}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{_string(key)} = {_literal(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))


def _literal(value: str | bool | int | list[str]) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list):
        return f"[{', '.join(_string(item) for item in value)}]"
    return json.dumps(value)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and surrogate pairs, which it forbids.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
