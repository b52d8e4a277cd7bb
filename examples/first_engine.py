"""torchrun --nproc-per-node 2 first_engine.py, or meshwright run --ranks 2 first_engine.py."""

import torch
from torch import nn

import meshwright

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(640, 32), torch.randint(10, (640,)))


def build():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(out, batch):
    return nn.functional.cross_entropy(out, batch[1])


engine = meshwright.Engine(build, loss=loss, optimizer=torch.optim.AdamW, batch=data[:64])
for batch in engine.loader(data):
    result = engine.step(batch)  # result.loss, result.grad_norm
if engine.leads:
    print(f"loss {result.loss:.4f} on {engine.slices} ranks")
