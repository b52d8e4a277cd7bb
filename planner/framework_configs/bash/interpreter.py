"""Interpreter of shell scripts: lists the commands that a script starts, and executes none.

A value that the script does not contain (an unset variable, the output of a program) stays unknown
and keeps its name.  Where a condition depends on one, every way through the script is followed:
`ScriptPath` has the commands of one, and what was decided on it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import PurePosixPath

from meshwright.planner.errors import DocumentError
from meshwright.planner.framework_configs.bash import arithmetic, patterns, syntax
from meshwright.planner.framework_configs.bash.arithmetic import NoNumberError
from meshwright.planner.framework_configs.bash.patterns import NoPatternError, Piece
from meshwright.planner.framework_configs.bash.syntax import (
    AndOr,
    Arithmetic,
    CaseCommand,
    CommandList,
    Computed,
    CountedLoop,
    Expansion,
    For,
    FunctionCommand,
    If,
    LiteralText,
    Node,
    Not,
    Opaque,
    Part,
    PipeCommand,
    Simple,
    Subshell,
    Substitution,
    TestCommand,
    VariableAssignment,
    While,
    Word,
)
from meshwright.planner.framework_configs.readers.input_limits import MOST_DEPTH, ReadingLimit

MOST_WAYS = 64
"""Largest number of ways through a script that are followed."""
MOST_ROUNDS = 1_000
"""Largest number of rounds of a loop."""
BEGIN, END = "\x01", "\x02"
"""Characters around the name of an unknown value."""
_UNKNOWN = re.compile(rf"{BEGIN}\*?([^{BEGIN}{END}]*){END}")
_OPEN = BEGIN + "*"
"""Prefix of an unknown value that may be no word, or several."""
_LONGEST_IN_BRACES = 1_000
"""Characters of a word whose braces are expanded."""

_HARMLESS_WORDS = """
    echo printf cd pushd popd mkdir rmdir module ml conda micromamba mamba pip pip3 sleep
    rm cp mv ln ls cat tee touch tail head date hostname nvidia-smi rocm-smi git wget curl
    tar unzip chmod chown which type ulimit umask trap wait kill pkill set shopt unset
    alias unalias hash jobs true false : return exit test [ read printenv dirname basename
    realpath readlink scontrol squeue sinfo scancel pwd whoami id uname df du free lscpu
    ps grep sed awk sort uniq wc find seq nproc numfmt tr cut diff md5sum sha256sum
    huggingface-cli hf wandb rsync scp zip gzip apt apt-get yum brew uv virtualenv source
    . deactivate sync logger xargs jq yq openssl docker-compose nsys-ui ibstat ibv_devinfo
    ip ifconfig getent ping nc clear tput stty
"""
HARMLESS = frozenset(_HARMLESS_WORDS.split())
"""Commands that train nothing; their words are ignored."""
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_BEFORE_WORDS = """
    exec nohup time command builtin sudo nice stdbuf setsid chrt ionice
"""
_BEFORE = frozenset(_BEFORE_WORDS.split())
"""Words before a command that do not change it."""
_ELSEWHERE_WORDS = """
    srun mpirun mpiexec mpiexec.hydra docker podman singularity apptainer kubectl enroot
    ssh pdsh clush parallel-ssh flux jsrun aprun prun deepspeed accelerate torchrun python
    python3 numactl taskset timeout env oc nsys ncu salloc xargs screen tmux unbuffer
"""
_ELSEWHERE = frozenset(_ELSEWHERE_WORDS.split())
"""Programs that start the command among their arguments."""
_ENVIRONMENTS = frozenset(("conda", "mamba", "micromamba", "uv", "poetry", "pixi", "pipenv", "pdm"))
"""Programs whose `run` starts the command among their arguments."""


class _Stop(Exception):  # noqa: N818 - an end, not an error
    """The end of a script, a function or a loop."""

    def __init__(self, what: str, count: int = 1, succeeds: bool | None = True) -> None:
        super().__init__(what)
        self.what, self.count, self.succeeds = what, count, succeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEnvironment:
    """Known surroundings of a script where it runs."""

    values: Mapping[str, str] = field(default_factory=dict)
    """Values of variables, of positional parameters (`1`) and of conditions by their text
    (`yes`)."""
    files: Callable[[str], str | None] = lambda _: None
    """Function that returns the text of a file beside this script."""
    written: dict[str, str | None] = field(default_factory=dict)
    """Texts of files that the script writes itself; None where it may write several."""

    def text_of(self, name: str) -> str | None:
        """Return the text of a file that the script has written, or that stands beside it."""
        name = name.removeprefix("./")
        return self.written[name] if name in self.written else self.files(name)

    def write(self, name: str, text: str | None) -> None:
        """Note what a script writes; a file of two texts has neither."""
        name = name.removeprefix("./")
        self.written[name] = text if self.written.get(name, text) == text else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPath:
    """One way through a script."""

    commands: tuple[tuple[str, ...], ...]
    """Words of each command that may train; unknown values are written `${NAME}`."""
    decisions: tuple[tuple[str, bool], ...]
    """Conditions with unknown values, and their assumed outcomes."""
    unfollowed: tuple[str, ...]
    """Scripts that other commands run and that are not there."""
    environment: Mapping[tuple[str, ...], Mapping[str, str]] = field(default_factory=dict)
    """Exported variables that each command finds, by its words; unknown values are written
    `${NAME}`."""


def ways(
    text: str, surroundings: ScriptEnvironment | None = None, of: str = "script"
) -> list[ScriptPath]:
    """Return the ways through a script that differ in what is started.

    DocumentError where there are too many, or where one is much longer than the script.
    """
    if BEGIN in text or END in text:
        raise DocumentError(of, "has control characters; give the script as text")
    body = syntax.parse(text, of)
    budget = ReadingLimit(of)
    surroundings = surroundings or ScriptEnvironment()
    waiting: list[tuple[bool, ...]] = [()]
    results: dict[tuple[tuple[str, ...], ...], ScriptPath] = {}
    followed = 0
    decided: list[tuple[str, bool]] = []
    while waiting:
        if followed == MOST_WAYS:
            names = ", ".join(dict.fromkeys(text for text, _ in decided))
            raise DocumentError(
                of,
                f"has more than {MOST_WAYS} ways through it; give the variables that decide: "
                f"{names:.200} (--set NAME=VALUE; all arguments: --set '@=FIRST SECOND')",
            )
        planned = waiting.pop()
        run = _Run(surroundings, budget, planned, of)
        run.follow(body)
        decided = run.decisions
        followed += 1
        for at in range(len(planned), len(run.decisions)):
            chosen = tuple(choice for _, choice in run.decisions[:at])
            waiting.append((*chosen, not run.decisions[at][1]))
        way = ScriptPath(
            commands=tuple(dict.fromkeys(run.commands)),
            decisions=tuple(run.decisions),
            unfollowed=tuple(dict.fromkeys(run.unfollowed)),
            environment=run.environment,
        )
        results.setdefault(way.commands, way)
    return list(results.values())


def unknown_names(word: str) -> list[str]:
    """Return the names of the unknown values in a word."""
    return _UNKNOWN.findall(word)


def _bash_text(word: str) -> str:
    """Return a word with unknown values as bash writes them."""
    return _UNKNOWN.sub(lambda match: _by_name(match[1]), word)


def _by_name(name: str) -> str:
    return "${" + name + "}" if re.fullmatch(r"\w+(\[[^\]]*\])?", name) else name


def _beside_script(name: str) -> str | None:
    """Return a path from the folder of a script; None where an unknown part is not that folder."""
    unknown = unknown_names(name)
    if not unknown:
        return name
    path = name.rpartition(END)[2]
    is_folder = all(_OWN_FOLDER.search(part) for part in unknown) and path.startswith("/")
    return path.lstrip("/") if is_folder else None


_OWN_FOLDER = re.compile(r"dirname|\bpwd\b|BASH_SOURCE|readlink|realpath")
"""Parts of expressions by which a script finds its own folder."""


def _unknown(name: str) -> str:
    return BEGIN + name[:60].replace(BEGIN, "").replace(END, "") + END


def _with_home(pieces: list[Piece]) -> list[Piece]:
    """Return a word whose tilde names a folder with that folder; another tilde is a character.

    A login name that no system has stays as it is, as Hydra's `~section.key`.
    """
    if not pieces or pieces[0][1] or not pieces[0][0].startswith("~"):
        return pieces
    login, slash, rest = pieces[0][0][1:].partition("/")
    if login and not re.fullmatch(r"[+-]|[a-z_][a-z0-9_-]*", login):
        return pieces
    folder = _unknown(f"~{login}" if login else "HOME")
    return [(folder, False), (slash + rest, False), *pieces[1:]]


Value = str | list[str] | dict[str, str]


@dataclass(slots=True)
class _ShellVariables:
    """Variables, functions and arguments of a shell."""

    variables: dict[str, Value | None] = field(default_factory=dict)
    """Values of variables; None of those that are known to be unset."""
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Node] = field(default_factory=dict)
    exported_functions: set[str] = field(default_factory=set)
    arguments: list[str] = field(default_factory=list)
    keyed: set[str] = field(default_factory=set)
    readonly: set[str] = field(default_factory=set)
    traps: dict[str, str] = field(default_factory=dict)
    """Scripts that run at the end of this shell, or where a command fails."""
    ends_by_failure: bool = False
    """True under `set -e`."""
    traps_errors_inside: bool = False
    """True under `set -E`."""
    exports_all: bool = False
    """True under `set -a`."""
    frames: list[dict[str, Value | None]] = field(default_factory=list)

    def copy(self) -> _ShellVariables:
        """Return the state of a subshell."""
        copied = {
            name: value.copy() if isinstance(value, list | dict) else value
            for name, value in self.variables.items()
        }
        return replace(
            self,
            variables=copied,
            exported=set(self.exported),
            functions=dict(self.functions),
            exported_functions=set(self.exported_functions),
            arguments=list(self.arguments),
            keyed=set(self.keyed),
            readonly=set(self.readonly),
            traps={},
            frames=[dict(frame) for frame in self.frames],
        )


class _Run:
    """One way through a script, in the making."""

    def __init__(
        self,
        surroundings: ScriptEnvironment,
        budget: ReadingLimit,
        planned: tuple[bool, ...],
        of: str,
    ) -> None:
        self.around, self.budget, self.planned, self.of = surroundings, budget, planned, of
        self.decisions: list[tuple[str, bool]] = []
        self._decided: dict[str, bool] = {}
        self.commands: list[tuple[str, ...]] = []
        self.environment: dict[tuple[str, ...], dict[str, str]] = {}
        self.unfollowed: list[str] = []
        self.state = _ShellVariables()
        numbered = [name for name in surroundings.values if name.isdecimal() and name != "0"]
        self.state.arguments = [
            surroundings.values.get(str(at), _unknown(str(at)))
            for at in range(1, 1 + max(map(int, numbered), default=0))
        ][:100]
        self._captured: list[str] | None = None
        self._substituted: bool | None = True
        self._tests_open = 0
        self._prefix: tuple[str, ...] = ()
        self._depth = 0

    def refuse(self, reason: str) -> DocumentError:
        return DocumentError(self.of, reason)

    def follow(self, body: Node) -> None:
        """Follow a script to its end."""
        with contextlib.suppress(_Stop):
            self._run_to_end(body)

    def _run_to_end(self, body: Node) -> bool | None:
        """Follow all commands of a shell, and what it has for its end."""
        try:
            try:
                return self.run(body)
            except _Stop as stop:
                if stop.what == "exec":
                    self.state.traps.clear()
                if stop.what in ("break", "continue"):
                    return True
                raise
        finally:
            at_end = self.state.traps.pop("EXIT", "")
            if at_end:
                with contextlib.suppress(_Stop):
                    self._script(at_end, self.state)

    def _decide(self, text: str) -> bool:
        """Return the outcome of an unknown condition on this way."""
        text = _bash_text(text)
        settled = self.around.values.get(text)
        if settled is not None:
            return settled.lower() in ("yes", "true", "1")
        if text not in self._decided:
            at = len(self.decisions)
            choice = self.planned[at] if at < len(self.planned) else False
            self.decisions.append((text, choice))
            self._decided[text] = choice
        return self._decided[text]

    # Commands.

    def run(self, node: Node) -> bool | None:
        """Follow a command; return whether it succeeds, None if that is unknown."""
        self.budget.spend(8)
        self._depth += 1
        if self._depth > 3 * MOST_DEPTH:
            raise self.refuse(f"calls itself more than {MOST_DEPTH} times")
        try:
            return self._run(node)
        finally:
            self._depth -= 1

    def _run(self, node: Node) -> bool | None:  # noqa: PLR0911, PLR0912 - a case for each form
        match node:
            case CommandList(commands):
                status: bool | None = True
                for command in commands:
                    status = self.run(command)
                    if status is False:
                        self._fail(command)
                return status
            case AndOr(first, others):
                status = self._run_tested(first)
                for at, (sign, command) in enumerate(others, start=1):
                    if status is None:
                        status = self._unknown_status(first)
                    if status == (sign == "&&"):
                        if at < len(others):
                            status = self._run_tested(command)
                        else:
                            status = self.run(command)
                            if status is False:
                                self._fail(command)
                        first = command
                return status
            case Not(command):
                status = self._run_tested(command)
                return None if status is None else not status
            case PipeCommand(stages):
                return self._pipeline(stages)
            case If(branches, otherwise):
                for condition, body in branches:
                    if self._is_true(condition):
                        return self.run(body)
                return True if otherwise is None else self.run(otherwise)
            case CaseCommand():
                return self._case(node)
            case For():
                return self._run_loop(node)
            case CountedLoop():
                return self._run_counted(node)
            case While():
                return self._while(node)
            case Subshell(body):
                return self._run_subshell(body)
            case FunctionCommand(name, body):
                self.state.functions[name] = body
                return True
            case TestCommand(words):
                return self._test([self._pieces(word) for word in words], double=True)
            case Computed(word):
                return self._arithmetic(word)
            case Simple():
                return self._simple(node)

    def _run_tested(self, node: Node) -> bool | None:
        """Follow a command whose failure decides something, which ends no shell."""
        self._tests_open += 1
        try:
            return self.run(node)
        finally:
            self._tests_open -= 1

    def _fail(self, command: Node) -> None:
        """Take a failure that nothing tests as `set -e` and a trap of errors do."""
        simple = Simple | TestCommand | Computed | PipeCommand | Subshell
        if self._tests_open or not isinstance(command, simple):
            return
        inside = bool(self.state.frames) and not self.state.traps_errors_inside
        if (at_error := self.state.traps.get("ERR", "")) and not inside:
            self._run_tested(syntax.parse(at_error, self.of))
        if self.state.ends_by_failure:
            raise _Stop("exit", succeeds=False)

    def _unknown_status(self, node: Node) -> bool:
        """Return how `a && b` takes an `a` whose end is unknown: tests either way, others well."""
        if isinstance(node, Not):
            return not self._unknown_status(node.command)
        text = self._text_of(node)
        return self._decide(text) if text else True

    def _text_of(self, node: Node) -> str:
        """Return the text of a test; none of other commands."""
        if isinstance(node, TestCommand):
            words = [_join_pieces(self._pieces(word)) for word in node.words]
            return f"[[ {' '.join(words)} ]]"
        if isinstance(node, Simple) and node.words:
            words = self._fields(node.words)
            if words and words[0] in ("[", "test"):
                return " ".join(words)
        return ""

    def _is_true(self, condition: Node) -> bool:
        status = self._run_tested(condition)
        return self._outcome(condition) if status is None else status

    def _outcome(self, condition: Node) -> bool:
        """Return the outcome on this way of a condition that known values do not decide."""
        last = condition
        while isinstance(last, CommandList) and last.commands:
            last = last.commands[-1]
        if isinstance(last, Not):
            inner = last.command
            text = self._text_of(inner) or self._command_name(inner)
            return not self._decide(text)
        return self._decide(self._text_of(last) or self._command_name(last))

    def _command_name(self, node: Node) -> str:
        """Return the words of a command as the name of its end."""
        while isinstance(node, AndOr | PipeCommand):
            node = node.first if isinstance(node, AndOr) else node.stages[-1]
        if isinstance(node, Simple):
            return " ".join(self._fields(node.words))[:80] or "a command"
        return "(( ))" if isinstance(node, Computed) else "a command"

    def _run_subshell(self, body: Node) -> bool | None:
        """Follow commands in a shell of their own."""
        before, self.state = self.state, self.state.copy()
        self.budget.spend(len(before.variables) * 4)
        try:
            return self._run_to_end(body)
        except _Stop as stop:
            return stop.succeeds
        finally:
            self.state = before

    def _pipeline(self, stages: tuple[Node, ...]) -> bool | None:
        for first, second in pairwise(stages):
            if isinstance(second, Simple) and self._reads_script(second):
                output = self._output(first)
                if output is None or unknown_names(output):
                    raise self.refuse("a shell reads a script from a pipe that is not known")
                return self._script(output, self.state.copy())
        status: bool | None = True
        for stage in stages:
            captured = self._captured
            if stage is not stages[-1]:
                self._captured = None
            status = self._run_subshell(stage)
            if captured is not None and len(stages) > 1:
                captured.append(_unknown("$(" + self._command_name(stages[-1]) + ")"))
            self._captured = captured
        return status

    def _reads_script(self, command: Simple) -> bool:
        words = self._fields(command.words)
        return bool(words) and words[0] in _SHELLS and all(w.startswith("-") for w in words[1:])

    def _case(self, node: CaseCommand) -> bool | None:
        text = _join_pieces(self._pieces(node.word))
        for alternatives, body in node.branches:
            for pattern in alternatives:
                pieces = self._pieces(pattern)
                if self._matches(pieces, text):
                    return self.run(body)
        return True

    def _matches(self, pieces: list[Piece], text: str) -> bool:
        plain = _join_pieces(pieces)
        if plain == "*" and not any(quoted for _, quoted in pieces):
            return True
        if not unknown_names(text) and not unknown_names(plain):
            try:
                return patterns.matches(pieces, text)
            except NoPatternError:
                pass
        return self._decide(f"{text} = {plain}")

    def _run_loop(self, node: For) -> bool | None:
        words = list(self.state.arguments) if node.words is None else self._fields(node.words)
        status: bool | None = True
        for word in words[: MOST_ROUNDS + 1]:
            if _is_open([word]) and not self._decide(f"for {node.name} in {word}"):
                continue
            self.state.variables[node.name] = word
            try:
                status = self.run(node.body)
            except _Stop as stop:
                if self._leaves(stop):
                    break
        if len(words) > MOST_ROUNDS:
            raise self.refuse(f"has a loop of more than {MOST_ROUNDS:,} rounds")
        return status

    def _run_counted(self, node: CountedLoop) -> bool | None:
        self._arithmetic(node.begin)
        for _ in range(MOST_ROUNDS):
            if node.condition and not self._condition_value(node.condition):
                return True
            if self._ends_in(node.body):
                return True
            self._arithmetic(node.step)
        raise self.refuse(f"has a loop of more than {MOST_ROUNDS:,} rounds")

    def _condition_value(self, condition: Word) -> bool:
        value = self._arithmetic(condition)
        if value is None:
            text = _bash_text(_join_pieces(self._pieces(condition)))
            raise self.refuse(f"for ((...)) ends by {text:.60}, which is not known")
        return value

    def _while(self, node: While) -> bool | None:
        for _ in range(MOST_ROUNDS):
            before = self.state.copy().variables, list(self.state.arguments), list(self.commands)
            status = self._run_tested(node.condition)
            decided = status is None
            if status is None:
                status = self._outcome(node.condition)
            if status == node.until:
                return True
            if self._ends_in(node.body):
                return True
            now = self.state.variables, self.state.arguments, list(dict.fromkeys(self.commands))
            if decided or now == (before[0], before[1], list(dict.fromkeys(before[2]))):
                return True
        raise self.refuse(f"has a loop of more than {MOST_ROUNDS:,} rounds")

    def _ends_in(self, body: Node) -> bool:
        """Run a round of a loop; return True if the loop ends in it."""
        try:
            self.run(body)
        except _Stop as stop:
            return self._leaves(stop)
        return False

    def _leaves(self, stop: _Stop) -> bool:
        """Return True if the loop ends; a stop of an outer loop is raised again."""
        if stop.what not in ("break", "continue"):
            raise stop
        if stop.count > 1:
            raise _Stop(stop.what, stop.count - 1)
        return stop.what == "break"

    # Values.

    def _value(self, name: str) -> Value | None:  # noqa: PLR0911 - a case for each form
        """Return the value of a variable or argument; None if it is unset."""
        state = self.state
        if name in state.variables:
            return state.variables[name]
        if name == "#":
            return _unknown("#") if _is_open(state.arguments) else str(len(state.arguments))
        if name in ("@", "*"):
            return list(state.arguments)
        if name.isdecimal() and name != "0":
            at = int(name[:6]) - 1
            if _is_open(state.arguments[: at + 1]):
                return _unknown(name)
            return state.arguments[at] if at < len(state.arguments) else None
        if name in ("?", "$", "!", "-", "0"):
            return _unknown(f"${name}" if name != "0" else "0")
        return self.around.values.get(name)

    def _store(self, name: str, value: Value) -> None:
        self.budget.spend(len(value) if isinstance(value, str) else sum(map(len, value)) + 1)
        if name == "IFS" and value != " \t\n":
            raise self.refuse("changes IFS, which is not followed")
        if name in self.state.readonly:
            raise self.refuse(f"sets {name}, which is read-only; give it one value")
        if self.state.exports_all:
            self.state.exported.add(name)
        self.state.variables[name] = value

    def _unset(self, name: str) -> None:
        if name in self.state.readonly:
            raise self.refuse(f"unsets {name}, which is read-only; leave it")
        if any(name in frame for frame in self.state.frames[:-1]):
            raise self.refuse(f"unsets {name}, which a function around has as its own")
        self.state.variables[name] = None
        self.state.keyed.discard(name)
        self.state.exported.discard(name)

    def _assign(self, assignment: VariableAssignment) -> None:
        name = assignment.name
        before = self._value(name)
        if assignment.array is not None:
            self._assign_array(assignment, before)
            return
        text = _join_pieces(self._pieces(assignment.value, tilde=True))
        if assignment.index is not None:
            key = _join_pieces(self._pieces(assignment.index))
            self._set_element(name, key, text, append=assignment.append)
            return
        if not assignment.append or before is None:
            if assignment.append and before is None:
                text = (self.around.values.get(name) or "") + text
            if isinstance(before, list) and not assignment.append:
                rest = [f"{_OPEN}{name}[@]{END}"] if _is_open(before[:1]) else []
                self._store(name, [text, *rest, *before[1:]])
                return
            self._store(name, text)
        elif isinstance(before, str):
            self.budget.spend(len(before))
            self._store(name, before + text)
        elif isinstance(before, list):
            self._store(name, [(before[0] if before else "") + text, *before[1:]])

    def _assign_array(self, assignment: VariableAssignment, before: Value | None) -> None:
        name = assignment.name
        elements = assignment.array or ()
        if name in self.state.keyed or any(key is not None for key, _ in elements):
            keyed: dict[str, str] = {}
            if assignment.append and isinstance(before, dict):
                keyed = dict(before)
            for key, word in elements:
                if key is None:
                    raise self.refuse(f"{name} has elements with and without an index")
                keyed[_join_pieces(self._pieces(key))] = _join_pieces(self._pieces(word))
            if name not in self.state.keyed:
                raise self.refuse(f"{name}: an array of stated indices is not followed")
            self._store(name, keyed)
            return
        words = self._fields(tuple(word for _, word in elements))
        if assignment.append and before is not None:
            words = [*(before if isinstance(before, list) else [str(before)]), *words]
        self._store(name, words)

    def _set_element(self, name: str, key: str, text: str, *, append: bool) -> None:
        before = self._value(name)
        if name in self.state.keyed:
            keyed = dict(before) if isinstance(before, dict) else {}
            keyed[key] = keyed.get(key, "") + text if append else text
            self._store(name, keyed)
            return
        array = (
            list(before) if isinstance(before, list) else [] if before is None else [str(before)]
        )
        at = self._number(key)
        if at is None or not 0 <= at <= len(array):
            raise self.refuse(
                f"{name}[{_bash_text(key):.40}] is set, and which element is not known"
            )
        if at == len(array):
            array.append("")
        array[at] = array[at] + text if append else text
        self._store(name, array)

    def _number(self, text: str) -> int | None:
        """Return the value of an expression; None if it is unknown."""
        if unknown_names(text):
            return None

        try:
            return arithmetic.value_of(text, self)
        except NoNumberError:
            return None

    def text_of(self, name: str, index: int | None) -> str:
        """Return the text of a variable or element in an expression."""
        value = self._value(name)
        if isinstance(value, list) and -len(value) <= (index or 0) < len(value):
            value = value[index or 0]
        elif value is None and name in self.state.variables:
            value = ""
        if not isinstance(value, str) or (index and value is self._value(name)):
            raise NoNumberError(name)
        if unknown_names(value):
            raise NoNumberError(name)
        return value

    def set_number(self, name: str, index: int | None, value: int) -> None:
        """Change a variable or element that an expression sets."""
        if index is not None:
            self._set_element(name, str(index), str(value), append=False)
        else:
            self._assign(VariableAssignment(name, False, (LiteralText(str(value), quoted=True),)))

    def _expression_value(self, text: str) -> int | None:
        """Return the value of an expression that may change variables; None if it is unknown."""
        if not arithmetic.changed_names(text):
            return self._number(text)
        kept = self.state
        self.state = kept.copy()
        value = self._number(text)
        if value is not None:
            for name, now in self.state.variables.items():
                kept.variables[name] = now
            self.state = kept
            return value
        self.state = kept
        for name, is_element in arithmetic.changed_names(text):
            if is_element or isinstance(self._value(name), list | dict):
                raise self.refuse(f"(({_bash_text(text):.60})) is not followed")
            self._store(name, _unknown(name))
        return None

    def _arithmetic(self, word: Word) -> bool | None:
        value = self._expression_value(_join_pieces(self._pieces(word)))
        return None if value is None else bool(value)

    # Words.

    def _fields(self, words: tuple[Word | VariableAssignment, ...]) -> list[str]:
        result: list[str] = []
        for word in words:
            if isinstance(word, VariableAssignment):
                text = _join_pieces(self._pieces(word.value, tilde=True))
                result.append(f"{word.name}{'+' if word.append else ''}={text}")
            else:
                result += [_join_pieces(pieces) for pieces in self._split(word)]
        return result

    def _pieces(self, word: Word, *, tilde: bool = False) -> list[Piece]:
        """Return a word that is not split, as the value of a variable."""
        pieces: list[Piece] = []
        for part in word:
            for at, more in enumerate(self._expansion(part)):
                if at:
                    pieces.append((" ", True))
                pieces += more
        if tilde:
            pieces = _with_home(pieces)
        return pieces

    def _split(self, word: Word) -> list[list[Piece]]:
        """Return the fields of a word: split where an expansion without quotes has blanks."""
        plain = "".join(
            part.text if isinstance(part, LiteralText) and not part.quoted else "x" for part in word
        )
        if "{" in plain and "}" in plain and ("," in plain or ".." in plain):
            if len(plain) > _LONGEST_IN_BRACES:
                return [[(_unknown("{,}"), False)]]
            return self._braces(word)
        return self._split_plain(word)

    def _split_plain(self, word: Word) -> list[list[Piece]]:
        """Return the fields of a word without braces."""
        fields: list[list[Piece]] = []
        open_field = False
        for part in word:
            for at, pieces in enumerate(self._expansion(part)):
                open_field = open_field and not at
                for text, quoted in pieces:
                    split = not quoted and not isinstance(part, LiteralText)
                    for place, piece in enumerate(_GAPS.split(text) if split else (text,)):
                        if place % 2:
                            open_field = False
                        elif piece or not split:
                            if not open_field:
                                fields.append([])
                            open_field = True
                            fields[-1].append((_unquoted_piece(piece) if split else piece, quoted))
        if fields:
            fields[0] = _with_home(fields[0])
        self.budget.spend(sum(len(text) + 1 for pieces in fields for text, _ in pieces))
        return fields

    def _braces(self, word: Word) -> list[list[Piece]]:
        """Return the fields of a word that has `{1..4}` or `{a,b}`."""
        self.budget.spend(sum(len(part.text) for part in word if isinstance(part, LiteralText)) * 8)
        words = expand_braces(word)
        if len(words) > MOST_ROUNDS:
            raise self.refuse(f"has a word of more than {MOST_ROUNDS:,} words in braces")
        self.budget.spend(sum(map(len, words)))
        return [field for each in words for field in self._split_plain(each)]

    def _expansion(self, part: object) -> list[list[Piece]]:
        """Return the expansion of a part of a word: a field each, which may be split still."""
        match part:
            case LiteralText(text, quoted):
                return [[(text, quoted)]]
            case Opaque(text):
                return [[(_unknown(text), True)]]
            case Arithmetic(word, quoted):
                text = _join_pieces(self._pieces(word))
                value = self._expression_value(text)
                names = unknown_names(text) or self._unset_in(text)
                name = names[0] if names else f"$(({text}))"
                return [[(_unknown(name) if value is None else str(value), quoted)]]
            case Substitution(body, text, quoted):
                output = self._output(body)
                if output is None:
                    output = _unknown(text)
                return [[(output.rstrip("\n"), quoted)]]
            case Expansion():
                return self._parameter(part)
        raise AssertionError(part)

    def _unset_in(self, text: str) -> list[str]:
        names: list[str] = re.findall(r"[A-Za-z_]\w*", text)
        values = {name: self._value(name) for name in names}
        return [
            inner
            for name, value in values.items()
            for inner in ([name] if value is None else unknown_names(str(value)))
        ]

    def _parameter(self, part: Expansion) -> list[list[Piece]]:
        value = self._value(part.name)
        index = None if part.index is None else _join_pieces(self._pieces(part.index))
        listed = index in ("@", "*") or part.name in ("@", "*")
        if part.operator == "!":
            return self._indirect(part, value)
        if listed:
            star = index == "*" or (index is None and part.name == "*")
            return self._list_items(part, value, star=star)
        text: str | None
        if isinstance(value, dict):
            is_known = index is not None and not unknown_names(index)
            text = value.get(index or "") if is_known else _unknown(f"{part.name}[{index}]")
        elif isinstance(value, list):
            at = 0 if index is None else self._number(index)
            if at is None or _is_open(value[: at + 1] if at >= 0 else value):
                text = _unknown(f"{part.name}[{_bash_text(index or '')}]")
            else:
                text = value[at] if -len(value) <= at < len(value) else None
        else:
            text = value if index in (None, "0") else None
        return self._scalar(part, text)

    def _indirect(self, part: Expansion, value: Value | None) -> list[list[Piece]]:
        if isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*|\d+", value):
            return self._parameter(Expansion(value, part.quoted))
        return [[(_unknown(part.name), part.quoted)]]

    def _scalar(self, part: Expansion, text: str | None) -> list[list[Piece]]:
        quoted, operator = part.quoted, part.operator
        if part.counted:
            is_known = text is not None and not unknown_names(text)
            return [[(str(len(text or "")) if is_known else _unknown(part.name), quoted)]]
        if not operator:
            if text is None and self._is_unset(part.name):
                text = ""
            shown = _unknown(part.name) if text is None else text
            self.budget.spend(len(shown))
            return [[(shown, quoted)]]
        if operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self._default(part, text)
        if text is None and self._is_unset(part.name):
            text = ""
        if text is None or unknown_names(text):
            return [[(_unknown(part.name if text is None else unknown_names(text)[0]), quoted)]]
        self.budget.spend(len(text))
        changed = self._operator_value(part, text)
        return [[(_unknown(part.name) if changed is None else changed, quoted)]]

    def _is_unset(self, name: str) -> bool:
        """Return whether a variable is known to have no value."""
        return name in self.state.variables and self.state.variables[name] is None

    def _default(self, part: Expansion, text: str | None) -> list[list[Piece]]:
        operator, quoted = part.operator, part.quoted
        if text and _UNKNOWN.fullmatch(text) and operator[0] == ":":
            return [[(text, quoted)]] if operator != ":+" else [[(_unknown(part.name), quoted)]]
        present = text is not None and (bool(text) or operator[0] != ":")
        if operator[-1] == "+":
            return self._of_word(part) if present else [[("", quoted)]]
        if present:
            assert text is not None
            self.budget.spend(len(text))
            return [[(text, quoted)]]
        if operator[-1] == "?":
            if text is None and not self._is_unset(part.name):  # the environment may have it
                return [[(_unknown(part.name), quoted)]]
            raise _Stop("exit", succeeds=False)
        if operator[-1] == "=":
            self._store(part.name, _join_pieces(self._pieces(part.word)))
        return self._of_word(part)

    def _of_word(self, part: Expansion) -> list[list[Piece]]:
        if part.quoted:
            return [[("", True), *((text, True) for text, _ in self._pieces(part.word))]]
        fields = self._split_default(part.word)
        return fields or [[]]

    def _split_default(self, word: Word) -> list[list[Piece]]:
        """Return the fields of a default, whose plain characters are split too."""
        pieces: list[list[Piece]] = [[]]
        for part in word:
            for at, more in enumerate(self._expansion(part)):
                if at:
                    pieces.append([])
                pieces[-1] += more
        return pieces

    def _operator_value(self, part: Expansion, text: str) -> str | None:  # noqa: PLR0911 - a case for each form
        """Return a known value under an operator; None where that is not followed."""
        operator, word = part.operator, part.word
        pieces = self._pieces(word)
        plain = _join_pieces(pieces)
        if unknown_names(plain):
            return None
        try:
            match operator:
                case "#" | "##":
                    return patterns.trimmed_end(pieces, text, front=True, longest=operator == "##")
                case "%" | "%%":
                    return patterns.trimmed_end(pieces, text, front=False, longest=operator == "%%")
                case "/" | "//":
                    self.budget.spend(len(text) * (1 + len(plain)))
                    return _replace(pieces, text, everywhere=operator == "//")
                case "^^" | ",," if not plain:
                    return text.upper() if operator == "^^" else text.lower()
                case "^" | "," if not plain:
                    first = text[:1].upper() if operator == "^" else text[:1].lower()
                    return first + text[1:]
                case ":":
                    begin, sign, length = plain.partition(":")
                    at, count = self._number(begin), self._number(length) if sign else len(text)
                    if at is None or count is None or count < 0 or at < -len(text):
                        return None
                    rest = text[at:]
                    return rest[:count]
        except NoPatternError:
            return None
        return None

    def _list_items(  # noqa: PLR0911, PLR0912 - a case for each form
        self, part: Expansion, value: Value | None, *, star: bool
    ) -> list[list[Piece]]:
        quoted = part.quoted
        if value is None:
            if part.counted:
                return [[("0", quoted)]]
            if part.operator in (":-", "-"):
                return self._of_word(part)
            if part.operator in (":+", "+"):
                return []
            return [[(f"{_OPEN}{part.name}[@]{END}", quoted)]]
        items = list(value.values()) if isinstance(value, dict) else value
        items = [items] if isinstance(items, str) else items
        listed_name = _unknown("$@" if part.name in ("@", "*") else f"{part.name}[@]")
        self.budget.spend(sum(map(len, items)) + 1)
        if part.counted:
            return [[(_unknown(part.name) if _is_open(items) else str(len(items)), quoted)]]
        if part.operator and _is_open(items):
            return [[(listed_name, quoted)]]
        if part.operator == ":":
            begin, sign, length = _join_pieces(self._pieces(part.word)).partition(":")
            at, count = self._number(begin), self._number(length) if sign else len(items)
            first = -1 if at is None else at + len(items) if at < 0 else at
            if part.name in ("@", "*") and at is not None and at >= 0:
                first -= 1
            if first < 0 or count is None or count < 0 or isinstance(value, dict):
                return [[(listed_name, quoted)]]
            items = items[first : first + count]
        elif part.operator in (":-", "-"):
            if not items or (len(items) == 1 and not items[0] and part.operator == ":-"):
                return self._of_word(part)
        elif part.operator in (":+", "+"):
            return self._of_word(part) if items else []
        elif part.operator:
            changed = [self._operator_value(part, item) for item in items]
            if any(item is None or unknown_names(item) for item in changed):
                return [[(listed_name, quoted)]]
            items = [item or "" for item in changed]
        if star and quoted:
            return [[(" ".join(items), True)]]
        return [[(item, quoted)] for item in items]

    def _output(self, body: Node) -> str | None:
        """Return the output of commands; None if that is unknown."""
        before, self._captured = self._captured, []
        state, self.state = self.state, self.state.copy()
        self.state.ends_by_failure = False
        status: bool | None = None
        try:
            status = self._run_to_end(body)
        except _Stop as stop:
            status = stop.succeeds
        finally:
            self._substituted = status
            self.state = state
            captured, self._captured = self._captured, before
        text = "".join(captured)
        return None if _ALL_UNKNOWN in text else text

    def _prints(self, text: str | None) -> None:
        if self._captured is not None:
            self._captured.append(_ALL_UNKNOWN if text is None else text)

    # Tests.

    def _test(self, words: list[list[Piece]], *, double: bool) -> bool | None:
        tests = _Tests(self, words, double=double)
        return tests.value()

    # Simple commands.

    def _simple(self, command: Simple) -> bool | None:
        if command.words and isinstance(command.words[0], VariableAssignment):
            raise AssertionError(command)
        captured = self._captured
        if command.redirected:
            self._captured = None if command.file is None else []
        try:
            return self._started_simple(command)
        finally:
            if command.file is not None:
                self._write(command, self._captured or [])
            self._captured = captured

    def _write(self, command: Simple, printed: list[str]) -> None:
        """Note what a command writes to a file, where it and its name are known."""
        assert command.file is not None
        names, text = self._fields((command.file,)), "".join(printed)
        is_known = bool(text) and not (command.appends or _ALL_UNKNOWN in text)
        for name in names if len(names) == 1 else []:
            if not unknown_names(name):
                known = is_known and not unknown_names(text)
                self.around.write(name, text if known else None)

    def _started_simple(self, command: Simple) -> bool | None:
        self._substituted = True
        words = self._fields(command.words)
        if not words:
            for assignment in command.assignments:
                self._assign(assignment)
            return self._substituted
        name = words[0]
        if name in syntax.DECLARATIONS:
            if name == "export" and self._exports_functions(command):
                return True
            return self._declare(name, command)
        if not command.assignments:
            return self._command(words, command)
        before = {a.name: self.state.variables.get(a.name) for a in command.assignments}
        exported = set(self.state.exported)
        if all(a.name == "IFS" for a in command.assignments) and name == "read":
            return self._command(words, command)
        for assignment in command.assignments:
            self._assign(assignment)
            self.state.exported.add(assignment.name)
        try:
            return self._command(words, command)
        finally:
            self.state.exported = exported
            for variable, value in before.items():
                if value is None:
                    self.state.variables.pop(variable, None)
                else:
                    self.state.variables[variable] = value

    def _declare(self, name: str, command: Simple) -> bool:
        options = ""
        for word in command.words[1:]:
            if isinstance(word, VariableAssignment):
                self._localize_assigned(name, word, options)
                variables = [word.name]
            else:
                variables = []
                for text in self._fields((word,)):
                    if text.startswith(("-", "+")):
                        options += text[1:]
                    else:
                        variables.append(self._declare_word(name, text, options))
            self._note_options(name, variables, options)
        return True

    def _declare_word(self, name: str, text: str, options: str) -> str:
        """Declare what a word names, with or without a value; return its name."""
        variable, sign, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", variable):
            raise self.refuse(f"{name} {_bash_text(text):.40} is not followed")
        self._localize(name, variable, options)
        if sign:
            self._store(variable, value)
        elif "A" in options:
            self.state.keyed.add(variable)
            self._store(variable, {})
        elif "a" in options and self.state.variables.get(variable) is None:
            self._store(variable, [])
        return variable

    def _note_options(self, name: str, variables: list[str], options: str) -> None:
        if name == "export" and "n" in options:
            self.state.exported.difference_update(variables)
        elif name == "export" or "x" in options:
            self.state.exported.update(variables)
        if name == "readonly" or "r" in options:
            self.state.readonly.update(variables)
        if set(options) & (set("ilu") if name == "export" else set("nilu")):
            raise self.refuse(f"{name} -{options} is not followed")

    def _exports_functions(self, command: Simple) -> bool:
        """Note the functions of `export -f`; False for another export."""
        words = [word for word in command.words[1:] if not isinstance(word, VariableAssignment)]
        texts = [text for word in words for text in self._fields((word,))]
        if not texts or texts[0] != "-f":
            return False
        self.state.exported_functions.update(texts[1:])
        return True

    def _localize_assigned(self, name: str, word: VariableAssignment, options: str) -> None:
        """Make a variable local, whose value may depend on the one outside."""
        if word.array is None and word.index is None and not word.append:
            text = _join_pieces(self._pieces(word.value, tilde=True))
            word = VariableAssignment(word.name, False, (LiteralText(text, quoted=True),))
        elif self.state.frames and any(
            isinstance(part, Expansion) and part.name == word.name
            for _, element in word.array or ()
            for part in element
        ):
            raise self.refuse(f"{name} {word.name}: reads itself, which is not followed")
        self._localize(name, word.name, options)
        if "A" in options:
            self.state.keyed.add(word.name)
        self._assign(word)

    def _localize(self, name: str, variable: str, options: str) -> None:
        if "g" in options:
            if any(variable in frame for frame in self.state.frames):
                raise self.refuse(f"{name} -g {variable} is not followed where it is local too")
        elif name in ("local", "declare", "typeset") and self.state.frames:
            frame = self.state.frames[-1]
            if variable not in frame:
                frame[variable] = self.state.variables.get(variable)
                self.state.variables[variable] = None

    def _command(self, words: list[str], command: Simple | None) -> bool | None:  # noqa: PLR0911 - a case for each form
        self.budget.spend(sum(map(len, words)))
        name = words[0]
        if name in self.state.functions:
            return self._call(name, words[1:])
        builtin = _BUILTINS.get(name)
        if builtin is not None:
            return builtin(self, words, command)
        base = PurePosixPath(name).name
        if name == "command" and words[1:2] in (["-v"], ["-V"]):
            self._prints(None)
            return None
        if base in _BEFORE and len(words) > 1:
            rest = _after_options(words[1:])
            return self._command(rest, command) if rest else None
        if base in _SHELLS:
            return self._shell(words, command, ())
        if base in _ELSEWHERE or (base in _ENVIRONMENTS and "run" in words[1:]):
            return self._elsewhere(base, words, command)
        if base.endswith((".sh", ".bash", ".slurm", ".sbatch")) or base == "sbatch":
            return self._file(words[1:] if base == "sbatch" else words, sourced=False)
        if base in HARMLESS:
            self._prints(None)
            return None
        self._start(words)
        return None

    def _start(self, words: list[str]) -> None:
        """Note a command that may train."""
        self._prints(None)
        started = (*self._prefix, *map(_bash_text, words))
        self.commands.append(started)
        values = self.state.variables
        self.environment[started] = {
            name: _bash_text(value)
            for name in sorted(self.state.exported)
            if isinstance(value := values.get(name), str)
        }

    def _call(self, name: str, arguments: list[str]) -> bool | None:
        if len(self.state.frames) > MOST_DEPTH // 3:
            raise self.refuse(f"{name} calls itself too often")
        before, self.state.arguments = self.state.arguments, arguments
        self.state.frames.append({})
        state = self.state
        try:
            return self.run(state.functions[name])
        except _Stop as stop:
            if stop.what != "return":
                raise
            return stop.succeeds
        finally:
            state.arguments = before
            for variable, value in state.frames.pop().items():
                state.readonly.discard(variable)
                if value is None:
                    state.variables.pop(variable, None)
                else:
                    state.variables[variable] = value

    def _script(
        self,
        text: str,
        state: _ShellVariables,
        arguments: list[str] | None = None,
        *,
        sourced: bool = False,
    ) -> bool | None:
        """Follow a script inside of this one."""
        self.budget.spend(len(text))
        text, names = _text_for_rereading(text)
        body = syntax.parse(text, self.of)
        before, self.state = self.state, state
        if arguments is not None:
            state.arguments = arguments
        for variable, value in names.items():
            state.variables[variable] = value
        try:
            return self.run(body)
        except _Stop as stop:
            if state is before and not (sourced and stop.what == "return"):
                raise
            return stop.succeeds
        finally:
            self.state = before

    def _shell(
        self, words: list[str], command: Simple | None, prefix: tuple[str, ...]
    ) -> bool | None:
        """Follow `bash -c text`, `bash file` and a shell that reads a here-document."""
        before, self._prefix = self._prefix, (*self._prefix, *prefix)
        try:
            at, commanded = 1, False
            while at < len(words) and words[at].startswith(("-", "+")) and words[at] != "--":
                commanded |= not words[at].startswith("--") and "c" in words[at]
                # `-euo pipefail`: the last letter of a word of options may take the next word.
                takes = words[at] in ("--rcfile", "--init-file") or (
                    not words[at].startswith("--") and words[at][-1] in "oO"
                )
                at += 2 if takes else 1
            rest = words[at + (at < len(words) and words[at] == "--") :]
            texts = [] if command is None else command.stdin
            if "s" in "".join(w[1:] for w in words[1:at] if not w.startswith("--")) and texts:
                script = _join_pieces(self._pieces(texts[-1]))
                return self._script(script, self._child(), rest)
            if commanded:
                if not rest:
                    raise self.refuse(f"{words[0]} -c has no command")
                return self._script(rest[0], self._child(), rest[2:])
            if rest:
                return self._file(rest, sourced=False)
            if texts:
                return self._script(_join_pieces(self._pieces(texts[-1])), self._child(), [])
            return None
        finally:
            self._prefix = before

    def _child(self) -> _ShellVariables:
        """Return the state that a program finds which this shell starts."""
        state = _ShellVariables()
        for name in self.state.exported:
            value = self.state.variables.get(name)
            if isinstance(value, str):
                state.variables[name] = value
                state.exported.add(name)
        for name in self.state.exported_functions & self.state.functions.keys():
            state.functions[name] = self.state.functions[name]
            state.exported_functions.add(name)
        return state

    def _file(self, words: list[str], *, sourced: bool) -> bool | None:
        """Follow a script beside this one."""
        words = _after_options(words)
        if not words:
            return None
        name = words[0]
        beside = _beside_script(name)
        text = None if beside is None else self.around.text_of(beside)
        if text is None:
            self.unfollowed.append(_bash_text(name))
            if not sourced:
                self._start(words)
            return None
        self._depth += 6
        try:
            return self._script(
                text,
                self.state if sourced else self._child(),
                words[1:] if not sourced or len(words) > 1 else None,
                sourced=sourced,
            )
        finally:
            self._depth -= 6

    def _elsewhere(self, base: str, words: list[str], command: Simple | None) -> bool | None:
        """Follow what a launcher starts: a shell among its words, a script, or the words alone."""
        if base == "xargs":  # it adds words that it reads
            words = [*words, f"{_OPEN}words that xargs reads{END}"]
        if base == "tmux":
            lines = [word for word in words[1:] if " " in word and not unknown_names(word)]
            return self._script(lines[-1], self._child(), []) if lines else None
        for at, word in enumerate(words[1:], start=1):
            name = PurePosixPath(word).name
            if name in _SHELLS and words[at - 1] != "--entrypoint":
                prefix = (*map(_bash_text, words[:at]), ";")
                state, self.state = self.state, self._child_of_launcher(base, words[1:at])
                try:
                    return self._shell(words[at:], command, prefix)
                finally:
                    self.state = state
            if name in self.state.functions and base in ("time", "env"):
                return self._call(name, words[at + 1 :])
            if name.endswith((".py", ".pyz")) or word == "-m":
                break
            if name.endswith((".sh", ".bash")) and not words[at - 1].startswith("-"):
                before, self._prefix = self._prefix, (*self._prefix, *words[:at], ";")
                try:
                    return self._file(words[at:], sourced=False)
                finally:
                    self._prefix = before
        if base in ("ssh", "pdsh", "clush"):
            return self._remote(base, words, command)
        self._start(words)
        return None

    def _child_of_launcher(self, base: str, words: list[str]) -> _ShellVariables:
        """Return the state of a shell with what its launcher sets and leaves out."""
        state = self.state.copy()
        if base in _CONTAINERS or (
            base == "env" and {"-", "-i", "--ignore-environment"} & {*words}
        ):
            state.exported.clear()
        for at, word in enumerate(words):
            before = words[at - 1] if at else ""
            if base == "env" and (before in ("-u", "--unset") or word.startswith("--unset=")):
                state.exported.discard(word.removeprefix("--unset="))
                state.variables[word.removeprefix("--unset=")] = None
            texts = [word]
            if word.startswith("--export=") and base == "srun":
                texts = word.removeprefix("--export=").split(",")
            elif base != "env" and before not in ("-e", "--env", "-x", "--setenv"):
                texts = [word.removeprefix("--env=")] if word.startswith("--env=") else []
            for text in texts:
                name, sign, value = text.partition("=")
                if sign and re.fullmatch(r"[A-Za-z_]\w*", name):
                    state.variables[name] = value
                    state.exported.add(name)
        return state

    def _remote(self, base: str, words: list[str], command: Simple | None) -> bool | None:
        at = 1
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in _WITH_VALUES else 1
        rest = words[at + 1 :] if base == "ssh" else words[at:]
        if rest:
            return self._script(" ".join(rest), _ShellVariables(), [])
        texts = [] if command is None else command.stdin
        if texts:
            return self._script(_join_pieces(self._pieces(texts[-1])), _ShellVariables(), [])
        return None


_CONTAINERS = ("docker", "podman", "kubectl")
_ALL_UNKNOWN = f"{BEGIN}{END}"
_WITH_VALUES = ("-p", "-i", "-l", "-o", "-F", "-J", "-L", "-R", "-D", "-W", "-w", "-x", "-u", "-f")


_GAPS = re.compile(rf"([ \t\n]+)(?![^{BEGIN}{END}]*{END})")
"""Blanks between words; those of an unknown value's name are not."""


def _unquoted_piece(piece: str) -> str:
    """Return a piece outside of quotes, whose unknown values may be no word, or several."""
    if BEGIN not in piece:
        return piece
    return _UNKNOWN.sub(lambda match: f"{_OPEN}{match[1]}{END}", piece)


def expand_braces(word: Word) -> list[Word]:
    """Return the words of a word with `{a,b}` and `{1..3}`; itself where it has none.

    >>> [part.text for (part,) in expand_braces((LiteralText("x{a,b{1..3..2}}", quoted=False),))]
    ['xa', 'xb1', 'xb3']
    """
    atoms: list[object] = []
    for part in word:
        plain = isinstance(part, LiteralText) and not part.quoted
        atoms += list(part.text) if plain and isinstance(part, LiteralText) else [part]
    words = []
    for expanded in _expand_atoms(atoms):
        parts: list[Part] = []
        for atom in expanded:
            if isinstance(atom, str):
                last = parts.pop() if parts and _is_plain(parts[-1]) else None
                before = last.text if isinstance(last, LiteralText) else ""
                parts.append(LiteralText(before + atom, quoted=False))
            else:
                parts.append(atom)  # type: ignore[arg-type]  # a part of the word
        words.append(tuple(parts))
    return words


def _is_plain(part: Part) -> bool:
    return isinstance(part, LiteralText) and not part.quoted


def _expand_atoms(atoms: list[object]) -> list[list[object]]:
    """Return the same of characters without quotes, and parts that stay as they are."""
    for begin, atom in enumerate(atoms):
        if atom != "{":
            continue
        depth, commas = 0, [begin]
        for at in range(begin, len(atoms)):
            depth += (atoms[at] == "{") - (atoms[at] == "}")
            if atoms[at] == "," and depth == 1:
                commas.append(at)
            if depth == 0:
                commas.append(at)
                break
        if depth:
            continue
        inside = atoms[begin + 1 : commas[-1]]
        if len(commas) > 2:
            listed = [
                each
                for first, last in pairwise(commas)
                for each in _expand_atoms(atoms[first + 1 : last])
            ]
        else:
            listed = _sequence(inside)
        if listed:
            rests = _expand_atoms(atoms[commas[-1] + 1 :])
            if len(listed) * len(rests) > MOST_ROUNDS:
                return [[]] * (MOST_ROUNDS + 1)
            return [[*atoms[:begin], *each, *rest] for each in listed for rest in rests]
    return [atoms]


def _sequence(atoms: list[object]) -> list[list[object]]:
    """Return the words of `1..3`, `01..10..2` and `a..e`; none of anything else."""
    text = "".join(atom if isinstance(atom, str) else "$" for atom in atoms)
    match = re.fullmatch(
        r"(?:(-?\d{1,6})\.\.(-?\d{1,6})|([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z]))(?:\.\.(-?\d{1,6}))?",
        text,
        re.A,
    )
    if match is None:
        return []
    is_number = match[1] is not None
    first, last = next(pair for pair in (match.group(1, 2), match.group(3, 4), match.group(5, 6))
                       if pair[0] is not None)  # fmt: skip
    begin, end = (int(each) if is_number else ord(each) for each in (first, last))
    step = max(abs(int(match[7] or 1)), 1) * (1 if begin <= end else -1)
    numbers = range(begin, end + (1 if step > 0 else -1), step)[: MOST_ROUNDS + 1]
    padded = is_number and any(re.match(r"-?0\d", each) for each in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [list(f"{at:0{width}d}" if is_number else chr(at)) for at in numbers]


def _replace(pieces: list[Piece], text: str, *, everywhere: bool) -> str | None:
    """Return `${name/old/new}` of a text; None where that is not followed."""
    old: list[Piece] = []
    new, divided = "", False
    for piece, quoted in pieces:
        begin, sign, rest = ("", "", piece) if divided else piece.partition("/")
        if quoted and not divided:
            begin, sign, rest = piece, "", ""
        if begin:
            old.append((begin, quoted))
        new, divided = new + rest, divided or bool(sign)
    if "&" in new or "\\" in new or not old:
        return None
    anchor = old[0][0][0] if not old[0][1] else ""
    if anchor in ("#", "%") and not everywhere:
        old[0] = (old[0][0][1:], False)
        return patterns.text_with_new_end(old, text, new, front=anchor == "#")
    if anchor in ("#", "%"):
        return None
    return patterns.text_with_replacement(old, text, new, everywhere=everywhere)


def _is_open(words: list[str]) -> bool:
    """Return True if one of these words may be none, or several."""
    return any(_OPEN in word for word in words)


def _join_pieces(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _after_options(words: list[str]) -> list[str]:
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in ("-n", "-u", "-c", "-p") and at + 1 < len(words) else 1
    return words[at:]


def _text_for_rereading(text: str) -> tuple[str, dict[str, str]]:
    """Return a text that is read again, its unknown values under names of their own."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        if re.fullmatch(r"[A-Za-z_]\w*", match[1]):
            variable = f"__unknown_{match[1]}"
        else:
            variable = f"__unknown_{len(names)}_"
        names[variable] = match[0]
        return "${" + variable + "}"

    return _UNKNOWN.sub(name, text), names


# --- tests ----------------------------------------------------------------------------------------


class _Tests:
    """`[ ... ]` and `[[ ... ]]`: a value, or None where something unknown decides."""

    def __init__(self, run: _Run, words: list[list[Piece]], *, double: bool) -> None:
        self._run, self._words, self._double, self._at = run, words, double, 0
        self._plain = [_join_pieces(pieces) for pieces in words]

    def value(self) -> bool | None:
        """Return the value of the whole test."""
        if not self._words:
            return False
        if not self._double and len(self._plain) > 4:
            if {"-a", "-o", "(", ")"} & set(self._plain):
                result = self._either()
                if self._at < len(self._plain):
                    return None
                return result
            return None
        result = self._either()
        if self._at < len(self._words):
            raise self._run.refuse(f"[ {_bash_text(' '.join(self._plain)):.60} ] is not followed")
        return result

    def _sign(self) -> str:
        return self._plain[self._at] if self._at < len(self._plain) else ""

    def _either(self) -> bool | None:
        left = self._conjunction()
        while self._sign() == ("||" if self._double else "-o"):
            self._at += 1
            right = self._conjunction()
            left = True if left or right else None if None in (left, right) else False
        return left

    def _conjunction(self) -> bool | None:
        left = self._primary()
        while self._sign() == ("&&" if self._double else "-a"):
            self._at += 1
            right = self._primary()
            left = False if False in (left, right) else None if None in (left, right) else True
        return left

    def _primary(self) -> bool | None:
        left_words = len(self._plain) - self._at
        sign = self._sign()
        following = self._plain[self._at + 1] if left_words > 1 else ""
        binary = left_words >= 3 and following in _COMPARISONS
        if sign == "!" and left_words > 1 and not binary:
            self._at += 1
            value = self._primary()
            return None if value is None else not value
        if sign == "(" and left_words > 2 and not binary:
            self._at += 1
            value = self._either()
            self._at += 1
            return value
        if binary:
            self._at += 3
            pattern = self._words[self._at - 1]
            return self._comparison(self._plain[self._at - 3], following, pattern)
        if re.fullmatch(r"-[a-zA-Z]", sign) and left_words > 1 and following not in ("&&", "||"):
            self._at += 2
            return self._unary(sign, following)
        self._at += 1
        return self._fill_unknown(sign)

    def _fill_unknown(self, text: str) -> bool | None:
        plain = _UNKNOWN.sub("", text)
        if plain:
            return True
        return None if unknown_names(text) else False

    def _unary(self, sign: str, text: str) -> bool | None:
        if sign in ("-z", "-n"):
            only = _UNKNOWN.fullmatch(text)
            if only and self._run._value(only[1]) is None and re.fullmatch(r"\w+", only[1]):
                # A variable that nothing sets; without quotes there is no word of it.
                return sign == "-z" or text.startswith(_OPEN)
            value = self._fill_unknown(text)
            return value if value is None or sign == "-n" else not value
        if sign == "-v" and re.fullmatch(r"[A-Za-z_]\w*", text):
            return self._run._value(text) is not None
        return None

    def _comparison(self, left: str, sign: str, right: list[Piece]) -> bool | None:  # noqa: PLR0911 - a case for each form
        text = _join_pieces(right)
        if sign in _NUMERIC:
            a, b = self._run._number(left), self._run._number(text)
            if a is None or b is None:
                return None
            return _NUMERIC[sign](a, b)
        if unknown_names(left) or unknown_names(text):
            return None
        if sign == "=~":
            simple = re.fullmatch(r"\^?(?:[\w-]|\[[\w-]+\][+*]?){0,20}\$?", text)
            if simple is None or len(re.findall(r"[+*]", text)) > 1 or len(left) > 400:
                return None
            return re.search(text, left, re.A) is not None
        if sign in ("<", ">"):
            return None
        if self._double:
            try:
                equal = patterns.matches(right, left)
            except NoPatternError:
                return None
        else:
            equal = left == text
        return equal if sign in ("=", "==") else not equal


_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_COMPARISONS = frozenset([*_NUMERIC, "=", "==", "!=", "=~", "<", ">"])


# --- builtins -------------------------------------------------------------------------------------

_Builtin = Callable[[_Run, list[str], Simple | None], bool | None]


def _echo(run: _Run, words: list[str], _: Simple | None) -> bool:
    at, newline = 1, "\n"
    while at < len(words) and re.fullmatch(r"-[neE]+", words[at]):
        newline = "" if "n" in words[at] else newline
        if "e" in words[at]:
            run._prints(None)
            return True
        at += 1
    run._prints(" ".join(words[at:]) + newline)
    return True


def _printf(run: _Run, words: list[str], _: Simple | None) -> bool:
    stored = words[2] if len(words) > 3 and words[1] == "-v" else None
    form, *values = words[3:] if stored else words[1:] or [""]
    text = _printf_text(form, values)
    if stored is None:
        run._prints(text)
    elif re.fullmatch(r"[A-Za-z_]\w*", stored):
        run._assign(_plain_assignment(stored, _unknown(stored) if text is None else text))
    else:
        raise run.refuse(f"printf -v {_bash_text(stored):.40} is not followed")
    return True


def _plain_assignment(name: str, text: str) -> VariableAssignment:
    return VariableAssignment(name, False, (LiteralText(text, quoted=True),))


_FORMAT = re.compile(r"%([-0]?)(\d{0,3})([sdixu%])|\\([nt\\])|([^%\\]+)", re.A)


def _printf_text(form: str, values: list[str]) -> str | None:
    """Return what `printf` makes of a format and values; None where that is not followed.

    >>> _printf_text("%s-%03d\\\\n", ["a", "7", "b", "8"])
    'a-007\\nb-008\\n'
    """
    if unknown_names(form) or "".join(match[0] for match in _FORMAT.finditer(form)) != form:
        return None
    text, left = "", list(values)
    while True:
        before = len(left)
        for match in _FORMAT.finditer(form):
            if match[4] or match[5]:
                text += match[5] or {"n": "\n", "t": "\t", "\\": "\\"}[match[4]]
            elif match[3] == "%":
                text += "%"
            else:
                part = _printf_value_text(match, left.pop(0) if left else None)
                if part is None:
                    return None
                text += part
        if not left or len(left) == before:
            return text


def _printf_value_text(match: re.Match[str], value: str | None) -> str | None:
    value = value or ""
    if match[3] != "s":
        if not re.fullmatch(r"-?(0|[1-9]\d{0,17})|", value):
            return None
        number = int(value or 0)
        if number < 0 and match[3] != "d":
            return None
        value = f"{number:x}" if match[3] == "x" else str(number)
    width = int(match[2] or 0)
    if width and unknown_names(value):
        return None
    if match[1] == "0" and match[3] != "s":
        return value.zfill(width)
    return value.ljust(width) if match[1] == "-" else value.rjust(width)


def _expr(run: _Run, words: list[str], _: Simple | None) -> bool | None:
    """Follow arithmetic of whole numbers; what else `expr` can do is unknown."""
    plain = all(re.fullmatch(r"-?(0|[1-9]\d{0,17})|[-+*/%()]", word) for word in words[1:])
    value = run._number(" ".join(words[1:])) if plain and len(words) > 1 else None
    run._prints(None if value is None else f"{value}\n")
    return None if value is None else value != 0


def _cat(run: _Run, words: list[str], command: Simple | None) -> bool | None:
    if len(words) == 1 and command is not None and command.stdin:
        run._prints(_join_pieces(run._pieces(command.stdin[-1])))
        return True
    for name in words[1:] or [""]:
        is_file = bool(name) and not name.startswith("-") and not unknown_names(name)
        run._prints(run.around.text_of(name) if is_file else None)
    return None


def _eval(run: _Run, words: list[str], _: Simple | None) -> bool | None:
    return run._script(" ".join(words[1:]), run.state)


def _source(run: _Run, words: list[str], _: Simple | None) -> bool | None:
    return run._file(words[1:], sourced=True)


def _exit(run: _Run, words: list[str], _: Simple | None) -> bool:
    code = run._number(words[1]) if len(words) > 1 else None
    raise _Stop(words[0], succeeds=None if code is None else code % 256 == 0)


def _break(run: _Run, words: list[str], _: Simple | None) -> bool:
    count = int(words[1]) if len(words) > 1 and words[1].isdecimal() and len(words[1]) < 4 else 1
    raise _Stop(words[0], max(count, 1))


def _set_options(run: _Run, words: list[str], _: Simple | None) -> bool:
    at = 1
    while at < len(words) and words[at][:1] in ("-", "+") and words[at] not in ("--", "-"):
        sign, letters = words[at][0], words[at][1:]
        takes = letters.endswith("o") and at + 1 < len(words)
        option = words[at + 1] if takes else ""
        if "e" in letters or option == "errexit":
            run.state.ends_by_failure = sign == "-"
        if sign == "-" and ("f" in letters or option in ("noglob", "keyword")):
            raise run.refuse(f"set {words[at]} is not followed")
        if "E" in letters or option == "errtrace":
            run.state.traps_errors_inside = sign == "-"
        if "a" in letters or option == "allexport":
            run.state.exports_all = sign == "-"
        at += 2 if takes else 1
    if at < len(words):
        run.state.arguments = words[at + (words[at] in ("--", "-")) :]
    return True


def _trap(run: _Run, words: list[str], _: Simple | None) -> bool:
    given = [word for word in words[1:] if word != "--"]
    if not given or given[0] in ("-l", "-p"):
        return True
    action, signals = ("-", given) if len(given) == 1 else (given[0], given[1:])
    for signal in signals:
        name = "EXIT" if signal == "0" else signal.upper().removeprefix("SIG")
        if action in ("-", ""):
            run.state.traps.pop(name, None)
        elif name in ("DEBUG", "RETURN"):
            raise run.refuse(f"trap of {name} is not followed")
        elif name in ("EXIT", "ERR"):
            run.state.traps[name] = action
    return True


def _shift(run: _Run, words: list[str], _: Simple | None) -> bool:
    count = run._number(words[1]) if len(words) > 1 else 1
    if count is None:
        raise run.refuse("shift by an unknown number is not followed")
    if _is_open(run.state.arguments):
        raise run.refuse("shift of arguments that are not known is not followed")
    if count > len(run.state.arguments):
        return False
    del run.state.arguments[: max(count, 0)]
    return True


def _unset(run: _Run, words: list[str], _: Simple | None) -> bool:
    of_functions = "-f" in words
    for name in words[1:]:
        if name.startswith("-"):
            continue
        element = re.fullmatch(r"([A-Za-z_]\w*)\[(.*)\]", name)
        if element:
            _unset_element(run, element[1], element[2])
        elif of_functions or (name not in run.state.variables and name in run.state.functions):
            run.state.functions.pop(name, None)
        elif unknown_names(name):
            raise run.refuse(f"unset {_bash_text(name):.40} is not followed")
        else:
            run._unset(name)
    return True


def _unset_element(run: _Run, name: str, key: str) -> None:
    values = run._value(name)
    if isinstance(values, dict) and not unknown_names(key):
        values.pop(key, None)
    elif isinstance(values, list) and values and run._number(key) in (-1, len(values) - 1):
        values.pop()
    elif values is not None:
        raise run.refuse(f"unset {name}[{_bash_text(key):.40}] is not followed")


def _read(run: _Run, words: list[str], _: Simple | None) -> None:
    options = "".join(word for word in words[1:] if word.startswith("-"))
    array = "a" in options or words[0] != "read"
    names = [name for name in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", name)]
    for name in names or ["REPLY" if words[0] == "read" else "MAPFILE"]:
        run._store(name, [f"{_OPEN}{name}{END}"] if array else _unknown(name))


def _bracket(run: _Run, words: list[str], _: Simple | None) -> bool | None:
    inner = words[1:]
    if words[0] == "[":
        if not inner or inner[-1] != "]":
            raise run.refuse("']' of '[' is missing")
        inner = inner[:-1]
    return run._test([[(word, True)] for word in inner], double=False)


def _run_let(run: _Run, words: list[str], _: Simple | None) -> bool | None:
    status: bool | None = True
    for text in words[1:]:
        status = run._arithmetic((LiteralText(text, quoted=True),))
    return status


def _true(run: _Run, words: list[str], _: Simple | None) -> bool:
    return words[0] != "false"


def _getopts(run: _Run, words: list[str], _: Simple | None) -> bool:
    if run.state.arguments:
        raise run.refuse("getopts is not followed; set the variables with --set NAME=VALUE")
    return False


_BUILTINS: dict[str, _Builtin] = {
    "echo": _echo,
    "printf": _printf,
    "expr": _expr,
    "cat": _cat,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "exit": _exit,
    "return": _exit,
    "break": _break,
    "continue": _break,
    "set": _set_options,
    "trap": _trap,
    "shift": _shift,
    "unset": _unset,
    "read": _read,
    "mapfile": _read,
    "readarray": _read,
    "[": _bracket,
    "test": _bracket,
    "let": _run_let,
    "true": _true,
    "false": _true,
    ":": _true,
    "getopts": _getopts,
}
