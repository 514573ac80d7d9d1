"""The portable backend with what TLX adds on NVIDIA's Hopper and later. No Triton here."""

from __future__ import annotations

from dataclasses import replace

import torch

from tbe_core import Capabilities, DeviceConfig, Lookup, Problem, Training, assist
from tbe_core.device_files import find
from tbe_core.tuning import Knob
from tbe_triton import TritonBackend
from tbe_triton.carry import Carry
from tbe_triton.configs import config_for
from tbe_triton.tables import DeviceTables

from . import features, providers


class TlxBackend(TritonBackend):
    """``tbe_triton``'s kernels, its update with a gpu fence, launch control and store-reduce where they exist."""

    name = "tlx"

    def unavailable(self, caps: Capabilities) -> str | None:
        reason = providers.out_of_question(caps)
        if reason is not None:
            return reason
        if caps.tlx_provider is None:
            return (
                "no provider of TLX is installed: pip install 'portable-tbe[tlx]' (triton-utlx, beside Triton), "
                "or fbtriton in Triton's place"
            )
        reason = providers.misfit(caps.tlx_provider, caps.triton_version)
        if reason is not None:
            return reason
        if assist.GPU_FENCE not in caps.tlx_features:
            return missing_feature(assist.GPU_FENCE, caps)
        return super().unavailable(caps)

    def preference(self, caps: Capabilities) -> int:
        """On request only, until a device shows where it is faster than the portable kernels."""
        return -1

    def configure(self, problem: Problem, caps: Capabilities) -> tuple[DeviceConfig, tuple[str, ...]]:
        config, portable = super().configure(problem, caps)
        config = replace(config, fused_programs=assist.fused_programs(caps, config))
        told = [f"TLX: {caps.tlx_provider}", *assist.notes(caps, config, problem.deterministic)]
        told += [missing_feature(name, caps) for name in assist.FEATURES if name not in caps.tlx_features]
        return config, (*portable, *told)

    def device_config(self, caps: Capabilities) -> DeviceConfig:
        """The user's file for this backend, else the portable kernels' numbers: the walk is theirs."""
        return find(self.name, caps, self.packaged) or config_for(caps)

    def search_space(self, caps: Capabilities) -> tuple[Knob, ...]:
        own = (
            Knob("persistent_warps", (0, 16, 32, 64), "backward"),
            Knob("steal_stretches", (0, 1, 4, 16), "backward") if assist.CLC in caps.tlx_features else None,
        )
        return (*super().search_space(caps), *(knob for knob in own if knob is not None))

    def _update(
        self, lookup: Lookup, tables: DeviceTables, grad: torch.Tensor, training: Training, carry: Carry
    ) -> None:
        providers.load()
        from .update import TlxUpdate

        TlxUpdate(lookup, tables, grad, training, carry).launch()


def missing_feature(name: str, caps: Capabilities) -> str:
    """A feature that the provider does not have on the device, by the instruction that was looked for."""
    wanted = " and ".join(features.INSTRUCTIONS[name])
    return f"{caps.tlx_provider} compiles no {wanted} for {caps.arch} ({name.replace('_', ' ')})"
