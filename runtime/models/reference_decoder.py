"""A decoder transformer of our own: RMSNorm, rotary positions, grouped queries, SwiGLU, experts.

Every figure comes from planner.documents.model.Architecture.  It is the model of the tests and of
the demo, and plain enough to read in a minute.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.planner.documents.model import Architecture, Experts, ModelGraph
from meshwright.runtime.core.head import Head
from meshwright.runtime.core.layer_names import EMBEDDING, HEAD, TensorStyle
from meshwright.runtime.core.mesh import WHOLE, Context
from meshwright.runtime.models.family_adapter import Adapter
from meshwright.runtime.parallel.context_parallel import attention, for_each_query_head
from meshwright.runtime.parallel.expert_parallel import mix_by_all_to_all

ROTARY_BASE = 10000.0
NORM_EPSILON = 1e-5
WEIGHT_STD = 0.02


class Embedding(nn.Module):
    """Token numbers [sample, position] to vectors [sample, position, hidden]."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look the tokens up."""
        return self.tokens(tokens)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; fewer key/value heads than query heads."""

    def __init__(
        self, architecture: Architecture, rotary: tuple[Tensor, Tensor], context: Context
    ) -> None:
        super().__init__()
        a = architecture
        self.head_dim = a.head_dim
        self.rotary = rotary
        self.context = context
        self.query = nn.Linear(a.hidden_size, a.heads * a.head_dim, bias=a.qkv_bias)
        self.key = nn.Linear(a.hidden_size, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.value = nn.Linear(a.hidden_size, a.kv_heads * a.head_dim, bias=a.qkv_bias)
        self.output = nn.Linear(a.heads * a.head_dim, a.hidden_size, bias=a.output_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions; the number of heads follows from the projections' local width."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate_pairs(query, self.rotary), rotate_pairs(key, self.rotary)
        if self.context.degree > 1:
            mix_by_all_to_all = attention(query, key, value, self.context)
        else:
            if query.is_cuda and query.dtype == torch.float32:
                # Fused kernels take groups of heads in 16 bits alone; without one there would be
                # scores of every pair of positions in memory.
                key, value = for_each_query_head(query, key, value)
            mix_by_all_to_all = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        return self.output(mix_by_all_to_all.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) up(x))."""

    def __init__(self, architecture: Architecture, ffn_size: int) -> None:
        super().__init__()
        a = architecture
        self.gate = nn.Linear(a.hidden_size, ffn_size, bias=a.mlp_bias)
        self.up = nn.Linear(a.hidden_size, ffn_size, bias=a.mlp_bias)
        self.down = nn.Linear(ffn_size, a.hidden_size, bias=a.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class ExpertWeights(nn.Module):
    """The matrices of a block's routed experts, each a SwiGLU; expert_parallel.py computes."""

    def __init__(self, hidden_size: int, experts: Experts) -> None:
        super().__init__()
        count, ffn_size = experts.count, experts.ffn_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * ffn_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, ffn_size))
        self.act_fn = functional.silu

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs."""
        return mix_by_all_to_all(self, tokens, index, weights)


class Mixture(nn.Module):
    """Experts that a router chooses for each token, and experts that all tokens share.

    The router's scores are a softmax over all experts; those of the chosen add up to one again.
    """

    def __init__(self, architecture: Architecture, experts: Experts) -> None:
        super().__init__()
        self.per_token = experts.per_token
        self.router = nn.Linear(architecture.hidden_size, experts.count, bias=False)
        self.experts = ExpertWeights(architecture.hidden_size, experts)
        width = experts.shared_ffn_size or experts.shared * experts.ffn_size
        self.shared = GatedMlp(architecture, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        tokens = x.flatten(0, 1)
        scores = functional.softmax(self.router(tokens).float(), dim=-1)
        weights, index = scores.topk(self.per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        routed = self.experts(tokens, index, weights).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)


class Block(nn.Module):
    """Attention, then MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        architecture: Architecture,
        rotary: tuple[Tensor, Tensor],
        context: Context,
        experts: Experts | None,
    ) -> None:
        super().__init__()
        self.attention_norm = norm(architecture)
        self.attention = Attention(architecture, rotary, context)
        self.mlp_norm = norm(architecture)
        self.mlp = (
            GatedMlp(architecture, architecture.ffn_size)
            if experts is None
            else Mixture(architecture, experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def norm(architecture: Architecture) -> nn.RMSNorm:
    """Return one norm over the hidden dim."""
    return nn.RMSNorm(architecture.hidden_size, eps=NORM_EPSILON)


def rotary_tables(
    head_dim: int, positions: Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [position, head_dim] (Su et al., 2021), halves side by side."""
    frequency = ROTARY_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(positions.float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def rotate_pairs(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim/2) of x [sample, head, position, head_dim] by position."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Reference(Adapter):
    """Adapter of the reference transformer."""

    def __init__(
        self,
        model: ModelGraph,
        *,
        seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        context: Context = WHOLE,
    ) -> None:
        super().__init__(model, dtype)
        self._context = context
        self.rotary = rotary_tables(
            self.architecture.head_dim, context.positions(seq_len), dtype, device
        )

    def layer(self, name: str) -> nn.Module:
        """Return a layer on the meta device."""
        a = self.architecture
        with torch.device("meta"):
            if name == EMBEDDING:
                return Embedding(a)
            if name == HEAD:
                return Head(norm(a), nn.Linear(a.hidden_size, a.vocab_size, bias=False))
            return Block(a, self.rotary, self._context, self._experts(name))

    def fill(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Normal weights, norms of one, biases of zero."""
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, WEIGHT_STD, generator=generator)

    def tensor_plan(self, layer: str) -> Mapping[str, TensorStyle]:
        """Divide heads and MLP columns; the vocabulary at both ends."""
        if layer == EMBEDDING:
            return {"tokens": "vocabulary"}
        if layer == HEAD:
            return {"output": "logits"}
        attention: dict[str, TensorStyle] = {
            "attention": "gather",
            "attention.query": "columns",
            "attention.key": "columns",
            "attention.value": "columns",
            "attention.output": "rows",
        }
        experts = self._experts(layer)
        if experts is None:
            return attention | {
                "mlp": "gather",
                "mlp.gate": "columns",
                "mlp.up": "columns",
                "mlp.down": "rows",
            }
        routed: dict[str, TensorStyle] = {"mlp": "mixture", "mlp.experts": "experts"}
        if experts.shared or experts.shared_ffn_size:
            routed |= {
                "mlp.shared.gate": "columns",
                "mlp.shared.up": "columns",
                "mlp.shared.down": "part",
            }
        return attention | routed

    def _experts(self, layer: str) -> Experts | None:
        """Return the experts of a block, if it has them."""
        experts = self.architecture.experts
        index = int(layer.rpartition(".")[2])
        return experts if experts is not None and index >= experts.dense_layers else None

    def published_name(self, name: str) -> str:
        """Our names are the published ones; a tied projection is the embedding."""
        if self.tied_names and name == "head.output.weight":
            return "embedding.tokens.weight"
        return name

    def pieces(self, name: str) -> int:
        """Experts keep their gate and up projections in one parameter [expert, 2 ffn, hidden]."""
        return 2 if name.endswith("experts.gate_up_proj") else 1
