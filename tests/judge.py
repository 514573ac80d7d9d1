"""How a result is judged against the fp64 reference: one rule for every backend and every quantity.

A value that is accumulated in fp32 and rounded once to ``dtype`` may differ from the exact ``x`` by

    tolerance * magnitude  +  eps(dtype)/2 * |x|  +  one quantum of dtype

(eps(dtype) and not half of it where the rounding is stochastic)

where ``tolerance`` is the contract's fp32 tolerance of that quantity (tbe_core.tolerances), ``magnitude`` is the
same sum over absolute values (so that cancellation is not held against the fp32 sum, and a small element
beside a large one is not excused), the second term is the one rounding, absent for fp32, and the quantum is
the spacing of subnormal numbers. This never allows more than the contract's low-precision tolerance.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from magnitudes import OF_STEP, Before

from tbe_core import SGD, Spec, tolerances
from tbe_core.reference import Reference


def allowed(
    expected: torch.Tensor,
    magnitude: torch.Tensor,
    tolerance: float,
    dtype: torch.dtype,
    stochastic: bool = False,
) -> torch.Tensor:
    """The largest permitted difference of each element, fp64."""
    found = torch.finfo(dtype)
    rounding = 0.0 if dtype == torch.float32 else found.eps if stochastic else found.eps / 2
    if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET", "0") == "1":
        # Triton's interpreter (3.8) cuts fp32 to bf16 towards zero; every device rounds to nearest.
        rounding = found.eps
    return (1 + rounding) * tolerance * magnitude + rounding * expected.abs() + found.smallest_normal * found.eps


def judge(
    what: str,
    got: torch.Tensor,
    expected: torch.Tensor,
    magnitude: torch.Tensor,
    tolerance: float,
    stochastic: bool = False,
) -> None:
    """Assert that ``got``, in its own dtype, is ``expected`` within ``allowed``; the message shows the worst."""
    assert got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}"
    if not expected.numel():
        return
    actual = got.detach().cpu().double()
    limit = allowed(expected, magnitude, tolerance, got.dtype, stochastic)
    # NaN compares false: it fails.
    wrong = ~((actual - expected).abs() <= limit)
    if bool(wrong.any()):
        excess = torch.where(wrong, (actual - expected).abs() / limit, 0.0).nan_to_num(nan=float("inf"))
        worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong; at {list(worst)} "
            f"got {float(actual[worst])!r}, expected {float(expected[worst])!r} within {float(limit[worst]):.3e}"
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN and the sign of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().cpu().contiguous().view(width), b.detach().cpu().contiguous().view(width))


@dataclass(frozen=True)
class Call:
    """The tensors of one call, on the CPU."""

    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None
    grad: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """What the reference says of one step from a state: values, their magnitudes, and the rows it touches."""

    spec: Spec
    out: torch.Tensor
    out_magnitude: torch.Tensor
    weight_grad: torch.Tensor
    weight_grad_magnitude: torch.Tensor
    tables: list[torch.Tensor]
    table_magnitudes: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    state_magnitudes: list[dict[str, torch.Tensor]]
    touched: list[list[int]]

    def judge_output(self, out: torch.Tensor) -> None:
        tolerance = tolerances.forward(self.spec.weights_dtype, torch.float32)
        judge("output", out, self.out, self.out_magnitude, tolerance)

    def judge_weight_grad(self, grad: torch.Tensor) -> None:
        tolerance = tolerances.per_sample_weight_grad(torch.float32)
        judge("gradient of per_sample_weights", grad, self.weight_grad, self.weight_grad_magnitude, tolerance)

    def judge_tables(self, tables: list[torch.Tensor]) -> None:
        tolerance = tolerances.weights(self.spec.optimizer.NAME, torch.float32)
        for t, table in enumerate(tables):
            size, stochastic = self.table_magnitudes[t], self.spec.stochastic_rounding
            judge(f"table {t}", table, self.tables[t], size, tolerance, stochastic)

    def judge_states(self, states: list[dict[str, torch.Tensor]]) -> None:
        tolerance = tolerances.state(self.spec.optimizer.NAME)
        for t, by_name in enumerate(states):
            assert by_name.keys() == self.states[t].keys()
            for name, state in by_name.items():
                expected, magnitude = self.states[t][name], self.state_magnitudes[t][name]
                judge(f"state {name!r} of table {t}", state, expected, magnitude, tolerance)


def sums(spec: Spec, call: Call, absolute: bool) -> list[torch.Tensor]:
    """Per table ``[rows, dim]`` fp64: each row's gradient sum, or the sum of its gradients' absolute values."""
    plain = replace(spec, optimizer=SGD(lr=1.0))
    zeros = [torch.zeros(t.rows, t.dim, dtype=torch.float64) for t in spec.layout.tables]
    reference = Reference(plain, zeros, [{} for _ in zeros])
    grad, weights = call.grad.double(), call.per_sample_weights
    if absolute:
        grad, weights = grad.abs(), None if weights is None else weights.detach().abs()
    reference.backward_update(grad, call.indices, call.offsets, weights, [1.0])
    return [-t for t in reference.tables]


def consult(
    spec: Spec,
    tables: list[torch.Tensor],
    states: list[dict[str, torch.Tensor]],
    hyper: list[float],
    call: Call,
    step: int = 1,
) -> Verdict:
    """Ask the reference about one forward and backward from ``tables`` and ``states``, which stay as they are.

    ``step``: which step of the operator it is, from 1.
    """
    reference = Reference.of(spec, tables, states)
    before = Reference.of(spec, tables, states)
    size = Reference.of(spec, [t.detach().cpu().double().abs() for t in tables], states)
    indices, offsets, weights = call.indices, call.offsets, call.per_sample_weights
    out = reference.forward(indices, offsets, weights)
    out_magnitude = size.forward(indices, offsets, None if weights is None else weights.detach().abs())
    weight_grad = weight_grad_magnitude = torch.zeros(indices.numel(), dtype=torch.float64)
    if weights is not None:
        weight_grad = reference.per_sample_weight_grad(call.grad, indices, offsets)
        weight_grad_magnitude = size.per_sample_weight_grad(call.grad.double().abs(), indices, offsets)
    touched = reference.backward_update(call.grad, indices, offsets, weights, hyper, step)
    table_magnitudes, state_magnitudes = _update_magnitudes(before, reference, touched, call, hyper, step)
    return Verdict(
        spec, out, out_magnitude, weight_grad, weight_grad_magnitude,
        reference.tables, table_magnitudes, reference.states, state_magnitudes, touched,
    )  # fmt: skip


def _update_magnitudes(
    before: Reference, after: Reference, touched: list[list[int]], call: Call, hyper: list[float], step: int
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Per table: magnitudes of rows and states; of rows that are not touched their own values."""
    spec = before.spec
    optimizer, named = spec.optimizer, dict(zip(spec.optimizer.HYPER, hyper, strict=True))
    rows: list[torch.Tensor] = []
    states: list[dict[str, torch.Tensor]] = []
    signed, absolute = sums(spec, call, absolute=False), sums(spec, call, absolute=True)
    for t, stepped in enumerate(touched):
        w, old = before.tables[t], before.states[t]
        row, state = OF_STEP[optimizer.NAME](
            Before(optimizer, w, signed[t], absolute[t], old, after.states[t], named, step)
        )
        rows.append(w.abs())
        rows[t][stepped] = row[stepped]
        states.append({name: value.abs() for name, value in old.items()})
        for name, value in states[t].items():
            value[stepped] = state[name][stepped]
    return rows, states
