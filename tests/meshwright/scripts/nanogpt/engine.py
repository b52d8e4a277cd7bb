import os

import meshwright
import torch
from model import GPT, get_batch


def main():
    adamw = lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True)
    engine = meshwright.Engine(
        GPT,
        os.environ.get("MESHWRIGHT_PLAN") or {"micro_batches": 2},
        loss=lambda out, batch: out[1],
        optimizer=adamw,
        inputs=lambda batch: batch,
        batch=get_batch(0),
        clip_norm=1.0,
    )
    for step in range(4):
        engine.step(engine.slice(get_batch(step)))
    state = engine.state_dict()
    if engine.leads:
        torch.save(state, os.environ["OUT"])


if __name__ == "__main__":
    main()
