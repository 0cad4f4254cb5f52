"""The agent of the OpenHands SDK (MIT): a Python library, run by a short program of ours; chat or Responses."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from harnesses import python
from harnesses.base import HOME, Command, End, Endpoint
from harnesses.facts import Facts, Label
from harnesses.packages import Part
from harnesses.reading import exit_error, failed_result
from sandbox.base import ExecResult, Mount

TARGET = Path("/opt/openhands")
INSIDE = Mount(source=Path(__file__).with_name("inside_openhands.py"), target=Path("/opt/lego/openhands.py"))
LOCK_SHA256 = {"1.58.2": "6080d9b6e373a015675575e2ff43d580da16e367682a7b47af9be9bb80d2680d"}
FIRST_WAIT_S = 1
UNLIMITED = 1_000_000
TELLS_REASONING = "deepseek/deepseek-reasoner"
"""Only for models that it knows by name does it repeat their reasoning to them; this one changes nothing else."""

Api = Literal["chat", "responses"]
Tool = Literal["terminal", "file_editor", "task_tracker", "task"]


@dataclass(frozen=True, kw_only=True)
class OpenHands:
    """The default agent of the OpenHands SDK, without its browser."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions", "responses"),
        glibc=False,
        needs=("bash",),
        session=Label(header="x-litellm-session-id"),
        # Its own has none: it is set where `inside_openhands.py` makes the model that summarises.
        summary=Label(header="x-lego-request", holds="compaction"),
        quirks=(
            "Puts an error in the place of arguments that are no JSON.",
            "Without tmux in the box it makes do with a terminal that is less stable.",
        ),
    )

    version: str = "1.58.2"
    """Release of the SDK and of its tools; only those with a pinned lock file."""
    instructions: str | None = None
    """The system text; None is OpenHands' own."""
    tools: tuple[Tool, ...] = ("terminal", "file_editor", "task_tracker")
    """Which of its tools the model gets, beside `finish` and `think`; task is the sub-agent."""
    api: Api = "chat"
    """The wire format it speaks to the model."""
    reasoning: bool = True
    """Tells the model its earlier reasoning; else, as OpenHands does for models it does not know, each call forks."""
    compact: bool = True
    """Summarises a history of 240 events, or one that the model refuses as too long; without, that ends the run."""
    steps: int | None = None
    """Rounds after which it ends, with what is done until then; None is as many as the recipe allows a trial."""
    retries: int = 4
    """Further tries of a model request that failed."""
    silence_s: int = 600
    """Longest wait for an answer."""

    def __post_init__(self) -> None:
        if self.version not in LOCK_SHA256:
            raise ValueError(f"version: no lock file for OpenHands {self.version!r}, there is {', '.join(LOCK_SHA256)}")
        if self.instructions is not None and not self.instructions.strip():
            raise ValueError("instructions: empty, give a text or None for OpenHands' own")
        if not self.tools:
            raise ValueError("tools: none, an agent needs at least one, as terminal")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: {self.steps}, must be 1 or more, or None")
        if self.retries < 0:
            raise ValueError(f"retries: {self.retries}, must be 0 or more")
        if self.silence_s < 1:
            raise ValueError(f"silence_s: {self.silence_s}, must be 1 or more")

    @property
    def name(self) -> str:
        return "openhands"

    @property
    def parts(self) -> tuple[Part, ...]:
        lock, sha256 = f"openhands-{self.version}.txt", LOCK_SHA256[self.version]
        return python.parts("openhands-sdk", self.version, lock=lock, sha256=sha256, glibc=(2, 34))

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return python.says_version(folders, "openhands.tools.preset.default", "openhands-sdk")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return python.mounts(self, cache, TARGET, INSIDE)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        job = {
            "packages": str(TARGET),
            "instruction": instruction,
            "instructions": self.instructions,
            "tools": self.tools,
            "compact": self.compact,
            "steps": self.steps or UNLIMITED,
            "llm": self._llm(endpoint),
        }
        return Command(
            argv=(*python.command(python.TARGET), str(INSIDE.target)),
            env={
                "HOME": str(HOME),
                **python.LITELLM_ALONE,
                "OPENHANDS_SUPPRESS_BANNER": "1",
                "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
                "LOG_LEVEL": "ERROR",
                "LOG_RICH_TRACEBACKS": "false",
            },
            stdin=json.dumps(job).encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the line our program ends with: stopping at `steps`, or for going in circles, also ends well."""
        return End(error=failed_result(result.stdout) or exit_error(result))

    def _llm(self, endpoint: Endpoint) -> Mapping[str, Any]:
        return {
            "model": f"openai/{endpoint.model}",
            "base_url": f"{endpoint.url}/v1",
            "api_key": endpoint.key,
            "api_mode": self.api,
            "model_canonical_name": TELLS_REASONING if self.reasoning else None,
            "max_input_tokens": endpoint.context_tokens,
            "max_output_tokens": endpoint.output_tokens,
            # It counts the first try too.
            "num_retries": self.retries + 1,
            "retry_min_wait": FIRST_WAIT_S,
            "retry_multiplier": 1.0,
            "timeout": self.silence_s,
            "disable_vision": True,
        }
