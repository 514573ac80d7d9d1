"""``torch.export`` of the forward: eager's bits at other sizes, from a file, in another process."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import INDICES, OFFSETS, TABLES, inputs, make, python, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim, ExportedProgram, export, load, save
from torch.fx.experimental import _config as shapes

import tbe
from tbe.exported import spec_of_text, spec_text
from tbe_core.optimizers import REGISTRY

Call = tuple[torch.Tensor, ...]


class Scores(nn.Module):
    """Pooled embeddings beside dense features, and a layer over both."""

    def __init__(self, emb: tbe.TableBatchedEmbeddingBags) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(1)
        self.over = nn.Linear(emb.spec.output_width + 3, 2)

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.over(torch.cat([dense, self.emb(indices, offsets).float()], dim=1)).relu()
        return out


def call_of(batch: int, longest: int, seed: int, dtype: torch.dtype = torch.int64) -> Call:
    """Dense features, ids (pruned ones and ids outside their table among them) and offsets of two features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (2 * batch,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(-2, 11, (int(offsets[-1]),), generator=generator)
    return torch.rand(batch, 3, generator=generator), ids.to(dtype), offsets.to(dtype)


def exported(model: nn.Module, strict: bool = False, dtype: torch.dtype = torch.int64) -> ExportedProgram:
    """With a dynamic batch and a dynamic number of ids; a batch of one among them."""
    batch, lookups = Dim("batch", min=1), Dim("lookups", min=0)
    with shapes.patch(backed_size_oblivious=True):
        return export(
            model.eval(), call_of(4, 3, 1, dtype), strict=strict,
            dynamic_shapes=({0: batch}, {0: lookups}, {0: 2 * batch + 1}),
        )  # fmt: skip


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::tbe.BadLookupWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bounds_check": "ignore", "pooling": "mean", "weights_dtype": torch.float16},
        {"optimizer": tbe.Adam(), "output_dtype": torch.bfloat16, "feature_table_map": [1, 1]},
    ],
    ids=["default", "mean", "adam"],
)
def test_a_program_equals_the_module_at_every_size(
    options: dict[str, Any], dtype: torch.dtype, strict: bool, tmp_path: Path
) -> None:
    model = Scores(make(**options))
    program = exported(model, strict, dtype)
    save(program, tmp_path / "scores.pt2")
    loaded = load(tmp_path / "scores.pt2")
    before = tensors(model.emb)
    for batch, longest, seed in ((4, 3, 2), (1, 5, 3), (1, 0, 4), (17, 9, 5), (2, 1, 6)):
        call = call_of(batch, longest, seed, dtype)
        with torch.no_grad():
            expected = model(*call)
            assert expected.shape == (batch, 2)
            assert torch.equal(program.module()(*call), expected)
            assert torch.equal(loaded.module()(*call), expected)
    after = tensors(model.emb)
    before["bad"] = after["bad"]  # the eager calls count
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_and_unpooled_rows() -> None:
    weighted, rows = make().eval(), make(tables=TABLES[:1], pooling="none").eval()
    n = Dim("lookups", min=0)
    ids, ends, factors = torch.tensor(INDICES), torch.tensor(OFFSETS), torch.rand(5, requires_grad=True)
    program = export(weighted, (ids, ends, factors), dynamic_shapes=({0: n}, None, {0: n})).module()
    other = (torch.tensor([9, 9, 1, 0, 4, 2, 3]), torch.tensor([0, 3, 3, 5, 7]), torch.rand(7))
    assert torch.equal(program(*other), weighted(*other).detach())
    program = export(rows, (ids, ends), dynamic_shapes=({0: n}, None)).module()
    assert torch.equal(program(*other[:2]), rows(*other[:2]).detach()) and len(program(*other[:2])) == 7


def test_a_program_needs_no_module_and_no_state(tmp_path: Path) -> None:
    """A process that has made no module loads and runs it; optimizer state is no input of its operator."""
    model = Scores(make(optimizer=tbe.Adam()))
    program = exported(model)
    (node,) = (n for n in program.graph.nodes if n.target is torch.ops.tbe.inference.default)
    assert [str(a) for a in node.args[:3]] == ["p_emb_weights", "indices", "offsets"]
    assert not any("tbe" in str(n.target) for n in program.graph.nodes if n is not node)
    save(program, tmp_path / "scores.pt2")
    call = call_of(6, 4, 9)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        torch.save((call, model(*call)), tmp_path / "call.pt")
    done = python(
        f"import torch, tbe; call, expected = torch.load({str(tmp_path / 'call.pt')!r})\n"
        f"program = torch.export.load({str(tmp_path / 'scores.pt2')!r}).module()\n"
        "assert torch.equal(program(*call), expected); print('same')"
    )
    assert done.stdout == "same\n", done.stderr


def test_what_cannot_be_exported_is_refused() -> None:
    call = (torch.tensor(INDICES), torch.tensor(OFFSETS))
    with pytest.raises(RuntimeError, match=r"in training mode: expected model\.eval\(\) before"):
        export(make(), call)
    with torch.no_grad():  # says as much
        assert torch.equal(export(make(), call).module()(*call), make()(*call))
    sizes = {"batch_size_per_feature_per_rank": [[2], [2]]}
    with pytest.raises(RuntimeError, match="expected one batch size for all features"):
        export(make().eval(), call, sizes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.tensor([0, 3, 2, 4, 5])}, r"offsets\[2\]=2 after 3 \(feature 0, bag 1\): expected"),
        ({"indices": torch.tensor([1, 2, 9, 0, 5])}, r"indices\[4\]=5 \(feature 1, table 'geo', bag 1\)"),
    ],
)
def test_a_program_checks_what_the_module_checks(changes: dict[str, Any], message: str) -> None:
    program = export(make(bounds_check="error").eval(), (), inputs()).module()
    with pytest.raises(ValueError, match=message):
        program(**inputs(**changes))


def test_a_program_keeps_the_module_s_backend_and_not_the_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    call = (torch.tensor(INDICES), torch.tensor(OFFSETS))
    monkeypatch.setenv("TBE_BACKEND", "cpu")
    free, bound = (export(make(backend=name).eval(), call).module() for name in (None, "cpu"))
    assert torch.equal(free(*call), bound(*call))
    monkeypatch.setenv("TBE_BACKEND", "triton")
    assert torch.equal(bound(*call), make(backend="cpu")(*call).detach())
    monkeypatch.delenv("TBE_BACKEND")
    monkeypatch.setenv("TBE_DISABLE", "cpu")
    with pytest.raises(tbe.BackendError, match="TBE_DISABLE"):
        bound(*call)


@pytest.mark.parametrize(("weighted", "pooling"), [(False, "sum"), (True, "mean"), (False, "none")])
def test_the_operator_passes_torch_s_own_checks(weighted: bool, pooling: Any) -> None:
    emb = make(pooling=pooling, tables=TABLES[:1] if pooling == "none" else TABLES)
    weights = torch.rand(5) if weighted else None
    call = (emb.weights, torch.tensor(INDICES), torch.tensor(OFFSETS), weights, spec_text(emb.spec), None)
    found = torch.library.opcheck(torch.ops.tbe.inference.default, call)
    assert len(found) >= 4 and set(found.values()) == {"SUCCESS"}, found


# --- a spec as text -----------------------------------------------------------------------------------------

NAMES = st.text(min_size=1, max_size=6).filter(lambda name: "." not in name)


@settings(max_examples=60)
@given(st.data())
def test_a_spec_comes_back_from_its_text(data: st.DataObject) -> None:
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    tables = [tbe.Table(n, data.draw(st.integers(1, 2**40)), data.draw(st.integers(1, 999))) for n in names]
    features = data.draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=6))
    optimizer = REGISTRY[data.draw(st.sampled_from(sorted(REGISTRY)))]()
    spec = replace(
        make().spec,
        layout=make().spec.layout.make(tables, features),
        optimizer=optimizer,
        pooling=data.draw(st.sampled_from(["sum", "mean"])),
        weights_dtype=data.draw(st.sampled_from([torch.float16, torch.bfloat16])),
        stochastic_rounding=data.draw(st.booleans()) and bool(optimizer.HYPER),
        gradient_clipping=data.draw(st.none() | st.floats(1e-30, 1e30)),
        frozen=tuple(sorted(set(data.draw(st.lists(st.integers(0, len(tables) - 1)))))),
    )
    found = spec_of_text(spec_text(spec))
    assert found == spec and found.handle == spec.handle


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layout": 3, "optimizer": {"name": "sgd"}}'])
def test_a_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the spec of an exported program cannot be read: "):
        spec_of_text(text)
    known = spec_text(make().spec)
    with pytest.raises(ValueError, match="optimizer 'mine': expected one of adagrad, "):
        spec_of_text(known.replace("rowwise_adagrad", "mine"))


# --- compiled ahead of time ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler: no g++ here")
def test_aot_inductor_equals_the_module(tmp_path: Path) -> None:
    model = Scores(make())
    path = torch._inductor.aoti_compile_and_package(exported(model), package_path=str(tmp_path / "scores.pt2"))
    compiled = torch._inductor.aoti_load_package(path)
    for batch, longest, seed in ((4, 3, 2), (1, 5, 3), (17, 9, 5)):
        call = call_of(batch, longest, seed)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*call), model(*call), rtol=1e-6, atol=1e-6)
