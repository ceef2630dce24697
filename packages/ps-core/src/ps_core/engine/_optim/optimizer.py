"""Define the optimizer of a training loop: ``torch.optim.Optimizer``'s interface to the engine's step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from ps_core._errors import InvalidInput
from ps_core._extents import Kind
from ps_core.engine._gradients.loss_scale import LossScale, Scaler
from ps_core.engine._optim.optimizer_state_dict import LOSS_SCALE, check_form, match_groups, pack, unpack
from ps_core.engine._optim.rules import OptimizerRule, Spec
from ps_core.engine._optim.settings import OptimizerBackend, Outcome, StatePlace, StepSettings
from ps_core.engine._optim.state_format import StateEntry, StateFormat, on_cpu
from ps_core.engine._optim.state_mapping import OptimizerState
from ps_core.engine._support.interrupts import defer_interrupts_installing
from ps_core.engine._support.not_compiled import graph_break

if TYPE_CHECKING:
    from ps_core.engine._parameters.param_state import ParamState

_PARAMETER = attrgetter("parameter")
R = TypeVar("R")


class ChunkedOptimizer(torch.optim.Optimizer):
    """The optimizer that ``chunked`` returns beside the model. ``param_groups`` are read at every step."""

    masters_in_state_dict = True
    """Default of `state_dict`: True to include the fp32 masters of parameters with 16-bit weights."""

    def __init__(
        self,
        gradients: OptimizerBackend,
        records: Sequence[ParamState],
        rule: OptimizerRule,
        *,
        loss_scale: LossScale | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Make the optimizer; ``records``: every managed parameter, in the order of ``model.parameters()``."""
        _check_max_norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self._gradients, self._loss_scale = gradients, loss_scale
        self.rule = rule
        self._outcome: Outcome | None = None
        self._scaled = False
        self._source = records
        """Every managed parameter; the engine adds those that were added to the model."""
        self._members = _members(rule.spec, records)
        self._groups_of = {record: index for index, rows in enumerate(self._members) for record in rows}
        self._begun_with = {record for record in records if record.trainable}
        self._unlisted: list[ParamState] = []
        self._awaited: dict[int, tuple[torch.Tensor, int]] = {}
        """Parameters that `add_param_group` was given and the model does not have yet: by id, with their group."""
        self._format = StateFormat(gradients, rule, self._kept, self._places)
        self._state = OptimizerState(self._format, list(self._records()), self._keys, self._replace)
        self._complete = False
        super().__init__(
            [_group(settings, rows) for settings, rows in zip(rule.groups, self._members, strict=True)],
            rule.defaults,
        )
        if loss_scale is not None:
            self.param_groups[0][LOSS_SCALE] = None  # a place for `state_dict`, which torch's flattening asks for
        self._complete = True

    # ---- training ----

    @graph_break
    def step(self, closure: Callable[[], R] | None = None) -> R | None:  # type: ignore[override]  # any result, not a float
        """Update the parameters from the gradients that backward left; nothing if one of them is not finite.

        ``closure``: a function that runs forward and backward. It is called once, and its result is returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._update()
        return result

    @defer_interrupts_installing
    @torch.no_grad()
    def _update(self) -> None:
        """Update the parameters from the gradients that are there."""
        self._gradients.check_usable()
        settings_of = self.settings()
        if not self._gradients.has_gradients():
            return
        if self.rule.whole:
            self._check_shapes()
        scaler = self._loss_scale if self._scaled else None
        if self._loss_scale is not None and scaler is None and not self._all_assigned():
            raise InvalidInput(
                "precision fp16, but the loss was not scaled, so its gradients may have been lost to rounding: call "
                "optimizer.scale(loss).backward() in place of loss.backward(); where Accelerate or the Trainer calls "
                "backward, give it optimizer.scaler (trainer.accelerator.scaler = optimizer.scaler)"
            )
        self._outcome = self._gradients.step(settings_of, self.max_grad_norm, 1.0 if scaler is None else scaler.value)
        if scaler is not None:
            scaler.update(skipped=self._outcome.skipped)

    @graph_break
    @defer_interrupts_installing
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if not set_to_none:
            raise InvalidInput(
                "zero_grad(set_to_none=False) asks for gradients of zeros, which would take memory; use zero_grad()"
            )
        self._scaled = False
        self._gradients.discard_gradients()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward on: times the loss scale in fp16, else as it is."""
        if self._loss_scale is None:
            return loss
        self._scaled = True
        return self._loss_scale.scale(loss)

    @property
    def scaler(self) -> Scaler:
        """Return `scale` and `step` under the names of ``torch.amp.GradScaler``, for code that expects one."""
        return Scaler(self, self._loss_scale)

    @property
    def loss_scale(self) -> float:
        """Return the factor that `scale` multiplies by."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    @property
    def processes(self) -> int:
        """Return how many processes share the model."""
        return self._gradients.processes

    @property
    def last_norm(self) -> float | None:
        """Return the last step's global gradient norm, unclipped and without the loss scale; None before any step."""
        return None if self._outcome is None else self._outcome.norm

    @property
    def last_skipped(self) -> bool:
        """Return True if the last step was skipped because a gradient, or the norm to clip by, was not finite."""
        return self._outcome is not None and self._outcome.skipped

    def _all_assigned(self) -> bool:
        """Return True if no gradient comes from backward. Assigned gradients were not rounded, and have no loss
        scale.
        """
        return all(record.assigned for record in self._records() if self._gradients.has_gradient(record))

    def _check_shapes(self) -> None:
        """Raise `InvalidInput` before a step if a parameter that is trained since `chunked` cannot be stepped whole."""
        for record, index in self._groups_of.items():
            if self._gradients.has_gradient(record):
                self.rule.check_parameter(index, record.name, record.shape)

    def _records(self) -> Iterator[ParamState]:
        return (record for members in self._members for record in members)

    def _take_in(self) -> None:
        """Add parameters that were added to the model to the groups that match them."""
        added = self._source[len(self._groups_of) :]
        if not added:
            return
        self._state.add(added)
        for index, found in enumerate(_members(self.rule.spec, added)):
            for record in found:
                _, chosen = self._awaited.pop(id(record.parameter), (None, index))
                self._list(record, chosen)

    def _list(self, record: ParamState, index: int) -> None:
        """Put a parameter into a param group."""
        self.param_groups[index]["params"].append(record.parameter)
        self.param_groups[index]["param_names"].append(record.name)
        self._members[index].append(record)
        self._groups_of[record] = index

    def _unlist(self, record: ParamState) -> None:
        """Take a parameter out of its param group; the group's settings stay those of the parameter."""
        index = self._groups_of[record]
        place = self._members[index].index(record)
        for rows in (self.param_groups[index]["params"], self.param_groups[index]["param_names"], self._members[index]):
            del rows[place]

    def _list_trained(self) -> None:
        """Put what is trained now into its group; raise `InvalidInput` for gradients that are not the model's."""
        for record in [each for each in self._unlisted if each.trainable]:
            self._unlisted.remove(record)
            self._list(record, self._groups_of[record])
        if any(parameter.grad is not None for parameter, _ in self._awaited.values()):
            raise InvalidInput(
                "add_param_group was given parameters that have gradients and are not the model's: add their module to "
                "the model, and call the model"
            )

    def complete_groups(self) -> None:
        """List parameters that were added to the model, or are trained since, in their param groups."""
        self._take_in()
        if self._unlisted or self._awaited:
            self._list_trained()

    def name_groups(self) -> None:
        """Write the parameters' present names into the param groups: modules may have been moved since `chunked`."""
        for group, members in zip(self.param_groups, self._members, strict=False):  # the user may have assigned others
            if "param_names" in group:
                group["param_names"] = [record.name for record in members]

    def _leave_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take frozen parameters out of the param groups until they are trained, or `add_param_group` names them."""
        wanted = set(map(id, parameters))
        for record in [each for each in self._records() if id(each.parameter) in wanted and not each.trainable]:
            self._unlist(record)
            self._unlisted.append(record)

    def settings(self) -> Callable[[ParamState], StepSettings]:
        """Return a function that returns a parameter's settings, as the groups have them now."""
        if len(self._source) > len(self._groups_of) or self._unlisted or self._awaited:
            self.complete_groups()
        if len(self.param_groups) != len(self._members):
            raise InvalidInput(
                f"param_groups was assigned {len(self.param_groups)} groups, expected {len(self._members)}: assign as "
                "many, and add others by add_param_group"
            )
        found: dict[ParamState, StepSettings] = {}
        of_groups: list[StepSettings] = []
        for index, (group, members) in enumerate(zip(self.param_groups, self._members, strict=True)):
            self._check_group(index, group, members)
            of_groups.append(self.rule.read(index, group))
            found.update(dict.fromkeys(members, of_groups[index]))
        for record in self._unlisted:  # ranks compare the settings of all
            found[record] = of_groups[self._groups_of[record]]
        return found.__getitem__

    def _check_group(self, index: int, group: dict[str, Any], members: Sequence[ParamState]) -> None:
        """Raise `InvalidInput` if a param group was changed in a way that the engine cannot follow."""
        found = group["params"]
        if len(found) != len(members) or not all(map(is_, found, map(_PARAMETER, members))):
            raise InvalidInput(
                f"param_groups[{index}]['params'] was changed; which parameters belong to a group is settled by "
                "chunked(): release(model) and call it again with other groups"
            )
        self.rule.check(f"param_groups[{index}]", group)

    # ---- state ----

    @property  # type: ignore[override]  # torch's is an attribute, a defaultdict
    def state(self) -> OptimizerState:
        """Return each parameter's state, which is read on access; assignments are written to the engine."""
        if self._complete:  # torch's constructor looks, too
            self._take_in()
        return self._state

    @state.setter
    def state(self, entries: Mapping[Any, Mapping[str, Any]]) -> None:
        if self._complete:  # torch's constructor assigns an empty one
            self._state.assign(entries)

    def state_dict(self, *, masters: bool | None = None) -> dict[str, Any]:
        """Copy everything to the CPU, in the format of torch's optimizer; see [Note: one format].

        ``masters``: with the fp32 parameters, or without; None: of those whose weights are 16 bits, unless
        `masters_in_state_dict` is False.
        """
        self._take_in()
        self.name_groups()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if masters is None and _moved_by_accelerate(sys._getframe(1)) and not self._state:
            masters = False
        found = pack(self.rule, self.param_groups, self._members, lambda record: self._entry(record, masters))
        if self._loss_scale is not None:
            found[LOSS_SCALE] = found["param_groups"][0][LOSS_SCALE] = self._loss_scale.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def _entry(self, record: ParamState, masters: bool | None) -> dict[str, Any]:
        """Copy a parameter's entry of `state_dict` to the CPU."""
        values = {}
        for key in self._keys(record, masters):
            value = self._format.read(record, key)
            values[key] = self._gradients.state_dict_value(value) if isinstance(value, torch.Tensor) else value
        return values

    def _keys(self, record: ParamState, masters: bool | None = None) -> tuple[str, ...]:
        """Return the names in a parameter's entry of `state_dict` and `state`."""
        if masters is None:
            masters = self.masters_in_state_dict and record.dtype.itemsize < 4
        return self._format.keys(record, master=masters)

    def _kept(self, record: ParamState) -> tuple[str, ...]:
        """Name what the entry of a stepped parameter holds."""
        index = self._groups_of[record]
        return (*self.rule.scalar_names(index), *self.rule.places(index, record.shape, self.param_groups[index]))

    def _places(self, record: ParamState) -> tuple[tuple[str, ...], Mapping[str, StatePlace]]:
        """Name the single values that it may hold, whatever the settings, and return where its tensors are."""
        index = self._groups_of[record]
        return self.rule.scalar_names(index), self.rule.places(index, record.shape)

    @defer_interrupts_installing
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this optimizer, or of PyTorch's optimizer of the same kind and groups.

        Everything is checked before anything is changed. Parameters change where the state holds their masters. They do
        not if other weights were loaded since the last step; see [Note: which is loaded first].
        """
        given = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        check_form(given)
        groups = self._match_groups(given["param_groups"])
        entries = unpack(given, groups, self._records(), self._format)
        scale = given.get(LOSS_SCALE) or given["param_groups"][0].get(LOSS_SCALE)
        if self._loss_scale is not None and scale:
            LossScale().load_state_dict(scale)  # so that a wrong one is refused before anything changes
        with self._gradients.loading("optimizer.load_state_dict(...)"):
            for record, entry in entries.items():
                self._format.write(record, entry)
                if entry.master is not None:
                    self._gradients.load_master(record, on_cpu(entry.master))
        if self._loss_scale is not None and scale:
            self._loss_scale.load_state_dict(scale)
        self.param_groups = groups
        self._gradients.states_loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @defer_interrupts_installing
    def _replace(self, entries: Mapping[ParamState, StateEntry]) -> None:
        """Write the entries that were assigned to `state`."""
        with self._gradients.loading("optimizer.state = ..."):
            for record, entry in entries.items():
                self._format.write(record, entry)
                if entry.master is not None:
                    self._gradients.write_state(record, Kind.P32, on_cpu(entry.master))
        self._gradients.compare_writes()

    def _match_groups(self, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the param groups with the saved numbers; raise `InvalidInput` if the saved groups do not match."""
        self._take_in()
        self.name_groups()
        return match_groups(self.rule, self.param_groups, list(map(len, self._members)), saved)

    def _append_group(self, param_group: dict[str, Any]) -> None:
        """Append a param group by PyTorch's own method, without its decorator.

        The decorator imports PyTorch's compiler, only to switch it off: that takes a second and 70 MB.
        """
        add = torch.optim.Optimizer.add_param_group
        getattr(add, "__wrapped__", add)(self, param_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group for parameters that were unfrozen, or added to the model, since `chunked`."""
        if not self._complete:
            self._append_group(param_group)
            return
        self._take_in()
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        parameters = [each[1] if isinstance(each, tuple) else each for each in listed]
        known = {id(record.parameter): record for record in self._groups_of}
        found = [known[id(each)] for each in parameters if id(each) in known]
        for record in found:
            if record in self._begun_with or record.steps:
                raise InvalidInput(
                    f"add_param_group: {record.name!r} is trained with param_groups[{self._groups_of[record]}] "
                    "already; give it parameters that were frozen at chunked() or added since, or release(model) and "
                    "call chunked() again with another Group"
                )
        own = {**self.defaults, **{key: value for key, value in param_group.items() if key != "params"}}
        index = len(self.param_groups)
        self.rule.check("add_param_group", own)
        self.rule.add_group(own)
        self._members.append([])
        self._append_group({**own, "params": [], "param_names": []})
        for record in found:
            if record in self._unlisted:
                self._unlisted.remove(record)
            else:
                self._unlist(record)
            self._begun_with.add(record)
            self._list(record, index)
        self._awaited |= {id(each): (each, index) for each in parameters if id(each) not in known}

    def awaits(self, parameter: torch.Tensor) -> bool:
        """Return True for a parameter that `add_param_group` was given and the model does not have yet."""
        return id(parameter) in self._awaited

    # ---- what torch's optimizers can do and this cannot ----

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidInput(
            "a ChunkedOptimizer cannot be copied or pickled, its state is in the engine's chunks; use state_dict()"
        )

    def __repr__(self) -> str:
        rows = [
            f"ChunkedOptimizer({self.rule.name}, max_grad_norm={self.max_grad_norm}, loss_scale={self.loss_scale:g})"
        ]
        for index, group in enumerate(self.param_groups):
            numbers = ", ".join(f"{name}={group[name]}" for name in self.rule.groups[index])
            rows.append(f"  group {index}: {len(group['params'])} parameters, {numbers}")
        return "\n".join(rows)


def _members(optimizer: Spec, records: Iterable[ParamState]) -> list[list[ParamState]]:
    """Return the records of each group: first those that no `Group` matches."""
    members: list[list[ParamState]] = [[] for _ in range(len(optimizer.groups) + 1)]
    for record in records:
        matches = (i for i, group in enumerate(optimizer.groups, 1) if group.match(record.name, record.parameter))
        members[next(matches, 0)].append(record)
    return members


def _group(settings: Mapping[str, Any], members: Sequence[ParamState]) -> dict[str, Any]:
    # Names apart: pairs of name and parameter, which torch takes too, would leave an empty group without names.
    parameters, names = [record.parameter for record in members], [record.name for record in members]
    return {"params": parameters, "param_names": names, **settings}


def _check_max_norm(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidInput(f"max_grad_norm must be a number above 0, or None; found {value!r}")


def _moved_by_accelerate(caller: FrameType) -> bool:
    """Return True for Accelerate's wrapper, which moves a new optimizer's state to the accelerator, and back.

    Before the first step that state has nothing new for the engine, and the masters might not fit there.
    """
    return caller.f_globals.get("__name__") == "accelerate.optimizer" and caller.f_code.co_name == "__init__"
