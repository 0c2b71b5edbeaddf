"""Two models that train against each other: a generator learns to draw points on a ring, a discriminator to tell them from real ones.

Each has an optimizer and a loss of its own; a step that one of them must leave out does not cost the other its step.

Run it with `python examples/gan.py`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import Accelerator  # stock: from accelerate import Accelerator

NOISE = 8


def ring(count):
    """Points on a circle of radius 2, a little off it."""
    angle = torch.rand(count) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) * (2 + 0.05 * torch.randn(count, 1))


def network(inputs, outputs, width=64):
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, outputs))


def main(samples=4096, batch_size=128, epochs=40, learning_rate=1e-3, seed=0):
    """Train both, print the steps of each, and return how far drawn points lie off the ring, on average."""
    torch.manual_seed(seed)
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=learning_rate, betas=(0.5, 0.99))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=learning_rate, betas=(0.5, 0.99))
    loader = DataLoader(TensorDataset(ring(samples)), batch_size=batch_size, shuffle=True, drop_last=True)
    generator, discriminator, generator_optimizer, discriminator_optimizer, loader = accelerator.prepare(
        generator, discriminator, generator_optimizer, discriminator_optimizer, loader
    )

    applied = {"generator": 0, "discriminator": 0}
    for _ in range(epochs):
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE, device=real.device)
            target = torch.ones(len(real), 1, device=real.device)

            fake = generator(noise)
            loss = (
                nn.functional.binary_cross_entropy_with_logits(discriminator(real), target)
                + nn.functional.binary_cross_entropy_with_logits(discriminator(fake.detach()), 1 - target)
            ) / 2
            discriminator_optimizer.zero_grad()
            accelerator.backward(loss)
            discriminator_optimizer.step()
            applied["discriminator"] += not discriminator_optimizer.step_was_skipped

            loss = nn.functional.binary_cross_entropy_with_logits(discriminator(fake), target)
            generator_optimizer.zero_grad()
            accelerator.backward(loss)
            generator_optimizer.step()
            applied["generator"] += not generator_optimizer.step_was_skipped

    accelerator.print(f"steps applied: {applied}")
    with torch.no_grad():
        drawn = generator(torch.randn(2000, NOISE, device=accelerator.device))
    return (drawn.norm(dim=1) - 2).abs().mean().item()


if __name__ == "__main__":
    print(f"mean distance from the ring: {main():.3f}")
