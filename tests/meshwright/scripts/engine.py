"""Train an image classifier on all ranks that started this script."""

import os

import meshwright
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + F.relu(self.conv(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self, width=8, depth=4, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def images(count):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (count,), generator=generator)
    pictures = torch.randn(count, 3, 8, 8, generator=generator) + labels[:, None, None, None]
    return TensorDataset(pictures, labels)


def main():
    data = images(256)
    loss = lambda out, batch: (F.cross_entropy(out, batch[1], reduction="sum"), len(out))
    sgd = lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    engine = meshwright.Engine(Classifier, loss=loss, optimizer=sgd, batch=data[:64])
    rank, world, optimizer = engine.slice_rank, engine.slices, engine.optimizer
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=64 // world, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            result = engine.step(batch)
            scheduler.step()
        if engine.leads:
            print(f"epoch {epoch} loss {result.loss:.4f}")
    engine.save(os.environ.get("OUT", "checkpoints"))


if __name__ == "__main__":
    main()
