"""Compute the worked examples anew: `python plans/make.py [NAME ...]`.

Each example is a folder with everything it was computed from and everything that came out:
model.yaml, cluster.yaml, profile.yaml where there is one, command.txt, plan.yaml, prediction.yaml,
certificate.yaml.  `tests/test_plans.py` computes each again and compares.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from meshwright.planner.catalog.expressions import resolve_cluster, resolve_model
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import Document
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.profile import Profile
from meshwright.planner.requests.request import SURE_TO_FIT, Request
from meshwright.planner.search.search import search

FOLDER = Path(__file__).parent
EXAMPLES = {
    "demo-4m-on-local": "demo-4m --cluster local:2 --seq-len 128 --global-batch 16",
    "llama-3.1-8b-on-8xh100": (
        "llama-3.1-8b --cluster 8xh100-sxm-80gb --seq-len 8192 --global-batch 128"
    ),
    "llama-3.1-70b-on-8x8xh100": (
        "llama-3.1-70b --cluster 8x8xh100-sxm-80gb --seq-len 8192 --global-batch 256"
    ),
    "gpt3-175b-on-16x8xa100": (
        "gpt3-175b --cluster 16x8xa100-sxm-80gb --seq-len 2048 --global-batch 1536"
    ),
}


def options(name: str) -> tuple[str, str, int, int]:
    """Return model, cluster, sequence length and global batch of an example."""
    model, _, cluster, _, seq_len, _, global_batch = shlex.split(EXAMPLES[name])
    return model, cluster, int(seq_len), int(global_batch)


def computed(name: str) -> dict[str, Document]:
    """Return the documents that an example's own model, cluster and profile lead to."""
    folder = FOLDER / name
    model = document.read(ModelGraph, folder / "model.yaml")
    cluster = document.read(ClusterSpec, folder / "cluster.yaml")
    measured = folder / "profile.yaml"
    profile = document.read(Profile, measured) if measured.exists() else None
    _, cluster_name, seq_len, global_batch = options(name)
    request = Request.create(
        model,
        cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        profile=profile,
        called=cluster_name,
        fit_probability=SURE_TO_FIT,
    )
    answer = search(request)
    return {
        "plan.yaml": answer.plan,
        "prediction.yaml": answer.prediction,
        "certificate.yaml": answer.certificate,
    }


def main(names: list[str]) -> None:
    """Write the examples; the cluster and profile of `local` are kept, being measurements."""
    for name in names or EXAMPLES:
        folder = FOLDER / name
        model, cluster, _, _ = options(name)
        document.write(resolve_model(model), folder / "model.yaml")
        if not (cluster.startswith("local") and (folder / "cluster.yaml").exists()):
            document.write(resolve_cluster(cluster), folder / "cluster.yaml")
        profile = " --profile profile.yaml" if (folder / "profile.yaml").exists() else ""
        command = f"meshwright plan {EXAMPLES[name]}{profile} -o plan.yaml\n"
        document.write_text(command, folder / "command.txt")
        for file, result in computed(name).items():
            document.write(result, folder / file)
        print(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
