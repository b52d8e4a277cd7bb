import os

import torch
import torch.distributed as dist
from model import GPT, get_batch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT()
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(4):
        x, y = get_batch(step, rank, world)
        for at, (micro_x, micro_y) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            model.set_requires_gradient_sync(at == 1)
            _, loss = model(micro_x, micro_y)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(state, os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
