"""The reference transformer and the engine around it, against transformers and a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright.runtime.launch.training_loop import token_engine
from meshwright.runtime.models import reference_decoder as reference
from tests.runtime import cases

CPU = torch.device("cpu")


def test_positions_rotate_as_complex_numbers() -> None:
    x = torch.randn(1, 1, 6, 8)
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(6, 4), torch.outer(torch.arange(6.0), frequency))
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn

    rotated = reference.rotate_pairs(
        x, reference.rotary_tables(8, torch.arange(6), torch.float32, CPU)
    )

    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1))


def test_it_is_llama() -> None:
    """With the same weights, transformers' Llama has the same loss."""
    graph = cases.transformer()
    engine = token_engine(cases.plan(graph), graph, device=CPU)
    a = cases.architecture()
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=a.vocab_size,
            hidden_size=a.hidden_size,
            intermediate_size=a.ffn_size,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.kv_heads,
            head_dim=a.head_dim,
            rms_norm_eps=reference.NORM_EPSILON,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    llama.load_state_dict(
        {
            llama_name(name.removeprefix("model.")): value.clone()
            for name, value in engine.state().items()
            if name.startswith("model.")
        }
    )
    tokens = cases.global_tokens(0)
    expected = cases.library_loss(llama, tokens)

    loss = engine.step(tokens).loss

    assert loss == pytest.approx(expected.item(), rel=1e-6)


def llama_name(name: str) -> str:
    for ours, theirs in (
        ("embedding.tokens", "model.embed_tokens"),
        ("head.norm", "model.norm"),
        ("head.output", "lm_head"),
        ("block.", "model.layers."),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.query", "self_attn.q_proj"),
        ("attention.key", "self_attn.k_proj"),
        ("attention.value", "self_attn.v_proj"),
        ("attention.output", "self_attn.o_proj"),
        ("mlp.gate", "mlp.gate_proj"),
        ("mlp.up", "mlp.up_proj"),
        ("mlp.down", "mlp.down_proj"),
    ):
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_trains_like_a_plain_loop(tied: bool) -> None:
    graph = cases.transformer(tied_embeddings=tied)
    plan = cases.plan(graph, micro_batches=4)
    model = nn.Sequential(*token_engine(plan, graph, device=CPU).units.values())
    engine = token_engine(plan, graph, device=CPU)

    expected = [plain_step(model, step, plan) for step in range(4)]
    results = [engine.step(cases.global_tokens(step)) for step in range(4)]

    assert [r.loss for r in results] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert [r.grad_norm for r in results] == pytest.approx([n for _, n in expected], rel=1e-5)
    for ours, plain in zip(
        nn.Sequential(*engine.units.values()).parameters(), model.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def plain_step(model: nn.Sequential, step: int, plan: cases.Plan) -> tuple[float, float]:
    """One step as anyone would write it: the whole batch, PyTorch's clipping and AdamW."""
    training = plan.training
    if not hasattr(model, "adamw"):
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        model.adamw = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            weight_decay=training.weight_decay,
            foreach=False,
        )
    rate = training.learning_rate * min(1.0, (step + 1) / training.warmup_steps)
    for group in model.adamw.param_groups:
        group["lr"] = rate
    tokens = cases.global_tokens(step)
    logits: Tensor = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
    model.adamw.step()
    model.adamw.zero_grad()
    return loss.item(), norm.item()
