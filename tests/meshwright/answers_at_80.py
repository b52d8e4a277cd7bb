"""Common commands as a user gives them, and what they print on 80 columns.

`python -m tests.meshwright.answers_at_80` writes `golden/` and the blocks of README and `docs/`
that show one of them; read what changed aloud before it is committed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
SCRIPT = (
    "python pretrain_gpt.py --micro-batch-size 1 --global-batch-size 128 --seq-length 4096 \\\n"
    "  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel \\\n"
    "  --bf16 --use-distributed-optimizer --log-interval 5\n"
)
PROBLEM = (
    "format: 1\nmicro_batches: 8\n"
    "kinds:\n  block:\n    options: [{name: keep, forward_s: 1.0e-2, backward_s: 2.0e-2}]\n"
    "layers:\n- {layers: [block], count: 6}\n"
    "stages:\n- {capacity_bytes: 1.0, count: 3}\n"
)
EIGHT = "--cluster 8xh100-sxm-80gb"
COMMANDS: dict[str, str] = {
    "plan": f"plan llama-3.1-8b {EIGHT} --global-batch 128 -o plan.yaml",
    "plan-torchtitan": (
        f"plan llama-3.1-8b {EIGHT} --framework torchtitan --seq-len 8192 --global-batch 64 "
        "-o titan.yaml"
    ),
    "plan-does-not-fit": "plan llama-3.1-8b --cluster rtx-4090",
    "predict": f"predict llama-3.1-8b {EIGHT} --layout tp=4,pp=2 --global-batch 64",
    "show": "show plan.yaml",
    "export": "export titan.yaml -o config.py",
    "import": f"import run.sh --from megatron --model llama-3.1-8b {EIGHT} -o mine.yaml",
    "compare": f"compare plan.yaml mine.yaml {EIGHT}",
    "compare-best": "compare mine.yaml --best -o best.yaml",
    "solve": "solve small.yaml",
    "whatif": (
        "whatif --model llama-3.1-8b --clusters 8xh100-sxm-80gb,8xh200-sxm --tokens 1e11 "
        "--deadline-days 20"
    ),
    "catalog": "catalog nodes",
}
"""In this order: later ones read what earlier ones wrote."""


def prepare(folder: Path) -> None:
    """Write the files that a user has."""
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "small.yaml").write_text(PROBLEM)


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    environment = {**os.environ, "COLUMNS": "80", "MESHWRIGHT_DEFAULTS": ""}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for name, command in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *command.split()],
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                env=environment,
            )
            text = f"$ meshwright {command}\n{done.stdout}{done.stderr}"
            (GOLDEN / f"{name}.txt").write_text(text)
    root = GOLDEN.parents[2]
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        page.write_text(with_answers(page.read_text()))


def with_answers(page: str) -> str:
    """Return a page with what the common commands print in blocks that begin with one of them."""

    def answered(block: re.Match[str]) -> str:
        for name, command in COMMANDS.items():
            if block[1] == f"$ meshwright {command}":
                return f"```\n{(GOLDEN / f'{name}.txt').read_text().rstrip()}\n```"
        return block[0]

    return re.sub(r"^```\n(\$ meshwright .*)\n(?:(?!```).*\n)*```$", answered, page, flags=re.M)


if __name__ == "__main__":
    main()
