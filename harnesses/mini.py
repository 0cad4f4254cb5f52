"""The mini-swe-agent (MIT): a small Python program whose only tool is a shell; chat, Responses, or actions as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from harnesses import python
from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts
from harnesses.packages import Part
from harnesses.reading import exit_error, failed_result
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/mini")
INSIDE = Mount(source=Path(__file__).with_name("inside_mini.py"), target=Path("/opt/lego/mini.py"))
SETTINGS = HOME / ".mini/lego.yaml"
LOCK_SHA256 = {"2.4.6": "d870387703635046078416d1ba763955a9dfcf7de71d68f9c30acb3eca585c8f"}

Api = Literal["chat", "responses", "text"]
MODELS: Mapping[Api, str] = {"chat": "litellm", "responses": "litellm_response", "text": "litellm_textbased"}
CONFIGS: Mapping[Api, str] = {"chat": "mini.yaml", "responses": "mini.yaml", "text": "mini_textbased.yaml"}


@dataclass(frozen=True, kw_only=True)
class Mini:
    """The mini-swe-agent, driven through its own command."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions", "responses"),
        glibc=False,
        quirks=("Deletes an answer whose call is bad, and tells the model so in its own words.",),
    )

    version: str = "2.4.6"
    """Release; only those with a pinned lock file."""
    instructions: str | None = None
    """The system text; None is mini-swe-agent's own."""
    api: Api = "chat"
    """How it asks the model for commands: in a wire format's tool calls, or fenced in plain text."""
    steps: int | None = None
    """Model calls after which it ends, with what is done until then; None is as many as the recipe allows a trial."""
    command_s: int = 30
    """Longest run of one command of the model."""
    retries: int = 4
    """Further tries of a model request that failed, 4 s after the first and later ever longer."""
    silence_s: float = 600.0
    """Longest wait for an answer."""

    def __post_init__(self) -> None:
        if self.version not in LOCK_SHA256:
            raise ValueError(
                f"version: no lock file for mini-swe-agent {self.version!r}, there is {', '.join(LOCK_SHA256)}"
            )
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for mini-swe-agent's own")
        if self.api not in MODELS:
            raise ValueError(f"api: {self.api!r}, must be one of {', '.join(MODELS)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: {self.steps}, must be 1 or more, or None")
        if self.command_s < 1:
            raise ValueError(f"command_s: {self.command_s}, must be 1 or more")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries}, must be 0 or more")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "mini"

    @property
    def parts(self) -> tuple[Part, ...]:
        lock, sha256 = f"mini-{self.version}.txt", LOCK_SHA256[self.version]
        return python.parts("mini-swe-agent", self.version, lock=lock, sha256=sha256, glibc=(2, 28))

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return python.says_version(folders, "minisweagent.run.mini", "mini-swe-agent")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return python.mounts(self, cache, TARGET, INSIDE)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        # By its full path: a task's repository could have a file of that name.
        config = [str(TARGET / "minisweagent/config" / CONFIGS[self.api]), str(SETTINGS)]
        return Command(
            argv=(*python.command(python.TARGET), str(INSIDE.target)),
            env={
                "HOME": str(HOME),
                **python.LITELLM_ALONE,
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_GLOBAL_CONFIG_DIR": str(SETTINGS.parent),
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(self.retries + 1),
            },
            files={SETTINGS: json.dumps(self._settings(instruction, endpoint)).encode()},
            stdin=json.dumps({"packages": str(TARGET), "config": config}).encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the exit status: a limit of its own, or three answers in a row without a command, also end well."""
        return End(error=failed_result(result.stdout) or exit_error(result))

    def _settings(self, instruction: str, endpoint: Endpoint) -> Mapping[str, Any]:
        # The client library's own tries would multiply with these.
        request = {
            "api_base": f"{endpoint.url}/v1",
            "api_key": endpoint.key,
            "timeout": self.silence_s,
            "max_retries": 0,
        }
        agent: dict[str, Any] = {"step_limit": self.steps or 0}
        if self.instructions is not None:
            # The text is a template: this one holds a constant.
            agent["system_template"] = f"{{{{ {self.instructions!a} }}}}"
        return {
            "run": {"task": instruction},
            "agent": agent,
            "environment": {"timeout": self.command_s},
            "model": {
                "model_name": f"openai/{endpoint.model}",
                "model_class": MODELS[self.api],
                "model_kwargs": {"api_base": f"{endpoint.url}/v1", "api_key": endpoint.key, **request},
            },
        }
