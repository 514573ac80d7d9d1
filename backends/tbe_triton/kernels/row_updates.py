"""One device function an optimizer: the step of one row from its completed gradient. Independent of the
reference in tbe_core, which judges them.

Kernels hand two things on: ``tensors``, the pointers (weights, first state, second state, hyper, counter), and
the constant ``STEP``, a tuple whose places are named below. Columns beyond a row's dim hold zeros in ``w``, ``g``
and states, so that sums over the block are sums over the row.
"""

import triton
import triton.language as tl

from .rounding import round_row

OPTIMIZER: tl.constexpr = tl.constexpr(0)
STATE1: tl.constexpr = tl.constexpr(1)
STATE2: tl.constexpr = tl.constexpr(2)
DECAY_MODE: tl.constexpr = tl.constexpr(3)
LIMITS_NORM: tl.constexpr = tl.constexpr(4)
STOCHASTIC: tl.constexpr = tl.constexpr(5)
"""Places in ``STEP``: the optimizer's name, the kinds of its states ("none", "row", "element"), and options."""


@triton.jit
def load_state(state_ptr, key, element, cols, mask, live, KIND: tl.constexpr):
    """A row's state: a scalar, its elements, or 0.0 where there is none. Read only where ``live``."""
    state = 0.0
    if KIND == "row":
        state = tl.load(state_ptr + key, mask=live, other=0.0)
    if KIND == "element":
        state = tl.load(state_ptr + element + cols, mask=live & mask, other=0.0)
    return state


@triton.jit
def store_state(state_ptr, key, element, cols, mask, state, KIND: tl.constexpr):
    if KIND == "row":
        tl.store(state_ptr + key, state)
    if KIND == "element":
        tl.store(state_ptr + element + cols, state, mask=mask)


@triton.jit
def step_sgd(w, g, lr):
    return w - lr * g


@triton.jit
def step_adagrad(w, g, moment, lr, hyper_ptr):
    eps = tl.load(hyper_ptr + 1)
    moment += g * g
    return w - lr * g / (tl.sqrt(moment) + eps), moment


@triton.jit
def step_rowwise_adagrad(w, g, moment, lr, hyper_ptr, dim, MODE: tl.constexpr, LIMITED: tl.constexpr):
    eps = tl.load(hyper_ptr + 1)
    decay = tl.load(hyper_ptr + 2)
    max_norm = tl.load(hyper_ptr + 3)
    h = g
    if MODE == "l2":
        h = g + decay * w
    moment += tl.sum(h * h, axis=0) / dim
    rate = lr / (tl.sqrt(moment) + eps)
    if MODE == "l2":
        w = (1.0 - rate * decay) * w
    if MODE == "decoupled":
        w = (1.0 - lr * decay) * w
    w = w - rate * g
    if LIMITED:
        norm = tl.sqrt(tl.sum(w * w, axis=0))
        w = tl.where(norm > max_norm, w * (max_norm / norm), w)
    return w, moment


@triton.jit
def bias_correction(beta, steps):
    """``1 - beta^steps`` without the cancellation that plain fp32 suffers where beta is near 1."""
    # log(beta) by the series of atanh, exact differences first; below 0.5 the logarithm is not small.
    s = (beta - 1.0) / (beta + 1.0)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))))))
    x = steps * tl.where(beta >= 0.5, 2.0 * s * series, tl.log(tl.maximum(beta, 1e-30)))
    near = x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040))))))
    return tl.where(x > -0.35, -near, 1.0 - tl.exp(x))


@triton.jit
def moments_direction(w, g, m, v, hyper_ptr, counter_ptr, dim, mask, ROWWISE: tl.constexpr):
    """Adam's and LAMB's direction, decay included; zero beyond the row."""
    beta1 = tl.load(hyper_ptr + 1)
    beta2 = tl.load(hyper_ptr + 2)
    eps = tl.load(hyper_ptr + 3)
    decay = tl.load(hyper_ptr + 4)
    steps = tl.load(counter_ptr).to(tl.float32)
    m = beta1 * m + (1.0 - beta1) * g
    square = g * g
    if ROWWISE:
        square = tl.sum(square, axis=0) / dim
    v = beta2 * v + (1.0 - beta2) * square
    # One division an element: the corrections are inverted once a row.
    root = tl.sqrt(v * (1.0 / bias_correction(beta2, steps))) + eps
    r = m * (1.0 / bias_correction(beta1, steps)) / root + decay * w
    return tl.where(mask, r, 0.0), m, v


@triton.jit
def norm_ratio(w, r):
    """``norm(w) / norm(r)``, or 1 where either is 0."""
    of_w = tl.sqrt(tl.sum(w * w, axis=0))
    of_r = tl.sqrt(tl.sum(r * r, axis=0))
    return tl.where((of_w > 0) & (of_r > 0), of_w / of_r, 1.0)


@triton.jit
def step_lars(w, g, m, lr, hyper_ptr):
    eta = tl.load(hyper_ptr + 1)
    momentum = tl.load(hyper_ptr + 2)
    decay = tl.load(hyper_ptr + 3)
    of_w = tl.sqrt(tl.sum(w * w, axis=0))
    divisor = tl.sqrt(tl.sum(g * g, axis=0)) + decay * of_w
    rate = tl.where((of_w > 0) & (divisor > 0), lr * eta * of_w / divisor, lr)
    m = momentum * m + rate * (g + decay * w)
    return w - m, m


@triton.jit
def step_row(tensors, element, key, w, state1, state2, g, cols, dim, STEP: tl.constexpr):
    """Step the row that starts at ``element`` and store it and its state. ``w`` and the states are its values
    before the step, loaded ahead of use; hyper-parameters are read at launch, so that graphs see changes."""
    weights_ptr, state1_ptr, state2_ptr, hyper_ptr, counter_ptr = tensors
    # Named before they are passed on: Triton 3.6 takes an element of a constant tuple as an argument only so.
    KIND1: tl.constexpr = STEP[STATE1]
    KIND2: tl.constexpr = STEP[STATE2]
    MODE: tl.constexpr = STEP[DECAY_MODE]
    LIMITED: tl.constexpr = STEP[LIMITS_NORM]
    mask = cols < dim
    if STEP[OPTIMIZER] != "none":
        lr = tl.load(hyper_ptr)
    if STEP[OPTIMIZER] == "none":  # the row of a sparse gradient
        w = g
    elif STEP[OPTIMIZER] == "sgd":
        w = step_sgd(w, g, lr)
    elif STEP[OPTIMIZER] == "adagrad":
        w, state1 = step_adagrad(w, g, state1, lr, hyper_ptr)
    elif STEP[OPTIMIZER] == "rowwise_adagrad":
        w, state1 = step_rowwise_adagrad(w, g, state1, lr, hyper_ptr, dim, MODE, LIMITED)
    elif STEP[OPTIMIZER] == "lars":
        w, state1 = step_lars(w, g, state1, lr, hyper_ptr)
    else:
        ROWWISE: tl.constexpr = KIND2 == "row"
        r, state1, state2 = moments_direction(w, g, state1, state2, hyper_ptr, counter_ptr, dim, mask, ROWWISE)
        if (STEP[OPTIMIZER] == "lamb") or (STEP[OPTIMIZER] == "partial_rowwise_lamb"):
            w = w - lr * norm_ratio(w, r) * r
        else:
            tl.static_assert((STEP[OPTIMIZER] == "adam") or (STEP[OPTIMIZER] == "partial_rowwise_adam"))
            w = w - lr * r
    store_state(state1_ptr, key, element, cols, mask, state1, KIND1)
    store_state(state2_ptr, key, element, cols, mask, state2, KIND2)
    if STEP[STOCHASTIC]:
        w = round_row(w, counter_ptr, key, cols, weights_ptr.dtype.element_ty.is_fp16())
    tl.store(weights_ptr + element + cols, w.to(weights_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_and_step_row(tensors, element, key, g, cols, dim, STEP: tl.constexpr):
    """``step_row`` where nothing has been loaded ahead."""
    KIND1: tl.constexpr = STEP[STATE1]
    KIND2: tl.constexpr = STEP[STATE2]
    mask = cols < dim
    w = tl.load(tensors[0] + element + cols, mask=mask, other=0.0).to(tl.float32)
    state1 = load_state(tensors[1], key, element, cols, mask, True, KIND1)
    state2 = load_state(tensors[2], key, element, cols, mask, True, KIND2)
    step_row(tensors, element, key, w, state1, state2, g, cols, dim, STEP)
