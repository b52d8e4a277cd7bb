"""More modules and losses in the ways of published code, small; none of their code is copied.

Llama (Touvron), ViT (Dosovitskiy), Swin (Liu), ResNet (He) with gates (Hu), DDPM (Ho), SimSiam
(Chen), Barlow Twins (Zbontar), VICReg (Bardes), DINO and SwAV (Caron), RetinaNet (Lin), DETR
(Carion), DQN (Mnih), SAC (Haarnoja), WaveNet and PixelCNN (van den Oord), attention decoders
(Bahdanau), packed sequences (Sutskever), BERT (Devlin), ELECTRA (Clark), T5 (Raffel), ALBERT (Lan),
adaptive computation (Graves), Transformer-XL (Dai), RevNet (Gomez), deep equilibrium (Bai), neural
ODEs (Chen), MAML (Finn), Glow (Kingma), spectral norm (Miyato), weight norm (Salimans), PointNet
(Qi), ArcFace (Deng), pruning (Frankle), quantization (Jacob), capsules (Sabour), slots (Locatello),
deep sets (Zaheer), mixture densities (Bishop), CRF (Lafferty), pointers (Vinyals), word2vec
(Mikolov), DPO (Rafailov), RWKV (Peng), Hyena (Poli), neural operators (Li), Gumbel (Jang), IWAE
(Burda), dice (Milletari), N-BEATS (Oreshkin), task weights (Kendall), DeepFM (Guo), prompts (Li).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from meshwright import whole_batch
from tests.runtime.forward_ways.published import (
    Attention,
    Block,
    D,
    T,
    V,
    by_name,
    first_of,
    generator_of,
    images,
    of_words,
    only,
    returned_mean,
    tokens,
    views,
    whole,
)
from tests.runtime.forward_ways.way import ALONE, ON_RANKS, SAMPLES, Way, squares


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Rotary(nn.Module):
    """Tables that grow when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), False)
        self.longest = 0

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        if length > self.longest:
            self.longest = length
            angles = torch.outer(torch.arange(length).float(), self.frequencies)
            angles = torch.cat([angles, angles], -1)
            self.register_buffer("cos", angles.cos(), False)
            self.register_buffer("sin", angles.sin(), False)
        return self.cos[:length], self.sin[:length]


class LlamaLayer(nn.Module):
    """Two heads of queries share one of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, 4), nn.Linear(D, 4)
        self.o, self.gate, self.up = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.RMSNorm(D)
        self.down = nn.Linear(D, D)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        b, t, _ = x.shape
        h = self.norm(x)
        q, k, v = (f(h).view(b, t, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = tables
        q, k = (y * cos + torch.cat([-y[..., 2:], y[..., :2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, D))
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rotary = nn.Embedding(V, D), Rotary()
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x, tables = self.words(idx), self.rotary(idx.shape[1])
        for layer in self.layers:
            x = layer(x, tables)
        return self.head(x)


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(2, D, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.randn(1, 5, D))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


class Window(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.qkv, self.out = shift, nn.Linear(2, 6), nn.Linear(2, 2)
        self.table = nn.Parameter(torch.randn(9, 1))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        offset = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + 1
        self.register_buffer("index", offset[..., 0] * 3 + offset[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        y = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = y.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = self.qkv(y).chunk(3, -1)
        scores = q @ k.transpose(1, 2) + self.table[self.index.view(-1)].view(4, 4)
        y = self.out(scores.softmax(-1) @ v)
        y = y.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Window(0), Window(1)])
        self.merge = nn.Linear(8, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        x = torch.cat([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1)
        return self.merge(x).mean((1, 2))


class Residual(nn.Module):
    """Convolutions without statistics of the batch, and gates of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.squeeze = nn.GroupNorm(2, 4), nn.Sequential(*mlp(4, 2, 4), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.norm(self.conv1(x)).relu_())
        return (x + y * self.squeeze(y.mean((2, 3)))[:, :, None, None]).relu_()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(), Residual())
        self.fc = nn.Linear(4, V)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.pool(self.stem(x)))
        return self.fc(torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1))


class Ddpm(nn.Module):
    """A U-Net of skips that are popped, with a table of times."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(0.01, 0.2, 10)
        self.register_buffer("alphas", (1 - betas).cumprod(0))
        self.time = mlp(D, D, 4)
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.up = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)])

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        alpha = self.alphas[t].view(-1, 1, 1, 1)
        half = torch.arange(D // 2, device=x.device)
        angle = t[:, None] / 10 ** (half / 4)
        emb = self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        h, skips = alpha.sqrt() * x + (1 - alpha).sqrt() * noise, []
        for layer in self.down:
            h = (layer(h) + emb).relu()
            skips.append(h)
        for layer in self.up:
            skip = skips.pop()
            if h.shape[-1] != skip.shape[-1]:
                h = functional.interpolate(h, scale_factor=2)
            h = layer(torch.cat([h, skip], 1))
        return functional.mse_loss(h, noise)


def diffused(step: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator_of(step)
    x, noise = torch.randn(2, SAMPLES, 2, 8, 8, generator=g)
    return x, torch.randint(10, (SAMPLES,), generator=g), noise


class SimSiam(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(D, D, D), mlp(D, D, D)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        z1, z2 = self.encoder(x), self.encoder(other)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


def of_cosines(out: Any, batch: Any) -> Tensor:
    p1, p2, z1, z2 = out
    return -(functional.cosine_similarity(p1, z2) + functional.cosine_similarity(p2, z1)).mean() / 2


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(D, D, D)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(x), self.encoder(other)


class Coded(Twins):
    """Codes of one view are computed without a gradient, as the refusal of a pipeline asks."""

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            codes = self.encoder(x)
        return codes, self.encoder(other)


def redundancy(out: Any, batch: Any) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in out)
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 0.01 * (c - c.diagonal().diag()).square().sum()


def vicreg(out: Any, batch: Any) -> Tensor:
    a, b = out
    loss = functional.mse_loss(a, b)
    for z in (a, b):
        loss = loss + (1 - (z.var(0) + 1e-3).sqrt()).relu().mean()
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        loss = loss + (covariance - covariance.diagonal().diag()).square().sum() / D
    return loss


def sinkhorn(out: Any, batch: Any) -> Tensor:
    a, b = (functional.normalize(z, dim=-1) for z in out)
    with torch.no_grad():
        q = (a / 0.5).exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True)
            q = q / q.sum(0, keepdim=True)
    return -(q.T * (b / 0.1).log_softmax(-1)).sum(-1).mean()


class Dino(nn.Module):
    """Views of two sizes go through one encoder in groups of their length."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(D, D, V), mlp(D, D, V)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        crops = [x, x.roll(1, 1), x[:, :3], x[:, 3:]]
        sizes = [crop.shape[1] for crop in crops]
        outputs, begin = [], 0
        while begin < len(crops):
            end = next((i for i in range(begin, 4) if sizes[i] != sizes[begin]), 4)
            outputs.append(self.student(torch.cat(crops[begin:end]).mean(1)).chunk(end - begin))
            begin = end
        student = [y for group in outputs for y in group]
        with torch.no_grad():
            teacher = [(self.teacher(crop.mean(1)) / 0.5).softmax(-1) for crop in crops[:2]]
        losses = [
            -(q * p.log_softmax(-1)).sum(-1)
            for i, q in enumerate(teacher)
            for j, p in enumerate(student)
            if i != j
        ]
        return torch.stack(losses).mean()


@torch.no_grad()
def follow_student(module: Any, step: int) -> None:
    for p, q in zip(module.student.parameters(), module.teacher.parameters(), strict=True):
        q.data.mul_(0.9).add_(0.1 * p.detach())


class Retina(nn.Module):
    """Levels of a pyramid go through one head each."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)])
        self.head = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for level in self.levels:
            x = level(x).relu()
            outputs.append(self.head(x).flatten(2).transpose(1, 2))
        return torch.cat(outputs, 1)


def boxes(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 2, 8, 8, generator=generator_of(step))
    labels = torch.randint(-1, 3, (SAMPLES, 20), generator=generator_of(step + 50))
    return x, labels if step % 2 else labels.clamp(min=0)


def focal(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    positive = batch[1] > 0
    target = torch.zeros_like(out)
    target[positive] = functional.one_hot(batch[1][positive], 3).float()
    chosen = batch[1] >= 0
    p = out[chosen].sigmoid()
    ce = functional.binary_cross_entropy_with_logits(out[chosen], target[chosen], reduction="none")
    weight = (p * (1 - target[chosen]) + (1 - p) * target[chosen]).square()
    return (weight * ce).sum(), positive.sum()


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.backbone = nn.Embedding(3, D), nn.Linear(D, D)
        self.layer = nn.TransformerDecoderLayer(D, 2, D, 0.0, batch_first=True)
        self.box = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.backbone(x)
        queries = self.queries.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        return self.box(self.layer(queries, memory)).sigmoid()


def matched(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Boxes of each sample are matched to queries, the cheapest first."""
    total, count = out.new_zeros(()), 0
    for boxes_here, wanted in zip(out, batch[1][:, :2, :4], strict=True):
        cost = torch.cdist(boxes_here, wanted, p=1)
        left = list(range(3))
        for box in range(2):
            at = min(left, key=lambda query: float(cost.detach()[query, box]))
            left.remove(at)
            total, count = total + cost[at, box], count + 1
    return total, count


class Dqn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(D, D, 3), mlp(D, D, 3)
        self.target.requires_grad_(False)

    def forward(self, state: Tensor, after: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        q = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online(after).argmax(1, keepdim=True)
            wanted = 1 + 0.9 * self.target(after).gather(1, best).squeeze(1)
        return q, wanted


def transitions(step: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator_of(step)
    a, b = torch.randn(2, SAMPLES, D, generator=g)
    return a, b, torch.randint(3, (SAMPLES,), generator=g)


def huber(out: Any, batch: Any) -> Tensor:
    return functional.smooth_l1_loss(*out)


def copy_target(module: Any, step: int) -> None:
    if step % 2 == 0:
        module.target.load_state_dict(module.online.state_dict())


class Sac(nn.Module):
    """Actor and critics in one loss, which moves the actor alone through the critics."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(D, D, 4)
        self.critics = nn.ModuleList(mlp(D + 2, D, 1) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, state: Tensor, after: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self.actor(state).chunk(2, -1)
        noise = after[:, :2]
        chosen = (mean + log_std.clamp(-2, 2).exp() * noise).tanh()
        log_p = (-noise.square() / 2 - log_std - (1 - chosen.square() + 1e-3).log()).sum(-1)
        values = []
        for critic in self.critics:
            frozen = {name: p.detach() for name, p in critic.named_parameters()}
            values.append(
                functional_call(critic, frozen, (torch.cat([state, chosen], -1),)).squeeze(-1)
            )
        actor = self.log_alpha.exp().detach() * log_p - torch.min(*values)
        temperature = -self.log_alpha * (log_p.detach() - 2)
        taken = torch.cat([state, after[:, 2:4]], -1)
        errors = [(critic(taken).squeeze(-1) - action).square() for critic in self.critics]
        return (actor + temperature + errors[0] + errors[1]).mean()


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.dilated = nn.ModuleList(nn.Conv1d(D, 2 * D, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(3))
        self.head = nn.Conv1d(D, V, 1)

    def forward(self, idx: Tensor) -> Tensor:
        x, total = self.words(idx).transpose(1, 2), 0
        for conv, skip in zip(self.dilated, self.skips, strict=True):
            a, b = conv(functional.pad(x, (conv.dilation[0], 0))).chunk(2, 1)
            y = skip(a.tanh() * b.sigmoid())
            total, x = total + y, x + y
        return self.head(total.relu()).transpose(1, 2)


class Speller(nn.Module):
    """A decoder that attends position by position, with a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(V, D), nn.GRU(D, D // 2, 1, True, True, 0.0, True)
        self.cell, self.energy = nn.GRUCell(2 * D, D), nn.Linear(2 * D, 1)
        self.head = nn.Linear(D, V)

    def forward(self, idx: Tensor) -> Tensor:
        memory, _ = self.encoder(self.words(idx))
        state, outputs = memory.new_zeros(idx.shape[0], D), []
        for t in range(idx.shape[1]):
            spread = state[:, None].expand_as(memory)
            weight = self.energy(torch.cat([memory, spread], -1)).softmax(1)
            context = (weight * memory).sum(1)
            state = self.cell(torch.cat([self.words(idx[:, t]), context], -1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, 1)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True)
        self.head = nn.Linear(D, V)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        lengths = (targets != -100).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.words(idx), lengths, True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], True, total_length=idx.shape[1])
        return self.head(out)


def summed_words(out: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    loss = functional.cross_entropy(out.transpose(1, 2), targets, reduction="sum")
    return loss, (targets != -100).sum()


class Bert(nn.Module):
    """A tied decoder with a bias of its own, and a head on the first position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(V, D), nn.ModuleList(Block() for _ in range(2))
        self.transform = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))
        self.bias, self.next = nn.Parameter(torch.zeros(V)), nn.Linear(D, 2)

    def forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(idx)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.transform(x), self.words.weight, self.bias)
        return logits, self.next(x[:, 0].tanh())


def masked_and_next(out: Any, batch: Any) -> tuple[Tensor, int]:
    words = functional.cross_entropy(out[0].transpose(1, 2), batch["targets"], reduction="none")
    return words.mean(1).sum() + functional.cross_entropy(
        out[1], batch["idx"][:, 0] % 2, reduction="sum"
    ), len(out[1])


class Electra(nn.Module):
    """A small model replaces words, and the larger one says which."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.generator, self.discriminator = Block(), nn.ModuleList([Block(), Block()])
        self.head, self.says = nn.Linear(D, V), nn.Linear(D, 1)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        hidden = idx.clone()
        hidden[:, ::3] = 0
        logits = self.head(self.generator(self.words(hidden)))
        with torch.no_grad():
            fake = torch.where(hidden == 0, logits.argmax(-1), idx)
        x = self.words(fake)
        for block in self.discriminator:
            x = block(x)
        replaced = (fake != idx).float()
        found = functional.binary_cross_entropy_with_logits(self.says(x)[..., 0], replaced)
        return functional.cross_entropy(logits.transpose(1, 2), idx) + 5 * found


class T5Layer(nn.Module):
    """Only the first layer has biases of positions; it hands them on."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.bias = nn.Embedding(2 * T, 2) if first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        if bias is None:
            at = torch.arange(t, device=x.device)
            bias = self.bias(at[None] - at[:, None] + T).permute(2, 0, 1)[None]
        q, k, v = (f(x).view(b, t, 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) + bias
        y = (scores.float().softmax(-1).type_as(scores) @ v).transpose(1, 2).reshape(b, t, D)
        return x + self.o(y), bias


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.layers = nn.ModuleList(T5Layer(at == 0) for at in range(3))

    def forward(self, idx: Tensor) -> Tensor:
        x, bias = self.words(idx), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return (x * D**-0.5) @ self.words.weight.t()


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.widen = nn.Embedding(V, 4), nn.Linear(4, D)
        self.block, self.head = Block(), nn.Linear(D, V)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.widen(self.words(idx))
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Pondering(nn.Module):
    """Runs a cell until all samples have halted, four times at most."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt = nn.GRUCell(D, D), nn.Linear(D, 1)
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state, out = torch.zeros_like(x), torch.zeros_like(x)
        left, steps = x.new_ones(len(x), 1), 0
        while bool((left > 0.3).any()) and steps < 4:
            state = self.cell(x, state)
            p = self.halt(state).sigmoid() * left
            out, left, steps = out + p * state, left - p, steps + 1
        return self.head(out + left * state)


class Recurrence(nn.Module):
    """Keeps the hidden states of the step before, in a buffer that it binds anew."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(V, D), Block()
        self.head = nn.Linear(D, V)
        self.register_buffer("memory", torch.zeros(T, D))

    def forward(self, idx: Tensor) -> Tensor:
        h = self.words(idx)
        x = self.block(torch.cat([self.memory.expand(len(idx), -1, -1), h], 1))[:, T:]
        if self.training:
            self.memory = h.detach().mean(0)
        return self.head(x)


class Reverse(torch.autograd.Function):
    """Backward makes the inputs anew of the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> Tensor:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            a = a + f(b)
            out = torch.cat([a, b + g(a)], -1)
        ctx.save_for_backward(out)
        ctx.weights = weights
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        a, b = out.chunk(2, -1)
        with torch.enable_grad():
            b = (b - ctx.g(a)).detach().requires_grad_()
            a = (a - ctx.f(b)).detach().requires_grad_()
            a_out = a + ctx.f(b)
            again = torch.cat([a_out, b + ctx.g(a_out)], -1)
            grads = torch.autograd.grad(again, (a, b, *ctx.weights), grad)
        return torch.cat(grads[:2], -1), None, None, *grads[2:]


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.ModuleList([mlp(D // 2, D, D // 2), mlp(D // 2, D, D // 2)]) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = Reverse.apply(x, pair[0], pair[1], *pair.parameters())
        return x


class Equilibrium(nn.Module):
    """A fixed point without gradients, and a hook that solves for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)
        with torch.no_grad():
            self.inner.weight.mul_(0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z = (self.inner(z) + self.outer(x)).tanh()
        z = (self.inner(z) + self.outer(x)).tanh()
        if z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = (self.inner(z0) + self.outer(x)).tanh()

            def backward(grad: Tensor) -> Tensor:
                g = grad
                for _ in range(20):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(backward)
        return self.head(z)


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.field, ctx.weights = field, weights
        with torch.no_grad():
            for _ in range(4):
                x = x + 0.25 * field(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        total = [torch.zeros_like(w) for w in ctx.weights]
        for _ in range(4):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.field(x)
                grads = torch.autograd.grad(y, (x, *ctx.weights), grad)
            x = x.detach() - 0.25 * y.detach()
            grad = grad + 0.25 * grads[0]
            total = [a + 0.25 * b for a, b in zip(total, grads[1:], strict=True)]
        return None, grad, *total


class NeuralOde(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)), nn.Linear(D, V)  # noqa: E501  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Adjoint.apply(self.field, x, *self.field.parameters()))


class Maml(nn.Module):
    """Takes a step of its own on each task before it is judged there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(D, D, D)

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for task in x:
            support, query = task[:3], task[3:]
            weights = dict(self.net.named_parameters())
            with torch.enable_grad():
                inner = (functional_call(self.net, weights, (support,)) - support).square().mean()
                grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            losses.append((functional_call(self.net, fast, (query,)) - query).square().mean())
        return torch.stack(losses)


class ActNorm(nn.Module):
    """Its first batch says its first values."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.ones(D))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
                self.begun.fill_(True)
        return (x + self.shift) * self.scale


class Glow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = ActNorm(), nn.Parameter(torch.linalg.qr(torch.randn(D, D))[0])
        self.net = mlp(D // 2, D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x) @ self.mix
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        log_det = scale.sum(-1) + torch.linalg.slogdet(self.mix)[1]
        log_det = log_det + self.norm.scale.abs().log().sum()
        return torch.cat([a, b * scale.exp() + shift], -1), log_det


class FlowStep(Glow):
    """The same without what the first batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.begun.fill_(True)


def nll(out: Any, batch: Any) -> Tensor:
    return (out[0].square().sum(-1) / 2 - out[1]).mean()


class MaskedConv(nn.Conv2d):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1:] = mask[:, :, 2:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight * self.mask, self.bias, padding=1)


class MaskedInPlace(MaskedConv):
    """Published ones set the weight itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return nn.Conv2d.forward(self, x)


class PixelCnn(nn.Module):
    def __init__(self, conv: type[MaskedConv] = MaskedConv) -> None:
        super().__init__()
        self.net = nn.Sequential(conv(2, 4, 3, padding=1), nn.ReLU(), conv(4, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Pixels(PixelCnn):
    def __init__(self) -> None:
        super().__init__(MaskedInPlace)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(D, D))
        self.last = parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.leaky_relu(self.first(x)))


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(T, T, 3, padding=1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(x).tanh()
        return x


class PointNet(nn.Module):
    """Its transform of points is kept close to orthogonal by a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.transform = nn.Conv1d(D, D, 1), nn.Linear(D, D * D)
        self.shared, self.head = nn.Conv1d(D, D, 1), nn.Linear(D, V)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.transpose(1, 2)
        turn = self.transform(self.points(x).relu().amax(2)).view(-1, D, D) + torch.eye(D)
        y = torch.bmm(turn, x)
        return self.head(self.shared(y).relu().amax(2)), turn


def of_points(out: Any, batch: Any) -> Tensor:
    apart = torch.eye(D) - torch.bmm(out[1], out[1].transpose(1, 2))
    return out[0].square().mean() + 0.001 * apart.norm(dim=(1, 2)).mean()


class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.weight = mlp(D, D, D), nn.Parameter(torch.randn(V, D))

    def forward(self, x: Tensor, other: Tensor, label: Tensor) -> Tensor:
        cosine = functional.linear(functional.normalize(self.encoder(x)), functional.normalize(self.weight))  # noqa: E501  # fmt: skip
        theta = cosine.clamp(-0.99, 0.99).acos()
        at = torch.arange(len(x), device=x.device)
        theta = theta.clone()
        theta[at, label] += 0.1
        return functional.cross_entropy(4 * theta.cos(), label)


class Pruned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(D, D, D)
        for layer in (self.net[0], self.net[2]):
            prune.l1_unstructured(layer, "weight", amount=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Quantized(nn.Module):
    """Rounds weights by their range, and passes gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            w = layer.weight
            scale = w.detach().abs().amax() / 7
            rounded = w + ((w / scale).round() * scale - w).detach()
            x = functional.linear(x, rounded, layer.bias).relu()
        return x


class Observed(Quantized):
    """Its range of activations is an average over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.range.mul_(0.9).add_(0.1 * x.detach().abs().max())
        step = self.range / 7
        return super().forward(x + ((x / step).round() * step - x).detach())


class Capsules(nn.Module):
    """Routing by agreement, three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(0.3 * torch.randn(T, 3, 4, D))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bti,tcji->btcj", x, self.votes)
        logits = x.new_zeros(len(x), T, 3)
        for round_ in range(3):
            out = (logits.softmax(2)[..., None] * votes).sum(1)
            norm = out.square().sum(-1, keepdim=True)
            out = norm / (1 + norm) * out / (norm + 1e-6).sqrt()
            if round_ < 2:
                logits = logits + (votes.detach() * out[:, None].detach()).sum(-1)
        return out


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.randn(1, 3, D))
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.cell, self.norm = nn.GRUCell(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.begin.expand(len(x), -1, -1)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            weight = (self.q(self.norm(slots)) @ k.transpose(1, 2)).softmax(1) + 1e-6
            updates = weight / weight.sum(-1, keepdim=True) @ v
            slots = self.cell(updates.reshape(-1, D), slots.reshape(-1, D)).view_as(slots)
        return slots


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = mlp(D, D, D), mlp(D, D, V)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.rho((self.phi(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(1))


def sets(step: int) -> tuple[Tensor, Tensor]:
    g = generator_of(step)
    x = torch.randn(SAMPLES, T, D, generator=g)
    return x, (torch.rand(SAMPLES, T, generator=g) > 0.4).float()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(D, D, D), nn.Linear(D, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, mean, log_std = self.head(self.body(x).tanh()).chunk(3, -1)
        return weight.log_softmax(-1), mean, log_std


def mixture_nll(out: Any, batch: Any) -> Tensor:
    weight, mean, log_std = out
    y = batch[1][:, :1]
    log_p = weight - log_std - ((y - mean) / log_std.exp()).square() / 2
    return -log_p.logsumexp(-1).mean()


class Crf(nn.Module):
    """Scores of paths by the forward algorithm, masked by the words that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.emit = nn.Embedding(V, D), nn.Linear(D, 3)
        self.steps, self.begin = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        scores, mask = self.emit(self.words(idx)), targets != -100
        tags = (targets.clamp(min=0)) % 3
        rows = torch.arange(len(idx), device=idx.device)
        path = self.begin[tags[:, 0]] + scores[:, 0].gather(1, tags[:, :1])[:, 0]
        alpha = self.begin + scores[:, 0]
        for t in range(1, idx.shape[1]):
            move = self.steps[tags[:, t - 1], tags[:, t]] + scores[rows, t, tags[:, t]]
            path = path + move * mask[:, t]
            after = (alpha[:, :, None] + self.steps).logsumexp(1) + scores[:, t]
            alpha = torch.where(mask[:, t, None], after, alpha)
        return alpha.logsumexp(-1) - path


def mean_of_all(out: Tensor, batch: Any) -> Tensor:
    return out.mean()


class Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cell = nn.LSTM(D, D, batch_first=True), nn.LSTMCell(D, D)
        self.key, self.query, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(x)
        h, c, outputs = h[0], c[0], []
        taken = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        given = x.mean(1)
        for _ in range(3):
            h, c = self.cell(given, (h, c))
            scores = self.v((self.key(memory) + self.query(h)[:, None]).tanh())[..., 0]
            scores = scores.masked_fill(taken, -1e4)
            at = scores.argmax(-1)
            taken = taken | functional.one_hot(at, x.shape[1]).bool()
            given = x[torch.arange(len(x), device=x.device), at]
            outputs.append(scores.log_softmax(-1))
        return torch.stack(outputs, 1)


def pointed(out: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -out[..., 0].clamp(min=-20).sum(), out[..., 0].numel()


class Word2Vec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Embedding(V, D), nn.Embedding(V, D)

    def forward(self, idx: Tensor) -> Tensor:
        centre, around, noise = self.inputs(idx[:, 0]), self.outputs(idx[:, 1:3]), self.outputs(idx[:, 3:])  # noqa: E501  # fmt: skip
        near = functional.logsigmoid((around * centre[:, None]).sum(-1)).sum(-1)
        far = functional.logsigmoid(-torch.bmm(noise, centre[..., None])[..., 0]).sum(-1)
        return -(near + far)


class Preferences(nn.Module):
    """A policy and the frozen one that it began as, on pairs of sequences in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = (
            nn.Sequential(nn.Embedding(V, D), Block(), nn.Linear(D, V)) for _ in range(2)
        )
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False).eval()

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([idx, targets.clamp(min=0)])
        wanted = both.roll(-1, 1)[..., None]
        policy = self.policy(both).log_softmax(-1).gather(-1, wanted)[..., 0].sum(-1)
        with torch.no_grad():
            reference = self.reference(both).log_softmax(-1).gather(-1, wanted)[..., 0].sum(-1)
        chosen, rejected = (policy - reference).chunk(2)
        return chosen, rejected


def preferred(out: Any, batch: Any) -> Tensor:
    return -functional.logsigmoid(0.1 * (out[0] - out[1])).mean()


class TimeMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(0.5 * torch.ones(3, 1, 1, D))
        self.decay, self.first = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.k, self.v, self.r, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        past = self.shift(x)
        k, v, r = (f(x * m + past * (1 - m)) for f, m in zip((self.k, self.v, self.r), self.mix, strict=True))  # noqa: E501  # fmt: skip
        num = den = torch.zeros_like(x[:, 0])
        outputs, decay = [], -self.decay.exp()
        for t in range(x.shape[1]):
            now = (self.first + k[:, t]).exp()
            outputs.append((num + now * v[:, t]) / (den + now))
            num = num * decay.exp() + k[:, t].exp() * v[:, t]
            den = den * decay.exp() + k[:, t].exp()
        return self.o(r.sigmoid() * torch.stack(outputs, 1))


class Rwkv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimeMix() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class LongConv(nn.Module):
    """A filter as long as the sequence, by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.gates = mlp(2, D, D), nn.Linear(D, 2 * D)
        self.register_buffer("t", torch.linspace(0, 1, T)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        k = self.filter(torch.cat([self.t, self.t.cos()], -1)) * (-2 * self.t).exp()
        a, b = self.gates(x).chunk(2, -1)
        n = 2 * x.shape[1]
        y = torch.fft.irfft(torch.fft.rfft(a, n, 1) * torch.fft.rfft(k, n, 0), n, 1)
        return x + b * y[:, : x.shape[1]]


class Fourier(nn.Module):
    """Weights of modes are complex numbers, which a plan trains as pairs of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(D, D, 3, 2))
        self.beside, self.head = nn.Conv1d(D, D, 1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        modes = torch.fft.rfft(y)
        out = torch.zeros_like(modes)
        out[..., :3] = torch.einsum(
            "bim,iom->bom", modes[..., :3], torch.view_as_complex(self.weight)
        )
        y = torch.fft.irfft(out, n=y.shape[-1]) + self.beside(y)
        return self.head(functional.gelu(y).transpose(1, 2))


class Gumbel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = (
            nn.Linear(D, 4),
            nn.Embedding(4, D),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        soft = ((self.encoder(x) + other[:, :4]) / 0.7).softmax(-1)
        hard = functional.one_hot(soft.argmax(-1), 4).type_as(soft)
        return self.decoder((hard - soft.detach() + soft) @ self.codes.weight)


class Iwae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self.encoder(x).tanh().chunk(2, -1)
        noise = torch.stack([noise, -noise, 0.5 * noise])
        z = mean + log_std.exp() * noise
        log_w = -(self.decoder(z.tanh()) - x).square().mean(-1) - z.square().mean(-1) / 2
        log_w = log_w + (noise.square() / 2 + log_std).mean(-1)
        return -log_w.logsumexp(0)


def dice(out: Tensor, batch: Any) -> Tensor:
    p, t = out.sigmoid(), (batch[1] > 0).float()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


class NBeats(nn.Module):
    """Each block takes away what it explains, and adds its part of the forecast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(D, D, D + 4) for _ in range(3))
        basis = torch.linspace(0, 1, 5)[None] ** torch.arange(4)[:, None]
        self.basis = nn.Parameter(basis, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        forecast = 0
        for block in self.blocks:
            back, theta = block(x).split([D, 4], -1)
            x, forecast = x - back, forecast + theta @ self.basis
        return forecast


class Tasks(nn.Module):
    """Weights of its tasks are learned with the tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(D, D, D)
        self.heads = nn.ModuleDict({"depth": nn.Linear(D, 1), "label": nn.Linear(D, V)})
        self.log_vars = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(1)) for name in self.heads}
        )

    def forward(self, x: Tensor, other: Tensor, label: Tensor) -> dict[str, Tensor]:
        h = self.body(x).relu()
        out = {name: head(h) for name, head in self.heads.items()}
        losses = {
            "depth": (out["depth"][:, 0] - other[:, 0]).square().mean(),
            "label": functional.cross_entropy(out["label"], label),
        }
        total = sum((-s).exp() * losses[name] + s for name, s in self.log_vars.items())
        return {"loss": total.squeeze(), **out}


def by_key(out: Any, batch: Any) -> Tensor:
    return out["loss"]


class DeepFm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embed = nn.Embedding(3 * V, 1), nn.Embedding(3 * V, D)
        self.register_buffer("offsets", V * torch.arange(3), persistent=False)
        self.bias, self.deep = nn.Parameter(torch.zeros(1)), mlp(3 * D, D, 1)

    def forward(self, idx: Tensor) -> Tensor:
        x = idx[:, :3] + self.offsets
        e = self.embed(x)
        pairs = (e.sum(1).square() - e.square().sum(1)).sum(1, keepdim=True) / 2
        return self.linear(x).sum(1) + self.bias + pairs + self.deep(e.flatten(1))


class Prompted(nn.Module):
    """A frozen model with trained keys and values before its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(V, D), Block(), nn.Linear(D, V))
        self.model.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(2, D))

    def forward(self, idx: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(idx), -1, -1), self.model[0](idx)], 1)
        return self.model[2](self.model[1](x))[:, 2:]


class Attended(nn.Module):
    """Remembers what its attention saw, for whoever reads it behind the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.seen = Attention(), []

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        self.seen = [y]
        return x + self.seen[-1]


REPLICAS = frozenset(("replicas",))
WAYS = {
    "Llama": Way(Llama, of_words, inputs=only("idx"), batches=tokens),
    "ViT": Way(Vit, squares, batches=images),
    "Swin": Way(Swin, squares, batches=images),
    "ResNet": Way(ResNet, squares, batches=images),
    "DDPM": Way(Ddpm, returned_mean, inputs=whole, batches=diffused),
    "SimSiam": Way(SimSiam, of_cosines, inputs=whole, batches=views),
    "Barlow Twins": Way(Twins, whole_batch(redundancy), inputs=whole, batches=views),
    "VICReg": Way(Twins, whole_batch(vicreg), inputs=whole, batches=views),
    "SwAV": Way(Twins, whole_batch(sinkhorn), trains=ON_RANKS, inputs=whole, batches=views),
    "SwAV, codes without gradient": Way(Coded, whole_batch(sinkhorn), inputs=whole, batches=views),
    "DINO": Way(Dino, returned_mean, trains=ON_RANKS, batches=first_of, before=follow_student),
    "RetinaNet": Way(Retina, focal, batches=boxes),
    "DETR": Way(Detr, matched, batches=first_of),
    "DQN": Way(Dqn, huber, trains=ON_RANKS, inputs=whole, batches=transitions, before=copy_target),
    "SAC": Way(Sac, returned_mean, trains=ON_RANKS, inputs=whole, batches=transitions),
    "WaveNet": Way(WaveNet, of_words, inputs=only("idx"), batches=tokens),
    "attention decoder": Way(Speller, of_words, inputs=only("idx"), batches=tokens),
    "packed LSTM": Way(Packed, summed_words, trains=ON_RANKS, inputs=by_name, batches=tokens),
    "BERT": Way(Bert, masked_and_next, inputs=only("idx"), batches=tokens),
    "ELECTRA": Way(Electra, returned_mean, inputs=by_name, batches=tokens),
    "T5": Way(T5, of_words, inputs=only("idx"), batches=tokens),
    "ALBERT": Way(Albert, of_words, inputs=only("idx"), batches=tokens),
    "adaptive computation": Way(Pondering, squares, trains=ALONE, batches=views),
    "Transformer-XL": Way(Recurrence, of_words, trains=ALONE, inputs=only("idx"), batches=tokens),
    "RevNet": Way(Reversible, squares, trains=ON_RANKS, batches=views),
    "deep equilibrium": Way(Equilibrium, squares, trains=ON_RANKS, batches=views),
    "neural ODE": Way(NeuralOde, squares, trains=ON_RANKS, batches=views),
    "MAML": Way(Maml, mean_of_all, trains=ON_RANKS, batches=first_of),
    "Glow": Way(Glow, nll, trains=ALONE, batches=views),
    "flow without first values": Way(FlowStep, nll, batches=views),
    "PixelCNN": Way(PixelCnn, squares, trains=ON_RANKS, batches=images),
    "PixelCNN in place": Way(Pixels, squares, trains=REPLICAS, batches=images),
    "spectral norm": Way(Spectral, squares, trains=ON_RANKS, batches=views),
    "weight norm": Way(WeightNormed, squares, batches=first_of),
    "PointNet": Way(PointNet, of_points, batches=first_of),
    "ArcFace": Way(ArcFace, returned_mean, trains=ON_RANKS, inputs=whole, batches=transitions),
    "pruning": Way(Pruned, squares, trains=ON_RANKS, batches=views),
    "quantization": Way(Quantized, squares, trains=ON_RANKS, batches=views),
    "observed quantization": Way(Observed, squares, trains=ALONE, batches=views),
    "capsules": Way(Capsules, squares, trains=ON_RANKS, batches=first_of),
    "slots": Way(Slots, squares, batches=first_of),
    "deep sets": Way(DeepSets, squares, inputs=whole, batches=sets),
    "mixture density": Way(Mixture, mixture_nll, batches=views),
    "CRF": Way(Crf, mean_of_all, inputs=by_name, batches=tokens),
    "pointer network": Way(Pointer, pointed, batches=first_of),
    "word2vec": Way(Word2Vec, mean_of_all, inputs=only("idx"), batches=tokens),
    "DPO": Way(Preferences, preferred, inputs=by_name, batches=tokens),
    "RWKV": Way(Rwkv, squares, batches=first_of),
    "Hyena": Way(LongConv, squares, batches=first_of),
    "neural operator": Way(Fourier, squares, batches=first_of),
    "Gumbel": Way(Gumbel, squares, inputs=whole, batches=views),
    "IWAE": Way(Iwae, mean_of_all, inputs=whole, batches=views),
    "dice": Way(PixelCnn, whole_batch(dice), trains=ON_RANKS, batches=images),
    "N-BEATS": Way(NBeats, squares, batches=views),
    "task weights": Way(Tasks, by_key, inputs=whole, batches=transitions),
    "DeepFM": Way(DeepFm, squares, inputs=only("idx"), batches=tokens),
    "prompts": Way(Prompted, of_words, inputs=only("idx"), batches=tokens),
    "remembered attention": Way(Attended, squares, trains=ON_RANKS, batches=first_of),
}
