"""Compute the learning rate of each step."""

from __future__ import annotations

import math

from ps_models.train._options import TrainOptions


def learning_rate(options: TrainOptions, step: int) -> float:
    """Return the learning rate of a step; steps are counted from 1.

    Warm-up rises in a straight line and reaches ``lr`` at its last step. The last step of all has ``final_lr`` of it,
    unless the schedule is constant.
    """
    warm = options.warmup_steps
    if step <= warm:
        return options.lr * step / warm
    if options.schedule == "constant":
        return options.lr
    part = min(1.0, (step - warm) / max(1, options.steps - warm))
    left = (1 + math.cos(math.pi * part)) / 2 if options.schedule == "cosine" else 1 - part
    return options.lr * (options.final_lr + (1 - options.final_lr) * left)
