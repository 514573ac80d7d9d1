"""The features of a provider on an architecture, each proven by its instruction in compiled code.

A provider may drop an operation and compile on, or crash: so a child process compiles, and the PTX counts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tbe_core.assist import ASYNC_LOAD, CLC, GPU_FENCE, MBARRIER, STORE_REDUCE

from .providers import Provider

logger = logging.getLogger("tbe")

INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    GPU_FENCE: ("fence.acq_rel.gpu",),
    CLC: ("clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel.is_canceled"),
    STORE_REDUCE: ("cp.reduce.async.bulk.tensor",),
    MBARRIER: ("mbarrier.init", "mbarrier.try_wait"),
    ASYNC_LOAD: ("cp.async.c",),
}
"""Feature to what the start of an instruction must be; every one of them."""

DROPPED = "is not registered"
"""What triton-utlx prints of an operation that it then leaves out."""

TIMEOUT_SECONDS = 300
_MARK = "tbe-feature "
_CHILD = """
import json, sys
provider, arch, names, sys.path[:] = json.loads(sys.argv[1])
from tbe_tlx.feature_child import main
main(provider, arch, names)
"""


def missing(provider: Provider, triton_version: str, arch: int) -> dict[str, str]:
    """Feature to why it is missing; "" where it is there. Asked of a child once a machine, then read from disk.

    A compiler that hangs is not remembered: that may be the machine's load.
    """
    from triton import knobs

    key = "-".join((str(provider).replace(" ", "-"), triton_version, f"sm_{arch}", _fingerprint()))
    path = Path(knobs.cache.dir) / f"tbe-tlx-{key}.json"
    known = _read(path)
    if known is not None:
        return known
    try:
        found = compile_features(provider, arch)
    except subprocess.TimeoutExpired:
        logger.warning("%s on sm_%d: the compiler did not end in %d seconds", provider, arch, TIMEOUT_SECONDS)
        return dict.fromkeys(INSTRUCTIONS, f"the compiler did not end in {TIMEOUT_SECONDS} seconds")
    logger.debug("%s on sm_%d: %s", provider, arch, found)
    try:
        _write(path, found)
    except OSError as error:
        logger.warning("%s cannot be written, so TLX is probed again in every process: %s", path, error)
    return found


def compile_features(provider: Provider, arch: int, names: Iterable[str] = INSTRUCTIONS) -> dict[str, str]:
    """Feature to why it is missing, by compiling now; a new child after every one that died.

    Raises:
        subprocess.TimeoutExpired: a compiler hangs.
    """
    waiting, found = list(names), dict[str, str]()
    while waiting:
        output, code = _run_child(provider, arch, waiting)
        told = parse(output)
        if not told:
            # The child did not come as far as the first kernel: so it is with all of them.
            last = output.strip().splitlines()[-1:] or [f"the child ended with code {code}"]
            return found | dict.fromkeys(waiting, last[0])
        for name, why in told.items():
            found[name] = _ending(code) if why is None else why
        waiting = [name for name in waiting if name not in told]
    return found


def parse(output: str) -> dict[str, str | None]:
    """Feature to why it is missing, from a child's output; None for the one at which the output breaks off."""
    found: dict[str, str | None] = {}
    for part in output.split(_MARK)[1:]:
        head, _, rest = part.partition("\n")
        name, _, verdict = head.partition(" ")
        if not verdict:  # it begins: what follows was printed while it compiled
            found[name] = next((line.strip() for line in rest.splitlines() if DROPPED in line), None)
        elif found.get(name) is None:
            found[name] = json.loads(verdict)
    return found


def verdict(name: str, ptx: str) -> str:
    """Why compiled code does not have a feature; "" where it does."""
    code = re.sub(r"//.*", "", ptx)
    lacking = [text for text in INSTRUCTIONS[name] if not re.search(rf"(?<![\w.]){re.escape(text)}", code)]
    return f"{', '.join(lacking)} is not in the compiled code" if lacking else ""


def _run_child(provider: Provider, arch: int, names: list[str]) -> tuple[str, int]:
    told = json.dumps([provider.module, arch, names, sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, told],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "TRITON_ALWAYS_COMPILE": "1", "TRITON_INTERPRET": "0"},
    )
    return done.stdout, done.returncode


def _ending(code: int) -> str:
    return f"the compiler died of signal {-code}" if code < 0 else f"the compiler ended with code {code}"


def announce(name: str, verdict: str | None = None) -> None:
    """In the child: a feature begins, or with a verdict ends. Flushed, since the next line may be its last."""
    print(f"\n{_MARK}{name}" + ("" if verdict is None else f" {json.dumps(verdict)}"), flush=True)


def _fingerprint() -> str:
    """Of everything of ours that decides what is compiled and what is looked for."""
    names = ("builtins.py", "kernels/feature_probes.py", "feature_child.py", "features.py")
    texts = (Path(__file__).parent.joinpath(name).read_bytes() for name in names)
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _read(path: Path) -> dict[str, str] | None:
    """The kept result; None where there is none that can be used."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, so TLX is probed again: %s", path, error)
        return None
    whole = isinstance(known, dict) and set(known) == set(INSTRUCTIONS)
    return known if whole and all(isinstance(why, str) for why in known.values()) else None


def _write(path: Path, found: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(temporary, path)
