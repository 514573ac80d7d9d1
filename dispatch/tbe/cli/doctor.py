"""``tbe doctor``: what this machine has, which backend serves which problem, why the others do not."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Annotated, Any

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show devices, backends with their reasons, and the plan of the default problem on each device."""
    report = _report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    software = report["software"]
    typer.echo("  ".join(f"{k} {v or 'absent'}" for k, v in software.items()))
    for name, value in report["environment"].items():
        typer.echo(f"{name}={value}")
    for device in report["devices"]:
        typer.echo(f"\n{device['device']}: {device['description']}")
        for backend in device["backends"]:
            typer.echo(f"  {backend['name']:8}{backend['unavailable'] or 'usable'}")
        typer.echo("  plan of fp16 tables with row-wise Adagrad, D=64 and D=128:")
        typer.echo("    " + device["plan"].replace("\n", "\n    "))


def _report() -> dict[str, Any]:
    import os

    import torch

    import tbe
    from tbe import environment, probe

    caps = probe.capabilities("cpu")
    return {
        "software": {
            "tbe": tbe.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": caps.triton_version,
            "cuda-cccl": caps.cccl_version,
        },
        "environment": {n: os.environ[n] for n in environment.VARIABLES if n in os.environ},
        "devices": [_device(d) for d in probe.devices()],
    }


def _device(device: Any) -> dict[str, Any]:
    import torch

    from tbe import BackendError, RowwiseAdagrad, Table, backends, policy, probe
    from tbe_core import Layout, Spec

    tables = [Table("a", 1_000_000, 128), Table("b", 300, 64)]
    spec = Spec(Layout.make(tables, None), RowwiseAdagrad(), weights_dtype=torch.float16)
    try:
        plan = str(policy.plan_for(spec.problem(), device, policy.request(None)))
    except BackendError as error:
        plan = str(error)
    return {
        "device": str(device),
        "description": str(probe.capabilities(device)),
        "backends": [asdict(b) for b in backends(device)],
        "plan": plan,
    }
