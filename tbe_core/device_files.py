"""A device's configuration as a JSON file: which device it is for, where its numbers come from, the numbers.

    {"backend": "triton", "device": {"vendor": "nvidia", "arch": "sm_90", "name": "NVIDIA H200"},
     "source": "tuned on ...", "config": {"stretch": 128, ...}}

``vendor``, ``arch`` and ``name`` are shell-style patterns. Numbers left out take the defaults of
``DeviceConfig``; in a tuned file the source then says which.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from .config import DeviceConfig
from .plan import BackendError
from .types import Capabilities

_TOP = ("backend", "device", "source", "config")
_DEVICE = ("vendor", "arch", "name")


class DeviceFileError(BackendError):
    """A device file or the directory of them cannot be used; the message names the file and the key."""


@dataclass(frozen=True)
class DeviceFile:
    """One file's contents. ``vendor``, ``arch`` and ``name`` are patterns."""

    path: Path
    config: DeviceConfig
    backend: str
    vendor: str
    arch: str
    name: str

    def fits(self, backend: str, caps: Capabilities) -> bool:
        """Whether it is for ``backend`` on the device."""
        pairs = ((caps.vendor, self.vendor), (caps.arch, self.arch), (caps.name, self.name))
        return backend == self.backend and all(fnmatchcase(value, pattern) for value, pattern in pairs)

    @property
    def closeness(self) -> int:
        """Characters that the patterns fix: of two files that fit, the greater is the closer."""
        return sum(c not in "*?" for c in self.vendor + self.arch + self.name)


def find(backend: str, caps: Capabilities, packaged: Path) -> DeviceConfig | None:
    """The configuration of a device: the user's own file (``caps.config_dir``) before the ``packaged`` ones.

    ``source`` of what is returned ends in the file that it came from. None: no file fits.

    Raises:
        DeviceFileError: a file is broken, or two of one directory fit equally closely.
    """
    if caps.config_dir is not None:
        own = _closest(files_in(Path(caps.config_dir)), backend, caps)
        if own is not None:
            return replace(own.config, source=f"{own.config.source} (from {own.path})")
    found = _closest(files_in(packaged), backend, caps)
    return None if found is None else replace(found.config, source=f"{found.config.source} ({found.path.name})")


def _closest(files: Iterable[DeviceFile], backend: str, caps: Capabilities) -> DeviceFile | None:
    fitting = sorted((f for f in files if f.fits(backend, caps)), key=lambda f: -f.closeness)
    if len(fitting) > 1 and fitting[0].closeness == fitting[1].closeness:
        raise DeviceFileError(
            f"{fitting[0].path} and {fitting[1].path} both fit {caps}, equally closely: remove one, or make its "
            "key 'device' more exact"
        )
    return fitting[0] if fitting else None


@lru_cache(maxsize=64)
def files_in(directory: Path) -> tuple[DeviceFile, ...]:
    """Every ``.json`` file of a directory, read once a process. Raises ``DeviceFileError``."""
    if not directory.is_dir():
        raise DeviceFileError(f"{directory} is not a directory: expected one of device files")
    return tuple(read(path) for path in sorted(directory.glob("*.json")))


def read(path: Path) -> DeviceFile:
    """The contents of one file. Raises ``DeviceFileError`` that names the file and the key."""
    try:
        found = _object(json.loads(path.read_text(encoding="utf-8")), "the file", _TOP)
        device = _object(found["device"], "key 'device'", _DEVICE)
        values = {k: found[k] for k in ("backend", "source")} | {f"device.{k}": device[k] for k in _DEVICE}
        texts = {key: _text(key, value) for key, value in values.items()}
        patterns = (texts[f"device.{key}"] for key in _DEVICE)
        return DeviceFile(path, _config(texts["source"], found["config"]), texts["backend"], *patterns)
    except (OSError, ValueError) as error:  # JSON's and Unicode's errors are ValueErrors
        raise DeviceFileError(f"{path}: {error}") from None


def _object(value: object, what: str, keys: tuple[str, ...]) -> dict[str, object]:
    """``value`` as an object of exactly these keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {value!r}: expected an object")
    for key in keys:
        if key not in value:
            raise ValueError(f"{what} has no key {key!r}: expected {', '.join(keys)}")
    for key in value:
        if key not in keys:
            raise ValueError(f"{what} has an unknown key {key!r}: expected {', '.join(keys)}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"key {key!r} is {value!r}: expected a text")
    return value


def _config(source: str, numbers: object) -> DeviceConfig:
    if not source.startswith(("tuned ", "untuned")):
        raise ValueError(f"key 'source' is {source!r}: expected 'tuned on ...' or 'untuned ...'")
    if not isinstance(numbers, dict):
        raise ValueError(f"key 'config' is {numbers!r}: expected an object")
    if "source" in numbers:
        raise ValueError("key 'config' has an unknown key 'source': it belongs beside 'config'")
    missing = [f.name for f in fields(DeviceConfig) if f.name not in numbers and f.name != "source"]
    if missing and source.startswith("tuned "):
        source += f"; untuned defaults for {', '.join(missing)}"
    try:
        return DeviceConfig.from_dict({"source": source, **numbers})
    except ValueError as error:
        raise ValueError(f"key 'config': {error}") from None


def write(path: Path, backend: str, caps: Capabilities, config: DeviceConfig) -> None:
    """Write ``config`` as the file of exactly this kind of device; a file of that name is replaced whole.

    Raises ``OSError``.
    """
    numbers = config.to_dict()
    value = {
        "backend": backend,
        "device": {key: glob.escape(getattr(caps, key)) for key in _DEVICE},
        "source": numbers.pop("source"),
        "config": numbers,
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2) + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
