"""One immutable request to the planner, and every default of it.

`Request.create` fills in what is left open, alike for every command.  What is published of
pretraining decides: most models of the catalogue were trained on 4,096 tokens a sample first and on
longer ones in a late phase, and on about 4 million tokens a step (Llama 2: both; GPT-3 3.2 million;
Llama 3 began with 4 million).  Devices change the arithmetic of training as little as can be: the
batch is rounded up to a multiple of them, so that each can have a sample, and up to 1,024 devices
that changes no power of two.  CPUs are tried out, not trained on: 256 tokens, 8 samples a rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.planner.catalog import framework as framework_called
from meshwright.planner.catalog import native
from meshwright.planner.documents.cluster import ClusterSpec, DeviceGroup, Precision
from meshwright.planner.documents.document import nearest
from meshwright.planner.documents.framework import Framework, base_of
from meshwright.planner.documents.framework_space import EVERYTHING, Space
from meshwright.planner.documents.model import ModelGraph, is_script
from meshwright.planner.documents.plan import INSIDE_OUT, Job, Layout, Plan, Scales, check_size
from meshwright.planner.documents.profile import Profile, Profiles
from meshwright.planner.documents.training import (
    Lora,
    MasterWeights,
    Objective,
    Optimizer,
    Training,
)
from meshwright.planner.documents.units import MOST_SAMPLES, MOST_TOKENS
from meshwright.planner.errors import DocumentError
from meshwright.planner.requests.pins import Pins
from meshwright.planner.schedules import PLAIN, name_with_ahead, schedule_of

SEQ_LEN = 4096
"""Default tokens of a sample; fewer if the model takes fewer."""
TOKENS_PER_STEP = 2**22
"""Tokens of a global batch."""
TUNING_SAMPLES = 8
FEWEST_TUNING_SAMPLES, MOST_TUNING_SAMPLES = 16, 128
"""Bounds of the global batch of a fine-tuning in samples; TUNING_SAMPLES are those of each rank."""
CPU_SEQ_LEN = 256
CPU_SAMPLES = 8
"""Samples of each rank in a step on CPUs; CPU_SEQ_LEN are the tokens of a sample."""
AS_PREDICTED = 0.5
"""Fit probability of plans whose predicted memory equals the capacity."""
SURE_TO_FIT = 0.95
"""Default fit probability of the plans that a user is given."""
FACTORY_SEQ_LEN = 256
"""Tokens of a sample of a model without a stated length."""


@dataclass(frozen=True, slots=True)
class Request:
    """Request to plan or predict steps of `job` for a model on a cluster."""

    model: ModelGraph
    cluster: ClusterSpec
    job: Job
    pins: Pins = field(default_factory=Pins)
    profile: Profiles = None
    """Measurements of the model on the cluster, of each device group where devices differ."""
    framework: Framework = field(default_factory=native)
    """Framework that trains the plan."""
    called: str | None = None
    """Name of the cluster in a plan, an expression or a file; None: its own name."""
    fit_probability: float = AS_PREDICTED
    """Smallest probability with which plans have to fit, since memory use differs from its
    prediction."""

    def __post_init__(self) -> None:
        if not 0 < self.fit_probability < 1:
            raise DocumentError(
                "fit-probability",
                f"is {self.fit_probability:g}; it lies between 0 and 1, as 0.95",
            )

    @classmethod
    def create(
        cls,
        model: ModelGraph,
        cluster: ClusterSpec,
        *,
        seq_len: int | None = None,
        document_len: int | None = None,
        global_batch: int | None = None,
        precision: Precision | None = None,
        lora: Sequence[str] = (),
        optimizer: Optimizer = "adamw",
        masters: MasterWeights = "fp32",
        objective: Objective = "sft",
        pins: Pins | None = None,
        profile: Profiles = None,
        framework: str = "native",
        called: str | None = None,
        fit_probability: float = AS_PREDICTED,
    ) -> Request:
        """Return a request; what is None takes the default that suits the model and the devices.

        `lora` are settings of adapters, as `rank=16`; `framework` is a name or an alias.  Layers
        are measured in our runtime, so that a `profile` is of no other framework.  A sample of a
        script's module is defined by its batch, and it trains in fp32 unless a precision is named.
        """
        if is_script(model.source or ""):
            if seq_len not in (None, 1):
                raise DocumentError(
                    "seq-len", "is given by the shapes of the example batch; leave it out"
                )
            if base_of(framework) != "native":
                raise DocumentError(
                    "framework", f"is {framework}; a module of your own is trained natively"
                )
            seq_len, precision = 1, precision or "fp32"
        for name, value, most in (
            ("seq-len", seq_len, MOST_TOKENS),
            ("global-batch", global_batch, MOST_SAMPLES),
        ):
            if value is not None:
                check_size(name, value, most)
        on_cpu = cluster.groups[0].accelerator.kind == "cpu"
        limit = model.architecture.max_positions if model.architecture else FACTORY_SEQ_LEN
        if seq_len is None:
            seq_len = min(limit, CPU_SEQ_LEN if on_cpu else SEQ_LEN)
        adapters = adapters_of(lora)
        if pins is not None and "quantized" in pins.allowed and adapters is None:
            raise DocumentError(
                "allow", "quantized packs frozen weights, and all are trained; add --lora rank=16"
            )
        if global_batch is None:
            global_batch = _default_batch(
                cluster.devices,
                seq_len,
                on_cpu=on_cpu,
                tunes=adapters is not None or objective != "sft",
            )
        job = Job(
            seq_len=seq_len,
            global_batch=global_batch,
            precision=cluster.precision_for(precision),
            lora=adapters,
            optimizer=optimizer,
            master_weights=masters,
            objective=objective,
            document_len=document_len,
        )
        framework_ = framework_called(framework)
        measured = profile if base_of(framework_.name) == "native" else None
        return cls(
            model, cluster, job, pins or Pins(), measured, framework_, called, fit_probability
        )

    @classmethod
    def of_plan(
        cls, plan: Plan, model: ModelGraph, cluster: ClusterSpec, profile: Profiles = None
    ) -> Request:
        """Return the request that a plan answers; only plans of `native` use the profile."""
        framework_ = framework_called(plan.framework)
        measured = profile if base_of(framework_.name) == "native" else None
        return cls(model, cluster, plan.job, profile=measured, framework=framework_)

    @property
    def cluster_name(self) -> str:
        """The cluster as a plan names it."""
        return self.called or self.cluster.name

    @property
    def only_profile(self) -> Profile | None:
        """The profile, where devices are all alike."""
        if self.profile is None or isinstance(self.profile, Profile):
            return self.profile
        if len(self.profile) > 1:
            raise DocumentError(
                "profile",
                f"is of {' and '.join(self.profile)}, and the devices are all alike; give one",
            )
        return next(iter(self.profile.values()), None)

    @property
    def profiles(self) -> dict[str, Profile]:
        """The profile of each device group that has one."""
        if self.profile is None:
            return {}
        names = [group.name for group in self.cluster.groups]
        if isinstance(self.profile, Profile):
            if len(names) > 1:
                raise DocumentError(
                    "profile",
                    "was measured on one kind of device, and the cluster has several; name the "
                    f"kind, as in --profile {names[0]}=profile.yaml",
                )
            return {names[0]: self.profile}
        for name in self.profile:
            if name not in names:
                raise DocumentError(
                    "profile", f"'{name}' is no group of it; {nearest(name, names)}"
                )
        return dict(self.profile)

    @property
    def space(self) -> Space:
        """Layouts that the framework executes; DocumentError if it is priced and not searched."""
        if self.framework.space is None:
            raise DocumentError(
                "framework",
                f"is {self.framework.name}, whose runs are priced and whose layouts are not "
                "searched; name another --framework; `meshwright catalog frameworks` lists them",
            )
        return self.framework.space

    @property
    def scales(self) -> Scales:
        """Requested scales of fp8 operands, or the framework's."""
        space = self.framework.space or EVERYTHING
        return self.pins.scales or space.usual_scales(self.job.precision)

    def on_groups(self, groups: tuple[DeviceGroup, ...]) -> Request:
        """Return the same of some device groups alone, under the whole cluster's name."""
        profiles = self.profiles
        of_groups = {group.name: profiles[group.name] for group in groups if group.name in profiles}
        return replace(
            self, cluster=self.cluster.part(groups), profile=of_groups, called=self.cluster_name
        )


def adapters_of(texts: Sequence[str]) -> Lora | None:
    """Return the adapters of settings, as `rank=16`; None where there are none."""
    settings = [f"lora.{each}" for each in _settings(texts)]
    return Training().with_settings(settings).lora if settings else None


def _settings(texts: Sequence[str]) -> list[str]:
    """Return settings that are given one by one, or several behind commas outside of brackets.

    >>> _settings(["rank=16,targets=[q_proj,v_proj]", "alpha=32"])
    ['rank=16', 'targets=[q_proj,v_proj]', 'alpha=32']
    """
    return [each.strip() for text in texts for each in re.split(r",(?![^\[]*\])", text)]


def _default_batch(devices: int, seq_len: int, *, on_cpu: bool, tunes: bool) -> int:
    """Return the default samples of a step: a multiple of the devices.

    Adapters are fitted to few data, in batches of 16 to 128 samples.

    >>> [_default_batch(devices, 4096, on_cpu=False, tunes=True) for devices in (1, 2, 8, 24, 256)]
    [16, 16, 64, 120, 256]
    >>> _default_batch(8, 4096, on_cpu=False, tunes=False)
    1024
    """
    if on_cpu:
        return CPU_SAMPLES * devices
    if tunes:
        return tuning_batch(devices)
    return -(-max(1, TOKENS_PER_STEP // seq_len) // devices) * devices


def tuning_batch(devices: int) -> int:
    """Return the default samples of a step of a fine-tuning: 16 to 128, or one a device.

    >>> tuning_batch(2), tuning_batch(8), tuning_batch(512)
    (16, 64, 512)
    """
    samples = max(FEWEST_TUNING_SAMPLES, TUNING_SAMPLES * devices)
    return max(1, min(samples, MOST_TUNING_SAMPLES) // devices) * devices


def pinned_layout(request: Request, *, idle: int | None = None) -> Layout:
    """Return the one layout that the pins of a request describe.

    Choices that they leave open take the plainest value: data parallelism the devices that are
    left, sharded by ZeRO-1, and a micro-batch 1 sample.  Devices are left `idle` only if their
    number is named; a layout that takes all devices leaves none, as on a part of a cluster.
    """
    cluster, job, pins = request.cluster, request.job, request.pins
    if pins.pipelines == "unlike":
        raise DocumentError(
            "layout",
            "pipelines=unlike: a layout is of one kind of pipelines; predict a plan's file",
        )
    tensor, pipeline = pins.tensor or 1, pins.pipeline or 1
    context, expert = pins.context or 1, pins.expert or 1
    used = cluster.devices - (idle or 0)
    if used < 1 and tensor * context * pipeline * (pins.data or 0) != cluster.devices:
        raise DocumentError(
            "layout", f"idle={idle} leaves none of {cluster.devices} devices; lower it"
        )
    data = pins.data or max(1, used // (tensor * context * pipeline))
    micro_batch, schedule = pins.micro_batch or 1, pins.schedule or PLAIN
    zero = (1 if data > 1 else 0) if pins.zero is None else pins.zero
    shard = (pins.data_shard or data) if zero else 1
    beside = context if (request.framework.space or EVERYTHING).shards_context else 1
    if job.global_batch % (data * micro_batch):
        raise DocumentError(
            "layout",
            f"dp={data} x micro_batch={micro_batch} does not divide the global batch of "
            f"{job.global_batch}",
        )
    if zero and data * beside == 1:
        raise DocumentError(
            "layout", f"zero={zero} needs dp > 1 to shard over; use zero=0, or lower tp, cp and pp"
        )
    if data % shard or (zero and shard * beside == 1):
        raise DocumentError(
            "layout", f"shard={shard} must divide dp={data} and exceed 1; name a divisor of dp"
        )
    if pins.data_shard and not zero and pins.data_shard > 1:
        raise DocumentError(
            "layout", f"shard={pins.data_shard} needs zero=1, 2 or 3; add one, or leave shard out"
        )
    if (shard * context * tensor) % expert:
        raise DocumentError(
            "layout", f"ep={expert} does not divide shard x cp x tp = {shard * context * tensor}"
        )
    left = cluster.devices - tensor * context * pipeline * data
    if left > 0 and left != idle:
        raise DocumentError(
            "layout",
            f"tp={tensor} x cp={context} x pp={pipeline} x dp={data} leaves {left} of "
            f"{cluster.devices} devices idle; add idle={left}, or name degrees whose product is "
            f"{cluster.devices}",
        )
    ahead = pins.ahead or ()
    if ahead and len(ahead) != pipeline - 1:
        raise DocumentError(
            "layout",
            f"ahead={'-'.join(map(str, ahead))} has numbers of {len(ahead)} links; name pp, which "
            "has one link less",
        )
    return Layout(
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        data_replicate=data // shard,
        data_shard=shard,
        zero=zero,
        schedule=name_with_ahead(schedule, ahead),
        virtual_stages=pins.virtual_stages or schedule_of(schedule).stages_per_rank[0],
        **pins.axes() | {"scales": request.scales},
        order=pins.order or INSIDE_OUT,
        micro_batch=micro_batch,
        micro_batches=job.global_batch // (data * micro_batch),
    )
