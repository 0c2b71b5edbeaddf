"""In which order gradients are sent, and which of them a bucket waits for."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halfstep.distributed import DataParallel, MeanOverRanks, Solo
from halfstep.distributed.buckets import Bucket


class Net(nn.Module):
    """Blocks of a 16-bit layer and an fp32 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False).bfloat16(), nn.LayerNorm(16)) for _ in range(3))


class First:
    """Whose loss reaches the last block alone, and who uses its norm at once."""

    def __init__(self, model: Net) -> None:
        self._reached, self._taken = {id(p) for p in model.blocks[2].parameters()}, {id(model.blocks[2][1].weight)}

    def reaches(self, p: Tensor) -> bool:
        return id(p) in self._reached

    def takes(self, p: Tensor) -> bool:
        return id(p) in self._taken

    def use(self, p: Tensor) -> None:
        raise AssertionError("no gradient was made")


def laid_out() -> tuple[Net, MeanOverRanks]:
    model, reducer = Net(), MeanOverRanks(Solo(), DataParallel(bucket_cap_mb=16 * 16 * 2 / 2**20))
    reducer.join(model)
    return model, reducer


def test_a_bucket_is_sent_in_the_order_of_its_last_parameter() -> None:
    """The fp32 norms of the whole model fill one bucket, which is there when the first of them is: the 16-bit layers need not wait for it."""
    model, reducer = laid_out()
    reducer.expect()
    layers = [block[0].weight for block in model.blocks]
    norms = [bucket for bucket in reducer._buckets if bucket.dtype == torch.float32]
    assert [len(bucket.parameters) for bucket in norms] == [6]
    sent = [bucket.parameters[0] for bucket in reducer._order]
    assert [next(i for i, p in enumerate(sent) if p is layer) for layer in layers] == [3, 1, 0]
    assert reducer._order.index(norms[0]) == 2  # the first block's norm is registered after its layer, and its gradient made before


def test_a_bucket_waits_for_what_the_loss_reaches_alone() -> None:
    model, reducer = laid_out()
    reducer.expect(First(model))
    waits = [len(bucket.waits) for bucket in reducer._order]
    assert waits == [1, 0, 2, 0]
    assert [len(bucket.used) for bucket in reducer._order] == [0, 0, 1, 0]
    reducer.give_up()
    assert not any(bucket.used for bucket in reducer._buckets)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """One rank that exchanges gradients with itself."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Taker:
    """Uses the gradients of some parameters."""

    def __init__(self, *taken: Tensor) -> None:
        self.taken, self.used = taken, list[tuple[int, Tensor]]()

    def reaches(self, p: Tensor) -> bool:
        return True

    def takes(self, p: Tensor) -> bool:
        return any(p is t for t in self.taken)

    def use(self, p: Tensor) -> None:
        assert p.grad is not None
        self.used.append((id(p), p.grad.clone()))
        p.grad = None


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_what_is_used_lies_in_the_parcel_alone_and_comes_back_in_order(group: None, wire: torch.dtype) -> None:
    plain, taken, missing = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    conv = nn.Parameter(torch.zeros(2, 3, 4, 4))
    plain.grad, taken.grad, conv.grad = torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), torch.rand(2, 3, 4, 4).bfloat16().float()
    conv.grad = conv.grad.contiguous(memory_format=torch.channels_last)
    before = conv.grad.clone()
    bucket, users = Bucket([conv, missing, taken, plain], wire, 0), Taker(conv, missing, taken)
    bucket.expect(users)
    bucket.send(1)
    assert taken.grad is None
    assert plain.grad is not None
    assert [p is missing for p in bucket.lacks] == [True]
    bucket.receive(users)
    assert [i for i, _ in users.used] == [id(conv), id(taken)]  # nobody has a gradient of the other
    assert torch.equal(users.used[0][1], before)
    assert users.used[0][1].stride() == before.stride()
    assert torch.equal(users.used[1][1], torch.tensor([1.0, 2.0, 3.0]))
    assert users.used[1][1].dtype == torch.float32
    assert torch.equal(plain.grad, torch.ones(3))
    assert bucket.flat is None
