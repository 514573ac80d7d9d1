"""``tbe doctor``: what this machine has, which backend serves which problem, why the others do not."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tbe_core.devices import DEVICES

if TYPE_CHECKING:
    from tbe_core import Capabilities, Spec


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    as_device: Annotated[
        str | None,
        typer.Option("--as", help=f"Pretend to be a machine with one of: {', '.join(DEVICES)}."),
    ] = None,
) -> None:
    """Show devices, backends with their reasons, and the plans of typical problems on each device."""
    if as_device is not None and as_device not in DEVICES:
        typer.echo(f"tbe doctor: --as {as_device}: expected one of {', '.join(DEVICES)}", err=True)
        raise typer.Exit(2)
    report = _report(as_device)
    typer.echo(json.dumps(report, indent=2) if as_json else _text(report))


def _text(report: dict[str, Any]) -> str:
    lines = ["  ".join(f"{k} {v or 'absent'}" for k, v in report["software"].items())]
    lines += [f"{name}={value}" for name, value in report["environment"].items()]
    for device in report["devices"]:
        pretended = " (not here: facts from its specification, software from here)" if device["pretended"] else ""
        lines += ["", f"{device['device']}: {device['description']}{pretended}"]
        lines += [f"  {b['name']:8}{b['unavailable'] or 'usable'}" for b in device["backends"]]
        for plan in device["plans"]:
            lines += [f"  {plan['problem']}:", "    " + plan["plan"].replace("\n", "\n    ")]
    return "\n".join(lines)


def _report(as_device: str | None) -> dict[str, Any]:
    import tbe
    from tbe import environment, probe

    here = probe.software()
    if as_device is None:
        devices = [_device(str(d), probe.capabilities(d), False) for d in probe.devices()]
    else:
        devices = [_device(as_device, probe.as_if(as_device), True)]
    return {
        "software": {
            "tbe": tbe.__version__,
            "python": platform.python_version(),
            "torch": here["torch_version"],
            "triton": here["triton_version"],
            "cuda-cccl": here["cccl_version"],
        },
        "environment": environment.present(),
        "devices": devices,
    }


def _problems() -> dict[str, tuple[Spec, bool]]:
    """Typical problems: what they are called, the operator, and whether lookups are weighted."""
    import torch

    from tbe import SGD, RowwiseAdagrad, Table
    from tbe_core import Layout, Spec

    mixed = Layout.make([Table("a", 1_000_000, 128), Table("b", 300, 64)], None)
    narrow = Layout.make([Table("a", 1_000_000, 16)], None)
    wide = Layout.make([Table("a", 100_000, 16_384)], None)
    return {
        "fp16 tables of D=64 and D=128, sum, row-wise Adagrad": (
            Spec(mixed, RowwiseAdagrad(), weights_dtype=torch.float16),
            False,
        ),
        "fp32 table of D=16, weighted mean, SGD": (Spec(narrow, SGD(), "mean"), True),
        "bf16 table of D=16, no pooling, SGD": (
            Spec(narrow, SGD(), "none", torch.bfloat16, torch.bfloat16),
            False,
        ),
        "fp32 table of D=16384, sum, SGD": (Spec(wide, SGD()), False),
    }


def _device(name: str, caps: Capabilities, pretended: bool) -> dict[str, Any]:
    from tbe import BackendError, policy

    plans = []
    for title, (spec, weighted) in _problems().items():
        backend = source = None
        try:
            plan = policy.plan_on(spec.problem(weighted=weighted), caps, policy.request(None))
            backend, source, text = plan.backend, plan.config.source, str(plan)
        except BackendError as error:
            text = str(error)
        plans.append({"problem": title, "backend": backend, "config_source": source, "plan": text})
    return {
        "device": name,
        "pretended": pretended,
        "description": str(caps),
        "backends": [asdict(b) for b in policy.backends_on(caps)],
        "plans": plans,
    }
