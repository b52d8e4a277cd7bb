"""Rates of a cluster for all work but a layer's computation, each with its source.

A profile's measured collectives and overheads stand first; without them the figures of the
framework hold (meshwright.planner.documents.framework), and `assumptions` names each one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

from meshwright.planner.catalog import native
from meshwright.planner.costs import compute
from meshwright.planner.costs.collectives import (
    Amount,
    Curves,
    Levels,
    collective_s,
    curves_by_name,
    dispatch_s,
)
from meshwright.planner.costs.layer_seconds import shown_s
from meshwright.planner.costs.memory.state_bytes import StateTypes, updated_bytes
from meshwright.planner.documents.prediction import Assumption
from meshwright.planner.documents.units import bytes_text
from meshwright.planner.errors import DocumentError
from meshwright.planner.operators.operator_table import larger

if TYPE_CHECKING:
    from meshwright.planner.documents.cluster import ClusterSpec, Collective
    from meshwright.planner.documents.framework import Framework
    from meshwright.planner.documents.plan import Job, Layout, Offload
    from meshwright.planner.documents.profile import Calibration, Overheads, Profile
    from meshwright.planner.operators.expert_routing import Routing

Hidden = Literal["units", "copies", "gather", "reduce"]
"""Communication that is hidden: collectives of units in each pass, the same with copies over the
host link, whose engines do not wait for products, or collectives once per step."""

POLLED_MESSAGES = 3
"""Messages of a transfer between stages whose host polls, the mean of 4 forward and 2 backward."""
BESIDE_PRODUCTS = 1 / 3
"""Rate of a collective of FSDP's units that runs beside computation over that of one that runs
alone: its kernels wait for multiprocessors, and share memory with products.  Three readings agree.
Four devices of one node overlapped in full compute 1.189 times as long, and are 1.102 times as fast
as one after the other (arXiv:2507.03114, means of A100, H100, MI210 and MI250), so that 0.61 of
what is hidden is seen: 0.18 to 0.22 of multiprocessors over that is 0.30 to 0.36.  Llama-2-7B under
FSDP is 37 % slower a device on 2,048 H100 than on 128 (arXiv:2411.13055, section 4, from memory):
36 % at a third, 29 % at a half, 9 % at the whole rate.  Of runs of llm_foundry and prime_rl the
errors fall with it (docs/results/accuracy.md)."""
HOST_LINK_SHARE = 0.86
"""Share of a host link's quoted rate that copies from and to pinned memory reach: headers and flow
control of PCIe take the rest.  Measured on an H100 and an H200, 53.0 to 55.0 GB/s of 63
(docs/results/gpu.md); both ways at once each direction reaches 46."""
LONG_WINDOW_S = 1e3
"""Behind which a second of communication hides as much as it ever does."""
USUAL_MULTIPROCESSORS = 132
"""Multiprocessors of a device that does not state them: those of H100."""
USUAL_HOST_MEMORY_BYTES_PER_S = 4e11
"""Bytes per second of one node's memory, where a cluster does not state them: two sockets with
eight channels of DDR4-3200."""
HOST_MEMORY_SHARE = 0.6
"""Share of a host's quoted memory bandwidth that AdamW on all its cores is assumed to reach."""


@dataclass(frozen=True)
class Rates:
    """Seconds on one cluster, in one precision, beside the arithmetic of layers."""

    device: compute.DeviceRates
    curves: Curves
    overheads: Overheads | None
    on_cpu: bool
    framework: Framework
    calibration: Calibration | None = None
    host_link_bytes_per_s: float | None = None
    """Bytes per second that one device reaches in one direction while all devices of its node
    copy."""
    host_memory_bytes_per_s: float = 0.0
    """Bytes per second of one device's share of its host while all devices' processes work."""
    multiprocessors: int = USUAL_MULTIPROCESSORS
    fastest_link_bytes_per_s: float = 0.0
    """Bytes per second of a device's links to its nearest peers."""

    @property
    def action_s(self) -> float:
        """Seconds of the host for one action of a pipeline's schedule."""
        if self.overheads:
            return self.overheads.pipeline_action_s
        measured_s = self.calibration.action_s if self.calibration else None
        return self.framework.host.action_s if measured_s is None else self._pace * measured_s

    def action_share(self, virtual_stages: int) -> float:
        """Return the share of an action's seconds that each of a rank's stages takes."""
        return 1 / virtual_stages if self.framework.host.action_of == "rank" else 1.0

    @property
    def slack(self) -> float | None:
        """Reserved over allocated memory, where runs have shown it."""
        return self.calibration.slack if self.calibration else None

    @property
    def step_s(self) -> float:
        """Fixed seconds of a step."""
        if self.overheads:
            return self.overheads.step_s
        measured_s = self.calibration.step_s if self.calibration else None
        return self.framework.host.step_s if measured_s is None else self._pace * measured_s

    @property
    def _pace(self) -> float:
        return (self.calibration.pace if self.calibration else None) or 1.0

    def waits(self, layout: Layout) -> float:
        """Return the share of a transfer to the next stage for which its sender waits."""
        rule = self.framework.pipeline
        return 1 - (rule.interleaved_overlap if layout.virtual_stages > 1 else rule.overlap)

    def polled_s(self, layout: Layout) -> float:
        """Seconds that a step's transfers between stages sleep, where their hosts poll.

            t = 3 s n (m + (p - 1) / 2)

        A stage between two others takes part in n = 4 transfers for each of m micro-batches, one of
        two stages in 2, one after another; the first micro-batch passes p - 1 of them forward, and
        the last one p - 1 backward.  Of an activation and its mask, and of a gradient, two messages
        of metadata each are slept for: 3 s in the middle of both ways.
        Source: nanotron, branch nouamane/bench2 at 67c5ebb6, parallel/pipeline_parallel/p2p.py.
        """
        ranks = layout.pipeline
        each = (0 if ranks == 1 else 2) if ranks <= 2 else 4
        asleep = POLLED_MESSAGES * self.framework.pipeline.polled_s
        return asleep * each * (layout.micro_batches + (ranks - 1) / 2)

    def link_s(self, operation: Collective, size_bytes: Amount, group: Levels) -> Amount:
        """Seconds of a collective, of one size or of each in an array."""
        return collective_s(operation, size_bytes, group, self.curves)

    def exchange_s(self, size_bytes: Amount, group: Levels, routing: Routing | None) -> Amount:
        """Seconds of an all-to-all between experts' ranks; `routing` of tokens that are sent once.

        Kernels of their own reach another share of the links than the collective library.
        """
        rate = self.framework.experts.links_rate
        if routing is None:
            return self.link_s("all_to_all", size_bytes, group) / rate
        return dispatch_s(size_bytes, group, routing) / rate

    def memory_s(self, moved_bytes: float) -> float:
        """Seconds of memory traffic."""
        return moved_bytes / (self.device.curve.memory * self.device.memory_bytes_per_s)

    def host_copy_s(self, size_bytes: float) -> float:
        """Seconds of a copy between device and host, one direction; on a CPU both are memory."""
        if self.on_cpu:
            return self.memory_s(2 * size_bytes)
        if self.host_link_bytes_per_s is None:
            raise DocumentError(
                "groups[0].host_link_bytes_per_s",
                "is not given, and what is offloaded to the host goes over that link; "
                "add it, or leave offloading out",
            )
        return size_bytes / self.host_link_bytes_per_s

    def host_memory_s(self, moved_bytes: float) -> float:
        """Seconds of memory traffic on the host."""
        if self.on_cpu:
            return self.memory_s(moved_bytes)
        return moved_bytes / self.host_memory_bytes_per_s

    def host_exchange_s(self, working_bytes: float, backward_s: float) -> float:
        """Seconds of an update on the host beside the update itself.

        Gradients in the working type go down behind the backward, working copies come up.
        Source: Ren et al., 2021 (ZeRO-Offload, arXiv:2101.06840).
        """
        copy_s = self.host_copy_s(working_bytes)
        return larger(0.0, copy_s - backward_s) + copy_s

    def host_optimizer_s(self, parameters: float, types: StateTypes) -> float:
        """Seconds of clipping and AdamW by the host, for the parameters of a rank."""
        return self.host_memory_s(updated_bytes(types, self.framework.optimizer) * parameters)

    def optimizer_s(self, parameters: float, types: StateTypes) -> float:
        """Seconds of clipping and AdamW for the parameters of a rank."""
        if self.overheads:
            return self.overheads.optimizer_s_per_parameter * parameters
        return self.memory_s(updated_bytes(types, self.framework.optimizer) * parameters)

    def beside_products(self, group: Levels) -> float:
        """Return the rate of a unit's collective beside products over that of one alone.

            r, or of registered buffers min(1, r W / W')

        Multiprocessors limit what a collective moves, to r of what it moves alone.  Of buffers that
        are registered with the collective library network cards read and write themselves, so that
        only W, the rate of the fastest links of a device, is limited, not a network of rate W'.
        """
        if not (group and self.framework.sharding.registered):
            return BESIDE_PRODUCTS
        slowest = min(level.tier.bytes_per_s for level in group)
        return min(1.0, BESIDE_PRODUCTS * max(1.0, self.fastest_link_bytes_per_s / slowest))

    def products_s(self, flops: float) -> float:
        """Seconds of large matrix products beside those of layers: an optimizer's own."""
        rate = self.device.peak_flops * self.device.curve.matmul * self.device.sustained
        return flops / rate

    def exposed_s(
        self,
        communication_s: float,
        window_s: float,
        hidden: Hidden = "units",
        beside: float = BESIDE_PRODUCTS,
    ) -> float:
        """Seconds of a sharding collective that computation of `window_s` does not hide.

        `meshwright.planner.costs.sharding` has the law.  A measured overlap has it in itself.
        `beside` is the rate of a unit's collective beside products over that of one alone.
        """
        if self.overheads:
            return shown_s(communication_s, window_s, self.overheads.overlap)
        if self.on_cpu:
            return communication_s
        rule, rate = self.framework.sharding, 1.0
        match hidden:
            case "units":
                overlap, rate = rule.overlap, beside
            case "copies":
                overlap = rule.overlap
            case "gather":
                overlap = rule.gather_overlap
            case "reduce":
                overlap = rule.reduce_overlap
            case _:
                assert_never(hidden)
        taken = min(1.0, rule.channels / self.multiprocessors)
        rate = larger(rate, taken)
        progress = (rate - taken) / (1 - taken) if taken < 1 else 0.0
        beside_s = overlap * communication_s
        seen_s = larger(beside_s * taken / rate, beside_s - window_s * progress)
        return (1 - overlap) * communication_s + seen_s

    def unit_s(self, ahead_s: float) -> float:
        """Seconds that a sharded unit adds to a pass, beside its collectives.

        Unmeasured, it is the host's work, of which a device that is behind by `ahead_s` sees less.
        """
        if self.overheads:
            return self.overheads.shard_unit_s
        return max(0.0, self.hooks_s - ahead_s)

    @property
    def hooks_s(self) -> float:
        """Seconds of the host in each pass of a sharded unit; 0 where they were measured."""
        return 0.0 if self.overheads else self.framework.sharding.unit_s

    def adding_s(self, moved_bytes: float) -> float:
        """Seconds of adding gradients up; what was measured of a backward has it."""
        return 0.0 if self.overheads else self.memory_s(moved_bytes)

    def gather_copy_s(self, gathered_bytes: float) -> float:
        """Seconds of the copies beside a gather of parameters; unmeasured, one read, one write."""
        if self.overheads and self.overheads.gather_copy_s_per_byte is not None:
            return self.overheads.gather_copy_s_per_byte * gathered_bytes
        return self.memory_s(2 * gathered_bytes)

    def reduce_copy_s(self, fresh_bytes: float, reduced_bytes: float) -> float:
        """Seconds of the copies beside a reduction; unmeasured, gradients read, its input written.

        `fresh_bytes` are the gradients as backward made them, `reduced_bytes` in the type reduced.
        """
        if self.overheads and self.overheads.reduce_copy_s_per_byte is not None:
            return self.overheads.reduce_copy_s_per_byte * reduced_bytes
        return self.memory_s(fresh_bytes + reduced_bytes)


def rates(
    cluster: ClusterSpec,
    job: Job,
    profile: Profile | None,
    framework: Framework | None = None,
    *,
    head_dim: int = 128,
) -> Rates:
    """Return the rates of a cluster's devices and links under a framework, by default `native`.

    Attention's rate depends on the size of a head where the framework has kernels of its own for
    it.
    """
    group = cluster.groups[0]
    accelerator = group.accelerator
    link = group.host_link_bytes_per_s
    framework = framework or native()
    return Rates(
        device=compute.device(
            accelerator,
            job.precision,
            framework,
            seq_len=job.seq_len,
            head_dim=head_dim,
            # What was measured on a machine is of its own devices.
            devices=cluster.devices if profile is None else 0,
        ),
        curves=curves_by_name(profile.collectives if profile else ()),
        overheads=profile.overheads if profile else None,
        calibration=profile.calibration if profile else None,
        on_cpu=accelerator.kind == "cpu",
        framework=framework,
        host_link_bytes_per_s=None
        if link is None
        else HOST_LINK_SHARE * link / min(group.host_link_devices, group.devices_per_node),
        host_memory_bytes_per_s=HOST_MEMORY_SHARE
        * (group.host_memory_bytes_per_s or USUAL_HOST_MEMORY_BYTES_PER_S)
        / group.devices_per_node,
        multiprocessors=accelerator.multiprocessors or USUAL_MULTIPROCESSORS,
        fastest_link_bytes_per_s=cluster.tiers[0].bytes_per_s if cluster.tiers else 0.0,
    )


def host_assumptions(cluster: ClusterSpec, offload: Offload) -> Iterator[Assumption]:
    """Yield what is taken for granted of the host, for layouts that offload to it."""
    group = cluster.groups[0]
    if group.accelerator.kind == "cpu":
        return
    link = group.host_link_bytes_per_s or 0.0
    shared = f", shared by {group.host_link_devices} devices" * (group.host_link_devices > 1)
    yield Assumption(
        what=f"host link of {bytes_text(link)}/s per direction{shared}, of which copies reach "
        f"{HOST_LINK_SHARE:.0%}",
        provenance="quoted",
        source=group.accelerator.sources.get("host_link_bytes_per_s", "cluster document"),
    )
    if offload != "parameters":
        return
    memory = group.host_memory_bytes_per_s
    yield Assumption(
        what=f"host memory of {bytes_text(memory or USUAL_HOST_MEMORY_BYTES_PER_S)}/s per node, of "
        f"which an optimizer on the host reaches {HOST_MEMORY_SHARE:.0%}",
        provenance="quoted" if memory else "assumed",
        source="cluster document" if memory else "planner/costs/hardware_rates.py",
    )


def assumptions(cluster: ClusterSpec, profile: Profile | None, used: Rates) -> Iterator[Assumption]:
    """Yield what was not measured on this cluster: device, links, overheads."""
    accelerator, curve = cluster.groups[0].accelerator, used.device.curve
    measured = f"profile of {profile.birth.date} on {profile.birth.host}" if profile else ""
    yield Assumption(
        what=f"kernels of {accelerator.name}: {curve.matmul:.0%} of peak in products, "
        f"{curve.memory:.0%} of memory bandwidth",
        provenance=curve.provenance,
        source=curve.source,
    )
    if used.device.eight_bit_flops is not None:
        casts = used.framework.eight_bit
        fused = sorted({casts.input_bytes, casts.gradient_bytes})
        moved = " to ".join(f"{each:g}" for each in fused)
        if casts.cast_bytes:
            moved = f"{casts.cast_bytes:g} bytes an element, {moved} in compiled blocks"
        else:
            moved = f"{moved} bytes an element"
        yield Assumption(
            what="products of Linears in 8 bits reach the same share of their peak as others of "
            f"theirs, and rounding an operand moves {moved}; not timed on a device",
            provenance="assumed",
            source="planner/costs/compute.py",
        )
    if used.device.sustained < 1:
        yield Assumption(
            what=f"sustained rate {used.device.sustained:.0%} of that of single kernels",
            provenance="fitted",
            source="published training runs on A100, H100 and B200; docs/decisions",
        )
    if used.device.slowest < 1:
        yield Assumption(
            what=f"products on the slowest of {cluster.devices} devices take "
            f"{1 / used.device.slowest - 1:.1%} longer than on that of a node",
            provenance="derived",
            source="planner/costs/compute.py, DEVICES_SPREAD",
        )
    for tier in cluster.tiers:
        operations = sorted(operation for name, operation in used.curves if name == tier.name)
        yield Assumption(
            what=f"links of tier {tier.name}"
            + (f": {', '.join(operations)}" if operations else ""),
            provenance="measured" if operations else tier.provenance,
            source=measured if operations else tier.source or "cluster document",
        )
    if used.calibration:
        yield Assumption(
            what=f"constants of {used.calibration.accelerator} and its links",
            provenance="fitted",
            source=used.calibration.source,
        )
    if used.overheads:
        yield Assumption(
            what="overlap, optimizer and runtime overheads", provenance="measured", source=measured
        )
        return
    speed = cluster.groups[0].host_speed
    if speed is not None and used.framework.host.call_s:
        yield Assumption(
            what=f"a call of Python takes {1e9 * speed.call_s:.0f} ns of the host and a launch "
            f"{1e9 * speed.launch_s:.0f} ns, {1e9 * used.framework.host.call_s:.0f} and "
            f"{1e9 * used.framework.host.launch_s:.0f} where seconds of the host were measured",
            provenance=speed.provenance,
            source=speed.source or "cluster document",
        )
    hidden = 1 - used.exposed_s(1.0, LONG_WINDOW_S)
    yield Assumption(
        what=f"up to {hidden:.0%} of sharding communication hides behind computation; "
        "the optimizer reads and writes each of its states once; a pipeline action takes "
        f"{1e3 * used.action_s:g} ms of the host, a step {1e3 * used.step_s:g} ms beside layers",
        provenance="assumed",
        source=f"framework {used.framework.name}",
    )
