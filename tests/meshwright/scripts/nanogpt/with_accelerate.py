import os

import torch
from accelerate import Accelerator
from model import GPT, get_batch


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(4):
        x, y = get_batch(step, rank, world)
        for micro_x, micro_y in zip(x.chunk(2), y.chunk(2), strict=True):
            with accelerator.accumulate(model):
                _, loss = model(micro_x, micro_y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(state, os.environ["OUT"])


if __name__ == "__main__":
    main()
