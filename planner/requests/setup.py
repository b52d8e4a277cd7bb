"""A training run as it is set up: the request, and its division among ranks.

A row of a table, flags of a framework and a layout on the command line all become one; what they
leave open is in `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.planner.documents.plan import Activations, Layout
from meshwright.planner.requests.request import Request

Recomputed = Literal["none", "selective", "full", "partial"]
"""Recomputation of every block; `partial` recomputes every second block completely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One training run: all inputs of its step time and memory."""

    request: Request
    """Model, cluster, job and framework."""
    layout: Layout
    recompute: Recomputed | None = "none"
    """Recomputation of blocks; None: not stated, so none if the run fits, else full."""
    recomputed_blocks: int | None = None
    """Number of first blocks of each stage that recompute; None: all."""
    activations: Activations = "keep"
    offloaded_blocks: int | None = None
    """Number of first blocks of each stage that `activations` applies to; None: all."""
    known: bool = True
    """True if the run is priced as its own framework, False if as the closest one."""
    assumed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Text of the layout."""
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
