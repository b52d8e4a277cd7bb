"""What comparing replicas costs: CPU seconds of a layer's digests against those of its step.

    python -m benchmarks.replica_digests [--hidden H] [--tokens N]

A block of a transformer, H wide with a feed-forward of 4 H, takes a training step with AdamW in
fp32 on N tokens.  Its parameters are digested as runtime.optim.replica_check does, every
COMPARED_EVERY-th step.  Both are CPU seconds of one thread, measured in turn, so that a busy
machine changes both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.runtime.optim import replica_check as agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCost:
    """Seconds of one thread for one block."""

    step_s: float
    digest_s: float

    @property
    def share(self) -> float:
        """Return the share of steps that comparing takes, at the interval of a launch."""
        return self.digest_s / agreement.COMPARED_EVERY / self.step_s


def digest_cost(*, hidden: int, tokens: int, repeats: int = 3) -> DigestCost:
    """Measure a block `hidden` wide on so many tokens."""
    layer = nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, dropout=0.0, batch_first=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    x = torch.randn(1, tokens, hidden)
    tensors = list(layer.named_parameters())

    def step() -> None:
        layer(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def digest() -> None:
        agreement._digest(tensors, torch.device("cpu"))

    step()
    digest()
    pairs = [(_cpu_s(step), _cpu_s(digest)) for _ in range(repeats)]
    step_s, digest_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    return DigestCost(step_s=step_s, digest_s=digest_s)


def _cpu_s(of: Callable[[], None]) -> float:
    began_s = time.process_time()
    of()
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cost = digest_cost(hidden=asked.hidden, tokens=asked.tokens)
    print(
        f"hidden {asked.hidden}, {asked.tokens} tokens: step {1e3 * cost.step_s:.0f} ms, digests "
        f"{1e3 * cost.digest_s:.1f} ms every {agreement.COMPARED_EVERY} steps: "
        f"{100 * cost.share:.3f} % of a step"
    )


if __name__ == "__main__":
    main()
