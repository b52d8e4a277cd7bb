"""The same problems as public planners, priced by their own formulas, theirs beside ours.

    python benchmarks/peers/run.py FOLDER [--only PEER] [--json]

FOLDER holds the peers' problems and stored plans, one JSON file each; none come with this project.
Every adapter first prices the stored plans and stops if a stored score does not come out.  CPU
seconds are of this process and of solving alone; the peers' are those stored with their plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers import (
    aceso,
    dnn_inference,
    dnn_partitioning,
    galvatron,
    piper,
    sailor_mixed,
    sailor_search,
    sailor_validation,
)
from benchmarks.peers.comparison import Comparison, table

Adapter = Callable[[Path], list[Comparison]]

ADAPTERS: dict[str, tuple[Adapter, tuple[str, ...]]] = {
    "piper": (
        piper.compare,
        ("piper_bert32a100.json", "piper_gnmt.json", "piper_resnet.json"),
    ),
    "galvatron": (galvatron.compare, ("galvatron_llama2_7b_1x8.json",)),
    "sailor": (sailor_search.compare, ("sailor_opt350_a100x32.json",)),
    "sailor-mixed": (
        sailor_mixed.compare,
        ("sailor_mixed_opt350.json", "sailor_mixed_opt350_32_96.json"),
    ),
    "dnn-partitioning": (
        dnn_partitioning.compare,
        ("dnnpart_bert24_training.json", "dnnpart_resnet50_training.json"),
    ),
    "aceso": (
        aceso.compare,
        tuple(f"aceso_gpt_{name}gpus.json" for name in ("1_3B_4", "2_6B_8", "6_7B_16", "13B_32")),
    ),
    "dnn-inference": (
        dnn_inference.compare,
        tuple(
            f"{name}_inference.json"
            for name in (
                *("Layer_bert24", "Layer_gnmt", "Layer_resnet50"),
                *("Operator_bert_l-3", "Operator_bert_l-6"),
                "Operator_resnet50",
            )
        ),
    ),
}

VALIDATION, RUNS = "sailor-validation", "validation_opt350_gh200.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 if there was nothing to compare or a peer has a better plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=[*ADAPTERS, VALIDATION])
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(argv)
    found: dict[str, list[Comparison]] = {}
    for name, (compare, files) in ADAPTERS.items():
        if arguments.only not in (None, name):
            continue
        for file in files:
            path = arguments.folder / file
            if not path.is_file():
                print(f"{path}: is not there; left out", file=sys.stderr)
                continue
            found.setdefault(name, []).extend(compare(path))
    errors: list[sailor_validation.Errors] = []
    if arguments.only in (None, VALIDATION) and (arguments.folder / RUNS).is_file():
        errors = sailor_validation.errors(arguments.folder / RUNS)
    if arguments.json:
        answer = {name: [row.as_dict() for row in rows] for name, rows in found.items()}
        print(json.dumps(answer | {VALIDATION: [row.as_dict() for row in errors]}, indent=1))
    else:
        for name, rows in found.items():
            print(f"## {name}\n\n{table(rows)}\n")
        if errors:
            print(f"## {VALIDATION}\n\n{sailor_validation.error_table(errors)}")
    verdicts = {row.verdict for rows in found.values() for row in rows}
    nothing = not verdicts and not errors
    return 1 if nothing or verdicts & {"worse", "only theirs"} else 0


if __name__ == "__main__":
    sys.exit(main())
