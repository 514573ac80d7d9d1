"""The options of a call and of training on a GPU: nothing waits, and graphs capture them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import differing, make, tensors

import tbe

pytestmark = pytest.mark.gpu


def training(emb: tbe.TableBatchedEmbeddingBags, sizes: list[list[int]]) -> Callable[[], list[torch.Tensor]]:
    """A block of two variable micro-batches whose inputs are on the GPU already; gives the weights' gradients."""
    bags = sum(map(sum, sizes))
    ids, ends = (torch.arange(2 * bags) % 5).cuda(), (2 * torch.arange(bags + 1)).cuda()
    mask, value = torch.tensor([True, False]).cuda(), torch.linspace(-1, 1, 2 * bags).cuda()
    width = sum(sum(row) * dim for row, dim in zip(sizes, emb.spec.layout.feature_dims, strict=True))
    grad = torch.linspace(-1, 1, width).cuda()

    def run() -> list[torch.Tensor]:
        found = []
        with emb.accumulate():
            for _ in range(2):
                weights = value.clone().requires_grad_()
                out = emb(ids, ends, weights, feature_requires_grad=mask, batch_size_per_feature_per_rank=sizes)
                found += torch.autograd.grad(out, weights, grad)
        return found

    return run


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[], None]]:
    def begin() -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    yield begin
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_gpu(waiting_is_an_error: Callable[[], None]) -> None:
    """Not even for sizes that are seen for the first time."""
    emb = make(device="cuda", gradient_clipping=0.5)
    emb.freeze("geo")
    training(emb, [[1, 2], [0, 4]])()
    again = training(emb, [[3, 2], [1, 0]])
    waiting_is_an_error()
    again()


def test_a_graph_replays_the_steps_of_eager_calls() -> None:
    sizes = [[1, 2], [0, 4]]
    eager, emb = (make(device="cuda", gradient_clipping=0.5) for _ in range(2))
    plain, captured = training(eager, sizes), training(emb, sizes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured()
    torch.cuda.current_stream().wait_stream(stream)
    plain()
    tbe.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = captured()
    for _ in range(2):
        graph.replay()
        expected = plain()
        assert all(map(torch.equal, got, expected))
        left, right = tensors(emb), tensors(eager)
        assert not differing(left, right)


def test_backwards_on_streams_of_their_own_are_joined() -> None:
    emb, plain = make(device="cuda"), make(device="cuda")
    ids, ends = torch.randint(0, 5, (60000,)).cuda(), (15 * torch.arange(4001)).cuda()
    grad = torch.randn(2000, 12).cuda()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    with emb.accumulate():
        for stream in streams:
            with torch.cuda.stream(stream):
                emb(ids, ends).backward(grad)
    with plain.accumulate():
        for _ in streams:
            plain(ids, ends).backward(grad)
    assert not differing(tensors(emb), tensors(plain))
