"""All ranks call the model with gradients enabled, but never backward, as for a loss that is only printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from _threads import Together, going_by, run
from ps_core.engine import load_checkpoint, load_weights, save_checkpoint, save_weights
from test_alike import WIDTH, Front

Save = Callable[[Front, Path], object]


def checkpoint(one: Front, folder: Path) -> None:
    save_checkpoint(folder / "saved", one.model, one.optimizer)
    load_checkpoint(folder / "saved", one.model, one.optimizer)


def weights(one: Front, folder: Path) -> None:
    save_weights(folder / "saved", one.model, masters=True)
    load_weights(one.model, folder / "saved")


@pytest.mark.parametrize("keeps", [True, False], ids=["keeps the loss", "drops the loss"])
@pytest.mark.parametrize("save", [checkpoint, weights])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", [True, False], ids=["plan", "no plan"])
def test_nothing_waits_for_a_step(plan: bool, precision: str, save: Save, keeps: bool, tmp_path: Path) -> None:
    """The weights can be saved and loaded, and training goes on with the bits of ranks that never made the call."""

    def case(each: Together, calls: bool) -> dict[str, torch.Tensor]:
        one = Front(each, precision=precision)
        for turn in range(4):
            if turn == 2 and calls:
                loss = one.model(torch.ones(4, WIDTH)).float().sum()
                if not keeps:
                    del loss
                save(one, tmp_path)
            one.backward(turn)
            one.step()
        return {name: value.clone() for name, value in one.model.state_dict().items()}

    with going_by(plan=plan):
        found, wanted = (run(2, case, calls)[0] for calls in (True, False))
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
