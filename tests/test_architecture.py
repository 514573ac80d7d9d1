"""What the folders promise: who imports whom, who reads the environment, and what ``import tbe`` loads."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest
from helpers import ROOT, python

from tbe import environment, registry

BACKENDS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").exists())
PACKAGES = {
    "tbe_core": ROOT / "tbe_core",
    "tbe": ROOT / "dispatch" / "tbe",
    **{name: ROOT / "backends" / name for name in BACKENDS},
}
SHARES_TRITON_KERNELS = ("tbe_tlx", "tbe_rocm")
OURS = {*PACKAGES, *registry.IN_TREE.values(), "backends", "dispatch"}


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    paths = sorted(PACKAGES[package].rglob("*.py"))
    assert paths, f"{package} has no files: the walk is broken"
    for path in paths:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imports_of(tree: ast.Module) -> set[str]:
    """Absolute imports of a file, dotted, wherever they stand; importlib's too when the name is spelled out."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def imported_packages(package: str) -> dict[str, set[str]]:
    """Top-level name to the files of ``package`` that import it."""
    found: dict[str, set[str]] = {}
    for path, tree in sources(package):
        for name in imports_of(tree):
            found.setdefault(name.partition(".")[0], set()).add(path)
    return found


def allowed_of_ours(package: str) -> set[str]:
    if package == "tbe_core":
        return {"tbe_core"}
    if package == "tbe":
        return {"tbe", "tbe_core"}
    return {"tbe_core", package, *(("tbe_triton",) if package in SHARES_TRITON_KERNELS else ())}


def env_reads(tree: ast.Module) -> list[str]:
    """Reads of single environment variables. Handing the whole environment to a child is no read."""
    found = []
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        single = (
            (isinstance(node, ast.Subscript) and re.fullmatch(r"(os\.)?environ\[.*\]", text, re.S))
            or (
                isinstance(node, ast.Call)
                and re.match(r"((os\.)?environ\.(get|pop|setdefault)|(os\.)?getenv)\(", text)
            )
            or (isinstance(node, ast.Compare) and re.search(r"\bin (os\.)?environ$", text))
        )
        if single:
            found.append(text)
    return found


def branches_on_vendor(tree: ast.Module) -> list[str]:
    """Comparisons that look at a device's vendor or architecture."""
    compares = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return [
        ast.unparse(node)
        for node in compares
        if any(isinstance(n, ast.Attribute) and n.attr in ("vendor", "arch") for n in ast.walk(node))
    ]


def jitted(tree: ast.Module) -> list[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if any(re.search(r"\bjit\b", ast.unparse(d)) for d in f.decorator_list)]


def test_the_walk_sees_what_it_should() -> None:
    """The rules below hold for every file only if their finders find."""
    tree = ast.parse(
        "import os.path\nfrom tbe_triton.kernels import x\nfrom . import y\n"
        "def f():\n    import backends\n    importlib.import_module('tbe_cpu')\n"
        "os.environ['TBE_A']; os.environ.get('B'); os.getenv('C'); 'D' in os.environ\n"
        "dict(os.environ); {**os.environ}\n"
        "if caps.vendor == 'amd' or caps.arch.startswith('x') or 9 <= int(caps.arch[3:]): pass\n"
        "@triton.jit\ndef k(): pass\n@other\ndef g(): pass\n"
    )
    assert imports_of(tree) == {"os.path", "tbe_triton.kernels", "backends", "tbe_cpu"}
    assert len(env_reads(tree)) == 4
    assert len(branches_on_vendor(tree)) == 2
    assert jitted(tree) == ["k"]
    assert {"tbe_cpu", "tbe_triton"} <= set(BACKENDS)


@pytest.mark.parametrize("package", PACKAGES)
def test_import_direction(package: str) -> None:
    found = imported_packages(package)
    wrong = {name: files for name, files in found.items() if name in OURS - allowed_of_ours(package)}
    assert not wrong


def test_the_core_needs_torch_only() -> None:
    outside = set(imported_packages("tbe_core")) - set(sys.stdlib_module_names)
    assert outside == {"torch"}


@pytest.mark.parametrize("package", ["tbe_core", "tbe"])
def test_neutral_layers_do_not_branch_on_vendors(package: str) -> None:
    assert not {path: found for path, tree in sources(package) if (found := branches_on_vendor(tree))}


@pytest.mark.parametrize("package", PACKAGES)
def test_one_file_reads_the_environment(package: str) -> None:
    reads = {path: found for path, tree in sources(package) if (found := env_reads(tree))}
    expected = {"dispatch/tbe/environment.py"} if package == "tbe" else set()
    assert set(reads) == expected, reads


@pytest.mark.parametrize("package", PACKAGES)
def test_kernels_live_in_their_folder(package: str) -> None:
    found = {path: names for path, tree in sources(package) if (names := jitted(tree))}
    assert not {path: names for path, names in found.items() if "/kernels/" not in path}
    if package == "tbe_triton":
        assert found


def test_what_environment_reads_is_declared() -> None:
    """Names read there and keys of ``VARIABLES`` are the same."""
    tree = ast.parse((PACKAGES["tbe"] / "environment.py").read_text())
    names = {m for text in env_reads(tree) for m in re.findall(r"'([A-Z_]+)'", text)}
    assert names == set(environment.VARIABLES)


LOADED = "import sys; print(sorted(n for n in sys.modules if n.split('.')[0] in {names} or n in {names}))"
HEAVY = ("triton", "tbe_cpu", "tbe_triton", "tbe_tlx", "tbe_rocm", "torch._dynamo", "torch._inductor")
TRAIN = """
import torch, tbe
emb = tbe.TableBatchedEmbeddingBags([tbe.Table("a", 9, 4)], optimizer=tbe.RowwiseAdagrad(), device="cpu")
before = emb.weights.clone()
emb(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
assert not torch.equal(before, emb.weights)
"""


def test_importing_tbe_loads_no_backend_triton_or_dynamo() -> None:
    done = python("import tbe\n" + LOADED.format(names=HEAVY))
    assert done.stdout.strip() == "[]", done.stderr


def test_training_on_the_cpu_loads_no_triton_or_dynamo() -> None:
    heavy = ("triton", "tbe_tlx", "tbe_rocm", "torch._dynamo", "torch._inductor")
    done = python(TRAIN + LOADED.format(names=heavy))
    assert done.stdout.strip() == "[]", done.stderr


def test_training_works_where_triton_is_not_installed() -> None:
    without = """
import importlib.metadata, sys
for name in ("triton", "cuda"):
    sys.modules[name] = None
known = importlib.metadata.version
def version(name):
    if "triton" in name or "cuda" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.version = version
"""
    done = python(without + TRAIN + "print(emb.plan)")
    assert "cpu serves" in done.stdout, done.stderr
    assert "triton: Triton is not installed: pip install" in done.stdout
