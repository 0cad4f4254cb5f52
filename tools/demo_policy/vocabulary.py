"""A byte-level BPE tokenizer that makes the demo's dialogues short: one token for a path, a number, an edit.

Whatever the split keeps whole and the vocabulary holds is one token (`ignore_merges`), so fixed texts of
the harnesses need no merges and are no control tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lego.tasks.mutate import EDITS

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
END_OF_TURN = "<|im_end|>"
PATTERNS = (
    r"[A-Za-z_][\w.-]*(?:/[\w.-]+)+|[A-Za-z_]\w*\.py(?!\w)",  # a path stays whole
    r" ?(?:is not|not in|if not|return not)(?!\w)",  # what an edit replaces stays whole
    r" ?(?<!\w)(?:min|max|any|all)\(",
    r" [01](?![\w.])",
    r"\([01](?![\w.])",
    r"[01]\]",
    r"\d{1,3}",
    r" ?\.?[A-Za-z_]\w*",
    r"\n *",
    r"\t *",
    r" ?[^\s\w]+",
    r" +",
)
TEMPLATE_PARTS = (
    "system\nYou fix bugs.",
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
    "assistant\n",
)
PROMPT_PARTS = ("\nCurrent date: ", "\nCurrent working directory: ", "\nCurrent working directory: /repo", " fails.")
RESULT_PARTS = (
    "Chunk ID: ",
    "\nWall time: ",
    " seconds\nProcess exited with code ",
    "\nOriginal token count: ",
    "\nOutput:\n",
    "(no output)",
    "\n\nCommand exited with code ",
)
CALL_NAMES = (("exec_command", "cmd"), ("bash", "command"))
_EDITED = ("is not", "not in", "if not", "return not", "min(", "max(", "any(", "all(", "0", "1", "(0", "(1", "0]", "1]")
EDITED = tuple(space + text for space in ("", " ") for text in _EDITED)
"""What an edit replaces, as the split keeps it."""
STRICT = ', "strict": false}}'
ROWS = 64
"""The vocabulary is padded to a multiple of this many rows."""


def build(corpus: Sequence[str], paths: Iterable[str], tools: Iterable[dict], merges: int, words: int) -> Tokenizer:
    """Trains `merges` merges; numbers, paths, edits, fixed texts and the commonest `words` are tokens of their own."""
    fixed = dict.fromkeys([*_call_parts(), *RESULT_PARTS, *PROMPT_PARTS, *TEMPLATE_PARTS, STRICT, *_tool_parts(tools)])
    pre_tokenizer = _pre_tokenizer(list(fixed))
    pairs = _learned_merges(corpus, pre_tokenizer, merges)
    common = _common_words(corpus, pre_tokenizer, words)
    whole = [*(_bytes(text) for text in (*map(str, range(1000)), *paths, *fixed, *EDITED)), *common]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys([*alphabet, *("".join(pair) for pair in pairs), *whole]))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def vocabulary_rows(tokenizer: Tokenizer) -> int:
    return -(-tokenizer.get_vocab_size() // ROWS) * ROWS


def kinds(tokenizer: Tokenizer, paths: Iterable[str]) -> list[list[int]]:
    """Ids of the numbers, of the paths and of the edits: each kind is copied or chosen in the same way."""
    texts = ([str(i) for i in range(1000)], list(paths), [edit_text(old, new) for old, new in EDITS])
    ids = tokenizer.get_vocab()
    return [[ids[_bytes(text)] for text in kind] for kind in texts]


def edit_text(old: str, new: str) -> str:
    """What stands after the line number of a `sed -i` command: one token of the vocabulary."""
    return f"s/{old}/{new}/' "


def write(tokenizer: Tokenizer, folder: Path, template: str) -> None:
    """tokenizer.json and tokenizer_config.json as `transformers` reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _bytes(text: str) -> str:
    """The text in the byte-level alphabet of the vocabulary."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(text))


def _pre_tokenizer(fixed: list[str]) -> pre_tokenizers.PreTokenizer:
    """Splits off the fixed texts first, the longest that fits, then paths, numbers, words and signs."""
    literals = [re.escape(text) for text in sorted(fixed, key=len, reverse=True)]
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join((*literals, *PATTERNS))), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _learned_merges(
    corpus: Iterable[str], pre_tokenizer: pre_tokenizers.PreTokenizer, merges: int
) -> list[tuple[str, str]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


def _common_words(corpus: Iterable[str], pre_tokenizer: pre_tokenizers.PreTokenizer, words: int) -> list[str]:
    counts = Counter(piece for text in corpus for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    return [piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:words]]


def _call_parts() -> list[str]:
    heads = [f'\n{{"name": "{name}", "arguments": {{"{key}": "' for name, key in CALL_NAMES]
    starts = [head + command for head in heads for command in ("nl -ba ", "sed -i '")]
    edits = [edit_text(old, new) for old, new in EDITS]
    return [*heads, *starts, " | sed -n '", ",+12p'\"}}\n", '"}}\n', "Done.", *edits]


def _tool_parts(tools: Iterable[dict]) -> list[str]:
    """A tool's JSON up to where harnesses and gateways differ, and its long texts alone for all other layouts."""
    parts = []
    for tool in tools:
        function = {key: value for key, value in tool["function"].items() if key != "strict"}
        whole = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        parts.append("\n" + whole.removesuffix("}}"))
        parts.extend(text for text in _texts(function) if len(text) >= 20)
    return parts


def _texts(value: object) -> list[str]:
    """The quoted form of every description inside a JSON value."""
    if isinstance(value, dict):
        text = value.get("description")
        own = [json.dumps(text, ensure_ascii=False)] if isinstance(text, str) else []
        return own + [text for inner in value.values() for text in _texts(inner)]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []
