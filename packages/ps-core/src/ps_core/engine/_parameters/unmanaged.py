"""What of a model is in no chunk, and has to be where the rest computes: buffers, and parameters of whole numbers."""

from __future__ import annotations

import torch
from torch import nn

from ps_core.engine._parameters.managed_parameter import ManagedParameter, set_data


def move_unmanaged(model: nn.Module, device: torch.device) -> None:
    """Move it there, as ``model.to(device)`` would."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
    for parameter in model.parameters():
        if not isinstance(parameter, ManagedParameter) and parameter.device != device:
            set_data(parameter, parameter.detach().to(device))
