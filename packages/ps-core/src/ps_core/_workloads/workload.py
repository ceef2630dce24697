"""Describe what one process computes in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ps_core._errors import InvalidInput
from ps_core._units import check_flag, check_whole


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Describe what one process computes in one micro-batch, and how."""

    batch: int = 4
    seq: int = 1024
    precision_bytes: int = 2
    """Bytes of an element of parameters, activations and gradients: 2 or 4."""
    checkpointing: bool = True
    """Keep only every block's input and recompute the rest in backward."""
    offload_checkpoints: bool = False
    """Let the planner move checkpoints off the compute tier."""
    chunked_loss: bool = False
    """Compute head and loss ``loss_chunk_tokens`` at a time, again in backward, instead of holding all logits."""
    loss_chunk_tokens: int = 1024
    head_tiles: int = 1
    """Cut a separate head into so many tensors, each for a part of the words and used by itself."""
    cpu_embedding: bool = False
    """Look tokens up in host memory: the table is in no moment, and not among the trace's tensors."""
    logit_bytes: int = 12
    """Bytes of all forms of one logit together."""
    materialised_attention: bool = False
    """True if attention writes its scores to memory."""
    dropout: bool = False
    fused: bool = True
    """True if norms and activations are single operators.

    In transformers GPT-2's activation and the rotary families' norms are not, and keep what their pieces need.
    """
    gradient_buffers: bool = True
    """True if a gradient arrives in separate memory before it is stored; False if kernels write it in place."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_flag(f"workload: {field.name}", value)
            else:
                check_whole(f"workload: {field.name}", value, 1)
        if self.precision_bytes not in (2, 4):
            raise InvalidInput(f"workload: precision_bytes must be 2 or 4, found {self.precision_bytes}")
        if self.offload_checkpoints and not self.checkpointing:
            raise InvalidInput("workload: offload_checkpoints needs checkpointing")

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch."""
        return self.batch * self.seq
