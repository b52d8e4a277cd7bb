"""Functions of `import meshwright`, over documents instead of files.

    plan = meshwright.plan("gpt2-small", "8xa100-sxm-80gb", global_batch=64)
    meshwright.predict(plan).step_time_s

A model is text, as on the command line, or a function that builds a module of the caller's own.
torch is imported only where a module is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import commands
from meshwright.api.inputs import need_torch
from meshwright.api.plan_options import PlanOptions, PredictOptions, keyword_options
from meshwright.planner.documents import document
from meshwright.planner.documents.cluster import ClusterSpec, Precision
from meshwright.planner.documents.document import Document
from meshwright.planner.documents.framework import Framework
from meshwright.planner.documents.model import ModelGraph
from meshwright.planner.documents.plan import Plan
from meshwright.planner.documents.prediction import Certificate, Prediction
from meshwright.planner.documents.profile import Profile
from meshwright.planner.errors import DocumentError
from meshwright.planner.search.answer import Alternative, Answer
from meshwright.planner.system.progress import progress_on_stderr
from meshwright.planner.whatif.run_study import Result
from meshwright.planner.whatif.study import Study
from meshwright.studies import study_command as studies

if TYPE_CHECKING:
    from torch import nn

    from meshwright.api.commands import ImportedPlan
    from meshwright.runtime.checkpoint.weight_export import Exported
    from meshwright.runtime.parallel.tensor_styles_search import TensorStyles

MODULE_FIELDS = ("batch", "loss", "inputs", "optimizer", "groups", "units")
"""Options that go with a function that builds a module."""
DOCUMENTS: tuple[type[Document], ...] = (
    Plan, Prediction, Certificate, ModelGraph, ClusterSpec, Profile, Study, Framework,
)  # fmt: skip
"""Types of documents that `load` reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlanOptions(PlanOptions):
    """Options of a plan, and the training inputs of a caller's own module."""

    batch: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    inputs: Callable[[Any], Any] | None = None
    groups: Callable[[str, Any], Any] | None = None
    units: Sequence[str] | None = None


@keyword_options(ModulePlanOptions)
def plan(
    model: str | Callable[[], nn.Module], cluster: str = "local", *, options: ModulePlanOptions
) -> Plan:
    """Return the plan to train by; `search` also returns its prediction and proof.

    `model` is a name of the catalogue, a config.json, a folder or `file.py:factory`; or a function
    that returns a module, whose `batch` is then a pytree of tensors, `loss(outputs, batch)` a sum
    and a count, and `inputs(batch)` what the module is given (runtime.engine.engine has all three).
    `optimizer` and `groups` are as the Engine has them, and tried for the bytes of their state;
    without them memory is that of AdamW.  Only shapes and types of the example `batch` count;
    without `global_batch` it is one.  A module is planned in fp32 unless `precision` says
    otherwise, as a plain script trains.  Among plans within 1.5 % of the fastest the simplest is
    taken, unless the fastest is preferred.  `fix`, `allow` and `require` are as on the command
    line: "pipeline=2", "offload"; so is `fit_probability`, with which the plan fits at least.

    >>> import meshwright
    >>> plan = meshwright.plan("gpt2-small", "8xa100-sxm-80gb", seq_len=1024, global_batch=64)
    >>> plan.mesh.devices, plan.global_batch
    (8, 64)

    Raises NoPlanFits, DocumentError where an argument does not say what it must, and for a module
    RecordError and BatchError.
    """
    return _search(model, cluster, options).plan


@keyword_options(ModulePlanOptions)
def search(
    model: str | Callable[[], nn.Module], cluster: str = "local", *, options: ModulePlanOptions
) -> Answer:
    """Return the fastest plan with its prediction and its certificate; arguments as of `plan`.

    `top` asks for the best plans of other meshes too; `gap=0.01` proves until no plan
    is more than 1 % faster, which may take minutes.

    >>> import meshwright
    >>> found = meshwright.search("gpt2-small", "2xa100-sxm-80gb", seq_len=1024, global_batch=16)
    >>> found.prediction.fits, found.certificate.gap < 0.01
    (True, True)
    """
    return _search(model, cluster, options)


def _search(
    model: str | Callable[[], nn.Module], cluster: str, options: ModulePlanOptions
) -> Answer:
    """Search as `search` does."""
    of_module = {name: getattr(options, name) for name in MODULE_FIELDS}
    of_plan = {field.name: getattr(options, field.name) for field in fields(PlanOptions)}
    if isinstance(model, str):
        if isinstance(options.optimizer, str):
            of_module["optimizer"] = None
        misplaced = next((name for name, value in of_module.items() if value is not None), None)
        if misplaced is not None:
            raise DocumentError(
                misplaced, "goes with a function that builds a module; leave it out"
            )
        with progress_on_stderr():
            return commands.plan(model, cluster, **of_plan)
    if isinstance(options.optimizer, str):
        raise DocumentError(
            "optimizer",
            f"is the word {options.optimizer}, and a module's is a function of its parameters; "
            "give torch.optim.AdamW or another",
        )
    of_plan["optimizer"] = None
    need_torch("building a module")
    from meshwright.runtime.engine.script_module import OwnScript  # noqa: PLC0415 - needs torch

    with progress_on_stderr():
        return commands.plan(OwnScript(build=model, **of_module), cluster, **of_plan)


def tensor_styles(
    build: Callable[[], nn.Module],
    *,
    batch: Any,
    inputs: Callable[[Any], Any] | None = None,
    units: Sequence[str] | None = None,
    ranks: int = 2,
) -> TensorStyles:
    """Return the parts of a module that a tensor axis of `ranks` divides, and the undivided rest.

    Each unit is run whole and in parts on random numbers, and compared; arguments as of `plan`.

    >>> import meshwright, torch
    >>> from torch import nn
    >>> build = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    >>> print(meshwright.tensor_styles(build, batch=torch.ones(2, 4), units=[""]))
    over 2 ranks:
      0  ColwiseParallel()
      2  RowwiseParallel()
    whole on each:
      3  its output is not read by one product alone, nor its input made by one

    Raises RecordError and BatchError, as `plan` does.
    """
    need_torch("building a module")
    from meshwright.runtime.core.side_effects import restore_side_effects  # noqa: PLC0415
    from meshwright.runtime.engine.module_graph import SAMPLES, few_samples  # noqa: PLC0415
    from meshwright.runtime.engine.setup import built  # noqa: PLC0415
    from meshwright.runtime.parallel.tensor_styles_search import DerivedStyles, TensorStyles  # noqa: PLC0415 - needs torch
    from meshwright.runtime.tracing.tracer import Recorder  # noqa: PLC0415

    with restore_side_effects(build):
        module, few = built(build, {}), few_samples(batch, SAMPLES)
        recorder = Recorder.of_units(module, few, inputs, units=units)
        return TensorStyles.for_units(DerivedStyles(module, recorder, few).units_at(ranks), ranks)


@keyword_options(PredictOptions)
def predict(
    model: Plan | str | Path, cluster: str | None = None, *, options: PredictOptions
) -> Prediction:
    """Say what a plan, or a layout of a model, will take in time and memory.

    A plan, its file, or a model in text with a `layout` such as "tp=2 dp=4 zero=1" and with `lora`,
    settings of adapters that alone are trained, such as ["rank=16"].

    >>> import meshwright
    >>> a100 = "8xa100-sxm-80gb"
    >>> predicted = meshwright.predict("gpt2-small", a100, layout="dp=8", global_batch=64)
    >>> step_s = predicted.step_time_s
    >>> predicted.fits, predicted.step_time_low_s <= step_s <= predicted.step_time_high_s
    (True, True)
    """
    if not isinstance(model, Plan):
        values = {field.name: getattr(options, field.name) for field in fields(options)}
        return commands.predict(str(model), cluster, **values)
    options.refuse_beside_plan()
    return commands.of_plan(model, cluster, options.profile)


def compare(
    plans: Sequence[Plan | str | Path], cluster: str | None = None
) -> tuple[Alternative, ...]:
    """Say what plans take beside the fastest of them, each on its own cluster or on one.

    >>> import meshwright
    >>> plans = [
    ...     meshwright.plan("gpt2-small", "2xa100-sxm-80gb", global_batch=16, fix=[degree])
    ...     for degree in ("dp=2", "pp=2")
    ... ]
    >>> first, second = meshwright.compare(plans)
    >>> first.more, second.more > 0, second.why != ""
    (0.0, True, True)
    """
    return commands.compare(plans, cluster)


def profile(
    model: str,
    cluster: str = "local",
    *,
    seq_len: int | None = None,
    global_batch: int | None = None,
    precision: Precision | None = None,
    budget: str | None = None,
    fresh: bool = False,
) -> Profile:
    """Measure a model's layers and the links of these machines; the result is a document.

    >>> import meshwright
    >>> measured = meshwright.profile("gpt2-small", "local:2", budget="1min")  # doctest: +SKIP
    >>> meshwright.save(measured, "profile.yaml")  # doctest: +SKIP
    """
    return commands.profile(
        model,
        cluster,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        budget=budget,
        fresh=fresh,
        quiet=True,
    )


def whatif(study: Study | str | Path | None = None, **flags: Any) -> Result:
    """Compare clusters before they are bought or rented: time, cost, energy of the best plans.

    A study, its file, or its words: `model`, `clusters`, `tokens`, `deadline_days`, `budget`, `by`.

    >>> import meshwright
    >>> found = meshwright.whatif(
    ...     model="gpt2-small", clusters=["8xa100-sxm-80gb", "8xh100-sxm-80gb"], tokens=1e12
    ... )
    >>> found.best.accelerator, len(found.outcomes)
    ('h100-sxm-80gb', 2)
    """
    if isinstance(study, Study):
        from meshwright.planner.whatif.run_study import run  # noqa: PLC0415 - all of it is needed only here

        if flags:
            raise DocumentError("study", f"is complete in itself; leave out {', '.join(flags)}")
        return run(study)
    return studies.whatif(None if study is None else str(study), **flags)


def export(
    source: str | Path,
    *,
    to: str | None = None,
    output: str | None = None,
    job: str | None = None,
    settings: Sequence[str] = (),
) -> Exported | commands.FrameworkConfiguration:
    """Write a checkpoint in the form of another program, or a plan as its configuration.

    A `job` (slurm, kubernetes, skypilot) starts the configuration; `settings` are NAME=VALUE.

    >>> import meshwright, pathlib, tempfile
    >>> plan = meshwright.plan("gpt2-small", "2xa100-sxm-80gb", framework="megatron")
    >>> file = pathlib.Path(tempfile.mkdtemp(), "plan.yaml")
    >>> meshwright.save(plan, file)
    >>> "--bf16" in meshwright.export(file).text
    True
    """
    return commands.export(str(source), to=to, output=output, job=job, settings=settings)


def import_plan(
    path: str | Path,
    *,
    cluster: str,
    of: str | None = None,
    model: str | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    document_len: int | None = None,
    values: Sequence[str] = (),
) -> ImportedPlan:
    """Read another framework's configuration as a plan; nothing in it is executed.

    `of` is megatron, megatron-bridge, torchtitan, deepspeed, accelerate, transformers, nanotron,
    fsdp, or slurm: a script that runs one of them; without it the settings tell.  `values` are
    those of a script's variables.

    >>> import meshwright, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "run.sh")
    >>> _ = file.write_text("python pretrain_gpt.py --micro-batch-size 2 --bf16 --seq-length 1024")
    >>> cluster = "2xa100-sxm-80gb"
    >>> found = meshwright.import_plan(file, of="megatron", cluster=cluster, model="gpt2-small")
    >>> found.plan.micro_batch, found.unknown
    (2, ())

    Raises DocumentError where a configuration is none, or none that can run there.
    """
    return commands.import_plan(
        str(path),
        of=of,
        cluster=cluster,
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        document_len=document_len,
        values=values,
    )


def load(path: str | Path) -> Document:
    """Read a document of any kind; it says itself which one it is.

    >>> import meshwright, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp(), "plan.yaml")
    >>> meshwright.save(meshwright.plan("gpt2-small", "2xa100-sxm-80gb"), file)
    >>> type(meshwright.load(file)).__name__
    'Plan'

    Raises DocumentError with the place in the file.
    """
    data = document.plain(document.read_text(path))
    keys = set(data) if isinstance(data, dict) else set()
    kind = max(DOCUMENTS, key=lambda one: _likeness(one, keys))
    return document.read(kind, path)


def save(written: Document, path: str | Path) -> None:
    """Write a document as YAML; the file appears whole or not at all.

    >>> import meshwright, pathlib, tempfile
    >>> plan = meshwright.plan("gpt2-small", "2xa100-sxm-80gb")
    >>> file = pathlib.Path(tempfile.mkdtemp(), "plan.yaml")
    >>> meshwright.save(plan, file)
    >>> meshwright.load(file) == plan
    True
    """
    document.write(written, path)


def _likeness(kind: type[Document], keys: set[str]) -> tuple[int, int]:
    """Return how well keys fit a kind of document: required ones that are missing count first."""
    required = {name for name, field in kind.model_fields.items() if field.is_required()}
    return -len(required - keys), len(keys & set(kind.model_fields)) - len(keys)
