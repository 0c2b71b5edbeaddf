"""In which order gradients are sent, and which of them a bucket waits for."""

import torch
from torch import Tensor, nn

from halfstep.distributed import DataParallel, MeanOverRanks, Solo


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
