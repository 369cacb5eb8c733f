"""An ordinary training script in plain PyTorch: a small network learns scikit-learn's handwritten digits.

    python train_digits.py --epochs 2 --save digits.pt
    torchrun --standalone --nproc-per-node 2 train_digits.py --parallel ddp --resume digits.pt --epochs 4
    torchrun --standalone --nproc-per-node 2 train_digits.py --parallel pipeline --resume digits.pt --epochs 4

All three load and save the same checkpoint: the whole model, the state of its optimizer, and the epoch.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH, MICRO_BATCHES, CUT = 48, 4, 2


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def data():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return images[:1440], labels[:1440], images[1440:], labels[1440:]


class Single:
    """One process has it all."""

    def __init__(self, model):
        self.model = self.trained = model

    def step(self, images, labels):
        loss = cross_entropy(self.trained(images), labels)
        loss.backward()
        return loss.item()

    def gather(self, optimizer):
        return self.model.state_dict(), optimizer.state_dict()


class Replicas(Single):
    """Each rank has a replica and its part of a batch."""

    def __init__(self, model):
        super().__init__(model)
        self.trained = DistributedDataParallel(model)

    def step(self, images, labels):
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        loss = torch.tensor(super().step(images[mine], labels[mine]))
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


class Pipeline(Single):
    """Rank 0 has the first layers, rank 1 the others; micro-batches flow between them."""

    def __init__(self, model):
        super().__init__(model)
        self.rank = dist.get_rank()
        self.layers = range(CUT) if self.rank == 0 else range(CUT, len(model))
        self.trained = model[self.layers.start : self.layers.stop]
        stage = PipelineStage(self.trained, self.rank, 2, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, MICRO_BATCHES, cross_entropy)

    def step(self, images, labels):
        losses = []
        if self.rank == 0:
            self.schedule.step(images)
        else:
            self.schedule.step(target=labels, losses=losses)
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.broadcast(loss, 1)
        return loss.item()

    def gather(self, optimizer):
        """Rank 0's state of all, the other rank's layers put in."""
        state, momenta = self.model.state_dict(), optimizer.state_dict()
        names = [name for name, _ in self.model.named_parameters()]
        mine = [name for name in names if int(name.split(".")[0]) in self.layers]
        there = [None, None]
        dist.all_gather_object(there, [(name, state[name], momenta["state"].get(names.index(name))) for name in mine])
        for name, tensor, momentum in there[1]:
            state[name] = tensor
            momenta["state"][names.index(name)] = momentum
        return state, momenta


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["single", "ddp", "pipeline"], default="single")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--metrics", type=Path)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    if options.parallel != "single":
        dist.init_process_group("gloo")
    first = int(os.environ.get("RANK", "0")) == 0
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = 0
    if options.resume:
        checkpoint = torch.load(options.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["epoch"]
    layout = {"single": Single, "ddp": Replicas, "pipeline": Pipeline}[options.parallel](model)
    images, labels, test_images, test_labels = data()
    log = options.metrics.open("w") if first and options.metrics else None

    def tell(**values):
        if log:
            print(json.dumps(values), file=log, flush=True)

    iteration = done * len(images) // BATCH
    for epoch in range(done, options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed + 1000 * epoch))
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            loss = layout.step(images[batch], labels[batch])
            optimizer.step()
            iteration += 1
            tell(iteration=iteration, train_loss=loss)
        state, momenta = layout.gather(optimizer)
        if first:
            whole = network()
            whole.load_state_dict(state)
            with torch.no_grad():
                right = (whole(test_images).argmax(1) == test_labels).float().mean().item()
            tell(iteration=iteration, epoch=epoch + 1, val_acc=right)
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {right:.4f}")
    if first and options.save:
        torch.save({"model": state, "optimizer": momenta, "epoch": options.epochs}, options.save)
    if options.parallel != "single":
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # to end gloo while its thread lets go of a last tensor is a deadlock in PyTorch 2.13


if __name__ == "__main__":
    main()
