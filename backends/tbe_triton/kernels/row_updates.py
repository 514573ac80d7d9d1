"""One device function an optimizer: the step of one row from its completed gradient. Independent of the
reference in tbe_core, which judges them."""

import triton
import triton.language as tl


@triton.jit
def step_sgd(w, g, lr):
    return w - lr * g


@triton.jit
def step_rowwise_adagrad(
    w, g, moment, lr, eps, decay, max_norm, D, DECAY_MODE: tl.constexpr, LIMITS_NORM: tl.constexpr
):
    """Columns beyond D hold zeros in ``w`` and ``g``, so that sums over the block are sums over the row."""
    h = g
    if DECAY_MODE == "l2":
        h = g + decay * w
    moment += tl.sum(h * h, axis=0) / D
    rate = lr / (tl.sqrt(moment) + eps)
    if DECAY_MODE == "l2":
        w = (1.0 - rate * decay) * w
    if DECAY_MODE == "decoupled":
        w = (1.0 - lr * decay) * w
    w = w - rate * g
    if LIMITS_NORM:
        norm = tl.sqrt(tl.sum(w * w, axis=0))
        w = tl.where(norm > max_norm, w * (max_norm / norm), w)
    return w, moment


@triton.jit
def step_row(
    weights_ptr,
    state_ptr,
    hyper_ptr,
    element,
    key,
    w,
    moment,
    g,
    cols,
    dim,
    OPTIMIZER: tl.constexpr,
    DECAY_MODE: tl.constexpr,
    LIMITS_NORM: tl.constexpr,
):
    """Step the row that starts at ``element`` and store it and its state. ``w`` and ``moment`` are its values
    before the step, loaded ahead of use; hyper-parameters are read at launch, so that graphs see changes."""
    mask = cols < dim
    lr = tl.load(hyper_ptr)
    if OPTIMIZER == "sgd":
        w = step_sgd(w, g, lr)
    if OPTIMIZER == "rowwise_adagrad":
        eps = tl.load(hyper_ptr + 1)
        decay = tl.load(hyper_ptr + 2)
        max_norm = tl.load(hyper_ptr + 3)
        w, moment = step_rowwise_adagrad(w, g, moment, lr, eps, decay, max_norm, dim, DECAY_MODE, LIMITS_NORM)
        tl.store(state_ptr + key, moment)
    tl.store(weights_ptr + element + cols, w.to(weights_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_and_step_row(
    weights_ptr,
    state_ptr,
    hyper_ptr,
    element,
    key,
    g,
    cols,
    dim,
    OPTIMIZER: tl.constexpr,
    DECAY_MODE: tl.constexpr,
    LIMITS_NORM: tl.constexpr,
):
    """``step_row`` where nothing has been loaded ahead."""
    w = tl.load(weights_ptr + element + cols, mask=cols < dim, other=0.0).to(tl.float32)
    moment = 0.0
    if OPTIMIZER != "sgd":
        moment = tl.load(state_ptr + key)
    step_row(
        weights_ptr, state_ptr, hyper_ptr, element, key, w, moment, g, cols, dim,
        OPTIMIZER, DECAY_MODE, LIMITS_NORM,
    )  # fmt: skip
