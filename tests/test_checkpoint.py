"""Checkpoints in files: both formats, torch's own readers, refusals with reasons, memory for one copy only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import TABLES, differing, inputs, make, python, step, tensors

import tbe
from tbe import pieces

FORMATS = ["directory", "file.safetensors", "state dict"]
Place = tuple[str, str]
Emb = tbe.TableBatchedEmbeddingBags


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the tests are moved in several pieces, the last one short."""
    monkeypatch.setattr(pieces, "ELEMENTS", 12)


def saved(emb: Emb, path: Path, prefix: str = "") -> Any:
    """The source for ``load_checkpoint``: a path that was written, or a copied state dict."""
    if path.name == "state dict":
        return {k: v.clone() for k, v in emb.state_dict(prefix=prefix).items()}
    if not path.suffix:
        path = path / str(len(list(path.glob("*"))))
    tbe.save_checkpoint(emb, path, prefix=prefix)
    return path


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def rewritten(values: dict[str, Any], path: Path) -> Any:
    """A source with these values, written by the formats' own libraries."""
    if path.name == "state dict":
        return values
    if path.suffix:
        library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
        library.save_file({k: v.contiguous().clone() for k, v in values.items()}, path)
        return path
    dcp.save(values, checkpoint_id=path / "rewritten", no_dist=True)
    return path / "rewritten"


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"weights_dtype": torch.float16},
    "adam": {"optimizer": tbe.Adam(lr=0.1)},
    "rounding": {"weights_dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 9},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("kind", FORMATS)
def test_save_load_step_equals_never_having_stopped(kind: str, case: str, place: Place, tmp_path: Path) -> None:
    options = {**OPTIONS[case], "backend": place[0], "device": place[1]}
    whole, again = make(**options), make(init=tbe.init.uniform(5, 6), **options)
    call = {k: v.to(place[1]) for k, v in inputs().items()}
    grad = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).to(place[1])
    whole(**call).backward(grad)
    whole.set_learning_rate(0.03)
    before = tensors(whole)
    source = saved(whole, tmp_path / kind)
    assert not differing(before, tensors(whole))
    tbe.load_checkpoint(again, source)
    for emb in (whole, again):
        emb(**call).backward(grad)
    # By table: the padding between tables is no part of a checkpoint.
    left, right = whole.state_dict(), again.state_dict()
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    assert tbe.FusedOptimizer(again).param_groups[0]["lr"] == pytest.approx(0.03)


def test_a_checkpoint_moves_between_backends(place: Place, tmp_path: Path) -> None:
    emb, on_cpu = make(backend=place[0], device=place[1]), make(backend="cpu", init=tbe.init.uniform(5, 6))
    emb(**{k: v.to(place[1]) for k, v in inputs().items()}).sum().backward()
    tbe.save_checkpoint(emb, tmp_path / "c")
    tbe.load_checkpoint(on_cpu, tmp_path / "c")
    for name, value in emb.state_dict().items():
        assert torch.equal(value.cpu(), on_cpu.state_dict()[name]), name


# --- torch's and safetensors' own readers and writers -------------------------------------------------------


def test_torch_s_reader_and_writer_know_the_directory(tmp_path: Path) -> None:
    emb, other, third = make(), make(init=tbe.init.uniform(5, 6)), make(init=tbe.init.uniform(7, 8))
    step(emb)
    emb.set_learning_rate(0.5)
    tbe.save_checkpoint(emb, tmp_path / "ours", prefix="model.")
    held = dcp.FileSystemReader(tmp_path / "ours").read_metadata().state_dict_metadata
    assert [len(held[f"model.{n}"].chunks) for n in ("ad.weight", "ad.sum", "geo.weight")] == [4, 1, 5]
    state = {"model": other.state_dict()}  # views: loaded in place
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert torch.equal(other.split_embedding_weights()[0], emb.split_embedding_weights()[0])
    other.load_state_dict(state["model"])
    assert tbe.FusedOptimizer(other).param_groups[0]["lr"] == 0.5
    dcp.save({"model": emb.state_dict()}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    tbe.load_checkpoint(third, tmp_path / "torchs", prefix="model.")
    for name, value in emb.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]) and torch.equal(value, third.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_safetensors_file_is_what_its_format_says(dtype: torch.dtype, tmp_path: Path) -> None:
    emb, path = make(weights_dtype=dtype), tmp_path / "c.safetensors"
    step(emb)
    tbe.save_checkpoint(emb, path, prefix="m.")
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, value in header.items():
        first, last = value["data_offsets"]
        assert first == end
        end = last
        held = torch.frombuffer(bytearray(data[8 + length + first : 8 + length + last]), dtype=torch.uint8)
        expected = emb.state_dict(prefix="m.")[name]
        assert value["dtype"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[expected.dtype]
        assert torch.equal(held.view(expected.dtype).view(value["shape"]), expected)
    assert header.keys() == emb.state_dict(prefix="m.").keys() and len(data) == 8 + length + end
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_safetensors_own_reader_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    emb = make(weights_dtype=torch.float16)
    tbe.save_checkpoint(emb, tmp_path / "c.safetensors")
    found = library.load_file(tmp_path / "c.safetensors")
    assert found.keys() == emb.state_dict().keys()
    assert all(torch.equal(found[k], v) for k, v in emb.state_dict().items())


def crafted(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


WHOLE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, 0 for its header: expected a safetensors file"),
    "long header": ((99).to_bytes(8, "little") + b"{}", "has 10 bytes, 99 for its header: expected"),
    "no JSON": (crafted(b"{"), "the header is no JSON"),
    "a list": (crafted([]), "the header is a list, expected a JSON object"),
    "no tensor": (crafted({"hyper": 3}), "the header's 'hyper' is 3, expected a tensor's"),
    "no offsets": (crafted({"hyper": {"dtype": "F32", "shape": [1]}}), "the header's 'hyper' is {"),
    "wrong size": (
        crafted({"hyper": {**WHOLE, "shape": [2]}}),
        "'hyper' has 4 bytes, expected [2] of torch.f",
    ),
    "cut off": (crafted({"hyper": WHOLE}, b"123"), "bytes: expected"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    data, message = BROKEN[case]
    emb, path = make(), tmp_path / "c.safetensors"
    path.write_bytes(data)
    before = tensors(emb)
    with pytest.raises(ValueError) as caught:
        tbe.load_checkpoint(emb, path)
    assert str(path) in str(caught.value) and message in str(caught.value)
    assert not differing(before, tensors(emb))


def test_a_dtype_that_is_not_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(crafted({"hyper": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}, b"0000"))
    with pytest.raises(ValueError, match="hyper: a tensor of F8_E5M2 in the checkpoint, expected"):
        tbe.load_checkpoint(make(), path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emb, path = make(), tmp_path / "c.safetensors"
    tbe.save_checkpoint(emb, path)
    before = path.read_bytes()
    step(emb)
    seen = []

    def full(flat: torch.Tensor) -> Any:
        seen.append(flat)
        if len(seen) > 2:
            raise OSError("no space left on device")
        return pieces.slices(flat)

    monkeypatch.setattr("tbe.sources.slices", full)
    with pytest.raises(OSError, match="no space left"):
        tbe.save_checkpoint(emb, path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_directory_that_holds_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    emb, other = make(), make(init=tbe.init.uniform(5, 6))
    tbe.save_checkpoint(emb, tmp_path)
    with pytest.raises(FileExistsError, match="holds a checkpoint: expected a new directory"):
        tbe.save_checkpoint(other, tmp_path)
    tbe.load_checkpoint(other, tmp_path)
    assert not [k for k, v in emb.state_dict().items() if not torch.equal(v, other.state_dict()[k])]


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"expected a \.safetensors file or a directory with a \.metadata"
    ):
        tbe.load_checkpoint(make(), tmp_path / "nothing")


# --- what fits, what does not -------------------------------------------------------------------------------


def refused(emb: Emb, source: Any, *told: str, **options: Any) -> None:
    before = tensors(emb)
    with pytest.raises(ValueError, match=r"^the checkpoint does not fit, nothing was loaded:\n- ") as caught:
        tbe.load_checkpoint(emb, source, **options)
    assert not [text for text in told if text not in str(caught.value)], caught.value
    assert str(caught.value).count("\n- ") == len(told), caught.value
    assert not differing(before, tensors(emb))


@pytest.mark.parametrize("kind", FORMATS)
def test_another_dtype_only_when_it_is_asked_for(kind: str, tmp_path: Path) -> None:
    emb, half = make(), make(weights_dtype=torch.float16, init=tbe.init.uniform(5, 6))
    step(emb)
    source = saved(emb, tmp_path / kind)
    refused(
        half,
        source,
        "table 'ad', weight: [10, 4] torch.float32 in the checkpoint, expected [10, 4] torch.float16; cast=True",
        "table 'geo', weight: [5, 8] torch.float32 in the checkpoint",
    )
    tbe.load_checkpoint(half, source, cast=True)
    for name, value in emb.state_dict().items():
        assert torch.equal(value.to(half.state_dict()[name].dtype), half.state_dict()[name])
    again = make(init=tbe.init.uniform(7, 8))
    tbe.load_checkpoint(
        again, saved(half, tmp_path / f"again {kind}" if kind[0] != "s" else tmp_path / kind), cast=True
    )
    assert torch.equal(again.split_embedding_weights()[0], half.split_embedding_weights()[0].float())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cast_that_overflows_is_refused(kind: str, tmp_path: Path) -> None:
    emb, half = make(), make(weights_dtype=torch.float16)
    emb.split_embedding_weights()[1][4, 7] = -1e5
    source = saved(emb, tmp_path / kind)
    refused(half, source, "'geo.weight' has values beyond the range of torch.float16: expected", cast=True)
    emb.split_embedding_weights()[1][4, 7] = torch.inf  # infinite already: nothing is lost
    tbe.load_checkpoint(half, saved(emb, tmp_path / kind), cast=True)
    assert half.split_embedding_weights()[1][4, 7] == torch.inf
    wide = make(weights_dtype=torch.bfloat16)
    emb.split_embedding_weights()[1][4, 7] = -1e5
    tbe.load_checkpoint(wide, saved(emb, tmp_path / kind), cast=True)
    assert wide.split_embedding_weights()[1][4, 7] == torch.tensor(-1e5).bfloat16()


@pytest.mark.parametrize("kind", FORMATS)
def test_renamed_tables_are_mapped_only_when_they_are_named(kind: str, tmp_path: Path) -> None:
    emb = make()
    step(emb)
    source = saved(emb, tmp_path / kind, prefix="model.")
    city = make(tables=[TABLES[0], tbe.Table("city", 5, 8)], init=tbe.init.uniform(5, 6))
    options: dict[str, Any] = {"prefix": "model."}
    refused(
        city,
        source,
        "table 'geo' of the checkpoint: the module has no such table, expected 'ad', 'city', or rename={'geo'",
        "table 'city': the checkpoint has none, expected [5, 8] torch.float32",
        "table 'city': the checkpoint has none, expected [5] torch.float32",
        **options,
    )
    tbe.load_checkpoint(city, source, rename={"geo": "city"}, **options)
    assert torch.equal(city.split_embedding_weights()[1], emb.split_embedding_weights()[1])
    assert torch.equal(city.split_optimizer_states()[1]["sum"], emb.split_optimizer_states()[1]["sum"])
    swapped = make(tables=[tbe.Table("geo", 10, 4), tbe.Table("ad", 5, 8)], init=tbe.init.uniform(5, 6))
    tbe.load_checkpoint(swapped, source, rename={"geo": "ad", "ad": "geo"}, **options)
    assert torch.equal(swapped.split_embedding_weights()[0], emb.split_embedding_weights()[0])
    refused(
        emb,
        source,
        "rename={'town': 'geo'}: the checkpoint has no table 'town', only 'ad', 'geo'",
        "rename={'ad': 'city'}: the module has no table 'city', only 'ad', 'geo'",
        rename={"town": "geo", "ad": "city"},
        **options,
    )
    twice = "of the checkpoint are both named 'ad."
    refused(emb, source, f"{twice}weight' here", f"{twice}sum' here", rename={"geo": "ad"}, **options)


def test_a_module_s_own_tables_can_change_places() -> None:
    emb = make(tables=[tbe.Table("ad", 9, 4), tbe.Table("geo", 9, 4)], optimizer=tbe.Adam())
    step(emb, indices=torch.tensor([1, 2, 8, 0, 4]))
    before = {k: v.clone() for k, v in emb.state_dict().items()}
    tbe.load_checkpoint(emb, emb.state_dict(), rename={"ad": "geo", "geo": "ad"})
    turned = {"ad": "geo", "geo": "ad"}
    for name, value in emb.state_dict().items():
        table, dot, what = name.partition(".")
        assert torch.equal(value, before[turned.get(table, table) + dot + what]), name


def test_a_mapped_file_of_torch_s_is_a_source(tmp_path: Path) -> None:
    emb, other = make(), make(init=tbe.init.uniform(5, 6))
    step(emb)
    torch.save(emb.state_dict(), tmp_path / "c.pt")
    tbe.load_checkpoint(other, torch.load(tmp_path / "c.pt", mmap=True))
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in emb.state_dict().items())


@pytest.mark.parametrize("kind", FORMATS)
def test_resized_tables_are_refused_with_the_way_to_go(kind: str, tmp_path: Path) -> None:
    emb = make()
    step(emb)
    source = saved(emb, tmp_path / kind)
    small, large = (make(tables=[TABLES[0], tbe.Table("geo", n, 8)]) for n in (4, 7))
    hint = "; tbe.resized grows a module that was loaded with 5 rows"
    refused(
        large,
        source,
        f"table 'geo', weight: [5, 8] torch.float32 in the checkpoint, expected [7, 8] torch.float32{hint}",
        f"table 'geo', sum: [5] torch.float32 in the checkpoint, expected [7] torch.float32{hint}",
    )
    refused(small, source, "weight: [5, 8] torch.float32 in the checkpoint, expected [4, 8] t", "sum: [5] torch")
    loaded = make(init=tbe.init.uniform(5, 6))
    tbe.load_checkpoint(loaded, source)
    grown = tbe.resized(loaded, {"geo": 7})
    assert torch.equal(grown.split_embedding_weights()[1][:5], emb.split_embedding_weights()[1])


@pytest.mark.parametrize("kind", FORMATS)
def test_another_optimizer_s_state_is_refused_and_can_be_left_out(kind: str, tmp_path: Path) -> None:
    sgd, adagrad = make(optimizer=tbe.SGD(lr=0.5)), make(init=tbe.init.uniform(5, 6))
    step(adagrad)
    refused(
        adagrad,
        saved(sgd, tmp_path / kind),
        "hyper: [1] torch.float32 in the checkpoint, expected [4] torch.float32",
        "table 'ad', sum: the checkpoint has only 'ad.weight', expected [10] torch.float32; states=False loads",
        "table 'geo', sum: the checkpoint has only 'geo.weight'",
    )
    before = tensors(adagrad)
    tbe.load_checkpoint(adagrad, saved(sgd, tmp_path / kind), states=False)
    assert differing(before, tensors(adagrad)) == ["weights"]
    assert torch.equal(adagrad.split_embedding_weights()[1], sgd.split_embedding_weights()[1])
    fresh = make(optimizer=tbe.SGD(lr=0.5))
    refused(
        fresh,
        rewritten({k: v for k, v in adagrad.state_dict().items() if k != "hyper"}, tmp_path / kind),
        "hyper: the checkpoint has none, expected [1] torch.float32",
        "'ad.sum' of the checkpoint: the module has no such value",
        "'geo.sum' of the checkpoint: the module has no such value",
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_values_that_cannot_be_converted_are_refused(kind: str, tmp_path: Path) -> None:
    good = {k: v.clone() for k, v in make().state_dict().items()}
    source = rewritten({**good, "ad.weight": torch.ones(10, 4, dtype=torch.int64)}, tmp_path / kind)
    refused(make(), source, "table 'ad', weight: [10, 4] torch.int64 in the checkpoint", cast=True)
    if kind == "state dict":
        refused(
            make(), {**good, "ad.weight": [1.0]}, "table 'ad', weight: a list in the checkpoint, expected [10"
        )


# --- memory -------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys, torch, tbe
from pathlib import Path

MIB = 1 << 20
rows = 512 * 1024  # of 128 fp32: 256 MiB, and a small table of another dim, so that neither owns its storage
emb = tbe.TableBatchedEmbeddingBags(
    [tbe.Table("big", rows, 128), tbe.Table("small", 9, 4)], optimizer=tbe.RowwiseAdagrad(), device="cpu",
    init=tbe.init.uniform(1, 2),
)
path, cast = Path(sys.argv[1]), sys.argv[2] == "cast"
if not path.suffix:
    import torch.distributed.checkpoint, tbe.distributed_planners
first = emb.split_embedding_weights()[0][::4096].clone()
tbe.save_checkpoint(tbe.TableBatchedEmbeddingBags([tbe.Table("a", 9, 4)], optimizer=tbe.SGD(), device="cpu"),
                    path.with_name("warm" + path.suffix))

def data():
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmData"))
    return int(line.split()[1]) * 1024

other = None
if cast:
    other = tbe.TableBatchedEmbeddingBags(emb.spec.layout.tables, optimizer=tbe.RowwiseAdagrad(), device="cpu",
                                          weights_dtype=torch.float16)
resource.setrlimit(resource.RLIMIT_DATA, (data() + 128 * MIB, resource.RLIM_INFINITY))
try:
    torch.empty(rows, 128)
except RuntimeError as error:
    assert "memory" in str(error), error
else:
    sys.exit("the limit does not hold: a second copy was allocated")
tbe.save_checkpoint(emb, path)
if cast:
    tbe.load_checkpoint(other, path, cast=True)
    assert torch.equal(other.split_embedding_weights()[0][::4096], first.half())
else:
    emb.weights.data.zero_()
    tbe.load_checkpoint(emb, path)
    assert torch.equal(emb.split_embedding_weights()[0][::4096], first)
    grown = dict(emb.state_dict())
    emb.load_state_dict(grown)
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc and limits memory as Linux does")
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", ["directory", "file.safetensors"])
def test_a_table_is_never_held_twice(kind: str, cast: bool, tmp_path: Path) -> None:
    """Saved and loaded under a limit of half a table beyond what is in use; a whole copy fails under it."""
    code = f"import sys\nsys.argv = ['', {str(tmp_path / kind)!r}, {'cast' if cast else ''!r}]\n{LIMITED}"
    done = python(code, OMP_NUM_THREADS="1")
    assert done.stdout == "done\n", done.stderr[-2000:]
