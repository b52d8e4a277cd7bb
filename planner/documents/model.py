"""ModelGraph: what is to be trained, as layers that a plan can place.

A graph is a chain of layers unless it has `edges`.  Layers that repeat are written once.  Figures
of a transformer are in `architecture`, under the names of its public configuration.
"""

from __future__ import annotations

import itertools
import math
import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from meshwright.planner.documents.document import Document, Part
from meshwright.planner.documents.units import Amount, Count, Flag, Line, Name, Positive, Text

if TYPE_CHECKING:
    import networkx

RECORDED = ":recorded"
"""Suffix of a configuration's path whose model is recorded."""
FIGURES = "figures:"
"""Prefix of a model that only the figures of another framework's configuration describe."""
MOST_LAYERS = 100_000
"""Largest number of layers; a larger one is a typing error, and layers are listed one by one."""
MOST_SETTINGS = 100
"""Largest number of settings that were not understood and that a model keeps."""
FileDigest = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", strict=True)]


def is_factory(text: str) -> bool:
    """Return True if MODEL names a function in a Python file.

    >>> is_factory("models/mine.py:build"), is_factory("gpt2"), is_factory("C:/x/config.json")
    (True, False, False)
    """
    return re.fullmatch(r".+\.py:[^\W\d]\w*", text) is not None


def is_script(text: str) -> bool:
    """Return True if MODEL is a function of a script that trains with meshwright.Engine itself.

    >>> is_script("script:build"), is_script("models/mine.py:build")
    (True, False)
    """
    return re.fullmatch(r"script:[^\W\d]\w*", text) is not None


def is_recorded(text: str) -> bool:
    """Return True if MODEL is a configuration whose model the library alone knows, and is recorded.

    >>> is_recorded("falcon/config.json:recorded"), is_recorded("falcon/config.json")
    (True, False)
    """
    return text.endswith(RECORDED) and len(text) > len(RECORDED)


def recorded_file(text: str) -> str:
    """Return the file or folder of such a MODEL."""
    return text.removesuffix(RECORDED)


def trains_as_module(text: str) -> bool:
    """Return True if MODEL trains as any module does, by a recording of its forward."""
    return is_script(text) or is_recorded(text)


def is_own(text: str) -> bool:
    """Return True if documents carry the figures of MODEL.

    Computing them runs code, or they are those of another framework's configuration.
    """
    return is_factory(text) or trains_as_module(text) or text.startswith(FIGURES)


class BatchLeaf(Part):
    """A tensor of a batch, as it is for one sample."""

    shape: tuple[Count, ...] | None = None
    """Shape without the dim of samples; None for a tensor that is not divided among samples."""
    dtype: Line
    """Type of the tensor's elements."""


class Experts(Part):
    """The mixture-of-experts part of a model's blocks."""

    count: Positive
    """Number of routed experts of a block."""
    per_token: Positive
    """Number of experts that each token uses."""
    ffn_size: Positive
    """Width of one expert."""
    shared: Count = 0
    """Number of shared experts, which every token uses."""
    shared_ffn_size: Count = 0
    """Width of all shared experts together; 0 means `shared` x `ffn_size`."""
    shared_gate: Flag = False
    """The output of shared experts is weighted by a product with one vector (Qwen2-MoE)."""
    dense_layers: Count = 0
    """Number of leading blocks with a plain MLP of `Architecture.ffn_size` instead of experts."""
    groups: Positive | None = None
    """Number of groups of experts, from `groups_per_token` of which a token's experts are chosen
    (node-limited routing); None: the choice is from all experts."""
    groups_per_token: Positive | None = None
    """Number of groups that a token's experts are chosen from."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.per_token > self.count:
            raise ValueError(
                f"per_token is {self.per_token}, more than the {self.count} experts; lower it"
            )
        groups, chosen = self.groups or 1, self.groups_per_token or 1
        if self.count % groups or chosen > groups:
            raise ValueError(
                f"groups_per_token is {chosen} of {groups} groups, of {self.count} experts; "
                "give groups that divide the experts, and choose at most all"
            )
        if self.per_token > self.count // groups * chosen:
            raise ValueError(
                f"per_token is {self.per_token}, more than {chosen} groups have; lower it"
            )
        return self


class LatentAttention(Part):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, keys and values."""

    q_rank: Count
    """Rank of the latent queries; 0 means that queries are projected directly."""
    kv_rank: Positive
    """Rank of the latent keys and values."""
    rope_head_dim: Positive
    """Features of a head that are rotated."""
    nope_head_dim: Positive
    """Features of a head that are not rotated."""
    value_head_dim: Positive
    """Features of a head's values."""


class Patches(Part):
    """The image side of a vision transformer."""

    image_size: Positive
    """Side of the image in pixels."""
    patch_size: Positive
    """Side of a patch in pixels."""
    channels: Positive = 3
    """Number of colour channels."""


class Architecture(Part):
    """Configuration figures of a transformer; `family` fixes what the figures leave open."""

    family: Name
    """Family of the model, such as llama; it determines what the figures leave open."""
    hidden_size: Positive
    """Width of the residual stream."""
    layers: Annotated[Positive, Field(le=MOST_LAYERS)]
    """Number of blocks."""
    heads: Positive
    """Number of attention heads of a block."""
    kv_heads: Positive
    """Number of heads of keys and values, a divisor of `heads`."""
    head_dim: Positive
    """Features of a head."""
    ffn_size: Positive
    """Width of a plain MLP."""
    vocab_size: Count
    """Number of tokens in the vocabulary; 0 for models without one."""
    gated_mlp: Flag
    """MLPs have a gate beside the up projection."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of norms: RMS norm or layer norm."""
    pre_norm: Flag = True
    """Norms are before attention and MLP, and one is before the head; else they are after attention
    and MLP, and none is before the head."""
    positions: Literal["rotary", "learned", "alibi", "none"] = "rotary"
    """Kind of positions."""
    max_positions: Positive = 131072
    """Largest sequence length in tokens."""
    tied_embeddings: Flag = False
    """The output projection shares the embedding's weights."""
    qkv_bias: Flag = False
    """Projections of queries, keys and values have a bias."""
    output_bias: Flag = False
    """The output projection of attention has a bias."""
    mlp_bias: Flag = False
    """Products of MLPs have a bias."""
    qk_norm: Flag = False
    """Queries and keys are normed."""
    post_norms: Flag = False
    """Norms also follow attention and MLP, as in Gemma-2."""
    sliding_window: Count = 0
    """Tokens that a local layer attends to; 0 means all."""
    sliding_every: Positive = 1
    """Every n-th block is global and the others are local; with 1 and a window, all are local."""
    global_blocks: tuple[Count, ...] | None = None
    """Indices of global blocks that follow no such period, beside a window and `sliding_every`
    1."""
    causal: Flag = True
    """Tokens attend to earlier tokens only."""
    token_types: Count = 0
    """Number of token types with an embedding, as in BERT."""
    embedding_size: Count = 0
    """Width of the token embedding where it differs from hidden_size (OPT-350M); 0: the same."""
    classes: Count = 0
    """Outputs of a classification head; 0 means a language-model head over the vocabulary."""
    parallel: Flag = False
    """Attention and MLP read the same residual, and both outputs are added to it (GPT-NeoX,
    Falcon)."""
    shared_norm: Flag = False
    """One norm feeds attention and MLP that run in parallel; else each has its own."""
    norm_bias: Flag = True
    """Layer norms have a bias."""
    rotary_dim: Count = 0
    """Features of a head that are rotated; 0 means all."""
    written_gelu: Flag = False
    """A plain MLP's GELU is written out as a product of tensors (GPT-NeoX's `gelu_fast`)."""
    head_bias: Flag = False
    """The output projection has a bias."""
    embedding_norm: Flag = False
    """A norm follows the embedding, as in Bloom."""
    head_transform: Flag = False
    """A dense layer, activation and norm before the output projection, as BERT has."""
    experts: Experts | None = None
    """Mixture of experts; None: all blocks are dense."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None: usual attention."""
    patches: Patches | None = None
    """Image patches; None: the model reads tokens."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads is {self.kv_heads}, which does not divide the {self.heads} heads; "
                "give a divisor"
            )
        if self.global_blocks and (not self.sliding_window or self.sliding_every > 1):
            raise ValueError("global_blocks need a window; give both, and sliding_every 1")
        return self

    @property
    def attention(self) -> Literal["mha", "gqa", "mqa", "mla"]:
        """Sharing of keys and values between heads."""
        if self.latent is not None:
            return "mla"
        if self.kv_heads == self.heads:
            return "mha"
        return "mqa" if self.kv_heads == 1 else "gqa"


class LayerTrace(Part):
    """Cost of one sample in a layer without built-in arithmetic, as traced in fp32."""

    forward_flops: Amount
    """FLOPs of forward."""
    stored_bytes: Count
    """Bytes saved for backward, without parameters."""
    transient_bytes: Count
    """Peak bytes inside forward or backward beyond those that stay."""
    output_bytes: Count
    """Bytes of the output."""


class DividedLayer(Part):
    """Share of one rank of a tensor axis in a traced layer, as traced in fp32 on one sample."""

    tensor: Annotated[Positive, Field(ge=2)]
    """Ranks that divide the layer."""
    parameters: Count
    """Parameters of the share."""
    trace: LayerTrace
    """Cost of one sample in the share."""
    sums_bytes: tuple[Count, ...] = ()
    """Bytes of each activation that ranks sum in forward, and again in a recomputation."""
    last_sum_bytes: Count = 0
    """Bytes of the last sum if a recomputation stops before it; 0 if it does not."""
    copies_bytes: tuple[Count, ...] = ()
    """Bytes of each activation whose gradients ranks sum in backward."""
    largest: Count = 0
    """Elements of the share's largest parameter."""
    whole_matrices: tuple[Count, ...] = ()
    """Sizes of those of the layer's `whole_matrices` that the axis divides."""


class TracedExperts(Part):
    """Experts of a traced layer, in two matrices for all of a module (expert_parallel)."""

    count: Positive
    """Experts of each module, or a common divisor of the modules' numbers of experts."""
    hidden: Positive
    """Features of a token."""
    parameters: Positive
    """Parameters of the experts."""
    exchanged_bytes: Count
    """Bytes in fp32 of one sample's tokens on the way to their chosen experts."""
    per_token: Positive = 1
    """Experts that each token uses."""


class TracedLogits(Part):
    """The product that makes a traced layer's logits, and the layer's trace without its loss.

    A plan may make logits and loss in chunks of rows.
    """

    rows: Positive
    """Rows of one sample."""
    width: Positive
    """Features of a row."""
    outputs: Positive
    """Number of outputs of a row."""
    trace: LayerTrace
    """Cost of one sample in the layer without its loss."""

    @property
    def flops(self) -> float:
        """FLOPs of the forward product for one sample."""
        return 2.0 * self.rows * self.width * self.outputs


class Layer(Part):
    """One layer, or `repeat` consecutive layers that are alike."""

    name: Annotated[Name, Field(max_length=190)]
    """Name of the layer; repeated layers get an index."""
    kind: Name
    """Layers of one kind cost the same: embedding, block, moe_block, local_block, head, ...

    Those that route tokens to experts end in `moe_block`, those with a window begin with `local_`.
    """
    repeat: Positive = 1
    """Number of consecutive layers that are alike."""
    parameters: Count
    """Parameters of one such layer; a weight tied to another layer's counts there, not here."""
    trace: LayerTrace | None = None
    """Cost of one sample, for layers without built-in arithmetic."""
    divided: Annotated[tuple[DividedLayer, ...], Field(min_length=1)] | None = None
    """Share of a rank by tensor degree; the layer is whole on each rank with other degrees."""
    largest: Count | None = None
    """Elements of a traced layer's largest parameter; None: unknown, taken to be the whole
    layer."""
    keys_bytes: Positive | None = None
    """Bytes in fp32 of the keys and values of one sample in a traced layer; ranks that divide
    positions gather them."""
    experts: TracedExperts | None = None
    """Experts of a traced layer."""
    logits: TracedLogits | None = None
    """Product that makes the logits of a traced layer."""
    tied: Positive | None = None
    """Parameters of other layers that this layer reads too; a stage without those layers has copies
    of them."""
    whole_matrices: tuple[Positive, ...] | None = None
    """Sizes in elements of the parameters that the optimizer updates as a whole (Muon, Adafactor):
    where they are divided, one rank gathers each, updates it and distributes it."""

    def divided_among(self, tensor: int) -> DividedLayer | None:
        """Return the share of one of `tensor` ranks, None where the layer is whole on each."""
        return next((shard for shard in self.divided or () if shard.tensor == tensor), None)


class Edge(Part):
    """Data that flows from one layer to another, where the graph is not a chain."""

    source: Name
    """Layer that produces the data."""
    target: Name
    """Layer that reads the data."""


class ModelGraph(Document):
    """Layers, their cost, and the flow of data between them."""

    kind_of_document: ClassVar[str] = "model"
    schema_file: ClassVar[str | None] = "model.json"
    not_digested: ClassVar[frozenset[str]] = frozenset({"files", "not_understood"})

    name: Name
    """Name of the model."""
    source: Line | None = None
    """Origin of the modules for the runtime: a catalogue name, a folder, `file.py:factory`, or
    `script:build` where the user's script passes them to meshwright.Engine."""
    files: dict[Line, FileDigest] | None = None
    """Digests of the Python files that made the modules of `file.py:factory`: the file itself and
    its imports from the same folder.  Paths are relative to that folder.  No other content of these
    files is run."""
    recording: FileDigest | None = None
    """Digest of the operations and shapes in the forward of a script's module
    (runtime.tracing.trace)."""
    positions: Positive | None = None
    """Positions of a traced sample, where ranks can divide them."""
    optimizer_bytes: Amount | None = None
    """Mean bytes of optimizer state per parameter, where a script's optimizer is not AdamW."""
    not_understood: Annotated[tuple[Text, ...], Field(max_length=MOST_SETTINGS)] | None = None
    """Settings of the model's configuration that were not understood and may change layers, each
    with its value.  Predictions are wider and never certain."""
    architecture: Architecture | None = None
    """Figures of a transformer; None for other models."""
    layers: tuple[Layer, ...]
    """Layers in the order of the chain."""
    edges: tuple[Edge, ...] = ()
    """Edges of a graph; empty for a chain in the order of `layers`.  In a graph, the stages between
    a layer and the last reader of its output pass the output on, since ranks exchange with their
    neighbours only."""
    colocated: dict[Name, Annotated[tuple[Name, ...], Field(min_length=2)]] | None = None
    """Layers of a graph that must be on one stage, by the name of their group."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for file in self.files or ():
            if file.startswith("/") or ".." in file.split("/"):
                raise ValueError(
                    f"files: '{file}' is not in the folder of the model's own file; put it there"
                )
        if not self.layers:
            raise ValueError("layers is empty; give at least one layer")
        count = sum(layer.repeat for layer in self.layers)
        if count > MOST_LAYERS:
            raise ValueError(
                f"layers are {count}; give at most {MOST_LAYERS}, with alike ones joined into one"
            )
        names = [name for name, _ in self.chain]
        if len(set(names)) < len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"layers: '{twice}' appears twice; give every layer its own name")
        for index, edge in enumerate(self.edges):
            for end in (edge.source, edge.target):
                if end not in names:
                    raise ValueError(
                        f"edges[{index}]: there is no layer '{end}'; name one that is listed"
                    )
        if self.edges:
            import networkx  # noqa: PLC0415 - loads slowly, and chains need none of it

            if not networkx.is_directed_acyclic_graph(self.graph):
                cycle = " -> ".join(edge[0] for edge in networkx.find_cycle(self.graph))
                raise ValueError(f"edges form a cycle ({cycle}); leave one of them out")
        self._check_colocated(set(names))
        return self

    def _check_colocated(self, names: set[str]) -> None:
        """Refuse groups that share layers, and those of which others wait to run in between."""
        if self.colocated and not self.edges:
            raise ValueError(
                "colocated: applies to graphs of layers; list the edges of this chain too"
            )
        home: dict[str, str] = {}
        for group, layers in (self.colocated or {}).items():
            for name in layers:
                if name not in names:
                    raise ValueError(
                        f"colocated.{group}: there is no layer '{name}'; name one that is listed"
                    )
                if name in home:
                    raise ValueError(
                        f"colocated.{group}: layer '{name}' is in '{home[name]}' already; name it "
                        "in one group"
                    )
                home[name] = group
        if not home:
            return
        import networkx  # noqa: PLC0415 - as above

        # A group and a layer may have one name.
        nodes = {name: (home[name], True) if name in home else (name, False) for name in names}
        joined = networkx.DiGraph(
            (nodes[edge.source], nodes[edge.target])
            for edge in self.edges
            if nodes[edge.source] != nodes[edge.target]
        )
        if networkx.is_directed_acyclic_graph(joined):
            return
        cycle = [layer for layer, *_ in networkx.find_cycle(joined)]
        groups = list(dict.fromkeys(name for name, grouped in cycle if grouped))
        others = list(dict.fromkeys(name for name, grouped in cycle if not grouped))
        remedies = []
        if others:
            remedies.append("add " + ", ".join(f"'{name}'" for name in others) + " to it")
        if len(groups) > 1:
            remedies.append("make " + " and ".join(f"'{name}'" for name in groups) + " one group")
        path = " -> ".join(name for name, _ in [*cycle, cycle[0]])
        raise ValueError(
            f"colocated.{groups[0]}: cannot be on one stage: {path} is a cycle of stages; "
            + " and ".join(remedies)
        )

    @cached_property
    def chain_kinds(self) -> tuple[str, ...]:
        """The kind of every single layer in order."""
        return tuple(layer.kind for _, layer in self.chain)

    @cached_property
    def chain(self) -> tuple[tuple[str, Layer], ...]:
        """Every single layer in order, with its own name: `block.0`, `block.1`, ...

        A name that stands for several layers gets an index that counts over all its runs.
        """
        totals: dict[str, int] = {}
        for layer in self.layers:
            totals[layer.name] = totals.get(layer.name, 0) + layer.repeat
        seen: dict[str, int] = {}
        result = []
        for layer in self.layers:
            for _ in range(layer.repeat):
                index = seen.get(layer.name, 0)
                seen[layer.name] = index + 1
                name = layer.name if totals[layer.name] == 1 else f"{layer.name}.{index}"
                result.append((name, layer))
        return tuple(result)

    @property
    def graph(self) -> networkx.DiGraph:
        """The layers as a directed graph of their names."""
        import networkx  # noqa: PLC0415 - as above

        graph = networkx.DiGraph()
        names = [name for name, _ in self.chain]
        graph.add_nodes_from(names)
        if self.edges:
            graph.add_edges_from((edge.source, edge.target) for edge in self.edges)
        else:
            graph.add_edges_from(itertools.pairwise(names))
        return graph

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Degrees of a tensor axis that divide some of the traced layers."""
        return tuple(
            sorted({shard.tensor for layer in self.layers for shard in layer.divided or ()})
        )

    @property
    def expert_count(self) -> int:
        """Experts that ranks can share, 0 where there are none."""
        a = self.architecture
        if a is not None:
            return a.experts.count if a.experts is not None else 0
        return math.gcd(
            *(layer.experts.count for layer in self.layers if layer.experts is not None)
        )

    @property
    def loss_kind(self) -> str:
        """The kind of layer that makes the loss of logits, whose figures depend on how."""
        return next((layer.kind for layer in self.layers if layer.logits is not None), "head")

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied weights once."""
        return sum(layer.parameters * layer.repeat for layer in self.layers)
