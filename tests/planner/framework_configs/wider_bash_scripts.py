"""Shell scripts by chance with what launch scripts hold more rarely; harmless in any shell."""

from __future__ import annotations

import re
from pathlib import Path

from tests.planner.framework_configs.bash_scripts import ARRAYS, NAMES, Script


def _templates(name: str) -> list[str]:
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [line.replace("\N{PILCROW SIGN}", "\n") for line in lines]


VALUES, COMMANDS = _templates("wider_values.txt"), _templates("wider_commands.txt")
"""Words and commands with `<places>` for others."""
_PLACE = re.compile(r"<(name|quoted|words|assign|launch|condition|command|value|array|small)>")


class WiderScript(Script):
    """One script in the making, of every construct that `Script` has and more."""

    def text(self) -> str:
        lines = [f"{name}={self.quoted()}" for name in NAMES if self.rng.random() < 0.9]
        lines += [f"{name}=({Script.value(self)} {self.quoted()})" for name in ARRAYS]
        lines += [self.command() for _ in range(self.rng.randint(1, 3))]
        names = " ".join(f'"${name}"' for name in NAMES if self.rng.random() < 0.5)
        return "\n".join([*lines, f"launch --end {self.value()} {names}"]) + "\n"

    def value(self) -> str:
        if self.rng.random() < 0.6:
            return super().value()
        return self.filled(self.rng.choice(VALUES))

    def command(self) -> str:
        if self.depth > 3 or self.rng.random() < 0.3:
            return super().command()
        self.depth += 1
        text = self.filled(self.rng.choice(COMMANDS))
        self.depth -= 1
        return text

    def filled(self, template: str) -> str:
        """Return a template with something by chance in each place."""
        return _PLACE.sub(lambda place: self.part(place[1]), template)

    def part(self, name: str) -> str:
        if name in ("array", "small"):
            return self.rng.choice(ARRAYS) if name == "array" else str(self.rng.randint(0, 3))
        text: str = getattr(self, name)()
        return text
