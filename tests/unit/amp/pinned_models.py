"""Models with a part to pin, and what that part gives in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.optim import master_of
from halfstep.policy import parse

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 48).reshape(6, 8)


class Feed(nn.Module):
    """Products, a functional op and dropout, whose argument may be a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.drop, self.o = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x: Tensor, *, extra: dict[str, Tensor] | None = None) -> Tensor:
        y: Tensor = self.o(self.drop(F.relu(self.i(x)))).softmax(-1)
        return y + x if extra is None else y + extra["e"]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x[None]))[0]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.register_buffer("factor", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(torch.arange(x.shape[0])) * self.factor


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.some = nn.Parameter(torch.randn(8, 8)), nn.ParameterList([torch.randn(8)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.t() + self.some[0] + self.w.norm()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None], x[None], x[None])[0][0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0][0]


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


PARTS = {
    "linear": lambda: nn.Linear(8, 8),
    "feed": Feed,
    "normed": Normed,
    "table": Table,
    "direct": Direct,
    "attention": Attending,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "parametrized": Parametrized,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
}


class Net(nn.Module):
    def __init__(self, part: nn.Module | None = None, again: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.a, self.part, self.b = nn.Linear(8, 8), part or Feed(), nn.Linear(8, 4)
        self.again, self.reentrant = again, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = checkpoint(self.part, h, use_reentrant=self.reentrant) if self.again else self.part(h)
        return self.b(h)


def net(precision: str | None = "bf16-mixed", kind: str = "feed", **how: bool) -> Net:
    torch.manual_seed(0)
    model = Net(PARTS[kind](), **how)
    if precision is not None:
        amp.bind(model, parse(precision), CPU)
        model(X)  # *-lean settles what is kept in 16 bits
    return model


def out(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    return model(X)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    out(model).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def in_fp32(model: Net, kind: str) -> nn.Module:
    """The part by itself, with the values that the model holds for it."""
    part = PARTS[kind]()
    held = {n: m.read() if (m := master_of(p)) is not None else p.detach().float() for n, p in model.part.named_parameters()}
    held |= {n: b.float() if b.is_floating_point() else b for n, b in model.part.named_buffers()}
    part.load_state_dict(held)
    return part


def held_to_fp32(model: Net, kind: str) -> None:
    """Run the pinned model; what its part was given, gave and got back must be what fp32 gives, takes and hands back."""
    twin, seen = in_fp32(model, kind), []
    model.part.register_forward_hook(lambda _, given, gave: seen.append((given[0].detach().float(), gave)))
    model.zero_grad()
    torch.manual_seed(3)
    y = model(X)
    (given, gave) = seen[0]
    gave.retain_grad()
    y.float().square().sum().backward()
    torch.manual_seed(3)
    with torch.autocast("cpu", enabled=False):
        wanted = twin(given)
    assert gave.dtype == torch.float32
    assert torch.equal(gave, wanted)
    wanted.backward(gave.grad)
    for name, p in model.part.named_parameters():
        assert torch.equal(p.grad, dict(twin.named_parameters())[name].grad.to(p.grad.dtype)), name
    for name, buffer in model.part.named_buffers():
        assert torch.equal(buffer, dict(twin.named_buffers())[name].to(buffer.dtype)), name
