import torch, torch.distributed as dist, pytest, time
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
def hello(rank, x):
    t=torch.tensor([float(rank+x)]); dist.all_reduce(t)
    net=DDP(nn.Linear(2,2)); net(torch.ones(1,2)).sum().backward()
    return t
def hang(rank):
    if rank: time.sleep(100)
    else: raise ValueError("x")
def test_a(on_ranks):
    assert on_ranks(hello, 3)[0].item()==7
def test_b(on_ranks):
    assert on_ranks(hello, 3)[1].item()==7
def test_c(on_ranks):
    with pytest.raises(Exception,match="ValueError: x"): on_ranks(hang)
