"""A stage of a graph of layers: several tensors in, several out, some only passed on.

Each boundary of the pipeline has the outputs that a stage before it made and a stage behind it
reads (planner.costs.crossings), in one order that both of its stages know.  The tokens are on
every rank, so they never cross: any layer may read them, under the name `tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from runtime.adapter import Chain

TOKENS = "tokens"
"""What a layer that reads the model's input names; no layer has this name."""


class Branches(Chain):
    """Layers of one stage in an order in which they can run.

    `reads` names what each takes; `received` and `sent` are what crosses the stage's ends.  The
    first stage receives the tokens alone, the last one sends what its last layer returns.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        *,
        reads: Mapping[str, Sequence[str]],
        received: Sequence[str],
        sent: Sequence[str],
    ) -> None:
        super().__init__(layers)
        self._reads = {name: tuple(reads[name]) for name in layers}
        self._received = tuple(received)
        self._sent = tuple(sent)
        users = {name: at for at, layer in enumerate(self.names) for name in self._reads[layer]}
        self._done = [
            [name for name, last in users.items() if last == at and name not in self._sent]
            for at in range(len(self.names))
        ]

    # The pipeline alone calls a stage of a graph, with all that crosses its ends.
    def forward(  # type: ignore[override]
        self, *received: Tensor, tokens: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Run all layers on one micro-batch."""
        held = dict(zip(self._received, received, strict=True))
        if tokens is not None:
            held[TOKENS] = tokens
        for at, name in enumerate(self.names):
            held[name] = self.get_submodule(name)(*(held[one] for one in self._reads[name]))
            for done in self._done[at]:
                del held[done]
        if self._sent == self.names[-1:]:
            return held[self.names[-1]]
        # A tensor that is passed on must not be the leaf that its gradient is gathered in.
        return tuple(
            held[name].view_as(held[name]) if name in self._received else held[name]
            for name in self._sent
        )
