"""A training loop of your own in fp16: autocast for the forward pass, a gradient scaler for the backward pass.

Run it with `python examples/loop.py`.
"""

import torch
from torch.utils.data import DataLoader
from transformers import get_scheduler
from verses import classifier, datasets

from halfstep.amp import GradScaler, autocast  # stock: from torch import autocast; from torch.amp import GradScaler


def evaluate(model, loader):
    """The share of the verses that the model labels correctly."""
    model.eval()
    correct = 0
    for batch in loader:
        inputs, mask, targets = batch["input_ids"], batch["attention_mask"], batch["labels"]
        with torch.no_grad(), autocast(device_type="cpu", dtype=torch.float16):
            outputs = model(inputs, attention_mask=mask)
        correct += (outputs.logits.argmax(dim=-1) == targets).sum().item()
    return correct / len(loader.dataset)


def main(train_size=6000, validation_size=2000, batch_size=64, epochs=2, learning_rate=1e-3):
    """Train, print how many steps were applied, and return the accuracy on the validation set."""
    train_dataset, validation_dataset = datasets(train_size, validation_size)
    train_loader = DataLoader(train_dataset, batch_size=batch_size, shuffle=True)
    validation_loader = DataLoader(validation_dataset, batch_size=batch_size)

    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    steps = epochs * len(train_loader)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)
    scaler = GradScaler("cpu")

    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in train_loader:
            inputs, mask, targets = batch["input_ids"], batch["attention_mask"], batch["labels"]
            optimizer.zero_grad()
            with autocast(device_type="cpu", dtype=torch.float16):
                outputs = model(inputs, attention_mask=mask, labels=targets)
                loss = outputs.loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)  # leaves the weights alone when a gradient is inf or NaN
            scaler.update()
            scheduler.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: training loss {total / len(train_loader):.3f}")

    applied = int(optimizer.state[model.classifier.weight].get("step", 0))  # AdamW counts the steps that it takes
    print(f"steps: {applied} applied, {steps - applied} skipped")
    return evaluate(model, validation_loader)


if __name__ == "__main__":
    print(f"validation accuracy: {main():.3f}")
