"""Values that leave the model for numpy, loggers, statistics and the screen (kind P)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from conformance.adapter import Library, Record, collector
from conformance.tools import BF16, near

RECORDS: list[Record] = []
record = collector(RECORDS, "P")


def _layer() -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 0.25)
    return layer


@record(
    "numpy-of-a-training-output",
    "metrics code calls .numpy() on what the model gave in the loop for bf16",
    today="TypeError: Got unsupported ScalarType BFloat16",
    right="an fp32 array: values leave the model in fp32, or the library has a bridge",
    check=lambda v: v == ("float32", 1.0),
    refs=("case 64",),
)
def numpy_of_output(library: Library) -> Any:
    layer = _layer()
    run = library.run(layer, [SGD(layer.parameters(), lr=0.1)], dtype=BF16)
    array = library.plain(run.forward(torch.ones(1, 4)).detach()).numpy()
    return str(array.dtype), float(array[0, 0])


def _output(name: str, title: str, today: str, use: Callable[[Tensor], float], wanted: float) -> None:
    @record(
        f"output-of-a-16-bit-model-in-{name}",
        f"the output of a model whose weights are all bf16 is given to {title}",
        today=today,
        right="works: values leave the model in fp32",
        check=lambda v: near(v, wanted, 1e-3),
        refs=("case 64",),
    )
    def output(library: Library) -> Any:
        model = library.cast_model(_layer(), BF16)
        inputs = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]], dtype=BF16)
        with torch.no_grad():
            return use(model(inputs))


_output("numpy", ".numpy()", "TypeError: Got unsupported ScalarType BFloat16", lambda y: float(y.numpy().mean()), 1.5)
_output("asarray", "np.asarray, as plotting libraries do", "TypeError", lambda y: float(np.asarray(y).mean()), 1.5)
_output("quantile", "torch.quantile", "RuntimeError: quantile() input tensor must be float or double", lambda y: float(torch.quantile(y, 0.5)), 1.5)
_output("histogram", "torch.histogram", "NotImplementedError", lambda y: float(torch.histogram(y, 4).hist.sum()), 8.0)
_output("svd", "torch.linalg.svdvals (spectral norms)", "NotImplementedError", lambda y: float(torch.linalg.svdvals(y)[0]), 20.0**0.5)


def _weights(name: str, title: str, today: str, use: Callable[[Tensor], float], wanted: float) -> None:
    @record(
        f"16-bit-weights-in-{name}",
        f"a logger looks at bf16 weights after fifty small steps from 0.25 to 0.245: {title}",
        today=today,
        right="0.245 in fp32: the library gives the value that its next step begins at",
        check=lambda v: near(v, wanted, 1e-3),
        refs=("case 64", "case 37"),
    )
    def weights(library: Library) -> Any:
        layer = _layer()
        model = library.cast_model(layer, BF16)
        optimizer = library.masters(SGD(model.parameters(), lr=1e-4))
        for _ in range(50):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
        return use(library.full(layer.weight))


def _array_file(w: Tensor) -> float:
    file = io.BytesIO()
    np.save(file, w.numpy())
    file.seek(0)
    return float(np.load(file)[0, 0])


_weights("a-numpy-file", "np.save", "TypeError", _array_file, 0.245)
_weights("a-mean", "their mean as JSON", "0.25: they did not move", lambda w: float(json.loads(json.dumps(w.mean().item()))), 0.245)


def _printed(losses: list[float]) -> list[str]:
    return [f"{value:.5f}" for value in losses]


@record(
    "a-loss-that-falls-looks-flat",
    "a loss by hand, -log_softmax(logits)[:, 0].mean(), of logits that improve by 0.002 a step, printed with five digits",
    today="2.07812 five times: the loss is a bf16 number",
    right="five losses, each lower than the one before",
    check=lambda v: len(set(v)) == 5 and v == sorted(v, reverse=True),
    refs=("case 64",),
)
def looks_flat(library: Library) -> Any:
    layer, losses = nn.Linear(4, 8), []
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    for step in range(5):
        with torch.no_grad(), library.autocast(BF16):
            layer.bias[0] = 0.002 * step
            loss = -layer(torch.ones(2, 4)).log_softmax(-1)[:, 0].mean()
        losses.append(float(loss))
    return _printed(losses)


@record(
    "hits-printed-from-16-bits",
    "the number of hits of a bf16 classifier, 1001 of 2048, as hits.to(logits.dtype).sum() in a block",
    today="1000: bf16 counts in fours there",
    right="1001",
    check=lambda v: v == "1001",
    refs=("case 64",),
)
def hits_printed(library: Library) -> Any:
    layer = nn.Linear(4, 2)
    with torch.no_grad(), library.autocast(BF16):
        logits = layer(torch.ones(2048, 4))
        return f"{float((torch.arange(2048) < 1001).to(logits.dtype).sum()):.0f}"
