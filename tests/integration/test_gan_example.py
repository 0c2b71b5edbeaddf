"""examples/gan.py: both models train, and the drawn points come near the ring."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "gan.py"


def test_the_generator_learns_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("example_gan", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    gan = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gan)
    small = {"samples": 1024, "batch_size": 64, "learning_rate": 2e-3}
    assert gan.main(**small, epochs=0) > 1.5  # untrained, near the middle
    assert gan.main(**small, epochs=12) < 0.9
    assert "steps applied: {'generator': 192, 'discriminator': 192}" in capsys.readouterr().out
