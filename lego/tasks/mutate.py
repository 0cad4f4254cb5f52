"""One-token edits of short Python functions, each exactly what `sed -i 'LINEs/OLD/NEW/' PATH` would do. Pure."""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VIEW = 13
"""Lines a look at a function shows; longer functions are not listed."""

_PAIRS = (
    (" < ", " <= "),
    (" > ", " >= "),
    (" == ", " != "),
    (" + ", " - "),
    (" += ", " -= "),
    (" and ", " or "),
    (" is not ", " is "),
    (" not in ", " in "),
    ("if not ", "if "),
    ("return not ", "return "),
    ("True", "False"),
    (" 0", " 1"),
    ("(0", "(1"),
    ("0]", "1]"),
    ("min(", "max("),
    ("any(", "all("),
    ("startswith", "endswith"),
    ("lstrip(", "rstrip("),
    ("lower(", "upper("),
    ("continue", "break"),
)

EDITS: tuple[tuple[str, str], ...] = tuple(pair for a, b in _PAIRS for pair in ((a, b), (b, a)))
"""(old, new) tokens, both directions; no character here means anything to sed, a shell quote or JSON."""

_WORD = re.compile(r"\w")


@dataclass(frozen=True)
class Function:
    """A top-level function or method; `line` (of its `def`) and `end` are 1-based and inclusive."""

    path: str
    name: str
    line: int
    end: int


@dataclass(frozen=True)
class Edit:
    """Replace the first `old` on a line by `new`."""

    line: int
    old: str
    new: str


def functions(source: str, path: str) -> tuple[Function, ...]:
    """The functions and methods of a file that fit one view, in file order."""
    return tuple(
        Function(path, node.name, node.lineno, node.end_lineno or node.lineno)
        for node in _definitions(ast.parse(source))
        if (node.end_lineno or node.lineno) - node.lineno < VIEW
    )


def candidates(lines: Sequence[str], function: Function) -> tuple[Edit, ...]:
    """Every edit that changes code (not text or comments) of the function's body and still compiles.

    `lines` are the whole file's, split at newlines only, as sed counts them.
    """
    snippet = _Snippet.of(lines, function)
    if snippet is None:
        return ()
    found = []
    for number in range(snippet.body_line, function.end + 1):
        text = lines[number - 1].rstrip("\n")
        for old, new in EDITS:
            at = _first(text, old, new)
            if at is None or snippet.is_text(number, at, at + len(old)):
                continue
            if snippet.compiles_with(number, text[:at] + new + text[at + len(old) :]):
                found.append(Edit(number, old, new))
    return tuple(found)


def apply(source: str, edit: Edit) -> str:
    """`source` after the edit; ValueError where its line lacks `old` (sed would change nothing)."""
    lines = source.split("\n")
    if not 1 <= edit.line <= len(lines) or edit.old not in lines[edit.line - 1]:
        raise ValueError(f"line {edit.line} holds no {edit.old!r}")
    lines[edit.line - 1] = lines[edit.line - 1].replace(edit.old, edit.new, 1)
    return "\n".join(lines)


def inverse(edit: Edit) -> Edit:
    """The edit that puts the old token back, if `new` is then the first of its kind on the line."""
    return Edit(edit.line, edit.new, edit.old)


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try):
            yield from _definitions(child)


def _first(text: str, old: str, new: str) -> int | None:
    """Where sed would replace; None if that is nowhere, inside a longer word, or already `new`."""
    at = text.find(old)
    if at < 0 or (len(new) > len(old) and text.startswith(new, at)):
        return None
    before, after = text[at - 1 : at] if at else "", text[at + len(old) : at + len(old) + 1]
    return None if _joined(before, old[0]) or _joined(after, old[-1]) else at


def _joined(outside: str, edge: str) -> bool:
    """Whether a character outside a token belongs to the same word or number as the token's edge."""
    if edge.isdigit():
        return outside == "." or bool(_WORD.match(outside))
    return bool(_WORD.match(edge) and _WORD.match(outside))


@dataclass(frozen=True)
class _Snippet:
    """The source of one function, parsed alone; columns and line numbers are the file's."""

    lines: tuple[str, ...]
    line: int
    body_line: int
    texts: tuple[tuple[tuple[int, int], tuple[int, int]], ...]

    @classmethod
    def of(cls, lines: Sequence[str], function: Function) -> "_Snippet | None":
        own = tuple(text.rstrip("\n") for text in lines[function.line - 1 : function.end])
        try:
            tree = ast.parse(_wrapped(own))
        except SyntaxError:
            return None
        node = next(_definitions(tree), None)
        if node is None:
            return None
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if not body:
            return None
        shift = function.line - 2
        return cls(own, function.line, body[0].lineno + shift, tuple(_texts(_wrapped(own), shift)))

    def is_text(self, line: int, start: int, stop: int) -> bool:
        """Whether columns [start, stop) of a line touch a string or a comment."""
        return any((line, start) < end and begin < (line, stop) for begin, end in self.texts)

    def compiles_with(self, line: int, text: str) -> bool:
        own = [*self.lines]
        own[line - self.line] = text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `is 0` and the like warn, and are edits all the same
            try:
                compile(_wrapped(own), "<edit>", "exec", dont_inherit=True)
            except SyntaxError:
                return False
        return True


def _wrapped(own: Sequence[str]) -> str:
    """Function lines as a module of their own: one line above them opens their indentation, if any."""
    head = "if 1:" if own and own[0][:1].isspace() else ""
    return "\n".join((head, *own, ""))


def _texts(source: str, shift: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans (line, column) of strings and comments; a whole f-string counts as text."""
    opens: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        start, end = (token.start[0] + shift, token.start[1]), (token.end[0] + shift, token.end[1])
        if kind in ("STRING", "COMMENT"):
            yield start, end
        elif kind == "FSTRING_START":
            opens.append(start)
        elif kind == "FSTRING_END":
            yield opens.pop(), end
