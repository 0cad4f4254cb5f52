"""Texts to token ids and back, with control tokens only where a template wrote them."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lego.errors import UsageError
from lego.records import Ids

# A private code point hides control-token text of a message from the search for control tokens; a
# message that holds the code point itself gets it doubled up in the same way.
_MARK = "\U0010fffd"


class Vocabulary:
    """The tokenizer.json of a model folder, in the shape that `renderers` asks of a tokenizer.

    `marks` are control sequences of the model that may be plain text here: `hide` hides them from templates as well.
    """

    unk_token_id: int | None = None

    def __init__(self, folder: Path, marks: Sequence[str] = (), eos_token_id: int | None = None) -> None:
        whole = read_json(folder / "tokenizer.json")
        self.name_or_path = str(folder)
        self.eos_token_id = eos_token_id
        try:
            self._full = Tokenizer.from_str(json.dumps(whole))
            self._plain = Tokenizer.from_str(json.dumps(_without_control_tokens(whole)))
        except Exception as error:
            raise UsageError(f"{folder / 'tokenizer.json'} is no tokenizer: {error!r}") from error
        decoder = self._full.get_added_tokens_decoder()
        self._control = {token.content: i for i, token in decoder.items() if not token.content.isspace()}
        self._search = _any_of(self._control)
        self._hidden = _any_of({*self._control, *marks} - {""})
        bytes_ = (self._full.token_to_id(f"<0x{n:02X}>") for n in range(256))
        self._bytes = frozenset(i for i in bytes_ if i is not None)

    @property
    def lead(self) -> list[int]:
        """The ids that this tokenizer puts before any text, such as a BOS."""
        with_lead = self._full.encode("a", add_special_tokens=True).ids
        text = self._full.encode("a", add_special_tokens=False).ids
        return with_lead[: with_lead.index(text[0])] if text and text[0] in with_lead else []

    def control(self, token: str) -> int | None:
        """The id of a control token; None if the text is no control token here."""
        return self._control.get(token)

    def hide(self, value: Any) -> Any:
        """A text, or all texts of a JSON value, marked so that `encode` takes control-token text for plain text."""
        if isinstance(value, dict):
            return {self.hide(k): self.hide(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.hide(v) for v in value]
        if not isinstance(value, str):
            return value
        text = value.replace(_MARK, _MARK + "0")
        return self._hidden.sub(lambda m: m[0][0] + _MARK + "1" + m[0][1:], text)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._search.finditer(text):
            ids += self._encode_plain(text[at : match.start()])
            ids.append(self._control[match[0]])
            at = match.end()
        return ids + self._encode_plain(text[at:])

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        shown = text.replace(_MARK + "1", "").replace(_MARK + "0", _MARK) if _MARK in text else text
        return self._plain.encode(shown, add_special_tokens=False).ids

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._full.decode(list(token_ids), skip_special_tokens=False)

    def settled(self, ids: Ids) -> int:
        """How many of the ids decode the same whatever follows, apart from a last U+FFFD."""
        end = len(ids)
        # A run of byte tokens is one text only if all of it is valid.
        while self._bytes and end and int(ids[end - 1]) in self._bytes:
            end -= 1
        return end

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._full.token_to_id(tokens)


class HarmonyVocabulary:
    """The vocabulary of gpt-oss, which comes with the harmony library and reads no text as control tokens."""

    unk_token_id: int | None = None
    eos_token_id: int | None = None
    lead: Sequence[int] = ()

    def __init__(self, folder: Path) -> None:
        from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

        self.name_or_path = str(folder)
        try:
            self._encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            # The package openai-harmony, of the same import name, downloads it.
            raise UsageError(f"gpt-oss needs oss-harmony, which brings its vocabulary along: {error}") from error
        self._top = self._encoding.encode("<|reserved_201088|>", allowed_special="all")[-1]
        theirs = Tokenizer.from_str(json.dumps(read_json(folder / "tokenizer.json")))
        for token in ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"):
            if theirs.token_to_id(token) != self.control(token):
                raise UsageError(f"{folder}/tokenizer.json: {token} is not {self.control(token)}, as harmony has it")

    def control(self, token: str) -> int | None:
        if token not in self._encoding.special_tokens_set:
            return None
        return self._encoding.encode(token, allowed_special="all")[0]

    def hide(self, value: Any) -> Any:
        return value

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        return self._encoding.decode([i for i in token_ids if i <= self._top])

    def settled(self, ids: Ids) -> int:
        return len(ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.control(tokens)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises UsageError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"model folder {path.parent}: cannot read {path.name} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, a JSON object is wanted")
    return found


def _without_control_tokens(whole: dict[str, Any]) -> dict[str, Any]:
    # Some vocabularies hold runs of blanks as added tokens: these are text.
    blank = [token for token in whole.get("added_tokens", []) if token["content"].isspace()]
    return whole | {"added_tokens": blank, "post_processor": None}
