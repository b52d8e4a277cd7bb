"""Problem: a bare partition problem as a document that a person can write by hand.

    format: 1
    schedule: 1f1b
    micro_batches: 8
    kinds:
      block:
        resident_bytes: 1.3e9
        options:
          - {name: keep, forward_s: 0.004, backward_s: 0.008, stored_bytes: 1.1e9}
          - {name: recompute, forward_s: 0.004, backward_s: 0.012, stored_bytes: 0.1e9}
      head:
        resident_bytes: 1.1e9
        options:
          - {name: keep, forward_s: 0.003, backward_s: 0.006, transient_bytes: 1.4e9}
    layers:
      - {layers: [block], count: 16}
      - head
    stages:
      - {capacity_bytes: 16e9, count: 3}
      - {capacity_bytes: 24e9, speed: 1.2}
    require:
      - {layers: [0, 3], stages: [0]}
      - {at_most: 6}

It says what layers cost and what stages hold; `planner.solver.partition_problem` has the formulas.
How layers and stages come to such numbers (a model, a machine, a layout) is not its business.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from meshwright.planner.documents.document import Document, Part, nearest
from meshwright.planner.documents.units import Count, Line
from meshwright.planner.errors import DocumentError
from meshwright.planner.schedules.schedule import most_in_flight
from meshwright.planner.solver import partition_problem as solver_side
from meshwright.planner.solver.graph_instance import GraphInstance, alike, chain_problem
from meshwright.planner.solver.partition_problem import Instance
from meshwright.planner.solver.requirements import Requirement
from meshwright.planner.solver.side_constraints import HostMemory

MOST_LAYERS = 4096
MOST_GRAPH_LAYERS = 1024
MOST_STAGES = 1024

# Wide enough for any machine, narrow enough that no sum overflows or loses its small terms.
Seconds = Annotated[float, Field(ge=0, le=1e6, strict=True, allow_inf_nan=False)]
Bytes = Annotated[float, Field(ge=0, le=1e15, strict=True, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-3, le=1e6, strict=True, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=0, le=1e6, strict=True, allow_inf_nan=False)]
Edge = tuple[Count, Count]
Together = Annotated[tuple[Count, ...], Field(min_length=2)]
MicroBatches = Annotated[int, Field(ge=1, le=10**6, strict=True)]
Repeats = Annotated[int, Field(ge=1, le=MOST_LAYERS, strict=True)]


class LayerOption(Part):
    """One way to run a layer, for one micro-batch on a device of speed 1.

    `stored_bytes` is saved for backward for each micro-batch in flight;
    `transient_bytes` only while the layer runs, and a stage pays the largest of its layers.
    """

    name: Line
    """Name of the option, unique within its kind."""
    forward_s: Seconds
    """Seconds of a forward pass of one micro-batch."""
    backward_s: Seconds
    """Seconds of a backward pass of one micro-batch, with what it recomputes or waits for."""
    stored_bytes: Bytes = 0.0
    """Bytes saved for the backward pass by each micro-batch in flight."""
    transient_bytes: Bytes = 0.0
    """Bytes in use only while the layer runs; a stage needs the largest of its layers."""
    resident_bytes: Bytes | None = None
    """Bytes resident in this option; None: those of the kind."""
    sync_s: Seconds | None = None
    """Seconds once per step in this option; None: those of the kind."""
    host_bytes: Bytes = 0.0
    """Bytes saved on the host by each micro-batch in flight."""


class LayerKind(Part):
    """Common figures of layers of one kind."""

    options: tuple[LayerOption, ...]
    """Ways to run a layer of this kind."""
    resident_bytes: Bytes = 0.0
    """Bytes of parameters, gradients and optimizer on the device."""
    sync_s: Seconds = 0.0
    """Seconds once per step; the stage with the largest sum counts."""
    host_resident_bytes: Bytes = 0.0
    """Bytes of parameters, gradients and optimizer on the host."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.options:
            raise ValueError("options: is empty; a layer needs at least one way to run")
        names = [option.name for option in self.options]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"options: '{name}' appears twice; give each option its own name")
        return self


class LayerRun(Part):
    """Layers, by kind, and how many times they follow each other; a name alone is one layer."""

    layers: tuple[Line, ...]
    """Names of kinds, in order."""
    count: Repeats = 1
    """Number of times that these layers follow each other."""

    @model_validator(mode="before")
    @classmethod
    def _single(cls, data: Any) -> Any:
        return {"layers": [data]} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Allow the name alone in the schema too."""
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


class StageRoom(Part):
    """One stage, or `count` alike in a row."""

    capacity_bytes: Bytes
    """Bytes of memory of a device of the stage."""
    fixed_bytes: Bytes = 0.0
    """Bytes in use before any layer: context and buffers."""
    speed: Factor = 1.0
    """Relative speed: seconds of layers are divided by it."""
    exposed_s: Seconds = 0.0
    """Seconds added to every micro-batch: transfers that are not overlapped."""
    in_flight: Factor | None = None
    """Number of micro-batches whose stored bytes are alive at once; None: that of the schedule."""
    count: Repeats = 1
    """Number of equal stages in a row."""


class HostRoom(Part):
    """The memory of one host, and how many devices of each stage share it."""

    capacity_bytes: Bytes
    """Bytes of memory of the host."""
    ranks: tuple[Count, ...]
    """Number of devices of each stage that share the host, in the order of stages."""


class Problem(Document):
    """Split layers over the stages of a pipeline, and choose an option for each.

    Layers are a chain, or a graph where they have `edges`.
    """

    kind_of_document: ClassVar[str] = "problem"
    schema_file: ClassVar[str | None] = "problem.json"

    schedule: Literal["1f1b", "gpipe", "custom"] = "1f1b"
    """Pipeline schedule.  `custom` needs `steady` and the `in_flight` of every stage.  GPipe ends
    all forwards before the first backward, so its slowest forward and slowest backward count
    apart."""
    micro_batches: MicroBatches = 1
    """Number of micro-batches of a step."""
    steady: Coefficient | None = None
    """Number of times that the slowest stage counts beside the sum of all; None: micro_batches -
    1."""
    fill: Coefficient = 1.0
    """Number of times that the sum of all stages counts."""
    kinds: dict[str, LayerKind]
    """Kinds of layers by name."""
    layers: tuple[LayerRun, ...]
    """Names of kinds in the order of the chain."""
    stages: tuple[StageRoom, ...]
    """Stages in order."""
    cut_s: tuple[Seconds, ...] = ()
    """Seconds that a cut behind each layer but the last adds to both stages that it separates."""
    edges: tuple[Edge, ...] = ()
    """Edges of a graph of layers: the number of a layer and of a later one that reads its
    output."""
    output_s: tuple[Seconds, ...] = ()
    """Seconds that a stage of a graph spends on sending or receiving the output of each layer."""
    relayed: bool = True
    """True: stages pass on outputs that only later stages read; False: these get them directly."""
    colocated: tuple[Together, ...] = ()
    """Groups of numbers of layers of a graph that stay on one stage."""
    hosts: tuple[HostRoom, ...] = ()
    """Hosts whose memory the stages share."""
    require: tuple[Requirement, ...] = ()
    """Constraints on the split."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        chain = self._chain()
        if not chain:
            raise ValueError("layers: is empty; name at least one")
        stages = sum(room.count for room in self.stages)
        if not 1 <= stages <= MOST_STAGES:
            raise ValueError(f"stages: there are {stages}; give 1 to {MOST_STAGES}")
        if self.cut_s and len(self.cut_s) != len(chain) - 1:
            raise ValueError(
                f"cut_s: has {len(self.cut_s)} values; between {len(chain)} layers are "
                f"{len(chain) - 1} places to cut"
            )
        self._check_graph(len(chain))
        self._check_ties(len(chain), stages)
        if self.schedule == "gpipe":
            for name, kind in self.kinds.items():
                if len({option.forward_s for option in kind.options}) > 1:
                    raise ValueError(
                        f"kinds.{name}.options: differ in forward_s; under gpipe the slowest "
                        "forward counts apart, and all options of a kind must agree in it"
                    )
        if self.schedule == "custom":
            if self.steady is None:
                raise ValueError("steady: is missing; a custom schedule needs it")
            for at, room in enumerate(self.stages):
                if room.in_flight is None:
                    raise ValueError(
                        f"stages[{at}].in_flight: is missing; a custom schedule needs it"
                    )
        return self

    def _check_graph(self, layers: int) -> None:
        if not self.edges:
            for name in ("output_s", "colocated"):
                if getattr(self, name):
                    raise ValueError(f"{name}: applies to graphs of layers; list their edges too")
            if not self.relayed:
                raise ValueError("relayed: applies to graphs of layers; list their edges too")
            return
        if layers > MOST_GRAPH_LAYERS:
            raise ValueError(
                f"edges: of {layers} layers; give a graph of at most {MOST_GRAPH_LAYERS}"
            )
        for name, instead in (("cut_s", "output_s"), ("hosts", "capacity_bytes of stages")):
            if getattr(self, name):
                raise ValueError(f"{name}: applies to chains; a graph with edges has {instead}")
        for at, (before, after) in enumerate(self.edges):
            if not before < after < layers:
                raise ValueError(
                    f"edges[{at}]: is {[before, after]}; an edge leads to a later one of layers 0 "
                    f"to {layers - 1}, so list a layer after those that it reads"
                )
        if self.output_s and len(self.output_s) != layers:
            raise ValueError(f"output_s: has {len(self.output_s)} values for {layers} layers")
        self._check_colocated(layers)

    def _check_colocated(self, layers: int) -> None:
        grouped: set[int] = set()
        for at, group in enumerate(self.colocated):
            for layer in group:
                if layer >= layers or layer in grouped:
                    raise ValueError(
                        f"colocated[{at}]: {layer} is no layer, or in a group already; layers are "
                        f"0 to {layers - 1}, each in one group at most"
                    )
                grouped.add(layer)

    def _check_ties(self, layers: int, stages: int) -> None:
        for at, host in enumerate(self.hosts):
            if len(host.ranks) != stages:
                raise ValueError(
                    f"hosts[{at}].ranks: has {len(host.ranks)} numbers; there are {stages} stages"
                )
        names = {option.name for kind in self.kinds.values() for option in kind.options}
        for at, asked in enumerate(self.require):
            if asked.layers is not None and asked.layers[1] >= layers:
                raise ValueError(
                    f"require[{at}].layers: is {list(asked.layers)}; the chain has layers 0 to "
                    f"{layers - 1}"
                )
            if max(asked.stages or (0,)) >= stages:
                raise ValueError(
                    f"require[{at}].stages: is {list(asked.stages or ())}; there are stages 0 to "
                    f"{stages - 1}"
                )
            for option in asked.options or ():
                if option not in names:
                    raise ValueError(
                        f"require[{at}].options: '{option}' is not one of kinds' options; "
                        f"{nearest(option, sorted(names))}"
                    )

    def _chain(self) -> list[str]:
        """Kinds of all layers in order."""
        chain: list[str] = []
        for at, item in enumerate(self.layers):
            for name in item.layers:
                if name not in self.kinds:
                    raise ValueError(
                        f"layers[{at}]: '{name}' is not one of kinds; "
                        f"{nearest(name, list(self.kinds))}"
                    )
            if len(chain) + item.count * len(item.layers) > MOST_LAYERS:
                raise ValueError(f"layers: there are more than {MOST_LAYERS}")
            chain += item.layers * item.count
        return chain

    def instance(self) -> Instance:
        """Return the problem as the solvers of chains take it; of a graph, without its edges."""
        names = list(self.kinds)
        rooms = [room for room in self.stages for _ in range(room.count)]
        m = self.micro_batches
        steady = m - 1.0 if self.steady is None else self.steady
        return Instance(
            layers=tuple(names.index(name) for name in self._chain()),
            kinds=tuple(_options(kind) for kind in self.kinds.values()),
            stages=tuple(
                solver_side.StageLimits(
                    capacity_bytes=room.capacity_bytes,
                    in_flight=room.in_flight
                    or most_in_flight(self.schedule, s, stages=len(rooms), micro_batches=m),
                    time_scale=1.0 / room.speed,
                    exposed_s=room.exposed_s,
                    fixed_bytes=room.fixed_bytes,
                )
                for s, room in enumerate(rooms)
            ),
            steady=steady,
            forward_apart=self.schedule == "gpipe",
            fill=self.fill,
            cut_s=(0.0, *self.cut_s, 0.0) if self.cut_s else (),
            hosts=tuple(
                HostMemory(capacity_bytes=host.capacity_bytes, ranks=host.ranks)
                for host in self.hosts
            ),
            sides=tuple(
                tie
                for asked in self.require
                if (tie := asked.tie(range(len(self._chain())), len(rooms))) is not None
            ),
        )

    def graph(self) -> GraphInstance:
        """Return the problem as the solvers of every kind take it.

        Raises DocumentError where groups that stay together wait for each other.
        """
        if not self.edges:
            return chain_problem(self.instance())
        try:
            return alike(
                self.instance(),
                edges=sorted(set(self.edges)),
                output_s=self.output_s,
                colocated=[sorted(group) for group in self.colocated],
                relayed=self.relayed,
            )
        except ValueError as error:
            raise DocumentError("colocated", str(error).removeprefix("colocated: ")) from error


def _options(kind: LayerKind) -> tuple[solver_side.Option, ...]:
    return tuple(
        solver_side.Option(
            name=option.name,
            forward_s=option.forward_s,
            backward_s=option.backward_s,
            stored_bytes=option.stored_bytes,
            transient_bytes=option.transient_bytes,
            resident_bytes=(
                kind.resident_bytes if option.resident_bytes is None else option.resident_bytes
            ),
            sync_s=kind.sync_s if option.sync_s is None else option.sync_s,
            host_bytes=option.host_bytes,
            host_resident_bytes=kind.host_resident_bytes,
        )
        for option in kind.options
    )
