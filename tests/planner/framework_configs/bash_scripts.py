"""Shell scripts by chance, which start `launch` with words; harmless in any shell."""

from __future__ import annotations

import random

NAMES = ("A", "B", "TP", "MBS", "ARGS", "EXTRA")
ARRAYS = ("MODEL_ARGS", "LIST")
WORDS = ("x", "7", "13", "--fp8-format hybrid", "--bf16", "a b", "7b", "it's", "", "two  gaps", "*")


class Script:
    """One script in the making; `depth` keeps compound commands small."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.depth, self.loops = rng, 0, 0
        self.functions: list[str] = []

    def text(self) -> str:
        lines = [f"{name}={self.quoted()}" for name in NAMES if self.rng.random() < 0.9]
        lines += [f"{name}=({self.words()})" for name in ARRAYS]
        lines += [self.command() for _ in range(self.rng.randint(2, 7))]
        lines.append(self.launch())
        return "\n".join(lines) + "\n"

    def quoted(self) -> str:
        word = self.rng.choice(WORDS)
        if "'" in word:
            return f'"{word}"'
        return self.rng.choice([f'"{word}"', f"'{word}'"])

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def value(self) -> str:
        name, array = self.name(), self.rng.choice(ARRAYS)
        return self.rng.choice(
            [
                f"${name}",
                f"${{{name}}}",
                f'"${name}"',
                f'"${{{name}}}b"',
                "${" + name + ":-" + self.rng.choice(["d", "8", "d e", "${A}"]) + "}",
                f'"${{{name}:-$B}}"',
                f"${{{name}:+set}}",
                f'"${{{name}-unset}}"',
                "${UNSET:-" + self.rng.choice(["8", "p q", '"p q"']) + "}",
                f"${{#{name}}}",
                f'"${{{name}%%b*}}"',
                f'"${{{name}#?}}"',
                f'"${{{name}//a/z}}"',
                f'"${{{name}:0:2}}"',
                f'"${{{array}[@]}}"',
                f"${{{array}[@]}}",
                f'"${{{array}[*]}}"',
                f"${{#{array}[@]}}",
                f'"${{{array}[0]}}"',
                f"$(({self.rng.randint(1, 9)} * {self.rng.randint(1, 9)} - 40 / 7))",
                f"$(echo {self.quoted()} c)",
                f'"$(echo {self.quoted()} c)"',
                "{1..3}",
                "v{p,q}",
                "pre$A'mid'\"$B\"",
                self.quoted(),
                "\\$A",
                "'$A'",
                "$'t\\tx'",
            ]
        )

    def words(self) -> str:
        return " ".join(self.value() for _ in range(self.rng.randint(0, 3)))

    def launch(self) -> str:
        return f"launch --end {self.words()} {self.value()}"

    def condition(self) -> str:
        name = self.name()
        return self.rng.choice(
            [
                f'[ "${name}" = 7 ]',
                f"[[ ${name} == 7* ]]",
                f'[[ "${name}" != x && -n ${name} ]]',
                f'[ -z "${name}" ]',
                f'[ -n "${{{name}:-}}" -a 1 -lt 2 ]',
                f"[ {self.rng.randint(0, 3)} -ge 2 ]",
                f"(( {self.rng.randint(0, 3)} > 1 ))",
                "true",
                "! false",
                f"[[ ${name} =~ ^[0-9]+$ ]]",
                f'[ ! "${name}" == x ] && true',
            ]
        )

    def command(self) -> str:
        self.depth += 1
        simple = [self.assign, self.append, self.launch, self.one_line, self.heredoc]
        compound = [self.if_, self.for_, self.case, self.function, self.while_, self.subshell,
                    self.nested, self.chain, self.set_arguments]  # fmt: skip
        makes = simple if self.depth > 3 else [*simple, *compound]
        text: str = self.rng.choice(makes)()
        self.depth -= 1
        return text

    def assign(self) -> str:
        return f"{self.name()}={self.value()}"

    def append(self) -> str:
        if self.rng.random() < 0.5:
            return f"{self.rng.choice(ARRAYS)}+=({self.words()})"
        return f"{self.name()}+={self.value()}"

    def one_line(self) -> str:
        return f"{self.assign()}; {self.assign()} # {self.assign()}"

    def heredoc(self) -> str:
        sign = self.rng.choice(["EOF", "'EOF'"])
        return f'{self.name()}=$(cat <<{sign}\nit\'s $A and "$B" `echo c` \\$A\nEOF\n)'

    def if_(self) -> str:
        other = (
            f"; elif {self.condition()}; then {self.command()}" if self.rng.random() < 0.4 else ""
        )
        other = other if "<<" not in other else ""
        body, otherwise = self.command(), self.command()
        begin = f"if {self.condition()}; then\n{body}\n{other.removeprefix('; ')}"
        return f"{begin}\nelse\n{otherwise}\nfi"

    def for_(self) -> str:
        return f"for {self.name()} in {self.words()} 1 2; do\n{self.command()}\ndone"

    def while_(self) -> str:
        self.loops += 1
        n, rounds, body = f"N{self.loops}", self.rng.randint(0, 3), self.command()
        return f"{n}=0\nwhile [ ${n} -lt {rounds} ]; do\n{body}\n(({n}++)) || true\ndone"

    def case(self) -> str:
        return (
            f"case ${self.name()} in\n7|13) {self.assign()};;\n[0-9]b)\n{self.command()}\n;;\n"
            f"x*) {self.launch()} ;;\n*) {self.assign()}\nesac"
        )

    def function(self) -> str:
        name = f"f{len(self.functions)}"
        self.functions.append(name)
        body = f'local A=${{1:-none}}; launch --in $A "$@" $#\n{self.command()}'
        return f"{name}() {{\n{body}\n}}\n{name} {self.words()}"

    def subshell(self) -> str:
        return f"( {self.command()}\n)"

    def nested(self) -> str:
        name = self.name()
        return self.rng.choice(
            [
                f"export {name}; bash -c 'launch --nested ${name} \"$1\"' zero {self.value()}",
                f'bash -c "launch --quoted \\"${name}x\\""',
                f"eval 'launch --eval \"${name}\"' " + self.rng.choice(["--more", "$B", ""]),
                "bash <<EOF\nlaunch --here '7' {1..2}\nEOF",
                f"LOCAL=4 launch --before {self.value()}",
                f"launch --pipe {self.value()} | cat",
            ]
        )

    def chain(self) -> str:
        return f"{self.condition()} && {self.assign()} || {self.assign()}"

    def set_arguments(self) -> str:
        return f'set -- {self.words()} end; launch --args "$@" $1; shift; launch --shifted $*'
