"""Modules and losses in the ways of published code, small; none of their code is copied.

nanoGPT (Karpathy), DiT (Peebles), MAE (He), VQ-VAE (van den Oord), BYOL (Grill), PPO (Schulman),
Deep Speech 2 (Amodei), DLRM (Naumov), RealNVP (Dinh), Mamba (Gu), Perceiver (Jaegle), U-Net
(Ronneberger), CLIP (Radford), distillation (Hinton), Switch (Fedus), FaceNet (Schroff), Transformer
(Vaswani), NeRF (Mildenhall), WGAN-GP (Gulrajani), GCN (Kipf), VAE (Kingma), AWD-LSTM (Merity),
ConvNeXt (Liu), hypernetworks (Ha).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional

from meshwright import whole_batch
from tests.runtime.forward_ways.way import ON_RANKS, SAMPLES, Way, squares

D, T, V = 8, 6, 11


def generator_of(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int) -> dict[str, Tensor]:
    ids = torch.randint(V, (SAMPLES, T + 1), generator=generator_of(step))
    targets = ids[:, 1:].clone()
    if step:
        targets[:, : step % 3] = -100
        targets[: step % 4, 3:] = -100
    return {"idx": ids[:, :-1], "targets": targets}


def by_name(batch: Any) -> Any:
    return batch


def mean_loss(out: Any, batch: Any) -> Tensor:
    return out[1]


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(D, 3 * D), nn.Linear(D, D), heads

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(D, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(b, t, D))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """Logits and a mean loss, the head tied to the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(V, D), "wpe": nn.Embedding(T, D),
             "h": nn.ModuleList(Block() for _ in range(2)), "ln_f": nn.LayerNorm(D)}
        )  # fmt: skip
        self.lm_head = nn.Linear(D, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None
        if targets is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.reshape(-1))
        return logits, loss


def noised(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, noise = torch.randn(2, SAMPLES, T, D, generator=generator_of(step))
    t = torch.rand(SAMPLES, generator=generator_of(step))
    return x, t, torch.randint(3, (SAMPLES,), generator=generator_of(step)), noise


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(D, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(D, elementwise_affine=False)
        self.attention, self.mlp = Attention(), nn.Linear(D, D)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, g, d, e, h = self.modulation(c)[:, None].chunk(6, dim=-1)
        x = x + g * self.attention(self.norm1(x) * (1 + a) + b, causal=False)
        return x + h * self.mlp(self.norm2(x) * (1 + d) + e)


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.label = nn.Linear(2, D), nn.Embedding(3, D)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(2))
        self.final = nn.Linear(D, D)

    def forward(self, x: Tensor, t: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        share = t[:, None, None]
        c = self.time(torch.stack([t.cos(), t.sin()], -1)) + self.label(y)
        x = (1 - share) * x + share * noise
        for block in self.blocks:
            x = block(x, c)
        return (self.final(x) - noise).square().mean()


def returned_mean(out: Tensor, batch: Any) -> Tensor:
    return out


class Mae(nn.Module):
    """Patches are shuffled by noise, some are dropped, and mask tokens stand in their places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Linear(D, D), nn.Linear(D, D)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D))
        self.encoder = nn.ModuleList(Block() for _ in range(1))
        self.decoder = nn.ModuleList(Block() for _ in range(1))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        order = noise.argsort(dim=1)
        back, keep = order.argsort(dim=1), T // 2
        kept = order[:, :keep, None].expand(-1, -1, D)
        h = self.embed(x).gather(1, kept)
        for block in self.encoder:
            h = block(h)
        h = torch.cat([h, self.mask_token.expand(len(x), T - keep, -1)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, D))
        for block in self.decoder:
            h = block(h)
        mask = torch.ones_like(noise)
        mask[:, :keep] = 0
        return self.decode(h), mask.gather(1, back)


def shuffled(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, T, D, generator=generator_of(step))
    return x, torch.rand(SAMPLES, T, generator=generator_of(step + 50))


def of_masked(out: Any, batch: Any) -> Tensor:
    error = (out[0] - batch[0]).square().mean(-1)
    return (error * out[1]).sum() / out[1].sum()


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, D), nn.Linear(D, D)
        self.codebook = nn.Embedding(5, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        distance = (z[..., None, :] - self.codebook.weight).square().sum(-1)
        q = self.codebook(distance.argmin(-1))
        commitment = (q.detach() - z).square().mean() + (q - z.detach()).square().mean()
        return self.decoder(z + (q - z).detach()), commitment


def of_vq(out: Any, batch: Any) -> Tensor:
    return functional.mse_loss(out[0], batch[0]) + 0.25 * out[1]


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.target = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        self.predictor = nn.Linear(D, D)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        loss = torch.zeros(len(x))
        for a, b in ((x, other), (other, x)):
            p = functional.normalize(self.predictor(self.online(a)), dim=-1)
            with torch.no_grad():
                z = functional.normalize(self.target(b), dim=-1)
            loss = loss + 2 - 2 * (p * z).sum(-1)
        return loss.mean()


def views(step: int) -> tuple[Tensor, Tensor]:
    x, other = torch.randn(2, SAMPLES, D, generator=generator_of(step))
    return x, other


@torch.no_grad()
def move_target(module: Any, step: int) -> None:
    pairs = zip(module.target.parameters(), module.online.parameters(), strict=True)
    for target, online in pairs if step else ():
        target.lerp_(online, 0.1)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.actor, self.critic = nn.Linear(D, 3), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.actor(h), self.critic(h)[:, 0]


def rollouts(step: int) -> dict[str, Tensor]:
    g = generator_of(step)
    return {
        "x": torch.randn(SAMPLES, D, generator=g),
        "action": torch.randint(3, (SAMPLES,), generator=g),
        "old": -torch.rand(SAMPLES, generator=g) - 0.5,
        "advantage": torch.randn(SAMPLES, generator=g),
        "value": torch.randn(SAMPLES, generator=g),
    }


def clipped(out: Any, batch: Any) -> Tensor:
    policy = torch.distributions.Categorical(logits=out[0])
    ratio = (policy.log_prob(batch["action"]) - batch["old"]).exp()
    gain = torch.min(ratio * batch["advantage"], ratio.clamp(0.8, 1.2) * batch["advantage"])
    error = (out[1] - batch["value"]).square().mean()
    return -gain.mean() + 0.5 * error - 0.01 * policy.entropy().mean()


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(D, D, 3, padding=1), nn.GRU(D, D, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.transpose(1, 2)).relu().transpose(1, 2)
        return self.head(self.rnn(h)[0]).log_softmax(-1)


def speech(step: int) -> dict[str, Tensor]:
    g = generator_of(step)
    return {
        "x": torch.randn(SAMPLES, T, D, generator=g),
        "text": torch.randint(1, V, (SAMPLES, 2), generator=g),
        "length": torch.randint(1, 3, (SAMPLES,), generator=g) if step else torch.full((8,), 2),
    }


def ctc(out: Tensor, batch: Any) -> Tensor:
    frames = torch.full((len(out),), out.shape[1])
    return functional.ctc_loss(
        out.transpose(0, 1), batch["text"], frames, batch["length"], zero_infinity=True
    )


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(D, D), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(V, D, mode="sum") for _ in range(2))
        self.top = nn.Linear(D + 3, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        stacked = torch.stack([x, *rows], 1)
        i, j = torch.triu_indices(3, 3, 1)
        products = (stacked @ stacked.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([x, products], 1))[:, 0]


def clicks(step: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator_of(step)
    return (
        torch.randn(SAMPLES, D, generator=g),
        torch.randint(V, (SAMPLES, 2, 3), generator=g),
        torch.randint(2, (SAMPLES,), generator=g).float(),
    )


def of_clicks(out: Tensor, batch: Any) -> Tensor:
    return functional.binary_cross_entropy_with_logits(out, batch[2])


class Coupling(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(D // 2, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1) if self.first else x.chunk(2, -1)[::-1]
        scale, shift = self.net(a).chunk(2, -1)
        b = b * scale.tanh().exp() + shift
        pair = (a, b) if self.first else (b, a)
        return torch.cat(pair, -1), log_det + scale.tanh().sum(-1)


class RealNvp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(at % 2 == 0) for at in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = x.new_zeros(len(x))
        for layer in self.layers:
            x, log_det = layer(x, log_det)
        return x, log_det


def likelihood(out: Any, batch: Any) -> Tensor:
    return -(Normal(0.0, 1.0).log_prob(out[0]).sum(-1) + out[1]).mean()


class Scan(nn.Module):
    """A selective scan, position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.delta, self.b, self.c = (nn.Linear(D, D) for _ in range(3))
        self.a_log, self.d = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        delta = functional.softplus(self.delta(x))
        state, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            decay = (-self.a_log.exp() * delta[:, t]).exp()
            state = decay * state + delta[:, t] * self.b(x[:, t]) * x[:, t]
            outputs.append(0.1 * (self.c(x[:, t]) * state + self.d * x[:, t]))
        return torch.stack(outputs, 1)


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scan() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, D))
        self.cross = nn.ModuleList(nn.MultiheadAttention(D, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        for attention in self.cross:
            latents = latents + attention(latents, x, x, need_weights=False)[0]
        return self.head(latents.mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(2, 8)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 2, 1)])

    def forward(self, x: Tensor) -> Tensor:
        skip = self.norms[0](self.down[0](x)).relu()
        h = self.norms[1](self.down[1](functional.max_pool2d(skip, 2))).relu()
        return self.up[1](torch.cat([self.up[0](h), skip], 1))


def images(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 2, 8, 8, generator=generator_of(step))
    return x, x.roll(1, 0)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(D, D), nn.EmbeddingBag(V, D)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        pair = (functional.normalize(self.image(x)), functional.normalize(self.text(ids)))
        return pair[0] * self.scale.exp(), pair[1]


def pairs_of(step: int) -> tuple[Tensor, Tensor]:
    g = generator_of(step)
    x = torch.randn(SAMPLES, D, generator=g)
    return x, torch.randint(V, (SAMPLES, 3), generator=g)


def contrastive(out: Any, batch: Any) -> Tensor:
    scores, same = out[0] @ out[1].T, torch.arange(len(out[0]))
    return (functional.cross_entropy(scores, same) + functional.cross_entropy(scores.T, same)) / 2


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(D, V), nn.Linear(D, V)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def softened(out: Any, batch: Any) -> Tensor:
    return 4 * functional.kl_div(
        (out[0] / 2).log_softmax(-1), (out[1] / 2).softmax(-1), reduction="batchmean"
    )


class Switch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero()[:, 0]
            if len(at):
                out = out.index_add(0, at, weight[at, None] * expert(rows[at]))
        return out.view_as(x)


class Triplets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return functional.triplet_margin_loss(*map(self.encoder, (anchor, near, far)))


def triplets(step: int) -> tuple[Tensor, Tensor, Tensor]:
    a, b, c = torch.randn(3, SAMPLES, D, generator=generator_of(step))
    return a, b, c


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.transformer = nn.Transformer(D, 2, 1, 1, 2 * D, 0.0, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        target = targets.clamp(min=0).roll(1, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(T)
        h = self.transformer(self.words(idx), self.words(target), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(h)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4 * D, D), nn.Linear(5 * D, D), nn.Linear(D, 4)])

    def forward(self, x: Tensor) -> Tensor:
        encoded = torch.cat([f(x * s) for s in (1.0, 2.0) for f in (torch.sin, torch.cos)], -1)
        h = self.layers[0](encoded).relu()
        h = self.layers[1](torch.cat([h, encoded], -1)).relu()
        density, color = self.layers[2](h).split([1, 3], -1)
        light = torch.exp(-functional.softplus(density).cumsum(1))
        return (light * color.sigmoid()).sum(1)


class Critic(nn.Module):
    """Its penalty differentiates what it makes of a mixture of both."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        with torch.enable_grad():
            score = self.net(mixed)
            (grad,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        penalty = (grad.norm(dim=-1) - 1).square()
        return self.net(fake)[:, 0] - self.net(real)[:, 0] + 10 * penalty


def critic_batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    real, fake = torch.randn(2, SAMPLES, D, generator=generator_of(step))
    return real, fake, torch.rand(SAMPLES, 1, generator=generator_of(step))


def summed(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return out.sum(), len(out)


class Gcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = edges.sum(-1).clamp(min=1).rsqrt()
        edges = degree[:, :, None] * edges * degree[:, None]
        for layer in self.layers:
            x = layer(edges @ x).relu()
        return x


def dense_graphs(step: int) -> tuple[Tensor, Tensor]:
    g = generator_of(step)
    x = torch.randn(SAMPLES, T, D, generator=g)
    return x, (torch.rand(SAMPLES, T, T, generator=g) > 0.5).float()


class Vae(nn.Module):
    """Returns a distribution, of which the loss takes its divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Normal]:
        mean, log_scale = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, log_scale.exp())
        return self.decoder(posterior.mean + posterior.stddev * noise), posterior


def evidence(out: Any, batch: Any) -> tuple[Tensor, int]:
    divergence = kl_divergence(out[1], Normal(0.0, 1.0)).sum()
    return (out[0] - batch[0]).square().sum() + divergence, 8 * batch[0].numel()


class LstmLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, 2, batch_first=True)
        self.head = nn.Linear(D, V)
        self.head.weight = self.words.weight

    def forward(self, idx: Tensor) -> Tensor:
        h, _ = self.rnn(self.words(idx))
        return self.head(h)


def of_words(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out.transpose(1, 2), batch["targets"])


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 2, stride=2)
        self.depthwise = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.mixes = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gammas = nn.ParameterList(nn.Parameter(0.1 * torch.ones(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, mix, gamma in zip(self.depthwise, self.mixes, self.gammas, strict=True):
            h = functional.layer_norm(conv(x).permute(0, 2, 3, 1), (8,))
            x = x + (gamma * functional.gelu(mix(h))).permute(0, 3, 1, 2)
        return x.mean((2, 3))


class Hyper(nn.Module):
    """Weights of a layer are made of an embedding, the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(D))
        self.maker, self.layer = nn.Linear(D, D * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.maker(self.code).view(D, D), "bias": self.layer.bias}
        return functional_call(self.layer, weights, (x,))


def first_of(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, T, D, generator=generator_of(step))
    return x, x.roll(1, 0)


def whole(batch: Any) -> Any:
    return batch


def two(batch: Any) -> Any:
    return batch[:2]


def only(*names: str) -> Any:
    return lambda batch: {name: batch[name] for name in names}


WAYS = {
    "nanoGPT": Way(Gpt, mean_loss, inputs=by_name, batches=tokens),
    "DiT": Way(DiT, returned_mean, inputs=whole, batches=noised),
    "MAE": Way(Mae, of_masked, inputs=whole, batches=shuffled),
    "VQ-VAE": Way(VqVae, of_vq, batches=first_of),
    "BYOL": Way(Byol, returned_mean, inputs=whole, batches=views, before=move_target),
    "PPO": Way(ActorCritic, clipped, inputs=only("x"), batches=rollouts),
    "speech": Way(Speech, ctc, inputs=only("x"), batches=speech),
    "DLRM": Way(Dlrm, of_clicks, inputs=two, batches=clicks),
    "RealNVP": Way(RealNvp, likelihood, batches=views),
    "Mamba": Way(Mamba, squares, batches=first_of),
    "Perceiver": Way(Perceiver, squares, batches=first_of),
    "U-Net": Way(UNet, squares, batches=images),
    "CLIP": Way(TwoTowers, whole_batch(contrastive), inputs=whole, batches=pairs_of),
    "distillation": Way(Distilled, softened, batches=views),
    "Switch": Way(Switch, squares, trains=ON_RANKS, batches=first_of),
    "FaceNet": Way(Triplets, returned_mean, inputs=whole, batches=triplets),
    "translator": Way(Translator, mean_loss, inputs=by_name, batches=tokens),
    "NeRF": Way(Nerf, squares, batches=first_of),
    "WGAN-GP": Way(Critic, summed, trains=ON_RANKS, inputs=whole, batches=critic_batch),
    "GCN": Way(Gcn, squares, inputs=whole, batches=dense_graphs),
    "VAE": Way(Vae, evidence, trains=ON_RANKS, inputs=whole, batches=views),
    "AWD-LSTM": Way(LstmLm, of_words, inputs=only("idx"), batches=tokens),
    "ConvNeXt": Way(ConvNext, squares, batches=images),
    "hypernetwork": Way(Hyper, squares, trains=ON_RANKS, batches=first_of),
}
