"""A training run as it is set up: what is asked, and how ranks divide it.

A row of a table, flags of a framework and a layout on the command line all become one; what they
leave open is in `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.planner.documents.plan import Activations, Layout
from meshwright.planner.requests.request import Request

Recomputed = Literal["none", "selective", "full", "partial"]
"""What every block recomputes; `partial` is all of every second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training run: everything that its step time and memory follow from."""

    request: Request
    """Model, cluster, job and framework."""
    layout: Layout
    recompute: Recomputed | None = "none"
    """None where nobody says: nothing if that fits, else everything."""
    recomputed_blocks: int | None = None
    """The first blocks of each stage, which alone recompute; None: all."""
    activations: Activations = "keep"
    offloaded_blocks: int | None = None
    """The first blocks of each stage, of which alone `activations` speaks; None: all."""
    known: bool = True
    """Whether it is priced as its own framework, and not as the closest one."""
    assumed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The layout as people write it."""
        layout = self.layout
        degrees = {
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "vpp": layout.virtual_stages,
            "cp": layout.context,
            "ep": layout.expert,
            "dp": layout.data,
        }
        named = [
            f"{name}={n}" for name, n in degrees.items() if n > 1 or name in ("tp", "pp", "dp")
        ]
        return " ".join(
            [*named, f"micro_batch={layout.micro_batch}", f"recompute={self.recompute}"]
        )
