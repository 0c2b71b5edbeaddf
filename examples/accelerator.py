"""The same training with an accelerator: it takes care of device, precision and loss scale, the loop stays yours.

Run it with `python examples/accelerator.py`.
"""

import torch
from torch.utils.data import DataLoader
from transformers import get_scheduler
from verses import classifier, datasets

from halfstep import Accelerator  # stock: from accelerate import Accelerator


def evaluate(model, loader):
    """The share of the verses that the model labels correctly."""
    model.eval()
    correct = 0
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        correct += (outputs.logits.argmax(dim=-1) == batch["labels"]).sum().item()
    return correct / len(loader.dataset)


def main(train_size=6000, validation_size=2000, batch_size=64, epochs=2, learning_rate=1e-3):
    """Train, print how many steps were applied, and return the accuracy on the validation set."""
    train_dataset, validation_dataset = datasets(train_size, validation_size)
    train_loader = DataLoader(train_dataset, batch_size=batch_size, shuffle=True)
    validation_loader = DataLoader(validation_dataset, batch_size=batch_size)

    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=epochs * len(train_loader))

    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model, optimizer, train_loader, validation_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, validation_loader, scheduler)

    applied = skipped = 0
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in train_loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()  # holds still when the optimizer step was skipped
            if accelerator.optimizer_step_was_skipped:
                skipped += 1
            else:
                applied += 1
            total += loss.item()
        accelerator.print(f"epoch {epoch + 1}: training loss {total / len(train_loader):.3f}")

    accelerator.print(f"steps: {applied} applied, {skipped} skipped")
    return evaluate(model, validation_loader)


if __name__ == "__main__":
    print(f"validation accuracy: {main():.3f}")
