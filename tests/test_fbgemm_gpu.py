"""The FBGEMM drop-in on a GPU: the CPU's results, the same bounds checks, nothing that waits."""

from __future__ import annotations

from typing import Any

import fbgemm_modules as modules
import pytest
import torch
from fbgemm_modules import assert_near, make, states

import tbe
import tbe.compat.fbgemm as ours
from tbe.compat.fbgemm import convert

pytestmark = pytest.mark.gpu

OPTIMIZERS = (
    ours.OptimType.EXACT_SGD,
    ours.OptimType.EXACT_ADAGRAD,
    ours.OptimType.EXACT_ROWWISE_ADAGRAD,
    ours.OptimType.ADAM,
)


def on_gpu(specs: Any = modules.SPECS, **options: Any) -> Any:
    """``make(ours)`` with its tables on the GPU, the same rows."""
    device, cuda = ours.EmbeddingLocation.DEVICE, ours.ComputeDevice.CUDA
    full = [(rows, dim, device, cuda) for rows, dim in specs]
    emb = ours.SplitTableBatchedEmbeddingBagsCodegen(full, **{"feature_table_map": list(modules.MAP), **options})
    for mine, value in zip(
        emb.split_embedding_weights(), make(ours, specs).split_embedding_weights(), strict=True
    ):
        mine.copy_(value)
    return emb


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_cpu_s_numbers_and_checkpoints(optimizer: ours.OptimType) -> None:
    cpu = make(ours, optimizer=optimizer, learning_rate=0.1, eps=0.01)
    gpu = on_gpu(optimizer=optimizer, learning_rate=0.1, eps=0.01)
    for seed in range(3):
        indices, offsets, weights = modules.batch(seed)
        one, other = weights.clone().requires_grad_(), weights.cuda().requires_grad_()
        left, right = cpu(indices, offsets, one), gpu(indices.cuda(), offsets.cuda(), other)
        grad = torch.randn(left.shape)
        left.backward(grad)
        right.backward(grad.cuda())
        assert_near([left.detach(), one.grad], [right.detach().cpu(), other.grad.cpu()], 1e-4)
    assert_near(states(cpu), [t.cpu() for t in states(gpu)], 1e-4)
    cpu.load_state_dict(convert.relocated(gpu.state_dict(), ours.EmbeddingLocation.HOST))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(states(cpu), states(gpu), strict=True))


def test_warning_rewrites_without_waiting_and_flush_tells() -> None:
    emb = on_gpu(learning_rate=0.1)
    before = emb.split_embedding_weights()[0].clone()
    offsets = torch.tensor([0, 1, 2, 2, 2], device="cuda")
    # Warm, backward too: kernels, and what is kept on the device. No gradient, so that no row changes.
    (emb(torch.tensor([1, 1], device="cuda"), offsets) * 0.0).sum().backward()
    indices, offsets = torch.tensor([99, 3], device="cuda"), torch.tensor([0, 1, 2, 9, 2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = emb(indices, offsets)
        out.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert indices.tolist() == [0, 3] and offsets.tolist() == [0, 1, 2, 2, 2]
    changed = (emb.split_embedding_weights()[0] != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [0]
    assert emb.bounds_check_warning.tolist() == [2]
    with pytest.warns(tbe.BadLookupWarning, match="2 ids or offsets") as caught:
        emb.flush()
    assert caught[0].filename == __file__


def test_fatal_names_the_id() -> None:
    emb = on_gpu(bounds_check_mode=ours.BoundsCheckMode.FATAL)
    with pytest.raises(RuntimeError, match=r"indices\[0\]=99 \(feature 0\)"):
        emb(torch.tensor([99], device="cuda"), torch.tensor([0, 1, 1, 1, 1], device="cuda"))


def test_lookups_before_the_first_offset_train_nothing() -> None:
    emb = on_gpu(learning_rate=0.1, pooling_mode=ours.PoolingMode.MEAN)
    before = emb.split_embedding_weights()[0].clone()
    indices, offsets = torch.tensor([5, 3, 4], device="cuda"), torch.tensor([1, 3, 3, 3, 3], device="cuda")
    out = emb(indices, offsets)
    torch.testing.assert_close(out[0, :8].detach(), before[3:5].mean(dim=0))
    out.sum().backward()
    changed = (emb.split_embedding_weights()[0] != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [3, 4]


def test_stochastic_rounding_is_a_gpu_s() -> None:
    emb = on_gpu(weights_precision=ours.SparseType.FP16)
    assert emb.tables.spec.stochastic_rounding
    assert not make(ours, weights_precision=ours.SparseType.FP16).tables.spec.stochastic_rounding


def test_dense_gradient() -> None:
    specs = list(modules.SPECS)
    pair = [
        ours.DenseTableBatchedEmbeddingBagsCodegen(specs, list(modules.MAP), use_cpu=cpu) for cpu in (True, False)
    ]
    pair[1].load_state_dict(pair[0].state_dict())
    indices, offsets, weights = modules.batch(0)
    found = []
    for emb, device in zip(pair, ("cpu", "cuda"), strict=True):
        samples = weights.detach().to(device, copy=True).requires_grad_()
        out = emb(indices.to(device), offsets.to(device), samples)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(device))
        found.append([t.detach().cpu() for t in (out, emb.weights.grad, samples.grad)])
    assert_near(*found, 1e-5)
