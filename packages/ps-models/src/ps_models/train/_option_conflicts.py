"""Refuse options that do not go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from ps_core._errors import InvalidInput

if TYPE_CHECKING:
    from ps_models.train._options import TrainOptions


def check_together(options: TrainOptions) -> None:
    """Raise `InvalidInput` for options that are each allowed, but not together."""
    if options.device == "cpu" and options.device_memory is not None:
        raise InvalidInput(
            f"--device-memory: found {options.device_memory!r} with --device cpu, which has --host-memory only; "
            "allowed with --device emulated, cuda or auto"
        )
    if options.device == "emulated" and options.device_memory is None:
        raise InvalidInput(
            "--device: found 'emulated' without --device-memory, which says how large the accelerator is to be"
        )
    if options.offload_checkpoints and not options.checkpointing:
        raise InvalidInput("--offload-checkpoints: found with --no-checkpointing, which makes none; allowed without it")
    if options.patience is not None and not options.eval_every:
        raise InvalidInput(
            f"--patience: found {options.patience} with --eval-every 0, which validates at the end only; allowed "
            "with --eval-every of at least 1"
        )
    if options.disk_dir is not None and options.disk is None:
        raise InvalidInput(f"--disk-dir: found {options.disk_dir!r} without --disk, which says how much of it")
    if options.step_speculative and options.accumulate > 1:
        raise InvalidInput(
            f"--step-speculative: found with --accumulate {options.accumulate}, whose gradients are complete in the "
            "last pass alone; allowed with --accumulate 1"
        )
    _check_source(options)


_ONLY_NAMED = ("vocab", "offload_checkpoints", "untied_head", "cpu_embedding", "head_tiles", "mask_token")
"""Options of models that are built by name."""
_ONLY_HF = ("lora", "pack", "chunked_loss")
_ONLY_LORA = ("lora_targets", "lora_alpha", "lora_merge")


def _check_source(options: TrainOptions) -> None:
    """Raise `InvalidInput` for options of one kind of model with the other."""
    values = ((row.name, getattr(options, row.name), row.default) for row in fields(options))
    changed = {name: value for name, value, default in values if value != default}
    if options.hf is None:
        _refuse(changed, _ONLY_HF, "without --hf", "with --hf, for a model of transformers")
    elif "model" in changed:
        raise InvalidInput(
            f"--model: found {options.model!r} with --hf, whose folder says what the model is; allowed is one of them"
        )
    else:
        _refuse(changed, _ONLY_NAMED, "with --hf", "for models by name (--model)")
    if options.lora is None:
        _refuse(changed, _ONLY_LORA, "without --lora", "with it")


def _refuse(changed: Mapping[str, object], names: Sequence[str], where: str, allowed: str) -> None:
    for name in names:
        if name in changed:
            shown = "" if changed[name] is True else f"{changed[name]!r} "
            raise InvalidInput(f"--{name.replace('_', '-')}: found {shown}{where}; allowed {allowed}")
