"""Parts that the files of cluster schedulers share: settings, #SBATCH lines, names, YAML texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml

from meshwright.planner.documents.plan import Plan
from meshwright.planner.errors import DocumentError, LaunchError

RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}
"""Kubernetes' names of devices, by the kind of accelerator."""


def job_settings(texts: Sequence[str], *, option: str = "job") -> dict[str, str]:
    """Return NAME=VALUE settings by name; DocumentError for a text that is none.

    >>> job_settings(["partition=gpu", "time=24:00:00"])
    {'partition': 'gpu', 'time': '24:00:00'}
    """
    settings: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or not value.isprintable():
            raise DocumentError(option, f"{text!a}: write NAME=VALUE, as in partition=gpu")
        settings[name] = value
    return settings


def refuse_lines(values: Sequence[str]) -> None:
    """Refuse values with line ends, which would be read as lines of the job script."""
    for value in values:
        if not value.isprintable():
            raise LaunchError(
                f"on: {value!a} cannot be written into a job script; use another name"
            )


def sbatch_lines(options: Mapping[str, str]) -> list[str]:
    """Return the #SBATCH lines of options of sbatch; an option without a value is a flag."""
    return [
        f"#SBATCH --{name}{f'={_sbatch_value(value)}' if value else ''}"
        for name, value in options.items()
    ]


def _sbatch_value(value: str) -> str:
    r"""Return a value of an #SBATCH line, where `#` begins a comment and a blank the next option.

    sbatch takes a backslash as bash does between quotes too, so nothing is quoted.

    >>> print(_sbatch_value("/data/my runs/slurm-%j.log"))
    /data/my\ runs/slurm-%j.log
    >>> print(_sbatch_value("a#b"), _sbatch_value("24:00:00"))
    a\#b 24:00:00
    """
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", value)


def job_name(plan: Plan) -> str:
    """Return a job's usual name, which Kubernetes takes too."""
    name = re.sub(r"[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")[:40]
    return f"meshwright-{name}".rstrip("-")


def pod_name(name: str, *, option: str = "job") -> str:
    """Return a name that Kubernetes takes; DocumentError for another."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name):
        raise DocumentError(
            option, f"name={name}: names of pods have lower-case letters, digits and -; rename it"
        )
    return name


class BlockTexts(yaml.SafeDumper):
    """YAML in which texts of several lines are written as blocks."""


BlockTexts.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        # Other characters that end lines would come back as \n: Python does not end a line there.
        "tag:yaml.org,2002:str",
        text,
        style="|" if "\n" in text and text.replace("\n", "").isprintable() else None,
    ),
)
