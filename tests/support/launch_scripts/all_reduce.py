"""A real worker: joins the process group from the environment alone and sums the ranks."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank() + 1))
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}")
dist.destroy_process_group()
