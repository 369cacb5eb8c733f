"""What a user writes by hand: DDP for one recipe's model and data under torchrun; prints the seconds of a step."""

import json
import sys
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flipper.training import recipes

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
recipe, count = recipes.get(sys.argv[1]), int(sys.argv[2])
data = recipe.data(None)
torch.manual_seed(1)
model = DistributedDataParallel(recipe.model())
optimizer = recipe.optimizer(model.parameters())
schedule = recipe.schedule(optimizer)
size = recipe.batch_size
times = []
order = torch.randperm(len(data.train_targets))
for step in range(count):
    start = perf_counter()
    position = step % (len(order) // size) * size
    if position == 0:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(step))
    mine = order[position : position + size].tensor_split(world)[rank]
    optimizer.zero_grad()
    loss = recipe.loss(model(data.train_features[mine]), data.train_targets[mine])
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    schedule.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    last = (total.item() / world, norm.item())
    times.append(perf_counter() - start)
if rank == 0:
    print(json.dumps(median(times[len(times) // 4 :])), flush=True)
dist.barrier()
dist.destroy_process_group()
