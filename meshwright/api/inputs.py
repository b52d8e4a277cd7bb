"""Inputs of commands: models, clusters, jobs, profiles and plans, read and checked."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from meshwright.planner.catalog import framework, frameworks, hub
from meshwright.planner.catalog.expressions import (
    locate_model,
    resolve_beside,
    resolve_cluster,
    resolve_model,
)
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec
from meshwright.planner.documents.document import is_there, nearest
from meshwright.planner.documents.framework import base_of
from meshwright.planner.documents.model import RECORDED, ModelGraph, is_factory, is_own, is_recorded
from meshwright.planner.documents.plan import Plan, check_size
from meshwright.planner.documents.profile import Profile, Profiles
from meshwright.planner.documents.units import MOST_TOKENS
from meshwright.planner.errors import DocumentError, LaunchError
from meshwright.planner.requests.request import FACTORY_SEQ_LEN

if TYPE_CHECKING:
    from meshwright.runtime.engine.script_module import OwnScript


def model_of(text: str, *, seq_len: int | None = None) -> ModelGraph:
    """Return the model that a catalogue name, a configuration or `file.py:factory` names.

    A factory's modules are traced on samples of `seq_len` tokens, by default as many as a job has.
    """
    return model_and_script(text, seq_len=seq_len)[0]


def model_and_script(
    text: str | OwnScript, *, seq_len: int | None = None
) -> tuple[ModelGraph, OwnScript | None]:
    """Return the same of a MODEL or of a script's module, and what the script trains if it is one.

    The file of a script is read and imported once.
    """
    script = script_of(text) if isinstance(text, str) else text
    if script is not None:
        return script.graph(), script
    assert isinstance(text, str), "no script is a MODEL's text"
    return _named_model(text, seq_len), None


def _named_model(text: str, seq_len: int | None) -> ModelGraph:
    if is_factory(text):
        need_torch(f"{text}: reading a Python factory")
        from meshwright.runtime.engine.factory_module import graph_of_factory  # noqa: PLC0415 - needs torch

        check_size("seq-len", FACTORY_SEQ_LEN if seq_len is None else seq_len, MOST_TOKENS)
        graph: ModelGraph = graph_of_factory(text, seq_len=seq_len or FACTORY_SEQ_LEN)
        return graph
    if is_recorded(text):
        return traced_model(text, seq_len)
    if text.endswith((".yaml", ".yml", ".json")) and not is_there(text):
        raise DocumentError("", "is not there; name a file that exists", file=text)
    try:
        return resolve_model(text)
    except DocumentError as refusal:
        error = refusal if refusal.file or not is_there(text) else refusal.in_file(text)
        # Only of a type without figures here: another error is not the recorder's.
        if error.path != "model_type" or importlib.util.find_spec("transformers") is None:
            raise error from refusal
        try:
            is_path = is_there(text) or not hub.is_hub_name(text)
            folder = text if is_path else str(hub.config_file(text).parent)
            return traced_model(f"{folder}{RECORDED}", seq_len)
        except DocumentError as refused:
            also = f"{error.message} Recorded as it is, {refused.message}"
            raise DocumentError(error.path, also, file=error.file) from refused


def script_of(text: str) -> OwnScript | None:
    """Return the script of `script.py:build` that trains a module; None for another MODEL."""
    if not is_factory(text):
        return None
    from meshwright.runtime.engine.user_code import trains_in_script  # noqa: PLC0415 - the runtime

    if not trains_in_script(text):
        return None
    need_torch(f"{text}: building a module")
    from meshwright.runtime.engine.script_module import OwnScript  # noqa: PLC0415 - needs torch

    return OwnScript.of_file(text)


def traced_model(source: str, seq_len: int | None) -> ModelGraph:
    """Return the model of a configuration, as the library's own class was seen to compute."""
    need_torch(f"{source}: recording a model")
    from meshwright.runtime.engine.traced_transformer import graph_of_library  # noqa: PLC0415 - needs torch

    check_size("seq-len", FACTORY_SEQ_LEN if seq_len is None else seq_len, MOST_TOKENS)
    graph: ModelGraph = graph_of_library(source, seq_len=seq_len or FACTORY_SEQ_LEN)
    return graph


def plan_model(wanted: Plan, plan_path: str | None = None) -> ModelGraph:
    """Return the model of a plan, and refuse one that is not the model the plan was made for.

    No code is run: of a `file.py:factory` the plan carries the figures.
    """
    identity = wanted.model
    try:
        _check_framework(wanted)
        if not is_own(identity.source):
            graph = resolve_beside(identity.source, plan_path or "")
        elif identity.graph is not None:
            graph = identity.graph
        else:
            raise DocumentError(
                "model.graph",
                f"is missing, and '{identity.source}' is code, which only launch and profile run; "
                "plan again: a plan carries the model's figures",
            )
        wanted.check_model(graph)
    except DocumentError as error:
        raise (error if error.file else error.in_file(plan_path or "plan")) from error
    return graph


def _check_framework(wanted: Plan) -> None:
    """Refuse a plan for a framework that the catalogue does not have."""
    if base_of(wanted.framework) not in frameworks():
        raise DocumentError(
            "framework",
            f"is '{wanted.framework:.40}'; {nearest(wanted.framework, list(frameworks()))}",
        )
    framework(wanted.framework)


def check_code(graph: ModelGraph, document_path: str) -> None:
    """Refuse a user's file that is not the one which a document names; nothing is run."""
    from meshwright.runtime.engine.user_code import check_files  # noqa: PLC0415 - the runtime

    if is_factory(graph.source or ""):
        check_files(locate_model(graph.source or "", document_path), graph.files)


def own_code(
    graph: ModelGraph, document_path: str, *, seq_len: int, trusted: bool = False
) -> ModelGraph:
    """Run the user's file that a document names, and return the model that it makes.

    The files must be those whose digests the document has, unless they are `trusted` as they are.
    """
    source = locate_model(graph.source or "", document_path)
    if not trusted:
        check_code(graph, document_path)
    need_torch(f"{source}: running a Python factory")
    from meshwright.runtime.engine.factory_module import graph_of_factory  # noqa: PLC0415 - needs torch

    traced: ModelGraph = graph_of_factory(
        source, seq_len=seq_len, digests=None if trusted else graph.files
    )
    return traced.model_copy(update={"name": graph.name, "source": graph.source})


def need_torch(what: str) -> None:
    """Refuse what needs torch where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise LaunchError(f"{what} needs torch; install it with: pip install 'meshwright[torch]'")


def profile_for(graph: ModelGraph, paths: str | None) -> Profiles:
    """Read `profile.yaml`, or `GROUP=a.yaml,GROUP=b.yaml` where devices differ."""
    if paths is None:
        return None
    if "=" not in paths or document.is_file(paths):
        return _oneprofile_for(graph, paths)
    profiles: dict[str, Profile] = {}
    for part in paths.split(","):
        group, sign, path = part.partition("=")
        if not sign or group in profiles:
            why = "is given twice" if sign else "has no group; write GROUP=FILE,GROUP=FILE"
            raise DocumentError("profile", f"'{part}': {group if sign else 'it'} {why}")
        profiles[group] = _oneprofile_for(graph, path)
    return profiles


def _oneprofile_for(graph: ModelGraph, path: str) -> Profile:
    measured = document.read(Profile, path)
    if measured.calibration is not None and not measured.layers:
        return measured  # constants of the cluster hold for every model
    if measured.model_digest != graph.digest:
        raise DocumentError(
            "model_digest",
            f"is {measured.model_digest}, but {graph.name} has {graph.digest}; "
            "this profile was measured on another model: measure again",
            file=path,
        )
    return measured


def machine_of(cluster: str, measured: Profiles) -> ClusterSpec:
    """Return a cluster, with the constants that runs on it showed where a profile has them."""
    machine = resolve_cluster(cluster)
    each = (measured,) if isinstance(measured, Profile) else (measured or {}).values()
    for profile in each:
        from meshwright.planner.calibration.fitting.fitted_constants import with_fitted_constants  # noqa: PLC0415 - few have any

        machine = with_fitted_constants(machine, profile.calibration)
    return machine


def check_devices(wanted: Plan, machine: ClusterSpec) -> None:
    """Refuse a plan for more devices than there are."""
    if wanted.ranks > machine.devices:
        raise DocumentError(
            "mesh",
            f"takes {wanted.ranks} ranks, and {machine.name} has {machine.devices} devices; "
            "plan again for this cluster",
        )


def is_plan(text: str) -> bool:
    """Return True if a path names a plan rather than a model."""
    if not text.endswith((".yaml", ".yml", ".json")) or not document.is_file(text):
        return False
    try:
        data = document.plain(document.read_text(text))
    except DocumentError as error:
        raise error.in_file(text) from error
    return isinstance(data, dict) and "stages" in data
