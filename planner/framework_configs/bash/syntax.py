"""A shell script as a tree: commands, their words, and the pieces that words are expanded from.

Source: POSIX Shell Command Language, and the bash manual where it goes beyond (arrays, `[[`, `((`).
DocumentError where a script is no such tree; nothing is expanded here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.readers.input_limits import MOST_DEPTH


@dataclass(frozen=True, slots=True)
class LiteralText:
    """Literal characters."""

    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """`$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME[@]}`, `${#NAME}`."""

    name: str
    quoted: bool
    index: Word | None = None
    operator: str = ""
    word: Word = ()
    counted: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`$((...))`."""

    word: Word
    quoted: bool


@dataclass(frozen=True, slots=True)
class Substitution:
    """`$(...)` and its older form."""

    body: Node
    text: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """Text that no reader follows, such as `<(...)`."""

    text: str


Part = LiteralText | Expansion | Arithmetic | Substitution | Opaque
Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class VariableAssignment:
    """`NAME=word`, `NAME+=word`, `NAME[word]=word`, `NAME=(words)`."""

    name: str
    append: bool
    value: Word = ()
    array: tuple[tuple[Word | None, Word], ...] | None = None
    """Elements with the index that each states."""
    index: Word | None = None


@dataclass(slots=True)
class Simple:
    """A command with what is assigned before it, and the text that it reads."""

    assignments: tuple[VariableAssignment, ...]
    words: tuple[Word | VariableAssignment, ...]
    """Assignments are arguments of `export`, `declare` and their like."""
    stdin: list[Word] = field(default_factory=list)
    redirected: bool = False
    """True if its output is redirected."""
    file: Word | None = None
    """File that it goes to, if it becomes all of that file's content."""
    appends: bool = False
    """True if it goes behind what the file has."""


@dataclass(frozen=True, slots=True)
class TestCommand:
    """`[[ ... ]]`, a word each."""

    words: tuple[Word, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """`(( ... ))`."""

    word: Word


@dataclass(frozen=True, slots=True)
class Not:
    """`! command`."""

    command: Node


@dataclass(frozen=True, slots=True)
class PipeCommand:
    """Commands joined by `|`."""

    stages: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class AndOr:
    """Commands joined by `&&` and `||`."""

    first: Node
    others: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class CommandList:
    """Commands one after the other."""

    commands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class If:
    """`if`, `elif`, `else`."""

    branches: tuple[tuple[Node, Node], ...]
    otherwise: Node | None


@dataclass(frozen=True, slots=True)
class CaseCommand:
    """`case word in pattern) ... esac`."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Node], ...]


@dataclass(frozen=True, slots=True)
class For:
    """`for NAME in words`; None: of the positional parameters."""

    name: str
    words: tuple[Word, ...] | None
    body: Node


@dataclass(frozen=True, slots=True)
class CountedLoop:
    """`for ((begin; condition; step))`."""

    begin: Word
    condition: Word
    step: Word
    body: Node


@dataclass(frozen=True, slots=True)
class While:
    """`while`, and `until`."""

    condition: Node
    body: Node
    until: bool


@dataclass(frozen=True, slots=True)
class Subshell:
    """`( ... )`."""

    body: Node


@dataclass(frozen=True, slots=True)
class FunctionCommand:
    """`name() { ... }`."""

    name: str
    body: Node


Node = (
    Simple
    | TestCommand
    | Computed
    | Not
    | PipeCommand
    | AndOr
    | CommandList
    | If
    | CaseCommand
    | For
    | CountedLoop
    | While
    | Subshell
    | FunctionCommand
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\[)?", re.ASCII)
_BLANK = re.compile(r"(?:[ \t]|\\\r?\n)*")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|<>()#]+|#")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_IN_BRACES = re.compile(r"[^}\"\\$`']+")
_DELIMITER = re.compile(r"""[ \t]*((?:\\.|'[^'\n]*'|"[^"\n]*"|[^\s\\'";&|<>()])+)""")
_REDIRECTION = re.compile(r"(?:\d+|&|\{\w+\})?(?:<<<|<<-?|<&|>&|>>|>\||<>|[<>])(?!\()")
_SPECIAL = "@*#?-$!0123456789"
_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")


def parse(text: str, of: str = "script") -> CommandList:
    """Return the tree of a script; DocumentError names the line of an error."""
    parser = _Parser(text, of)
    body = parser.sequence(())
    if parser.at < len(text):
        parser.refuse(f"'{text[parser.at : parser.at + 10]}' has no beginning")
    return body


class _Parser:
    def __init__(self, text: str, of: str) -> None:
        self.text, self.of, self.at = text, of, 0
        self._depth = 0
        self._heredocs: list[tuple[str, bool, bool, Simple | None]] = []

    def refuse(self, reason: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        raise DocumentError(
            self.of, f"is no shell script that can be followed: line {line}: {reason}"
        )

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self.refuse(f"is nested more than {MOST_DEPTH} deep; write it flatter")

    # Commands.

    def sequence(self, ends: tuple[str, ...]) -> CommandList:
        """Return commands until a reserved word, or a closing bracket, of `ends`."""
        self._deeper()
        commands: list[Node] = []
        while True:
            self._gap()
            if self.at >= len(self.text) or self._ends(ends):
                self._depth -= 1
                return CommandList(tuple(commands))
            command = self._chain()
            self._blanks()
            if self._accept("&"):
                command = Subshell(command)
            elif not self._next(";;") and self._accept(";"):
                pass
            commands.append(command)

    def _ends(self, ends: tuple[str, ...]) -> bool:
        if self._next(")") or self._next(";;"):
            return True
        word = self._keyword()
        if word in _RESERVED and word not in ends:
            self.refuse(f"'{word}' stands where a command begins")
        return word in ends and word != ""

    def _chain(self) -> Node:
        first = self._pipeline()
        others: list[tuple[str, Node]] = []
        while True:
            self._blanks()
            sign = self.text[self.at : self.at + 2]
            if sign not in ("&&", "||"):
                return AndOr(first, tuple(others)) if others else first
            self.at += 2
            self._gap()
            others.append((sign, self._pipeline()))

    def _pipeline(self) -> Node:
        self._blanks()
        if self._keyword() == "!":
            self.at += 1
            return Not(self._pipeline_of_any())
        if self._keyword() == "time":
            self.at += 4
            self._blanks()
            if self._keyword() == "-p":
                self.at += 2
        return self._pipeline_of_any()

    def _pipeline_of_any(self) -> Node:
        stages = [self._command()]
        while True:
            self._blanks()
            if self._next("||") or not self._next("|"):
                return stages[0] if len(stages) == 1 else PipeCommand(tuple(stages))
            self.at += 2 if self._next("|&") else 1
            self._gap()
            stages.append(self._command())

    def _command(self) -> Node:
        self._blanks()
        self._deeper()
        node = self._compound()
        self._depth -= 1
        return node

    def _compound(self) -> Node:
        if self._next("(("):
            node: Node = self._arithmetic()
        elif self._accept("("):
            body = self.sequence(())
            self._expect(")")
            node = Subshell(body)
        else:
            word = self._keyword()
            reads: dict[str, Callable[[], Node]] = {
                "if": self._if,
                "for": self._for,
                "while": self._while,
                "until": self._while,
                "case": self._case,
                "{": self._group,
                "[[": self._test,
                "function": self._function,
            }
            if word not in reads:
                if word in ("select", "coproc"):
                    self.refuse(f"'{word}' is not followed")
                return self._simple()
            node = reads[word]()
        self._redirections(None)
        return node

    def _word_is(self, word: str) -> None:
        self._gap()
        if self._keyword() != word:
            self.refuse(f"'{word}' is missing")
        self.at += len(word)

    def _if(self) -> Node:
        branches: list[tuple[Node, Node]] = []
        otherwise: Node | None = None
        self._word_is("if")
        while True:
            condition = self.sequence(("then",))
            self._word_is("then")
            branches.append((condition, self.sequence(("elif", "else", "fi"))))
            word = self._keyword()
            if word == "elif":
                self.at += 4
                continue
            if word == "else":
                self.at += 4
                otherwise = self.sequence(("fi",))
            self._word_is("fi")
            return If(tuple(branches), otherwise)

    def _while(self) -> Node:
        until = self._keyword() == "until"
        self.at += 5
        condition = self.sequence(("do",))
        return While(condition, self._do(), until)

    def _do(self) -> Node:
        self._word_is("do")
        body = self.sequence(("done",))
        self._word_is("done")
        return body

    def _for(self) -> Node:
        self._word_is("for")
        self._blanks()
        if self._accept("(("):
            return self._counted_loop()
        name = self._name()
        words: list[Word] | None = None
        self._gap()
        if self._keyword() == "in":
            self.at += 2
            words = []
            while word := self._word():
                words.append(word)
        self._blanks()
        self._accept(";")
        return For(name, None if words is None else tuple(words), self._do())

    def _counted_loop(self) -> Node:
        begin = self.at
        self._until_brackets()
        parts = self.text[begin : self.at - 2].split(";")
        if len(parts) != 3:
            self.refuse("'for ((' has no three parts")
        first, condition, step = (self._inner_parser(part)._quoted_text("") for part in parts)
        self._blanks()
        self._accept(";")
        self._gap()
        body = self._group() if self._keyword() == "{" else self._do()
        return CountedLoop(first, condition, step, body)

    def _case(self) -> Node:
        self._word_is("case")
        word = self._word()
        self._word_is("in")
        branches: list[tuple[tuple[Word, ...], Node]] = []
        while True:
            self._gap()
            if self._keyword() == "esac":
                self.at += 4
                return CaseCommand(word, tuple(branches))
            self._accept("(")
            patterns = [self._word()]
            self._blanks()
            while self._accept("|"):
                patterns.append(self._word())
                self._blanks()
            self._expect(")")
            body = self.sequence(("esac",))
            branches.append((tuple(patterns), body))
            if self._next(";;&") or self._next(";&"):
                self.refuse("';&' is not followed")
            if not self._accept(";;") and self._keyword() != "esac":
                self.refuse("';;' is missing")

    def _group(self) -> Node:
        self._word_is("{")
        body = self.sequence(("}",))
        self._word_is("}")
        return body

    def _function(self) -> Node:
        self._word_is("function")
        self._blanks()
        name = self._function_name()
        self._blanks()
        if self._accept("("):
            self._expect(")")
        self._gap()
        return FunctionCommand(name, self._command())

    def _function_name(self) -> str:
        match = re.compile(r"[\w.-]+").match(self.text, self.at)
        if match is None:
            self.refuse("a function has no name")
        self.at = match.end()
        return match[0]

    def _test(self) -> Node:
        self._word_is("[[")
        words: list[Word] = []
        while True:
            self._gap()
            if self._keyword() == "]]":
                self.at += 2
                return TestCommand(tuple(words))
            sign = next((s for s in ("&&", "||", "(", ")", "<", ">") if self._next(s)), "")
            if sign:
                self.at += len(sign)
                words.append((LiteralText(sign, quoted=False),))
                continue
            word = self._word(
                pattern=bool(words) and words[-1] == (LiteralText("=~", quoted=False),)
            )
            if not word:
                self.refuse("']]' is missing")
            words.append(word)

    def _arithmetic(self) -> Node:
        self.at += 2
        return Computed(self._until_brackets())

    def _simple(self) -> Node:
        command = Simple((), ())
        assignments: list[VariableAssignment] = []
        words: list[Word | VariableAssignment] = []
        declares = False
        while True:
            self._blanks()
            if self._redirection(command):
                continue
            if not words or declares:
                assignment = self._assignment()
                if assignment is not None:
                    (words if words else assignments).append(assignment)
                    continue
            word = self._word()
            if not word:
                break
            if not words:
                name = word[0].text if isinstance(word[0], LiteralText) and len(word) == 1 else ""
                declares = name in DECLARATIONS
                self._blanks()
                if name and not assignments and self._next("("):
                    self.at += 1
                    self._expect(")")
                    self._gap()
                    return FunctionCommand(name, self._command())
            words.append(word)
        command.assignments, command.words = tuple(assignments), tuple(words)
        if not assignments and not words and not command.stdin and not command.redirected:
            self.refuse(f"'{self.text[self.at : self.at + 10]}' is no command")
        return command

    def _assignment(self) -> VariableAssignment | None:
        begin = self.at
        match = _ASSIGN.match(self.text, begin)
        if match is None:
            return None
        self.at = match.end()
        index: Word | None = None
        if match[2]:
            index = self._until("]")
            if index is None:
                self.at = begin
                return None
        append = self._next("+=")
        if not append and not self._next("="):
            self.at = begin
            return None
        self.at += 2 if append else 1
        if not self._accept("("):
            value = () if self._blank_is_next() else self._word(begins=False)
            return VariableAssignment(match[1], append, value, index=index)
        elements: list[tuple[Word | None, Word]] = []
        while True:
            self._gap()
            if self._accept(")"):
                return VariableAssignment(match[1], append, array=tuple(elements), index=index)
            key: Word | None = None
            if self._next("["):
                place = self.at
                self.at += 1
                key = self._until("]")
                if key is None or not self._accept("="):
                    self.at, key = place, None
            word = self._word()
            if not word and key is None:
                self.refuse("')' of an array is missing")
            elements.append((key, word))

    def _until(self, end: str) -> Word | None:
        """Return the text before a bracket of this line; None if there is none."""
        line_end = self.text.find("\n", self.at, self.at + 200)
        place = self.text.find(end, self.at, self.at + 200)
        if place < 0 or 0 <= line_end < place:
            return None
        inside = self.text[self.at : place]
        if re.search(r"[\s;&|<>()]", inside):
            return None
        self.at = place + 1
        return self._inner_parser(inside)._quoted_text("")

    def _inner_parser(self, text: str) -> _Parser:
        parser = _Parser(text, self.of)
        parser._depth = self._depth + 1
        return parser

    # Redirections.

    def _redirections(self, command: Simple | None) -> None:
        self._blanks()
        while self._redirection(command):
            self._blanks()

    def _redirection(self, command: Simple | None) -> bool:
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        sign = match[0].lstrip("0123456789&")
        if sign in ("<<", "<<-"):
            delimiter = _DELIMITER.match(self.text, self.at)
            if delimiter is None:
                self.refuse("'<<' has no word")
            self.at = delimiter.end()
            plain = re.sub(r"\\(.)|['\"]", r"\1", delimiter[1])
            self._heredocs.append((plain, sign == "<<-", plain == delimiter[1], command))
            return True
        self._blanks()
        word = self._word()
        if not word and not sign.endswith("&"):
            self.refuse(f"'{sign}' has no word")
        if command is not None:
            if sign == "<<<":
                command.stdin.append((*word, LiteralText("\n", quoted=True)))
            elif sign.startswith(">") and match[0][:1] not in "23456789":
                command.redirected = True
                command.file, command.appends = word or None, sign == ">>"
            elif sign.startswith("<"):
                command.stdin.append((Opaque("a file"),))
        return True

    def _read_heredocs(self) -> None:
        for delimiter, tabs, expands, command in self._heredocs:
            lines: list[str] = []
            while True:
                if self.at >= len(self.text):
                    break
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end].rstrip("\r")
                self.at = min(end + 1, len(self.text))
                line = line.lstrip("\t") if tabs else line
                if line == delimiter:
                    break
                lines.append(f"{line}\n")
            body = "".join(lines)
            if command is not None:
                word: Word = (LiteralText(body, quoted=True),)
                if expands:
                    word = self._inner_parser(body)._quoted_text("")
                command.stdin.append(word)
        self._heredocs = []

    # Words.

    def _blank_is_next(self) -> bool:
        return self.text[self.at : self.at + 1] in (" ", "\t")

    def _word(self, *, pattern: bool = False, begins: bool = True) -> Word:
        """Return the word that begins here, or goes on; none where a sign or a gap does."""
        self._blanks()
        parts: list[Part] = []
        if begins and self.text[self.at : self.at + 1] == "#":
            return ()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace() or char in ";&|<>()":
                if char in "<>" and self.text[self.at + 1 : self.at + 2] == "(":
                    parts.append(self._process())
                    continue
                if pattern and char in "()|":
                    self.at += 1
                    parts.append(LiteralText(char, quoted=False))
                    continue
                break
            self._part(char, parts)
        return tuple(parts)

    def _part(self, char: str, parts: list[Part]) -> None:
        if char == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            if following == "\r" and self._next("\n"):
                self.at += 1
            elif following != "\n":
                parts.append(LiteralText(following or "\\", quoted=True))
        elif char == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                self.refuse("a quote is not closed")
            parts.append(LiteralText(self.text[self.at + 1 : end], quoted=True))
            self.at = end + 1
        elif char == '"':
            self.at += 1
            inside = self._quoted_text('"')
            if not (len(inside) == 1 and _is_list(inside[0])):  # no word where a list is empty
                parts.append(LiteralText("", quoted=True))
            parts += inside
        elif char in "$`":
            self._dollar(parts, quoted=False)
        else:
            match = _PLAIN.match(self.text, self.at)
            if match is None:
                self.refuse(f"'{char}' is no part of a word")
            self.at = match.end()
            parts.append(LiteralText(match[0], quoted=False))

    def _quoted_text(self, end: str) -> Word:
        """Return the text before a closing double quote, or before the end."""
        parts: list[Part] = []
        self._deeper()
        while True:
            if self.at >= len(self.text):
                if end:
                    self.refuse("a quote is not closed")
                break
            char = self.text[self.at]
            if char == end:
                self.at += 1
                break
            if char == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if following in ("$", "`", "\\") or (following == '"' and end):
                    parts.append(LiteralText(following, quoted=True))
                elif following != "\n":
                    parts.append(LiteralText("\\" + following, quoted=True))
            elif char in "$`":
                self._dollar(parts, quoted=True)
            else:
                match = _IN_QUOTES.match(self.text, self.at)
                taken = match[0] if match else char
                self.at += len(taken)
                parts.append(LiteralText(taken, quoted=True))
        self._depth -= 1
        return tuple(parts)

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        begin = self.at
        if self.text[begin] == "`":
            self._backtick(parts, quoted=quoted)
            return
        following = self.text[begin + 1 : begin + 2]
        self.at += 2
        if following == "{":
            parts.append(self._braces(quoted=quoted))
        elif self.text.startswith("((", begin + 1):
            self.at += 1
            parts.append(Arithmetic(self._until_brackets(), quoted))
        elif following == "(":
            body = self.sequence(())
            self._expect(")")
            parts.append(Substitution(body, self.text[begin : self.at], quoted))
        elif following == "'" and not quoted:
            match = re.compile(r"((?:\\.|[^'\\])*)'", re.DOTALL).match(self.text, self.at)
            if match is None:
                self.refuse("a quote is not closed")
            self.at = match.end()
            parts.append(LiteralText(_unescape(match[1]), quoted=True))
        elif following == '"' and not quoted:
            parts += self._quoted_text('"')
        elif following and following in _SPECIAL:
            parts.append(Expansion(following, quoted))
        elif match := _NAME.match(self.text, begin + 1):
            self.at = match.end()
            parts.append(Expansion(match[0], quoted))
        else:
            self.at = begin + 1
            parts.append(LiteralText("$", quoted=quoted))

    def _backtick(self, parts: list[Part], *, quoted: bool) -> None:
        match = re.compile(r"`((?:\\.|[^`\\])*)`", re.DOTALL).match(self.text, self.at)
        if match is None:
            self.refuse("a backquote is not closed")
        inside = re.sub(r"\\([`\\$])", r"\1", match[1])
        nested = self._inner_parser(inside)
        body = nested.sequence(())
        if nested.at < len(inside):
            self.refuse("a backquote ends early")
        self.at = match.end()
        parts.append(Substitution(body, match[0], quoted))

    def _process(self) -> Part:
        begin = self.at
        self.at += 2
        self.sequence(())
        self._expect(")")
        return Opaque(self.text[begin : self.at])

    def _braces(self, *, quoted: bool) -> Part:
        """Return the parameter of `${...}`, whose brace is open."""
        counted = self._next("#") and not self._next("#}")
        indirect = self._next("!")
        if counted or indirect:
            self.at += 1
        match = _NAME.match(self.text, self.at)
        if match is not None:
            name, self.at = match[0], match.end()
        else:
            digits = re.compile(r"\d+|[@*#?$!-]").match(self.text, self.at)
            if digits is None:
                self.refuse("'${' has no name")
            name, self.at = digits[0], digits.end()
        index: Word | None = None
        if self._accept("["):
            index = self._until("]")
            if index is None:
                self.refuse("an index is not closed")
        if self._accept("}"):
            if indirect:
                return Expansion(name, quoted, index, operator="!")
            return Expansion(name, quoted, index, counted=counted)
        if counted or indirect:
            self.refuse("'${#' and '${!' are followed with a name alone")
        signs = (":-", "-", ":=", "=", ":+", "+", ":?", "?", "##", "#", "%%", "%", "//", "/",
                 "^^", "^", ",,", ",", ":", "@")  # fmt: skip
        sign = next((sign for sign in signs if self._next(sign)), None)
        if sign is None:
            self.refuse("'${' is not closed")
        self.at += len(sign)
        default = sign[-1] in "-=+?"  # quotes around a pattern do not quote it
        return Expansion(name, quoted, index, sign, self._brace_word(quoted=quoted and default))

    def _brace_word(self, *, quoted: bool) -> Word:
        parts: list[Part] = []
        self._deeper()
        while True:
            if self.at >= len(self.text):
                self.refuse("'${' is not closed")
            char = self.text[self.at]
            if char == "}":
                self.at += 1
                self._depth -= 1
                return tuple(parts)
            match = _IN_BRACES.match(self.text, self.at)
            if match is not None:
                self.at = match.end()
                parts.append(LiteralText(match[0], quoted=quoted))
            elif char == "'" and quoted:
                self.at += 1
                parts.append(LiteralText("'", quoted=True))
            else:
                self._part(char, parts)

    def _until_brackets(self) -> Word:
        """Return the text of an expression before its `))`."""
        begin, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == ")" and depth == 0:
                if not self._next("))"):
                    break
                inside = self.text[begin : self.at]
                self.at += 2
                return self._inner_parser(inside)._quoted_text("")
            depth += (char == "(") - (char == ")")
            self.at += 1
        return self.refuse("'((' is not closed")

    # Signs.

    def _keyword(self) -> str:
        """Return the plain word at this place, up to the next sign."""
        match = re.compile(r"[^\s;&|<>()\"'$`\\]+").match(self.text, self.at, self.at + 20)
        return match[0] if match else ""

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            self.refuse("a name is missing")
        self.at = match.end()
        return match[0]

    def _next(self, sign: str) -> bool:
        return self.text.startswith(sign, self.at)

    def _accept(self, sign: str) -> bool:
        if self._next(sign):
            self.at += len(sign)
            return True
        return False

    def _expect(self, sign: str) -> None:
        self._gap()
        if not self._accept(sign):
            self.refuse(f"'{sign}' is missing")

    def _blanks(self) -> None:
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing too

    def _gap(self) -> None:
        """Go past blanks, comments and ends of lines; here-documents are read."""
        while True:
            self._blanks()
            if self.at >= len(self.text):
                return
            char = self.text[self.at]
            if char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n":
                self.at += 1
                if self._heredocs:
                    self._read_heredocs()
            elif char == "\r":
                self.at += 1
            else:
                return


def _is_list(part: Part) -> bool:
    """Return True if a part is `"${NAME[@]}"` or `"$@"`."""
    if not isinstance(part, Expansion) or part.counted:
        return False
    return part.name == "@" or part.index == (LiteralText("@", quoted=True),)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "e": "\x1b", "E": "\x1b", "b": "\b",
            "f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?"}  # fmt: skip
_ESCAPED = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|(.))", re.DOTALL
)


def _unescape(text: str) -> str:
    """Return the text of `$'...'`."""
    return _ESCAPED.sub(_character_of, text)


def _character_of(match: re.Match[str]) -> str:
    for digits, base in ((match[1], 16), (match[2], 16), (match[3], 16), (match[4], 8)):
        if digits:
            return chr(min(int(digits, base), 0x10FFFF))
    return _ESCAPES.get(match[5], match[0])
