"""Counts of the instructions that matter, and the resources, of a compiled Triton kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resources:
    """Vector registers a thread, how many of them spill, and all kinds of instructions with their counts."""

    registers: int
    spills: int
    instructions: dict[str, int]


KINDS = (
    *(f"global_{way}_{size}" for way in ("load", "store") for size in (32, 16, 12, 8, 4, 2, 1)),
    *(f"atomic_{order}" for order in ("acq_rel", "acquire", "release", "relaxed", "float", "cas")),
    *("barrier", "fence", "mma", "local_access", "local_bytes"),
    *("gpu_fence", "launch_control", "store_reduce"),
)
"""Every kernel has a count for each of these; 0 where it has none."""


def of_kernel(compiled: Any) -> Resources:
    """The resources of a ``triton.compiler.CompiledKernel``."""
    if compiled.metadata.target.backend == "cuda":
        return _nvidia(compiled)
    return _amd(compiled.asm["amdgcn"], compiled.asm["llir"])


def _all_kinds(found: Counter[str]) -> dict[str, int]:
    return {kind: found[kind] for kind in KINDS}


_PTX_ACCESS = re.compile(r"\b(ld|st)\.(?:[\w:]+\.)*?global((?:\.[\w:]+)*)")
_PTX_ATOMIC = re.compile(r"\b(?:atom|red)\.([\w.:]+)")
_PTX_OTHERS = {
    "barrier": re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync\b"),
    "fence": re.compile(r"\b(?:fence\.(?!mbarrier_init|proxy)|membar\.)"),
    "mma": re.compile(r"\b(?:wmma\.mma|mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"),
    "gpu_fence": re.compile(r"\bfence\.acq_rel\.gpu\b"),
    "launch_control": re.compile(r"\bclusterlaunchcontrol\.try_cancel\b"),
    "store_reduce": re.compile(r"\bcp\.reduce\.async\.bulk\.tensor\.[\w.:]*\.add\b"),
}


def _nvidia(compiled: Any) -> Resources:
    found: Counter[str] = Counter()
    code = re.sub(r"//.*", "", compiled.asm["ptx"])
    for way, rest in _PTX_ACCESS.findall(code):
        vector = re.search(r"\.v(\d)\b", rest)
        bits = re.search(r"\.[bufs](\d+)\b", rest)
        if bits is None:
            raise ValueError(f"PTX access without a type: {way}.global{rest}")
        size = int(bits[1]) // 8 * (int(vector[1]) if vector else 1)
        found[f"global_{'load' if way == 'ld' else 'store'}_{size}"] += 1
    for words in (match.split(".") for match in _PTX_ATOMIC.findall(code)):
        if "shared" in words:
            continue
        if {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"} & set(words):
            found["atomic_float"] += 1
        elif "cas" in words:
            found["atomic_cas"] += 1
        else:
            order = next((w for w in ("acq_rel", "acquire", "release") if w in words), "relaxed")
            found[f"atomic_{order}"] += 1
    for kind, pattern in _PTX_OTHERS.items():
        found[kind] = len(pattern.findall(code))
    usage = _resource_usage(compiled.asm["cubin"])
    spills = 0
    if usage["STACK"]:
        # Not every stack is a spill: the slow path of a division or root saves registers there, too.
        found["local_bytes"] = usage["STACK"]
        found["local_access"] = len(re.findall(r"\b(?:STL|LDL)\b", _cuobjdump(compiled.asm["cubin"], "-sass")))
        spills = _spilled(compiled)
    return Resources(usage["REG"], spills, _all_kinds(found))


def _cuobjdump(cubin: bytes, option: str) -> str:
    """What Triton's bundled cuobjdump prints of a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """What ptxas decided: ``REG`` a thread, ``STACK`` bytes a thread."""
    printed = _cuobjdump(cubin, "-res-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", printed)}
    if set(usage) != {"REG", "STACK"}:
        raise ValueError(f"cuobjdump -res-usage printed no REG and STACK: {printed!r}")
    return usage


def _spilled(compiled: Any) -> int:
    """Registers that ptxas spills, which only its own report tells: assembled once more, as Triton does."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    metadata = compiled.metadata
    options = ["-v", f"--gpu-name={sm_arch_from_capability(metadata.target.arch)}"]
    options += [] if metadata.enable_fp_fusion else ["--fmad=false"]
    options += metadata.ptx_options.split() if metadata.ptx_options else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(metadata.target.arch).path, *options, str(source), "-o", str(Path(folder, "out"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    stored = re.search(r"(\d+) bytes spill stores", report)
    if stored is None:
        raise ValueError(f"ptxas -v printed no spills: {report!r}")
    return -(-int(stored[1]) // 4)


_GCN_ACCESS = re.compile(r"^\s*(?:global|flat|buffer)_(load|store)_(\w+)", re.M)
_GCN_SIZES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b96": 12, "b64": 8, "b32": 4}
_GCN_OTHERS = {
    "barrier": re.compile(r"^\s*s_barrier(?:_signal)?\b", re.M),
    "fence": re.compile(r"^\s*(?:buffer_(?:wbl2|inv|wbinvl1\w*|gl[01]_inv)|global_(?:wb|inv|wbinv))\b", re.M),
    "mma": re.compile(r"^\s*v_(?:s?mfma\w*|s?wmma)_", re.M),
    "local_access": re.compile(r"^\s*scratch_(?:load|store)_", re.M),
}
_LLVM_ATOMIC = re.compile(
    r"\batomicrmw (?:volatile )?(\w+) ptr addrspace\(1\).*? (monotonic|acquire|release|acq_rel|seq_cst)\b"
)
_LLVM_CAS = re.compile(r"\bcmpxchg (?:weak )?(?:volatile )?ptr addrspace\(1\)")
_GCN_ATOMIC = re.compile(r"^\s*(?:global|flat|buffer)_atomic_(\w+)", re.M)


_ORDERS = {"monotonic": "relaxed", "seq_cst": "acq_rel"}
_LLVM_FENCES = re.compile(
    r"^\s*fence .*?\b(release|acquire|acq_rel|seq_cst)\b"
    r"|call .*?@llvm\.amdgcn\.raw\.ptr\.buffer\.atomic\.([\w.]+)",
    re.M,
)


def _buffer_atomics(llvm: str) -> list[tuple[str, str]]:
    """Operation and order of those through a buffer, which have no order of their own: the fences around them."""
    marks = [(fence, operation) for fence, operation in _LLVM_FENCES.findall(llvm)]
    found = []
    for i, (_, operation) in enumerate(marks):
        before = next((fence for fence, _ in reversed(marks[:i]) if fence), "")
        after = next((fence for fence, _ in marks[i + 1 :] if fence), "")
        release, acquire = before in ("release", "acq_rel", "seq_cst"), after in ("acquire", "acq_rel", "seq_cst")
        order = {(1, 1): "acq_rel", (1, 0): "release", (0, 1): "acquire"}.get((release, acquire), "relaxed")
        if operation and "cmpswap" not in operation:
            found.append((operation, order))
    return found


def _gcn_size(name: str) -> int:
    for part, size in _GCN_SIZES.items():
        if name.startswith(part):
            return size
    if "8" in name or "byte" in name:
        return 1
    if any(part in name for part in ("16", "short")):
        return 2
    raise ValueError(f"AMD access of unknown size: {name}")


def _amd(code: str, llvm: str) -> Resources:
    """Orders of atomics come from the LLVM IR, since the machine spells them as waits and cache operations."""
    found: Counter[str] = Counter()
    for way, name in _GCN_ACCESS.findall(code):
        if not name.startswith("lds"):
            found[f"global_{way}_{_gcn_size(name)}"] += 1
    for operation, order in [*_LLVM_ATOMIC.findall(llvm), *_buffer_atomics(llvm)]:
        floats = operation.startswith("f") or "pk" in operation
        found["atomic_float" if floats else f"atomic_{_ORDERS.get(order, order)}"] += 1
    found["atomic_cas"] = len(_LLVM_CAS.findall(llvm))
    machine = _GCN_ATOMIC.findall(code)
    floats = sum(bool(re.search(r"_(?:pk_)?b?f(?:16|32|64)\b", f"_{name}")) for name in machine)
    found["atomic_float"] = max(found["atomic_float"], floats)
    found["atomic_cas"] = max(found["atomic_cas"], sum("cmpswap" in name for name in machine))
    for kind, pattern in _GCN_OTHERS.items():
        found[kind] = len(pattern.findall(code))
    found["local_bytes"] = _gcn_number(code, "private_segment_fixed_size")
    return Resources(_gcn_number(code, "vgpr_count"), _gcn_number(code, "vgpr_spill_count"), _all_kinds(found))


def _gcn_number(code: str, name: str) -> int:
    match = re.search(rf"^\s*\.{name}:\s*(\d+)", code, re.M)
    if match is None:
        raise ValueError(f"no .{name} in the kernel's metadata")
    return int(match[1])
