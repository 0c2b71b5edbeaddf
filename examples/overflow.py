"""A layer whose values fp16 cannot hold: found, named, and held in fp32, through each of the three doors.

Run it with `python examples/overflow.py`. The second feed-forward block gives numbers beyond 65,504, where fp16 ends, so the loss is NaN; no loss
scale helps against that. The loop names the layer and skips the step, the accelerator is asked to hold the layer in fp32 from the next step on,
and the trainer does so by itself, runs the step again, and writes what it has learnt to rules.yaml.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import halfstep


class Block(nn.Module):  # growth: what its weights are multiplied by
    def __init__(self, width, growth=1.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.up.weight.data *= growth
        self.down.weight.data *= growth

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):  # three blocks, of which the second is the fault
    def __init__(self, width=32):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))
        self.blocks = nn.Sequential(Block(width), Block(width, growth=600.0), Block(width))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.last(self.blocks(self.first(x))).float(), labels)}


def batch():
    """Vectors, and the sum of each as its label."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return {"x": x, "labels": x.sum(1, keepdim=True)}


def told(result):
    held = ", ".join(result.pinned) or "nothing"
    return f"applied, loss {result.loss:.3g}" if result else f"{result.reason} in {result.culprits[0]}; held in fp32 from now on: {held}"


def by_loop(steps):
    """A loop of your own: the scaler that watches the model names the layer, and refuses the step."""
    model, data = Net(), batch()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), halfstep.amp.GradScaler("cpu")
    scaler.watch(model)
    for _ in range(steps):
        with halfstep.amp.autocast("cpu", dtype=torch.float16):
            loss = model(**data)["loss"]
        scaler.scale(loss).backward()
        yield scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def by_accelerator(steps):
    """The accelerator, asked to heal: from the next forward pass on the layer runs in fp32."""
    accelerator = halfstep.Accelerator(mixed_precision="fp16", cpu=True, heal="pin")
    model, data = Net(), batch()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for _ in range(steps):
        accelerator.backward(model(**data)["loss"])
        optimizer.step()
        yield accelerator.last_step
        optimizer.zero_grad()


def by_trainer(folder, steps):
    """The trainer heals by itself, and loses no step."""
    args = halfstep.TrainingArguments(folder, fp16=True, use_cpu=True, max_steps=steps, learning_rate=1e-3, disable_tqdm=True, save_strategy="no")
    rows = [{"x": x, "labels": labels} for x, labels in zip(*batch().values(), strict=True)]
    trainer = halfstep.Trainer(Net(), args, train_dataset=rows)
    trainer.train()
    return trainer.state


def main(steps=3):
    """Print what each way to ask says."""
    torch.manual_seed(0)
    print("trace:", str(halfstep.trace(Net(), batch(), precision="fp16-mixed")).splitlines()[0])
    for door, results in (("loop", by_loop(steps)), ("accelerator", by_accelerator(steps))):
        for number, result in enumerate(results, 1):
            print(f"{door}, step {number}: {told(result)}")
    with tempfile.TemporaryDirectory() as folder:
        state = by_trainer(folder, steps)
        print(f"trainer: {state.global_step} steps applied, {state.replayed_steps} of them run again, {state.skipped_steps} skipped; rules.yaml:")
        print((Path(folder) / "rules.yaml").read_text())


if __name__ == "__main__":
    main()
