import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

torch.manual_seed(0)
inputs = torch.randn(256, 20).double()
targets = inputs[:, :5].argmax(1)
layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
model = nn.Sequential(*layers).double()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
part = model[:2] if rank == 0 else model[2:]
optimizer = torch.optim.AdamW(part.parameters(), 3e-3)
stage = PipelineStage(part, rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, nn.functional.cross_entropy)
for x, y in zip(inputs.split(64), targets.split(64), strict=True):
    losses = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if rank == size - 1:
        print(torch.stack(losses).mean().item())
dist.destroy_process_group()
