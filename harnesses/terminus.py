"""Terminus-2, the agent of the package harbor (Apache-2.0): types into a terminal, as JSON or XML in its text says."""

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

TARGET = Path("/opt/terminus")
INSIDE = Mount(source=Path(__file__).with_name("inside_terminus.py"), target=Path("/opt/lego/terminus.py"))
LOCK_SHA256 = {"0.25.0": "e0d5ede81add070c96ad8fb659902196bedf39d0b5e78fd7d020725c585458d9"}

Parser = Literal["json", "xml"]


@dataclass(frozen=True, kw_only=True)
class Terminus:
    """The Terminus-2 agent; its box needs tmux. A failed model request is tried nine times."""

    facts: ClassVar[Facts] = Facts(
        wires=("chat/completions",),
        glibc=False,
        needs=("tmux", "bash"),
        summary="words",
        quirks=(
            "Asks whether the model is really done.",
            "Hands a history over in three calls: a summary, questions about it, and their answers.",
        ),
    )

    version: str = "0.25.0"
    """Release of harbor; only those with a pinned lock file."""
    parser: Parser = "json"
    """The form in which the model types."""
    reasoning: bool = True
    """Tells the model its earlier reasoning; else, as Terminus-2 does by itself, a thinking model's calls all fork."""
    compact: bool = True
    """Hands a history over to a new conversation when it gets too long; else a full context ends the run."""
    spare_tokens: int = 8000
    """Tokens that must be left, by its own count, or the history is handed over."""
    steps: int | None = None
    """Model calls after which it ends, with what is done until then; None is as many as the recipe allows a trial."""
    silence_s: float = 600.0
    """Longest wait for an answer."""

    def __post_init__(self) -> None:
        if self.version not in LOCK_SHA256:
            raise ValueError(f"version: no lock file for harbor {self.version!r}, there is {', '.join(LOCK_SHA256)}")
        if self.parser not in ("json", "xml"):
            raise ValueError(f"parser: {self.parser!r}, must be json or xml")
        if self.spare_tokens < 0:
            raise ValueError(f"spare_tokens: {self.spare_tokens}, must be 0 or more")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps: {self.steps}, must be 1 or more, or None")
        if self.silence_s <= 0:
            raise ValueError(f"silence_s: {self.silence_s}, must be above 0")

    @property
    def name(self) -> str:
        return "terminus"

    @property
    def parts(self) -> tuple[Part, ...]:
        lock, sha256 = f"terminus-{self.version}.txt", LOCK_SHA256[self.version]
        return python.parts("harbor", self.version, lock=lock, sha256=sha256, glibc=(2, 34))

    def starts(self, folders: Sequence[Path]) -> tuple[str, ...]:
        return python.says_version(folders, "harbor.agents.terminus_2.terminus_2", "harbor")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return python.mounts(self, cache, TARGET, INSIDE)

    def command(self, instruction: str, endpoint: Endpoint) -> Command:
        job = {"packages": str(TARGET), "instruction": instruction, "agent": self._agent(endpoint)}
        return Command(
            argv=(*python.command(python.TARGET), str(INSIDE.target)),
            env={"HOME": str(HOME), **python.LITELLM_ALONE},
            stdin=json.dumps(job).encode(),
        )

    def ended(self, result: ExecResult) -> End:
        """Reads the line our program ends with: stopping at `steps` also ends well."""
        return End(error=failed_result(result.stdout) or exit_error(result))

    def _agent(self, endpoint: Endpoint) -> Mapping[str, Any]:
        size = {"max_input_tokens": endpoint.context_tokens, "max_output_tokens": endpoint.output_tokens}
        price = {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0}
        return {
            "model_name": f"openai/{endpoint.model}",
            "api_base": f"{endpoint.url}/v1",
            "model_info": {**size, **price, "litellm_provider": "openai", "mode": "chat"},
            "parser_name": self.parser,
            "max_turns": self.steps,
            "interleaved_thinking": self.reasoning,
            "enable_summarize": self.compact,
            "proactive_summarization_threshold": self.spare_tokens,
            # Its film of the terminal needs a program that a box does not have.
            "record_terminal_session": False,
            "suppress_max_turns_warning": True,
            # The client library's own tries would multiply with these.
            "llm_kwargs": {"api_key": endpoint.key, "timeout": self.silence_s, "max_retries": 0},
        }
