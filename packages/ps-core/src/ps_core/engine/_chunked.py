"""``chunked``: put a model under management."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from ps_core._errors import AlreadyManaged, InvalidInput, UnsupportedParameter
from ps_core._options import Budget, Optimizer, Options
from ps_core._plan import Tier
from ps_core._program import Precision
from ps_core.engine._blocks import refuse_compiled
from ps_core.engine._bystanders import bring_along
from ps_core.engine._cuda.device import cuda_device
from ps_core.engine._device import Device
from ps_core.engine._disk.file import DiskFile
from ps_core.engine._eager import Eager
from ps_core.engine._emulated.standin import StandIn
from ps_core.engine._engine import Engine
from ps_core.engine._management import Management
from ps_core.engine._messages import say
from ps_core.engine._optimizer import ChunkedOptimizer
from ps_core.engine._packing import DTYPES, pack
from ps_core.engine._parameter import ManagedParameter
from ps_core.engine._pilot import Pilot
from ps_core.engine._placing import fill, place
from ps_core.engine._processes.joining import Alone, Joining, Unplanned
from ps_core.engine._processes.together import Together
from ps_core.engine._scaler import LossScale
from ps_core.engine._sharing import Sharing, data_bytes
from ps_core.engine._store import Store
from ps_core.engine._surgery import undo
from ps_core.engine._tracing.materialise import initial_values

_WEIGHTS_OF_GROUP = 7
"""A group's bytes over those of its weights, in 16 bits."""
_KEPT_FREE = 10
"""One part in so many of a tier is left alone where no budget is given."""


def chunked(  # noqa: PLR0913 - one name for each thing a user may want to say
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    device: str | Device = "cpu",
    budget: Budget | None = None,
    precision: str | Precision = Precision.BF16,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    collectives: Together | None = None,
    options: Options | None = None,
) -> tuple[nn.Module, ChunkedOptimizer | None]:
    """Put a model's parameters under management; train it afterwards by a plain PyTorch loop.

    The model is changed in place and returned with the optimizer (None without one). Parameters on ``meta`` are
    initialised group by group; the memory of others is consumed as they are packed. ``device`` is ``"cpu"``,
    ``"cuda"`` (or ``"cuda:1"``), or ``"emulated"`` (an accelerator of ``budget.device`` bytes, played by the CPU).
    With ``collectives`` (``ps_dist.connect()``) several processes share the model, each on its part of the batch.
    """
    options, budget = options or Options(), budget or Budget()
    mode = _precision(precision)
    _check(model, accumulation_steps)
    if options.eager_step:
        _check_eager(mode, accumulation_steps, max_grad_norm, disk=budget.disk is not None)
    where = _device(device, pin=options.pin)
    joining = Alone() if collectives is None else Joining(collectives)
    joining.check(where, options)
    training = optimizer is not None
    size = data_bytes(model, mode, training=training, accumulates=accumulation_steps > 1)
    whole = _tiers(where, budget, joining.sharers)
    with Sharing(budget, type(model).__name__, size, whole, alone=collectives is None) as sharing:
        tiers = sharing.begin()
        device_bytes = _passing_bytes(tiers) if len(tiers) > 1 else None
        packing = pack(model, options, mode, training=training, device_bytes=device_bytes)
        joining.share(packing, optimizer, f"{mode.value}, {accumulation_steps=}, {max_grad_norm=}")
        store = Store(where, tiers, poison=options.poison, file=_disk_file(budget))
        store.whole = sharing.whole
        overwrites = mode is not Precision.FP32 and accumulation_steps == 1
        sums = training and not overwrites and not options.eager_step and len(tiers) > 1
        if collectives is not None:
            store.still, sums = False, training and not overwrites
        place(store, packing.groups, accumulates=sums)
        loss_scale = LossScale() if mode is Precision.FP16 and training else None
        engine = Engine(
            store,
            packing.groups,
            overwrites=overwrites,
            loss_scale=loss_scale,
            constant_bytes=_constant_bytes(model, where),
            together=collectives,
            prefetch=options.prefetch,
        )
        cast = DTYPES[mode] if options.cast_inputs else None
        pilot: Pilot | Unplanned = Unplanned(training=training)
        if collectives is None:
            pilot = Pilot(
                engine,
                model_name=type(model).__name__,
                precision=mode,
                accumulate=accumulation_steps,
                training=training,
                options=options,
                cast=cast,
            )
        front = None
        if optimizer is not None:
            front = ChunkedOptimizer(
                engine, engine.records, optimizer, loss_scale=loss_scale, max_grad_norm=max_grad_norm
            )
            if options.eager_step:
                engine.eager = Eager(engine.passes, engine.gradients, engine.updater, front.settings)
        try:
            fill(packing.records, joining.values(initial_values(model)), engine)
            bring_along(model, where.torch_device)
            Management(model, engine, pilot, cast=cast).install()
        except BaseException:
            undo(engine)
            raise
        sharing.join(engine)
    return model, front


def _precision(precision: str | Precision) -> Precision:
    try:
        return Precision(precision)
    except ValueError:
        known = ", ".join(mode.value for mode in Precision)
        raise InvalidInput(f"precision must be one of {known}; found {precision!r}") from None


def _check(model: nn.Module, accumulation_steps: int) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"chunked(model, ...) expects an nn.Module, found {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ManagedParameter):
            raise AlreadyManaged(f"{name!r} is under management already: release(model) first")
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        raise InvalidInput(f"{type(model).__name__} has no parameters to manage")
    refuse_compiled(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedParameter(
                f"{name or type(model).__name__!r} is TorchScript, which reads parameters past every hook: build the "
                "model from the Python module"
            )
    steps = accumulation_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise InvalidInput(f"accumulation_steps must be a whole number of at least 1, found {steps!r}")


def _check_eager(mode: Precision, accumulation_steps: int, max_grad_norm: float | None, *, disk: bool) -> None:
    """Stepping during backward leaves out what only the end of backward can tell."""
    if disk:
        raise InvalidInput("Options.eager_step with Budget.disk: steps amid a pass would wait for it; choose one")
    if mode is Precision.FP16:
        raise InvalidInput("Options.eager_step with precision='fp16': no step could be skipped; use 'bf16' or 'fp32'")
    if accumulation_steps != 1:
        raise InvalidInput("Options.eager_step is one backward a step: leave accumulation_steps at 1")
    if max_grad_norm is not None:
        raise InvalidInput("Options.eager_step steps before the norm is known: leave max_grad_norm out")


def _constant_bytes(model: nn.Module, device: Device) -> int:
    """Non-model data that is always there; where the tide sees it, it is not counted twice."""
    return sum(buffer.nbytes for buffer in model.buffers()) if device.lazy else 0


def _device(device: str | Device, *, pin: bool) -> Device:
    if not isinstance(device, str):
        return device
    if device in ("cpu", "emulated"):
        return StandIn(name=device)
    if device.partition(":")[0] == "cuda":
        return cuda_device(device, pin=pin)
    raise InvalidInput(f"device must be 'cpu', 'emulated', 'cuda' or one CUDA device like 'cuda:1', found {device!r}")


def _tiers(device: Device, budget: Budget, sharers: int) -> tuple[Tier, ...]:
    host = budget.host_bytes
    if host is None:
        free = available_bytes()
        host = free - free // _KEPT_FREE
    host //= sharers
    disk = () if budget.disk_bytes is None else (Tier("disk", budget.disk_bytes // sharers & -128),)
    if device.name == "cpu":
        if budget.device is not None:
            raise InvalidInput("Budget.device must be None for device='cpu': its memory is Budget.host")
        return (Tier("host", host & -128 if disk else host), *disk)
    return (Tier("device", _device_bytes(device, budget) & -128), Tier("host", host), *disk)


def _device_bytes(device: Device, budget: Budget) -> int:
    found = device.memory_bytes()
    if found is None:
        if budget.device_bytes is None:
            raise InvalidInput(f"device={device.name!r} needs Budget(device=...): how large the accelerator is to be")
        return budget.device_bytes
    free, whole = found
    if budget.device_bytes is None:
        return free - free // _KEPT_FREE
    if budget.device_bytes > whole:
        raise InvalidInput(
            f"Budget(device=...) is {budget.device_bytes:,} bytes, but {device.torch_device} has {whole:,}, of which "
            f"{free:,} are free; None takes what is free, less a tenth"
        )
    return budget.device_bytes


def _passing_bytes(tiers: tuple[Tier, ...]) -> int:
    """The memory that weights pass through; above a disk whole groups do, which are seven times as large."""
    sizes = [tiers[0].capacity_bytes] * (tiers[0].name == "device")
    if tiers[-1].name == "disk":
        sizes.append(tiers[-2].capacity_bytes // _WEIGHTS_OF_GROUP)
    return min(sizes)


def _disk_file(budget: Budget) -> DiskFile | None:
    if budget.disk_dir is None:
        return None
    file = DiskFile(budget.disk_dir)
    how = "past the page cache" if file.direct else "through the page cache, for the file system has no O_DIRECT"
    say(f"disk tier: {file.name}, {how}; it has no name in its folder, and goes with the process")
    return file


def available_bytes() -> int:
    """Memory this process may still take: the system's, or its control group's if that is less."""
    return min(_limits())


def _limits() -> Iterator[int]:
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    if found:
        yield int(found[1]) * 1024
    else:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most, used = Path(limit).read_text().strip(), Path(usage).read_text().strip()
        except OSError:
            continue
        if most != "max":
            yield max(0, int(most) - int(used))
