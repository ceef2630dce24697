"""The optimizer a training loop holds: ``torch.optim.Optimizer``'s face, the engine's step behind it.

[Note: one format]
``param_groups[0]`` holds the parameters that no `Group` matches, ``param_groups[i]`` those of ``groups[i - 1]``, empty
ones too; with no groups that is ``torch.optim.AdamW(model.parameters())``, frozen parameters included (they never have
a state). ``state_dict()`` is what ``torch.optim.AdamW``, ``Adam`` or ``SGD`` with the same groups would give, and each
loads the other's. Two keys come on top where they apply, and torch's optimizers pass over them:

    "masters"       {index: fp32 parameter}, with ``state_dict(masters=True)``
    "loss_scale"    ``torch.amp.GradScaler``'s state, in fp16
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ps_core._errors import InvalidInput
from ps_core._options import SGD, Adam, AdamW, Optimizer
from ps_core._program import Kind
from ps_core.engine._interrupts import alone
from ps_core.engine._scaler import LossScale, Scaler
from ps_core.engine._settings import Gradients, Outcome, Rule, Settings

if TYPE_CHECKING:
    from ps_core.engine._records import TensorRecord

# What torch's own optimizers keep in a group besides the numbers, as it is when they do what the engine does.
SHARED = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
FIXED: dict[type, dict[str, Any]] = {
    AdamW: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": True},
    Adam: {**SHARED, "amsgrad": False, "capturable": False, "decoupled_weight_decay": False},
    SGD: {**SHARED, "dampening": 0, "nesterov": False},
}
FREE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Of these, those that change how torch computes a step and not what."""
STATES = {Rule.ADAM: {"exp_avg": Kind.M, "exp_avg_sq": Kind.V}, Rule.SGD: {"momentum_buffer": Kind.M}}
NUMBERS = ("lr", "betas", "eps", "momentum", "weight_decay")
MASTERS, LOSS_SCALE = "masters", "loss_scale"


class ChunkedOptimizer(torch.optim.Optimizer):
    """What ``chunked`` returns beside the model. ``param_groups`` are read at every step; see [Note: one format]."""

    def __init__(
        self,
        gradients: Gradients,
        records: Sequence[TensorRecord],
        optimizer: Optimizer,
        *,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """``records``: every parameter under management, in the order of ``model.parameters()``."""
        _check_max_norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self._gradients, self._loss_scale = gradients, loss_scale
        self._rule = Rule.SGD if isinstance(optimizer, SGD) else Rule.ADAM
        self._fixed = FIXED[type(optimizer)]
        self._name = type(optimizer).__name__
        self._outcome: Outcome | None = None
        self._scaled = False
        self._members = _members(optimizer, records)
        self._complete = False
        super().__init__(
            [_group(each, rows) for each, rows in zip((optimizer, *optimizer.groups), self._members, strict=True)],
            {**_numbers(optimizer), **self._fixed},
        )
        self._complete = True

    # ---- training ----

    @alone
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure is refused
        """Update the parameters from the gradients that backward left; nothing if one of them is not finite."""
        if closure is not None:
            raise InvalidInput(
                "step(closure) cannot be: a closure runs the model between updates of single parameters; run forward "
                "and backward first, then call step()"
            )
        self._gradients.check_usable()
        settings_of = self.settings()
        if not any(self._gradients.has_gradient(record) for record in self._records()):
            return
        scaler = self._loss_scale
        if scaler is not None and not self._scaled:
            raise InvalidInput(
                "precision fp16, but the loss was not scaled, so its gradients may have been lost to rounding: call "
                "optimizer.scale(loss).backward() in place of loss.backward(); where Accelerate or the Trainer calls "
                "backward, give it optimizer.scaler (trainer.accelerator.scaler = optimizer.scaler)"
            )
        self._outcome = self._gradients.step(settings_of, self.max_grad_norm, 1.0 if scaler is None else scaler.value)
        if scaler is not None:
            scaler.update(skipped=self._outcome.skipped)

    @alone
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if not set_to_none:
            raise InvalidInput(
                "zero_grad(set_to_none=False) asks for gradients of zeros, which would take memory; use zero_grad()"
            )
        self._scaled = False
        self._gradients.discard_gradients()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: times the loss scale in fp16, else as it is."""
        if self._loss_scale is None:
            return loss
        self._scaled = True
        return self._loss_scale.scale(loss)

    @property
    def scaler(self) -> Scaler:
        """`scale` and `step` under the names of ``torch.amp.GradScaler``, for code that is written for one."""
        return Scaler(self, self._loss_scale)

    @property
    def loss_scale(self) -> float:
        """What `scale` multiplies by."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    @property
    def last_norm(self) -> float | None:
        """The last step's global gradient norm, before clipping and without the loss scale; None before any step."""
        return None if self._outcome is None else self._outcome.norm

    @property
    def last_skipped(self) -> bool:
        """Whether the last step was skipped for a gradient that was not finite."""
        return self._outcome is not None and self._outcome.skipped

    def _records(self) -> Iterator[TensorRecord]:
        return (record for members in self._members for record in members)

    def settings(self) -> Callable[[TensorRecord], Settings]:
        """Each parameter's numbers, as the groups have them now."""
        found = dict(self._settings())
        return lambda record: found[record.name]

    def _settings(self) -> Iterator[tuple[str, Settings]]:
        """Every parameter's numbers as the groups have them now."""
        for index, (group, members) in enumerate(zip(self.param_groups, self._members, strict=True)):
            self._check_group(index, group, members)
            settings = self._read(group)
            for record in members:
                yield record.name, settings

    def _check_group(self, index: int, group: dict[str, Any], members: Sequence[TensorRecord]) -> None:
        """What the engine cannot follow must not be passed over."""
        found = group["params"]
        if len(found) != len(members) or any(a is not b.parameter for a, b in zip(found, members, strict=True)):
            raise InvalidInput(
                f"param_groups[{index}]['params'] was changed; which parameters belong to a group is settled by "
                "chunked(): release(model) and call it again with other groups"
            )
        self._check_fixed(f"param_groups[{index}]", group)

    def _check_fixed(self, where: str, group: dict[str, Any]) -> None:
        for key, value in self._fixed.items():
            if key not in FREE and group.get(key, value) != value:
                raise InvalidInput(f"{where}[{key!r}] is {group[key]!r}; the engine's {self._name} has only {value!r}")

    def _read(self, group: dict[str, Any]) -> Settings:
        """Values may be tensors (a learning rate that a compiled loop changes)."""
        lr, decay = _float("lr", group["lr"]), _float("weight_decay", group["weight_decay"])
        if self._rule is Rule.SGD:
            return Settings(kind=Rule.SGD, lr=lr, weight_decay=decay, momentum=_float("momentum", group["momentum"]))
        first, second = (_float("betas", beta) for beta in group["betas"])
        return Settings(
            kind=Rule.ADAM,
            lr=lr,
            weight_decay=decay,
            betas=(first, second),
            eps=_float("eps", group["eps"]),
            decoupled=self._fixed["decoupled_weight_decay"],
        )

    # ---- state ----

    def state_dict(self, *, masters: bool = False) -> dict[str, Any]:
        """Copies on the CPU, in torch's format; see [Note: one format]."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state, weights, groups, index = {}, {}, [], 0
        for group, members in zip(self.param_groups, self._members, strict=True):
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append({**packed, "params": list(range(index, index + len(members)))})
            for record in members:
                if entry := self._state_of(record, group):
                    state[index] = entry
                if masters and record.trainable:
                    weights[index] = self._gradients.read_state(record, Kind.P32)
                index += 1
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        if masters:
            found[MASTERS] = weights
        if self._loss_scale is not None:
            found[LOSS_SCALE] = self._loss_scale.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def _state_of(self, record: TensorRecord, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        if not record.steps or (self._rule is Rule.SGD and not group["momentum"]):
            return {}
        moments = {name: self._gradients.read_state(record, kind) for name, kind in STATES[self._rule].items()}
        return moments if self._rule is Rule.SGD else {"step": torch.tensor(float(record.steps)), **moments}

    @alone
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` of this, or of torch's optimizer of the same kind and groups, gave.

        Everything is checked before anything is changed. Without ``"masters"`` parameters stay as they are.
        """
        given = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        groups = self._match_groups(given["param_groups"])
        keys = (key for group in given["param_groups"] for key in group["params"])
        states = [
            (record, self._checked_state(record, given["state"].get(key, {})), self._checked_master(record, key, given))
            for record, key in zip(self._records(), keys, strict=True)
        ]
        if self._loss_scale is not None and LOSS_SCALE in given:
            self._loss_scale.load_state_dict(given[LOSS_SCALE])
        for record, (steps, moments), master in states:
            self._write(record, steps, moments, master)
        self.param_groups = groups
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _match_groups(self, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups as they will be."""
        sizes, found = [len(rows) for rows in self._members], [len(group["params"]) for group in saved]
        if sizes != found:
            raise InvalidInput(
                f"this state has groups of {found} parameters, the optimizer has groups of {sizes}: param_groups[0] "
                "is what no Group matches, then one for each Group, frozen parameters included"
            )
        matched = []
        for index, (own, theirs) in enumerate(zip(self.param_groups, saved, strict=True)):
            self._check_fixed(f"the state's param_groups[{index}]", theirs)
            absent = [key for key in NUMBERS if key in own and key not in theirs]
            if absent:
                raise InvalidInput(f"the state's param_groups[{index}] has no {absent[0]!r}: is it {self._name}'s?")
            names = {key: own[key] for key in ("params", "param_names")}
            numbers = {key: value for key, value in theirs.items() if key not in names}
            matched.append({**own, **deepcopy(numbers), **names})
            self._read(matched[-1])
        return matched

    def _checked_state(self, record: TensorRecord, entry: dict[str, Any]) -> tuple[int, dict[Kind, torch.Tensor]]:
        """Steps so far and moments. Empty: never stepped."""
        kinds = STATES[self._rule]
        present = {name: entry[name] for name in kinds if entry.get(name) is not None}
        if not present and not (self._rule is Rule.ADAM and entry):
            return 0, {}
        absent = sorted({*kinds, *(("step",) if self._rule is Rule.ADAM else ())} - entry.keys())
        if absent:
            raise InvalidInput(
                f"the state of {record.name!r} has no {absent[0]!r}, found {sorted(entry)}: is it {self._name}'s?"
            )
        if not record.trainable:
            raise InvalidInput(f"there is a state for {record.name!r}, which is frozen; unfreeze it before chunked()")
        moments = {kinds[name]: _shaped(f"{name} of {record.name!r}", value, record) for name, value in present.items()}
        return (int(entry["step"]) if self._rule is Rule.ADAM else 1), moments

    def _checked_master(self, record: TensorRecord, key: int, given: dict[str, Any]) -> torch.Tensor | None:
        value = given.get(MASTERS, {}).get(key)
        if value is None or not record.trainable:
            return None
        return _shaped(f"the master of {record.name!r}", value, record)

    def _write(
        self, record: TensorRecord, steps: int, moments: dict[Kind, torch.Tensor], master: torch.Tensor | None
    ) -> None:
        if record.steps and not moments:
            moments = {kind: torch.zeros(record.shape) for kind in STATES[self._rule].values()}
        values = moments if master is None else {**moments, Kind.P32: master}
        for kind, value in values.items():
            self._gradients.write_state(record, kind, value.detach().to("cpu", torch.float32))
        record.steps = steps

    # ---- what torch's optimizers can do and this cannot ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is being made."""
        if self._complete:
            raise InvalidInput(
                "add_param_group: memory is laid out for the parameters that chunked() was given; add the parameters "
                "to the model first, or release(model) and call chunked() again with another Group"
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidInput(
            "a ChunkedOptimizer cannot be copied or pickled, its state is in the engine's chunks; use state_dict()"
        )

    def __repr__(self) -> str:
        rows = [f"ChunkedOptimizer({self._name}, max_grad_norm={self.max_grad_norm}, loss_scale={self.loss_scale:g})"]
        for index, group in enumerate(self.param_groups):
            numbers = ", ".join(f"{name}={group[name]}" for name in NUMBERS if name in group)
            rows.append(f"  group {index}: {len(group['params'])} parameters, {numbers}")
        return "\n".join(rows)


def _members(optimizer: Optimizer, records: Iterable[TensorRecord]) -> list[list[TensorRecord]]:
    """The records of each group: first those no `Group` matches."""
    members: list[list[TensorRecord]] = [[] for _ in range(len(optimizer.groups) + 1)]
    for record in records:
        matches = (i for i, group in enumerate(optimizer.groups, 1) if group.match(record.name, record.parameter))
        members[next(matches, 0)].append(record)
    return members


def _numbers(source: object) -> dict[str, Any]:
    """Those of the optimizer, or those a Group sets itself."""
    return {name: value for name in NUMBERS if (value := getattr(source, name, None)) is not None}


def _group(source: object, members: Sequence[TensorRecord]) -> dict[str, Any]:
    # Names apart: pairs of name and parameter, which torch takes too, would leave an empty group without names.
    parameters, names = [record.parameter for record in members], [record.name for record in members]
    return {"params": parameters, "param_names": names, **_numbers(source)}


def _float(name: str, value: Any) -> float:
    """Of what somebody has put into a group (any: a number, or a tensor of one)."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidInput(f"{name} must be a number when the optimizer steps, found {value!r}") from None


def _check_max_norm(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidInput(f"max_grad_norm must be a number above 0, or None; found {value!r}")


def _shaped(what: str, value: Any, record: TensorRecord) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != record.shape:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        raise InvalidInput(f"{what} must be a tensor of shape {tuple(record.shape)}, found {found}")
    return value
