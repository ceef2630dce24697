"""Move the tensors of a model that are in no chunk to the compute device: buffers and integer parameters."""

from __future__ import annotations

import torch
from torch import nn

from ps_core.engine._parameters.managed_parameter import ManagedParameter, set_data


def move_unmanaged(model: nn.Module, device: torch.device) -> None:
    """Move buffers and integer parameters to a device, as ``model.to(device)`` would; leave those on ``meta``."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    for parameter in model.parameters():
        if not isinstance(parameter, ManagedParameter) and parameter.device != device and not parameter.is_meta:
            set_data(parameter, parameter.detach().to(device))
