"""What the model does in a drill, step by step, and how it says so to each harness."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lego.capture.journal import Origin
from lego.capture.offers import Offer, offers
from lego.capture.wire import Body, Dialect
from lego.errors import EngineError

STOP = "<|im_end|>"
CUT = 40
"""Characters short of a whole text in which the model calls a tool."""
FIELDS = ("cmd", "command", "commands")


@dataclass(frozen=True)
class Shell:
    """The model thinks, says `text` and calls the harness's shell tool; `loose` spells the arguments as few would."""

    command: str
    text: str = ""
    thought: str = "I look.\n"
    loose: bool = False


@dataclass(frozen=True)
class Finish:
    """The model says it is done, in the way that ends this harness's run."""

    text: str = "It is done."


@dataclass(frozen=True)
class Malformed:
    """The model calls the shell tool with arguments that are no JSON, or in a text that is not whole."""

    command: str = "ls"


@dataclass(frozen=True)
class Unknown:
    """The model calls a tool that nobody offered."""

    name: str = "telepathy"


@dataclass(frozen=True)
class Sampled:
    """The model says exactly this, before its stop token."""

    text: str


@dataclass(frozen=True)
class Broken:
    """The engine fails."""


@dataclass(frozen=True)
class Late:
    """The model says something after a silence."""

    seconds: float
    step: "Shell | Finish | Sampled"


Step = Shell | Finish | Malformed | Unknown | Sampled | Broken | Late


SUMMARY = Sampled("<summary>\nThe work is begun and is to be gone on with.\n</summary>")
SUMMARY_ASKED = re.compile(
    "CONTEXT CHECKPOINT COMPACTION|Respond with TEXT ONLY|component that summarizes"
    # Terminus hands over in three calls.
    "|hand off your work to another AI agent|picking up work from a previous AI agent|next agent has a few questions"
)


def asks_for_summary(harness: str, body: Body) -> bool:
    """Whether the harness compacts its history with this call: without tools, or by its first or last message."""
    if not body.get("tools") and harness not in TEXTS:
        return True
    told = [part for name in ("input", "messages") for part in body.get(name) or ()]
    return bool(SUMMARY_ASKED.search(json.dumps([told[:1], told[-1:]])))


def spoken(step: Shell | Finish | Malformed | Unknown | Sampled, harness: str, asked: Origin) -> str:
    """What a model of the Qwen family samples to make this step."""
    known = offers(Dialect(asked.dialect), asked.body)
    match step:
        case Sampled(text):
            return text + STOP
        case Unknown(name):
            return _called(name, json.dumps({"command": "ls"}))
        case Malformed(command) if not known and harness in TEXTS:
            return TEXTS[harness](Shell(command)).removesuffix(STOP)[:-CUT] + STOP
        case Malformed(command):
            name, arguments = shell_call(command, known)
            return _called(name, arguments.rstrip("}") + ", ")
        case Finish(text):
            return FINISHES.get(harness, _says)(text, known)
        case Shell() if not known and harness in TEXTS:
            return TEXTS[harness](step)
        case Shell(command, text, thought, loose):
            name, arguments = shell_call(command, known)
            return f"<think>\n{thought}</think>\n\n{text}" + _called(name, _loosened(arguments) if loose else arguments)


def shell_call(command: str, known: Iterable[Offer]) -> tuple[str, str]:
    """Name and arguments of the first tool that takes a shell command; other texts that it demands are filled."""
    for offer in known:
        schema = offer.parameters or {}
        properties: Mapping[str, Mapping] = schema.get("properties", {})
        found = next((name for name in FIELDS if name in properties), None)
        if found is not None:
            one = properties[found].get("type") == "string"
            rest = {name: "Runs it" for name in schema.get("required", ()) if _is_text(properties.get(name))}
            return offer.offered, json.dumps({**rest, found: command if one else [command]})
    raise EngineError("the harness offers no tool for a shell command")


def _is_text(schema: Mapping | None) -> bool:
    return schema is not None and schema.get("type") == "string" and "enum" not in schema


def _called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>{STOP}'


def _loosened(arguments: str) -> str:
    """The same arguments with spaces where none are needed, and an escape for a letter that needs none."""
    return arguments.replace('": ', '" :  ').replace("e", "\\u0065", 1) if '"e' not in arguments else arguments


def _says(text: str, known: Sequence[Offer]) -> str:
    return f"<think>\nDone.\n</think>\n\n{text}{STOP}"


def _submits(text: str, known: Sequence[Offer]) -> str:
    """mini-swe-agent ends with a command."""
    command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    return _called(*shell_call(command, known)) if known else TEXTS["mini"](Shell(command))


def _keystrokes(commands: Sequence[str], done: bool) -> str:
    keys = [{"keystrokes": f"{command}\n", "duration": 1.0} for command in commands]
    return json.dumps({"analysis": "I look.", "plan": "I go on.", "commands": keys, "task_complete": done}) + STOP


FINISHES: Mapping[str, Callable[[str, Sequence[Offer]], str]] = {
    "mini": _submits,
    "terminus": lambda text, known: _keystrokes((), True),
}
TEXTS: Mapping[str, Callable[[Shell], str]] = {
    "terminus": lambda step: _keystrokes((step.command,), False),
    "mini": lambda step: f"{step.text}\n```mswea_bash_command\n{step.command}\n```{STOP}",
}
"""Harnesses whose model has no tools, and calls the shell in its text."""
