"""The functions that a request offers to the model, whatever kind of tool its harness calls them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lego.capture.wire import Body, Dialect, field_of, name_of, objects


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as the model sees it, and how its harness names it."""

    name: str
    namespace: str = ""
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    custom: bool = False

    @property
    def offered(self) -> str:
        return f"{self.namespace}__{self.name}" if self.namespace else self.name

    @property
    def tool(self) -> dict[str, Any]:
        """In the chat-completions shape."""
        fields = {"name": self.offered, "description": self.description or None, "parameters": self.parameters}
        return {"type": "function", "function": fields | {"strict": self.strict}}


def offers(dialect: Dialect, body: Body) -> list[Offer]:
    """The functions among a request's tools; kinds that only a vendor's own models know are left out."""
    tools = objects(body.get("tools"), "tools")
    match dialect:
        case Dialect.RESPONSES:
            return list(_responses_offers(tools, "tools"))
        case Dialect.MESSAGES:
            own = [(i, tool) for i, tool in enumerate(tools) if tool.get("type") in (None, "custom")]
            return [_function(tool, "input_schema", f"tools[{i}]") for i, tool in own]
        case Dialect.CHAT:
            own = [(i, tool) for i, tool in enumerate(tools) if tool.get("type") == "function"]
            inner = [
                (f"tools[{i}].function", field_of(tool, "function", Mapping, f"tools[{i}]") or {}) for i, tool in own
            ]
            return [_function(function, "parameters", where) for where, function in inner]


def _responses_offers(tools: list[Any], where: str, namespace: str = "", about: str = "") -> Iterator[Offer]:
    for i, tool in enumerate(tools):
        place = f"{where}[{i}]"
        match tool.get("type"):
            case "function":
                yield _function(tool, "parameters", place, namespace, about)
            case "custom":
                yield _freeform(tool, place, namespace, about)
            case "namespace" if tool.get("tools") and not namespace:
                inner, text = objects(tool.get("tools"), f"{place}.tools"), field_of(tool, "description", str, place)
                yield from _responses_offers(
                    inner, f"{place}.tools", name_of(tool, place), f"{text}\n\n" if text else ""
                )


def _function(tool: Body, schema: str, where: str, namespace: str = "", about: str = "") -> Offer:
    description = about + (field_of(tool, "description", str, where) or "")
    name, parameters = name_of(tool, where), field_of(tool, schema, Mapping, where)
    return Offer(name, namespace, description, parameters, field_of(tool, "strict", bool, where))


def _freeform(tool: Body, where: str, namespace: str, about: str) -> Offer:
    """A tool that takes plain text, as a function of one string; its grammar is told in the description."""
    form = field_of(tool, "format", Mapping, where) or {}
    grammar = f"\n\nGrammar of `input` ({form.get('syntax')}):\n{form['definition']}" if form.get("definition") else ""
    description = about + (field_of(tool, "description", str, where) or "") + grammar
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return Offer(name_of(tool, where), namespace, description, schema, custom=True)
