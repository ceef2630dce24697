"""Optimizer settings, parameter groups, budgets and options refuse what cannot work."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from ps_core._errors import InvalidInput
from ps_core._options import (
    SGD,
    Adam,
    AdamW,
    Budget,
    Group,
    Options,
    TorchOptimizer,
    check_unused,
    for_parameter,
    mark_used,
)


def is_bias(name, parameter):
    return name.endswith("bias")


def test_the_first_matching_group_wins():
    optimizer = AdamW(
        lr=1e-3,
        weight_decay=0.1,
        groups=(Group(match=is_bias, weight_decay=0.0), Group(match=lambda name, _: True, betas=(0.5, 0.6), lr=0.2)),
    )
    assert for_parameter(optimizer, "a.bias") == AdamW(lr=1e-3, weight_decay=0.0)
    assert for_parameter(optimizer, "a.weight") == AdamW(lr=0.2, weight_decay=0.1, betas=(0.5, 0.6))
    assert for_parameter(SGD(momentum=0.9), "a.weight") == SGD(momentum=0.9)


def test_a_match_sees_the_parameter():
    optimizer = SGD(groups=(Group(match=lambda name, parameter: parameter == 3, momentum=0.5),))
    assert for_parameter(optimizer, "w", 3).momentum == 0.5
    assert for_parameter(optimizer, "w", 4).momentum == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(lr=-1),
        lambda: AdamW(lr=float("nan")),
        lambda: AdamW(lr=10**5000),
        lambda: Options(prefetch=10**400),
        lambda: SGD(lr=float("inf")),
        lambda: SGD(lr=True),
        lambda: SGD(lr="fast"),
        lambda: SGD(momentum=1.0),
        lambda: Adam(weight_decay=-0.1),
        lambda: Adam(betas=(0.9, 1.0)),
        lambda: Adam(betas=0.9),
        lambda: AdamW(betas=(0.9, 0.9, 0.9)),
        lambda: AdamW(eps=-1e-8),
        lambda: AdamW(groups=[Group(match=is_bias)]),
        lambda: AdamW(groups=({"match": is_bias},)),
        lambda: AdamW(groups=(Group(match="bias"),)),
        lambda: AdamW(groups=(Group(match=lambda name: True),)),
        lambda: AdamW(groups=(Group(match=is_bias, momentum=0.9),)),
        lambda: SGD(groups=(Group(match=is_bias, betas=(0.9, 0.9)),)),
        lambda: SGD(groups=(Group(match=is_bias, lr=-1.0),)),
        lambda: SGD(groups=(Group(match=is_bias, kind=dict),)),
        lambda: AdamW(groups=(Group(match=is_bias, kind="Adam"),)),
        lambda: Budget(device="20Gb?"),
        lambda: Budget(host=-1),
        lambda: Budget(disk="1GB"),
        lambda: Budget(disk_dir="/scratch"),
        lambda: Budget(disk="1GB", disk_dir=""),
        lambda: Budget(disk="1GB", disk_dir=3),
        lambda: Options(group_bytes=0),
        lambda: Options(group_bytes="lots"),
        lambda: Options(policy="random"),
        lambda: Options(prefetch=-1),
        lambda: Options(prefetch=1.5),
        lambda: Options(prefetch=True),
        lambda: Options(poison=1),
        lambda: Options(pin=None),
        lambda: Options(cast_inputs="yes"),
        lambda: Options(keep_fp32="norm"),
        lambda: Options(keep_fp32=(1,)),
        lambda: Options(plan_cache=3),
        lambda: Options(machine=3),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_match_that_tells_nothing_of_its_arguments_is_taken():
    groups = (Group(match=max, lr=0.1),)
    assert AdamW(groups=groups).groups == groups


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Budget("8GB"), r"Budget takes values by name, as in Budget\(device='8GiB'\); found '8GB' without one"),
        (
            lambda: AdamW(iter(())),
            r"as in AdamW\(lr=1e-3\), for the parameters of the model .*; found a tuple_iterator",
        ),
        (lambda: SGD(0.1), r"as in SGD\(lr=1e-3\), for .*; found 0\.1 without one"),
        (lambda: Options({}), r"as in Options\(prefetch=2\); found a dict without one"),
        (lambda: Group(is_bias, lr=1), r"as in Group\(match=lambda name, _: .*; found a function without one"),
        (lambda: Budget(device_memory="8GB"), "Budget has no 'device_memory'; it has device, host, disk, disk_dir$"),
        (
            lambda: Options(eager_step=True),
            "Options has no 'eager_step'; it has group_bytes, policy, prefetch, .*, machine, step$",
        ),
        (lambda: Options(step="soon"), "step must be one of after_backward, in_backward, speculative; found 'soon'"),
        (lambda: Adam(rate=1), "Adam has no 'rate'; it has lr, betas, eps, weight_decay, groups$"),
        (
            lambda: Adam(amsgrad=True, fused=True, groups=()),
            r"Adam has no 'amsgrad'; .*has it: TorchOptimizer\(torch.optim.Adam, amsgrad=True, groups=...\)$",
        ),
        (
            lambda: SGD(lr=0.1, momentum=0.9, nesterov=True),
            r"has it: TorchOptimizer\(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True\)$",
        ),
        (lambda: AdamW(amsgrad=False), "Leave amsgrad out: it is off$"),
        (lambda: AdamW(fused=True), "Leave fused out: steps are those of PyTorch's fused optimizer$"),
    ],
)
def test_values_are_given_by_their_names(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


def test_a_class_of_pytorch_with_its_settings():
    groups = (Group(match=is_bias, lr=0.1, settings={"alpha": 0.5}),)
    optimizer = TorchOptimizer(dict, lr=1e-3, momentum=0.9, groups=groups)
    assert (optimizer.kind, optimizer.settings, optimizer.groups) == (dict, {"lr": 1e-3, "momentum": 0.9}, groups)
    assert groups[0].overrides == {"lr": 0.1, "alpha": 0.5}
    assert repr(optimizer) == "TorchOptimizer(dict, lr=0.001, momentum=0.9)"
    assert pickle.loads(pickle.dumps(TorchOptimizer(dict, lr=1))).settings == {"lr": 1}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TorchOptimizer([]), r"as in TorchOptimizer\(torch.optim.RMSprop, lr=1e-3\); found a list"),
        (lambda: TorchOptimizer(dict, groups=[]), r"groups must be a tuple of Group\(match=..., ...\), found \[\]"),
        (lambda: TorchOptimizer(dict, groups=(Group(match=is_bias, settings=3),)), "Group.settings must be .* found 3"),
        (lambda: AdamW(groups=(Group(match=is_bias, settings={"alpha": 1}),)), "AdamW has no 'alpha' for a Group to"),
    ],
)
def test_a_class_of_pytorch_without_sense(make, words):
    with pytest.raises(InvalidInput, match=words):
        make()


def test_they_are_copied_as_they_are():
    for value in (Budget(device="1MiB"), AdamW(lr=0.1, groups=(Group(match=is_bias, lr=1),)), Options(prefetch=1)):
        assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == replace(value) == value


def test_sizes_may_be_numbers_or_texts():
    budget = Budget(device="1.5GiB", host=4096, disk="2GB", disk_dir="scratch")
    assert (budget.device_bytes, budget.host_bytes, budget.disk_bytes) == (3 << 29, 4096, 2 * 10**9)
    assert (Budget().device_bytes, Budget().host_bytes, Budget().disk_bytes) == (None, None, None)
    assert Options(group_bytes="64MiB", prefetch=0, keep_fp32=("norm",), plan_cache="plans").policy == "belady"


def test_defaults():
    assert Options() == Options(
        group_bytes=None,
        policy="belady",
        prefetch=None,
        poison=False,
        pin=True,
        keep_fp32=(),
        cast_inputs=True,
        plan_cache=None,
        machine=None,
    )
    assert Adam() == Adam(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    assert AdamW().weight_decay == 0.01


def test_options_are_frozen_and_keyword_only():
    with pytest.raises(FrozenInstanceError):
        Options().poison = True  # type: ignore[misc]
    with pytest.raises(InvalidInput):
        AdamW(1e-3)  # type: ignore[misc]


def test_a_budget_is_for_one_model_at_a_time() -> None:
    budget, managed = Budget(device="1MiB"), [True]
    check_unused(budget, "Student")
    mark_used(budget, "Teacher", lambda: managed[0])
    with pytest.raises(InvalidInput, match=r"given to Student is in use by another model, Teacher, .*budget\.split"):
        check_unused(budget, "Student")
    check_unused(replace(budget), "Student")
    managed[0] = False
    check_unused(budget, "Student")
