"""`launch --preflight`: devices and links of all nodes are timed before the first step."""

from __future__ import annotations

import sys

from meshwright.launch.launchable_plan import LaunchablePlan
from meshwright.planner.errors import LaunchError
from meshwright.planner.errors.shown import lines
from meshwright.profiler.device_check import check_devices
from meshwright.runtime.launch.preflight import cuda_devices
from meshwright.runtime.resilience.node_agent import Register
from meshwright.runtime.run.launch_options import LaunchRun
from meshwright.runtime.run.node_rank import ALONE, NodeRank
from meshwright.runtime.run.rendezvous import Rendezvous


def check_before_run(
    fit: LaunchablePlan, run: LaunchRun, node_rank: NodeRank, *, quiet: bool
) -> None:
    """Name devices and links that are slower than their like; spares are timed too.

    A node that comes to a run which has begun is timed alone.  A check that fails ends no run.
    """
    group = fit.machine.groups[0]
    ranks = min(group.devices_per_node, fit.plan.ranks)
    has_begun = run.checkpoint is not None and Register(run.checkpoint.absolute()).newest()
    meeting = ALONE if has_begun else node_rank
    try:
        with Rendezvous(meeting) as rendezvous:
            check = check_devices(
                ranks=ranks,
                device="cuda" if cuda_devices() else "cpu",
                rendezvous=rendezvous,
                quiet=True,
            )
    except LaunchError as error:
        print(f"meshwright: warning: {lines(str(error))}", file=sys.stderr)
        return
    for finding in check.findings:
        print(f"meshwright: warning: preflight: {lines(finding.text)}", file=sys.stderr)
    if not quiet:
        print(f"meshwright: {check.text}", file=sys.stderr)
