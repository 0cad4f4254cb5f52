"""Whose answer a message is, and which turn a history ends in, whatever a harness did to the spelling."""

from collections.abc import Collection
from dataclasses import dataclass

from lego.capture import keys
from lego.capture.keys import Key
from lego.chat.calls import schemas_of
from lego.chat.messages import Message, Tool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A turn as the harness sees it; `message.calls` carry our ids, of which `id` is the root."""

    id: str
    message: Message
    truncated: bool
    reasoning_tokens: int


class Joins:
    """The answers of a session, found by the ids that they handed out, by place, and by what they say."""

    def __init__(self, root: int) -> None:
        """`root` is the length of an answer's id, with which all ids of its items begin after their kind."""
        self._root_len = root
        self.answers: dict[int, Answer] = {}
        self._owners: dict[str, int] = {}
        self._ends: dict[Key, int] = {}
        self._contents: dict[tuple[str, ...], int | None] = {}
        """Turns by what they say; None for what several say."""

    def add(self, turn: int, answer: Answer, before: Key, extended: Collection[int | None]) -> None:
        """Takes in the answer to the history `before`. `extended` are turns that some history has gone on from."""
        self.answers[turn] = answer
        self._owners |= dict.fromkeys([answer.id, *(call.id for call in answer.message.calls)], turn)
        self._ends[_turn_key(before, turn)] = turn
        content = keys.content_key(answer.message)
        end = keys.digest(before, *content)
        # Of twins that say the same, a history told without ids means the one that was gone on from.
        if end not in self._ends or self._ends[end] not in extended:
            self._ends[end] = turn
        if any(content[1:]):
            self._contents[content] = turn if content not in self._contents else None

    def end(self, key: Key) -> int | None:
        """The turn whose history and answer have this key."""
        return self._ends.get(key)

    def key(self, before: Key, message: Message, tools: tuple[Tool, ...]) -> Key:
        """The key of a history one message longer; an answer of ours counts as its turn, however it is told."""
        if message.role != "assistant":
            # Which of our calls a result answers counts; ids that a harness made itself do not.
            call = message.call_id if message.call_id in self._owners else ""
            return keys.digest(before, *keys.content_key(message), call)
        owner = self.owner(message)
        if owner is not None and keys.same_answer(self.answers[owner].message, message, schemas_of(tools)):
            key = _turn_key(before, owner)
            if key in self._ends:
                return key
        key = keys.digest(before, *keys.content_key(message))
        owner = self._ends.get(key)
        return key if owner is None else _turn_key(before, owner)

    def owner(self, message: Message) -> int | None:
        """The turn that made all calls of this message, or else handed out its item ids."""
        names = [call.id for call in message.calls] or [self._root(item) for item in message.items]
        owners = {self._owners.get(name) for name in names}
        return owners.pop() if len(owners) == 1 else None

    def told(self, message: Message) -> int | None:
        """The turn whose answer this message is, by its ids or else by its content."""
        owner = self.owner(message)
        return owner if owner is not None else self._contents.get(keys.content_key(message))

    def without_reasoning(self, message: Message) -> bool:
        """Whether this is one of the answers, told without its reasoning."""
        if message.role != "assistant" or message.reasoning.strip():
            return False
        ids = [call.id for call in message.calls]
        mine = (answer.message for answer in self.answers.values() if answer.message.reasoning.strip())
        return any([c.id for c in m.calls] == ids and m.text.strip() == message.text.strip() for m in mine)

    def _root(self, item: str) -> str:
        return item[item.find("_") + 1 :][: self._root_len]


def _turn_key(before: Key, turn: int) -> Key:
    return keys.digest(before, "turn", str(turn))
