"""Examples of every command, as its help shows them; tests read each as the command line would."""

from __future__ import annotations

CLUSTER = "--cluster 8xh100-sxm-80gb"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "plan": (
        f"meshwright plan llama-3.1-8b {CLUSTER} -o plan.yaml",
        f"meshwright plan ./config.json {CLUSTER} --explain",
        "meshwright plan gpt2 --cluster local:2 --fix pp=2,schedule=1f1b",
        f"meshwright plan gpt2 {CLUSTER} --framework torchtitan",
    ),
    "compare": (
        "meshwright compare a.yaml b.yaml",
        "meshwright compare mine.yaml --best -o best.yaml",
    ),
    "import": (
        "meshwright import run.sh --from megatron --cluster local -o mine.yaml",
        "meshwright import run.slurm --from slurm --cluster 8xh200-sxm",
    ),
    "predict": (
        "meshwright predict plan.yaml",
        f"meshwright predict llama-3.1-8b {CLUSTER} --layout tp=4,pp=2",
    ),
    "solve": ("meshwright solve problem.yaml", "meshwright solve problem.yaml --solver ilp"),
    "tune": (
        "meshwright tune demo-4m --cluster local:2 --budget 20min -o plan.yaml",
        f"meshwright tune llama-3.1-8b {CLUSTER} --dry-run",
        "meshwright tune plan.yaml --run 'bash run.sh {config}' -o tuned.yaml",
    ),
    "launch": (
        "meshwright launch plan.yaml --data text.txt --steps 100",
        "meshwright launch plan.yaml --checkpoint checkpoints --resume",
        "meshwright launch plan.yaml --on slurm --job partition=gpu --dry-run",
        "meshwright launch plan.yaml --hosts a,b[0-2] --dry-run",
    ),
    "run": (
        "meshwright run --plan plan.yaml train.py --epochs 3",
        "meshwright run --plan plan.yaml --restarts 2 train.py",
    ),
    "watch": (
        "meshwright watch runs/demo-4m",
        "meshwright watch runs/demo-4m --incident 1 --share -o incident.html",
    ),
    "export": (
        "meshwright export plan.yaml --to torchtitan -o plan.py --job slurm",
        "meshwright export checkpoints --to huggingface -o model",
    ),
    "profile": (
        "meshwright profile demo-4m --cluster local:2 -o profile.yaml",
        "meshwright profile demo-4m --cluster local:2 --dry-run",
    ),
    "show": (
        "meshwright show plan.yaml --explain",
        "meshwright show plan.yaml --html report.html --trace trace.json",
    ),
    "validate": ("meshwright validate runs.csv --html report.html",),
    "calibrate": ("meshwright calibrate runs/demo-4m -o constants.yaml",),
    "whatif": (
        "meshwright whatif study.yaml --html report.html",
        "meshwright whatif --model llama-3.1-8b --tokens 1e11 \\",
        "    --clusters 8xh100-sxm-80gb,8xh200-sxm --deadline-days 20",
    ),
    "catalog": ("meshwright catalog models", "meshwright catalog accelerators"),
}


def epilog(command: str) -> str:
    """Return the examples of a command, below its options, as they are."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[command])))
