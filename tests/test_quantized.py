"""Quantised tables: rows within their bounds, lookups within the contract's tolerance, on every backend."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import quantized_reference as q
import torch
from conftest import INTERPRETED
from helpers import INDICES, OFFSETS, TABLES, differing, inputs, make, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from judge import judge, same_bits
from problems import Trial, bad_ids, trials

import tbe
from tbe_core import Layout, QuantizedSpec, Rejection, Spec, Table, choose, tolerances
from tbe_core.dtypes import WEIGHT_DTYPES
from tbe_core.plan import Policy
from tbe_core.quantization import QUANTIZATIONS
from tbe_core.reference import Reference
from tbe_core.types import BOUNDS_CHECK_MODES

Place = tuple[str, str]
each = pytest.mark.parametrize("quantization", QUANTIZATIONS)


def quantized(emb: Any, quantization: str, place: Place = ("cpu", "cpu"), **options: Any) -> Any:
    return tbe.quantize(emb, quantization, backend=place[0], **options)


def table_of(rows: torch.Tensor, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A module of one table with these rows."""
    emb = tbe.TableBatchedEmbeddingBags(
        [Table("t", *rows.shape)], optimizer=tbe.SGD(), weights_dtype=dtype, device="cpu", **options
    )
    with torch.no_grad():
        emb.split_embedding_weights()[0].copy_(rows)
    return emb


# --- rows ---------------------------------------------------------------------------------------------------

MAGNITUDES = (1e-45, 1e-40, 1e-30, 1e-4, 1.0, 1e4, 1e30, 1e38)


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.dtype]:
    """Rows of one magnitude each, some shifted far from 0, some of one value or zeros; in a table's dtype."""
    n, dim = draw(st.integers(1, 6)), draw(st.integers(1, 33))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randn(n, dim, generator=generator)
    for row in rows:
        kind = draw(st.sampled_from(("plain", "shifted", "one value", "zeros", "one large")))
        if kind == "shifted":
            row += 100
        elif kind == "one large":
            row[0] = 1e6
        elif kind != "plain":
            row[:] = row[0] if kind == "one value" else 0.0
        row *= draw(st.sampled_from(MAGNITUDES)) / max(float(row.abs().max()), 1.0)
    dtype = draw(st.sampled_from(WEIGHT_DTYPES))
    return rows.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max), dtype


@given(drawn=some_rows())
@each
def test_every_element_is_within_its_bound(quantization: str, drawn: tuple[torch.Tensor, torch.dtype]) -> None:
    rows, dtype = drawn
    module = quantized(table_of(rows, dtype), quantization)
    found = q.rows_of(module.state_dict(), module.spec.layout.tables[0], quantization)
    x = rows.double()
    assert ((x - found.values).abs() <= q.element_bound(x, found.scales, quantization)).all()
    # And what the module itself reads differs from that by fp32 rounding alone.
    judge("dequantize", module.dequantize("t"), found.values, found.magnitudes, 2.0**-23)


@given(drawn=some_rows())
@each
def test_scale_bias_and_codes_are_their_definition(
    quantization: str, drawn: tuple[torch.Tensor, torch.dtype]
) -> None:
    rows, dtype = drawn
    state = quantized(table_of(rows, dtype), quantization).state_dict()
    x, codes = rows.double(), state[f"t.{quantization}"].view(torch.uint8)
    for row in range(len(x)):
        low, high = float(x[row].min()), float(x[row].max())
        if quantization == "fp8":
            low, high, largest = 0.0, float(x[row].abs().max()), 448
        else:
            largest = q.LEVELS[quantization]
            assert float(state["t.bias"][row]) == low
        scale = float(torch.tensor((high - low) / largest, dtype=torch.float64).float())
        assert float(state["t.scale"][row]) == scale
        for column in range(x.shape[1]):
            got = q.value_of(codes[row], column, quantization)
            y = 0.0 if scale == 0 else (float(x[row, column]) - low) / scale
            wanted = q.nearest_e4m3(y) if quantization == "fp8" else float(min(round(y), largest))
            # A tie of fp64 numbers may be decided by their last place.
            tie = abs(abs(y - got) - abs(y - wanted)) <= 1e-6 * max(abs(y), 1.0)
            assert got == wanted or tie, (row, column, y)


@each
def test_rows_of_one_value_are_exact(quantization: str) -> None:
    """Zero rows in every format; other constants where there is a bias. No division by the scale 0."""
    rows = torch.tensor([[0.0] * 5, [3.7] * 5, [-1e-30] * 5, [1e4] * 5])
    got = quantized(table_of(rows), quantization).dequantize("t")
    assert same_bits(got[0], rows[0])
    if quantization == "fp8":
        judge("constants", got, rows.double(), rows.double().abs(), 2.0**-22)  # each is its row's largest
    else:
        assert same_bits(got, rows)


@each
@pytest.mark.parametrize("value", (float("inf"), float("-inf"), float("nan")))
def test_what_is_not_finite_is_refused_by_table_and_row(quantization: str, value: float) -> None:
    emb = make()
    with torch.no_grad():
        emb.split_embedding_weights()[1][3, 2] = value
    before = tensors(emb)
    with pytest.raises(ValueError, match=rf"row 3 of table 'geo' holds {value}: expected finite values"):
        tbe.quantize(emb, quantization)
    assert all(same_bits(before[name], now) for name, now in tensors(emb).items())


def test_rows_wider_than_float32_are_refused() -> None:
    emb = table_of(torch.tensor([[0.0, 1.0], [-3e38, 2e38]]))
    for quantization in ("int8", "int4"):
        with pytest.raises(
            ValueError, match=r"row 1 of table 't' spreads over 5e\+38: expected a number of float32"
        ):
            tbe.quantize(emb, quantization)
    assert tbe.quantize(emb, "fp8").dequantize("t").isfinite().all()


@each
@pytest.mark.parametrize("dim", (1, 2, 3, 7, 8, 16, 33, 129))
def test_rows_are_packed_as_documented(quantization: str, dim: int) -> None:
    emb = table_of(torch.randn(6, dim))
    module = quantized(emb, quantization)
    code_bytes = {"int8": dim, "int4": (dim + 1) // 2, "fp8": dim}[quantization]
    head = (code_bytes + 3) // 4 * 4
    ends = head + (4 if quantization == "fp8" else 8)
    size = (ends + 15) // 16 * 16
    assert module.storage.numel() == 6 * size == module.memory().packed
    packed, state = module.storage.view(6, size), module.state_dict()
    assert torch.equal(packed[:, :code_bytes], state[f"t.{quantization}"].view(torch.uint8))
    assert torch.equal(packed.view(torch.float32)[:, head // 4], state["t.scale"])
    if quantization != "fp8":
        assert torch.equal(packed.view(torch.float32)[:, head // 4 + 1], state["t.bias"])
    assert not packed[:, code_bytes:head].any() and not packed[:, ends:].any()
    if quantization == "int4" and dim % 2:
        assert not (packed[:, code_bytes - 1] >> 4).any()


def test_quantising_takes_no_second_copy_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece is larger than what ``tbe.pieces`` allows, and pieces give the rows of one."""
    from tbe import pieces
    from tbe import quantized as module

    emb, seen, plain = table_of(torch.randn(1000, 8)), [], module.pack
    whole = tbe.quantize(emb)
    monkeypatch.setattr(pieces, "ELEMENTS", 800)
    monkeypatch.setattr(module, "pack", lambda rows, form: seen.append(rows.numel()) or plain(rows, form))
    assert torch.equal(tbe.quantize(emb).storage, whole.storage)
    assert max(seen) <= 800 and len(seen) == 10


# --- FBGEMM's formats ---------------------------------------------------------------------------------------


def fbgemm() -> Any:
    pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed: nothing to compare with")
    return torch.ops.fbgemm


@pytest.mark.parametrize("magnitude", (1e-2, 1.0, 1e4))
def test_int8_rows_are_those_of_fbgemm_s_fused_8_bit_format(magnitude: float) -> None:
    """Same bias, scale within an ulp; a code differs only beside a tie, by 1: FBGEMM adds 1e-8 to the range."""
    rows = torch.randn(50, 64) * magnitude
    theirs = fbgemm().FloatToFused8BitRowwiseQuantized(rows)
    module = quantized(table_of(rows), "int8")
    ours = module.state_dict()
    scale, bias = theirs[:, 64:].contiguous().view(torch.float32).unbind(1)
    assert torch.equal(ours["t.bias"], bias)
    assert ((ours["t.scale"] - scale).abs() <= 2.0**-23 * scale).all()
    differ = ours["t.int8"].int() - theirs[:, :64].int()
    y = (rows.double() - bias[:, None]) / scale[:, None].double()
    tie = (y - y.floor() - 0.5).abs() < 255 * (1e-8 / (255 * scale[:, None]) + 2.0**-20)
    assert differ.abs().max() <= 1 and not differ[~tie].any()
    # And FBGEMM reads our rows: its format is the beginning of ours.
    packed = module.spec.table(module.storage, 0)[:, : 64 + 8].contiguous()
    read = fbgemm().Fused8BitRowwiseQuantizedToFloat(packed)
    found = q.rows_of(ours, module.spec.layout.tables[0], "int8")
    judge("FBGEMM's reading", read, found.values, found.magnitudes, 2.0**-23)


def test_int4_codes_are_those_of_fbgemm_s_fused_4_bit_format() -> None:
    """Its scale and bias are fp16, so on rows where fp16 holds both the codes are the same."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 16, (40, 32), generator=generator)
    levels[:, 0], levels[:, 1] = 0, 15
    exponents = torch.randint(-8, 4, (40, 1), generator=generator)
    rows = (levels.float() - 8) * torch.pow(2.0, exponents)
    theirs = fbgemm().FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4)
    ours = quantized(table_of(rows), "int4").state_dict()
    assert torch.equal(ours["t.int4"], theirs[:, :16])
    scale, bias = theirs[:, 16:].contiguous().view(torch.float16).float().unbind(1)
    assert torch.equal(ours["t.scale"], scale) and torch.equal(ours["t.bias"], bias)


# --- lookups ------------------------------------------------------------------------------------------------


def expected_output(module: Any, trial: Trial) -> tuple[torch.Tensor, torch.Tensor]:
    """By the fp64 reference, from the module's state_dict; and the same of the magnitudes."""
    state, layout = module.state_dict(), module.spec.layout
    rows = [q.rows_of(state, table, module.spec.quantization) for table in layout.tables]
    spec, none = Spec(layout, tbe.SGD(lr=1.0), module.spec.pooling), [{} for _ in rows]
    weights = trial.per_sample_weights
    call = (trial.indices, trial.offsets)
    out = Reference(spec, [r.values for r in rows], none).forward(*call, weights)
    sizes = Reference(spec, [r.magnitudes for r in rows], none)
    return out, sizes.forward(*call, None if weights is None else weights.abs())


def lookup_and_compare(trial: Trial, quantization: str, place: Place) -> None:
    emb = trial.module(*place)
    module = quantized(emb, quantization, place)
    weights = trial.per_sample_weights
    passed = [None if t is None else t.to(place[1], copy=True) for t in (trial.indices, trial.offsets, weights)]
    out = module(*passed)
    assert out.dtype == trial.output_dtype and not out.requires_grad
    want, size = expected_output(module, trial)
    judge("output", out, want, size, tolerances.forward(torch.float32, torch.float32))
    for given_, kept in zip((trial.indices, trial.offsets, weights), passed, strict=True):
        assert given_ is None or torch.equal(given_, kept.cpu()), "a tensor of the caller was changed"


@pytest.mark.values
@given(trial=trials())
@each
@pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")
def test_any_lookup(place: Place, quantization: str, trial: Trial) -> None:
    lookup_and_compare(trial, quantization, place)


@pytest.mark.values
@each
@pytest.mark.parametrize("pooling", ("sum", "mean", "none"))
@pytest.mark.parametrize("dim", (1, 2, 3, 7, 600, 1100))
def test_odd_and_wide_rows(place: Place, quantization: str, pooling: Any, dim: int) -> None:
    """Column blocks, the last half byte, and rows that are narrower than a word."""
    ids, offsets = torch.tensor([5, 0, 5, -1, 2, 3, 6, 6]), torch.tensor([0, 3, 3, 5, 8])
    trial = Trial((Table("a", 7, dim), Table("b", 9, dim)), (0, 1), ids, offsets, None, pooling)
    lookup_and_compare(trial, quantization, place)


@pytest.mark.values
@each
def test_long_bags_keep_the_tolerance(place: Place, quantization: str) -> None:
    n = 700 if INTERPRETED else 7000
    ids = torch.randint(0, 40, (n,))
    trial = Trial((Table("t", 40, 20),), (0,), ids, torch.tensor([0, n - 3, n]), torch.rand(n), "sum")
    lookup_and_compare(trial, quantization, place)


@pytest.mark.values
@each
def test_the_pooled_output_is_within_the_documented_bound_of_the_tables_own(
    place: Place, quantization: str
) -> None:
    """Sum of |weight| * element bound, and fp32 rounding: against the fp64 lookup of the rows before."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 30, (60,), generator=generator)
    weights = torch.randn(60, generator=generator)
    trial = Trial((Table("t", 30, 24),), (0,), ids, torch.tensor([0, 20, 21, 60]), weights, "sum")
    emb = trial.module(*place)
    module = quantized(emb, quantization, place)
    out = module(*(t.to(place[1]) for t in (trial.indices, trial.offsets, weights))).cpu().double()
    spec, x = Spec(emb.spec.layout, tbe.SGD(lr=1.0)), emb.split_embedding_weights()[0].cpu().double()
    exact = Reference(spec, [x], [{}]).forward(trial.indices, trial.offsets, weights)
    scales = module.state_dict()["t.scale"].cpu().double()
    bounds = q.element_bound(x, scales, quantization)
    bound = Reference(spec, [bounds], [{}]).forward(trial.indices, trial.offsets, weights.abs())
    _, size = expected_output(module, trial)
    assert ((out - exact).abs() <= bound + 1e-5 * size).all()
    assert (out - exact).abs().max() > 0.02 * bound.max(), "the bound says nothing"


@pytest.mark.values
def test_every_code_of_fp8_is_read_exactly(place: Place) -> None:
    """All 254 finite codes, subnormal ones too, by the kernels' arithmetic."""
    codes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    module = tbe.QuantizedTableBatchedEmbeddingBags(
        [Table("t", 1, 254)], quantization="fp8", backend=place[0], device=place[1]
    )
    state = {"t.fp8": codes.view(torch.float8_e4m3fn)[None], "t.scale": torch.ones(1)}
    module.load_state_dict(state)
    out = module(torch.tensor([0], device=place[1]), torch.tensor([0, 1], device=place[1]))
    wanted = torch.tensor([q.value_of(codes, c, "fp8") for c in range(254)])
    assert torch.equal(out[0].cpu(), wanted)


@pytest.mark.values
@each
def test_an_id_that_contributes_nothing_meets_no_weight(place: Place, quantization: str) -> None:
    ids, weights = torch.tensor([1, -1, 2]), torch.tensor([1.0, float("inf"), 1.0])
    module = quantized(table_of(torch.randn(4, 6)).to(place[1]), quantization, place)
    got = module(*(t.to(place[1]) for t in (ids, torch.tensor([0, 3]), weights)))
    rest = module(*(t.to(place[1]) for t in (ids[[0, 2]], torch.tensor([0, 2]))))
    assert torch.allclose(got, rest, rtol=1e-6, atol=1e-7)


@pytest.mark.values
@each
def test_a_repeated_lookup_is_bit_identical(place: Place, quantization: str) -> None:
    ids = torch.randint(0, 9, (50,)).to(place[1])
    module = quantized(table_of(torch.randn(9, 40)).to(place[1]), quantization, place)
    outs = [module(ids, torch.tensor([0, 45, 50], device=place[1])) for _ in range(3)]
    assert all(same_bits(outs[0], other) for other in outs[1:])


@pytest.mark.values
@pytest.mark.parametrize("mode", BOUNDS_CHECK_MODES)
def test_bad_ids(place: Place, mode: Any) -> None:
    module = quantized(make(device=place[1]), "int8", place, bounds_check=mode)
    ids, ends = torch.tensor([1, 10, -2, 0, 4], device=place[1]), torch.tensor(OFFSETS, device=place[1])
    good = module(torch.tensor([1, -1, -1, 0, 4], device=place[1]), ends)
    if mode == "error":
        with pytest.raises(ValueError, match=r"indices\[1\]=10 \(feature 0, table 'ad', bag 0\).*2 bad of 5"):
            module(ids, ends)
    elif mode == "warn":
        with pytest.warns(tbe.BadLookupWarning, match="2 ids outside their table"):
            out = module(ids, ends)
            module.flush()
        assert same_bits(out, good)
    elif mode == "ignore":
        assert same_bits(module(ids, ends), good)
    if mode != "none" and place[1] == "cpu":
        with pytest.raises(ValueError, match=r"offsets\[2\]=1 after 2"):
            module(ids.clamp(0, 4), torch.tensor([0, 2, 1, 3, 5]))


@pytest.mark.values
@pytest.mark.parametrize("empty", ("bags", "ids", "batch"))
def test_nothing_to_look_up(place: Place, empty: str) -> None:
    module = quantized(make(device=place[1]), "int4", place)
    ends = {"bags": [0, 0, 0, 0, 0], "ids": [0, 0, 0], "batch": [0]}[empty]
    out = module(torch.tensor([], dtype=torch.int64, device=place[1]), torch.tensor(ends, device=place[1]))
    assert out.shape == ((len(ends) - 1) // 2, 12) and not out.any()


# --- the module ---------------------------------------------------------------------------------------------


@each
def test_options_follow_the_source_and_can_be_set(quantization: str) -> None:
    emb = make(output_dtype=torch.float16, bounds_check="error", feature_table_map=[1, 0]).eval()
    module = tbe.quantize(emb, quantization)
    assert isinstance(module, tbe.QuantizedTableBatchedEmbeddingBags) and not module.training
    assert module.spec == QuantizedSpec(Layout.make(TABLES, [1, 0]), quantization, "sum", torch.float16, "error")
    other = tbe.quantize(emb, quantization, output_dtype=torch.float32, bounds_check="ignore")
    assert (other.spec.output_dtype, other.spec.bounds_check) == (torch.float32, "ignore")
    assert not list(module.parameters())


@each
def test_the_source_stays_as_it_is(quantization: str) -> None:
    emb = make()
    before = tensors(emb)
    tbe.quantize(emb, quantization)
    assert not differing(before, tensors(emb))


@each
def test_copies_and_checkpoints_keep_the_bits(quantization: str) -> None:
    module = tbe.quantize(make(), quantization)
    out = module(**inputs())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module)):
        assert same_bits(other(**inputs()), out) and other.spec == module.spec
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = tbe.QuantizedTableBatchedEmbeddingBags(TABLES, quantization=quantization, device="cpu")
    assert not fresh(**inputs()).any()
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh.storage, module.storage) and same_bits(fresh(**inputs()), out)
    assert module.to("cpu") is module and same_bits(module(**inputs()), out)


def test_a_copy_shares_no_rows() -> None:
    module = tbe.quantize(make())
    other = copy.deepcopy(module)
    other.storage.zero_()
    assert module.storage.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ad.int8": torch.zeros(9, 4, dtype=torch.uint8)},
            r"ad.int8 is \[9, 4\] torch.uint8: expected \[10, 4\]",
        ),
        ({"ad.int8": torch.zeros(10, 4)}, r"ad.int8 is \[10, 4\] torch.float32: expected \[10, 4\] torch.uint8"),
        (
            {"geo.scale": torch.tensor([1, 1, float("nan"), 1, 1])},
            r"geo.scale of row 2 is nan: expected a finite",
        ),
        ({"geo.bias": None}, r"geo.bias is a NoneType: expected a tensor"),
        ({"more": torch.zeros(1)}, r"Unexpected key\(s\) in state_dict: \"more\""),
    ],
)
def test_a_wrong_checkpoint_is_refused(change: dict[str, Any], message: str) -> None:
    module = tbe.quantize(make())
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict({**state, **change})
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())


def test_a_checkpoint_of_another_format_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*ad.int8"):
        tbe.quantize(make()).load_state_dict(tbe.quantize(make(), "fp8").state_dict())


def test_nan_codes_are_refused() -> None:
    module = tbe.quantize(make(), "fp8")
    state = {name: value.clone() for name, value in module.state_dict().items()}
    state["ad.fp8"].view(torch.uint8)[7, 1] = 0xFF
    with pytest.raises(RuntimeError, match=r"ad.fp8 of row 7 has a NaN: expected finite numbers"):
        module.load_state_dict(state)


def test_what_is_refused() -> None:
    emb, module = make(), tbe.quantize(make())
    for call, message in (
        (lambda: tbe.quantize(emb, "int2"), "quantization='int2': expected one of int8, int4, fp8"),
        (lambda: tbe.quantize(module), "emb=QuantizedTableBatchedEmbeddingBags: expected a tbe.TableBatched"),
        (lambda: module.half(), "cannot convert a quantised module to torch.float16: output_dtype is set when"),
        (lambda: module(**inputs(per_sample_weights=torch.rand(5, requires_grad=True))), "require a gradient"),
        (lambda: module(**inputs(per_sample_weights=torch.rand(4))), "per_sample_weights has length 4"),
        (lambda: module.dequantize("adx"), "table='adx': expected one of 'ad', 'geo', or its number"),
        (lambda: module.dequantize("ad", [3, 10]), r"ids: 10 of table 'ad': expected \[0, 10\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with torch.no_grad():
        assert module(**inputs(per_sample_weights=torch.rand(5, requires_grad=True))).shape == (2, 12)


def test_the_plan_names_reasons() -> None:
    plan = tbe.quantize(make(), "int4").plan
    assert plan.backend == "cpu" and str(plan).startswith("cpu serves sum D=4,8 int4->fp32 ids i64/i64 read-only")
    assert {r.backend for r in plan.rejected} >= {"tlx", "rocm"}

    class Without:
        """A backend from before quantised tables."""

        name = "old"

        def unavailable(self, caps: Any) -> None: ...
        def unsupported(self, problem: Any, caps: Any) -> tuple[str, ...]:
            return ()

        def preference(self, caps: Any) -> int:
            return 99

    known: list[Any] = [Without(), tbe.registry.load("cpu")]
    found = choose(plan.problem, plan.caps, known, Policy())
    assert found.backend == "cpu"
    assert found.rejected == (Rejection("old", ("has no lookup of int4 rows (no forward_quantized)",)),)


def test_memory_is_that_of_the_storage() -> None:
    tables = [Table("a", 1000, 128), Table("b", 10, 3)]
    for quantization, row in (("int8", 144), ("int4", 80), ("fp8", 144)):
        module = tbe.QuantizedTableBatchedEmbeddingBags(tables, quantization=quantization, device="cpu")
        memory = module.memory()
        assert memory.packed == module.storage.nbytes == 1000 * row + 10 * 16
        assert (memory.fp32, memory.fp16) == (1000 * 512 + 10 * 12, 1000 * 256 + 10 * 6)
        assert memory.line() in repr(module) and f"a: 1000 rows, D=128, {row} B a row" in str(memory)


def test_the_operator_passes_torch_s_own_checks() -> None:
    ids, ends = torch.tensor(INDICES), torch.tensor(OFFSETS)
    for quantization in QUANTIZATIONS:
        module = tbe.quantize(make(), quantization)
        for weights in (None, torch.rand(5)):
            arguments = (module.storage, ids, ends, weights, module._handle, "")
            found = torch.library.opcheck(torch.ops.tbe.quantized_lookup.default, arguments)
            assert set(found.values()) == {"SUCCESS"}, found
        check = (module.storage, ids, ends, module.bad, module._handle, "")
        assert set(torch.library.opcheck(torch.ops.tbe.check.default, check).values()) == {"SUCCESS"}


@each
def test_a_compiled_module_gives_the_same_bits(quantization: str) -> None:
    module = tbe.quantize(make(), quantization)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for weights in (None, torch.rand(5)):
        assert same_bits(
            compiled(**inputs(per_sample_weights=weights)), module(**inputs(per_sample_weights=weights))
        )


# --- eval and no_grad of the module that trains -------------------------------------------------------------


@pytest.mark.values
@settings(max_examples=8 if INTERPRETED else 40)
@given(trial=trials())
@pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")
def test_inference_is_the_training_forward_and_leaves_no_state(place: Place, trial: Trial) -> None:
    """Bit for bit; tables, state, counters of steps and hyper-parameters stay; the next step is as without it."""
    emb, alone = trial.module(*place), trial.module(*place)
    weights = trial.per_sample_weights
    passed = [None if t is None else t.to(place[1]) for t in (trial.indices, trial.offsets, weights)]
    before = tensors(emb)
    with torch.no_grad():
        plain = emb(*passed)
        evaluated = emb.eval()(*passed)
    after = tensors(emb.train())
    counted = {"bad"} if trial.bounds_check == "warn" and bad_ids(emb, trial.call()) else set()
    assert {*differing(before, after)} == counted, "only bad ids are counted"
    assert not plain.requires_grad and plain.grad_fn is None
    outs = [module(*passed) for module in (emb, alone)]
    assert all(same_bits(plain, other) for other in (evaluated, *(o.detach() for o in outs)))
    grad = trial.call().grad.to(place[1])
    for out in outs:
        if out.requires_grad:
            out.backward(grad)
    assert {*differing(tensors(emb), tensors(alone))} <= counted


def test_inference_prepares_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend is asked for no carry, eager or compiled; eval alone, without no_grad, still trains."""
    import tbe_cpu

    asked: list[bool] = []
    plain = tbe_cpu.CpuBackend.forward

    def forward(self: Any, lookup: Any, carry: bool) -> Any:
        asked.append(carry)
        return plain(self, lookup, carry)

    monkeypatch.setattr(tbe_cpu.CpuBackend, "forward", forward)
    emb = make().eval()
    with torch.no_grad():
        emb(**inputs())
        torch.compile(emb, fullgraph=True, backend="aot_eager")(**inputs())
    assert asked and not any(asked)
    emb(**inputs())
    assert asked[-1]
