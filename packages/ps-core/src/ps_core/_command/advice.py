"""Suggest changes: to make a model fit, or to make one that fits faster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from ps_core._command.forecast import Forecast, Subject, Training, Way, bounds, model_of, surely_fits
from ps_core._errors import InvalidInput
from ps_core._extents import Precision
from ps_core._trace import Trace
from ps_core._units import format_bytes
from ps_core._workloads.shapes import Family, Part, placed_tensors

_IDLE = 0.1
"""The fraction of a step that the GPU may wait without a remark."""
_FULL = 0.99
_GAIN = 1.03
"""The least speed-up for which a change is mentioned."""
_SHORTER_STEP_IF_FASTER = 1.02
"""More micro-batches, and steps within backward, are simulated if a training step without its optimizer steps is faster
by this factor. It is below `_GAIN`: that time still contains norms, which accumulation takes less often.
"""
_MOST_LEVERS = 3
_WAITS = {
    "host->device": "uploads over the link",
    "device->host": "downloads over the link",
    "disk->host": "reads from disk",
    "host->disk": "writes to disk",
    "collectives": "the other GPUs",
    "cpu": "the optimizer step on the CPU",
    "launch": "the thread that launches work",
}
_REMARKS = {
    "--step-in-backward": "; excludes clipping, unlike --step-speculative",
    "--step-speculative": "; if few steps have to be clipped",
}
"""What else is said of a change."""
_SPARE = 1.25
"""Suggested device memory, as a multiple of the least that suffices."""
_HUGE = 2**50
_ROUND = 2**34
"""Suggested memory is a multiple of 16 GiB."""
_HOSTS = tuple(steps * 2**power for power in range(33, 42) for steps in (2, 3))
"""Host memory that computers have, from 16 GiB to 6 TiB."""
_TILES = 16
"""The least number of tiles that is suggested for a head."""
_NODE = 8
"""The usual number of GPUs of a node."""


def advice(subject: Subject, found: Forecast) -> tuple[str, ...]:
    """Return notes on a plan that fits, and changes that would make it faster, by simulation."""
    told = found.prediction
    said = []
    idle = told.stalled_s / told.step_time_s if told.step_time_s else 0.0
    if idle > _IDLE:
        busy = {**told.busy_s, "launch": told.launching_s}
        name = max(_WAITS, key=lambda key: busy[key])
        said.append(
            f"compute is idle {idle:.0%} of the step, waiting most of all for {_WAITS[name]} ({busy[name]:.3g} s of "
            "work)"
        )
    said += _faster(subject, found)
    if found.offloads and not isinstance(found.training.offload_checkpoints, bool):
        said.append("inputs of recomputed blocks leave the GPU until backward (--no-offload-checkpoints keeps them)")
    if found.training.cpu_embedding and found.table is None:
        why = "where the CPU computes" if found.training.cluster.gpus == 1 else "with several processes"
        said.append(f"--cpu-embedding changes nothing here: {why} the token table is a parameter like others")
    full = [tier.name for tier in found.tiers if told.peak_bytes[tier.name] > _FULL * tier.capacity_bytes]
    if "host" in full:
        said.append("host memory is full to within 1 %: nothing else of size may run there (--reserve-host sets more)")
    return tuple(said)


def _faster(subject: Subject, found: Forecast) -> Iterator[str]:
    """Yield the changes that gain most, each planned and simulated roughly."""
    if not found.tokens_per_s:
        return
    speeds = []
    for label, changed in _levers(subject, found):
        offload = bool(changed.offload_checkpoints)
        speed = Way(subject, replace(changed, quick=True), offload=offload).tokens_per_s()
        if speed is not None and speed > _GAIN * found.tokens_per_s:
            speeds.append((speed, label))
    for speed, label in sorted(speeds, reverse=True)[:_MOST_LEVERS]:
        gain = speed / found.tokens_per_s
        yield f"{label}: {speed:,.0f} tokens/s, {gain:.2f} times as many (predicted{_REMARKS.get(label, '')})"


def _levers(subject: Subject, found: Forecast) -> Iterator[tuple[str, Training]]:
    """Yield changes of a training that fits, without other hardware."""
    training = replace(found.training, offload_checkpoints=found.offloads)
    if not training.step_in_backward and found.passes_alone_s * _SHORTER_STEP_IF_FASTER < found.step_time_s:
        yield f"--accumulate {4 * training.accumulate}", replace(training, accumulate=4 * training.accumulate)
        if training.accumulate == training.cluster.gpus == 1:
            undone = training.precision is Precision.FP16  # the loss scale may skip a step
            label = "--step-speculative" if undone else "--step-in-backward"
            yield label, replace(training, step_in_backward=True, speculative=undone)
    if isinstance(subject, Trace):
        return
    yield f"--batch {2 * training.batch}", replace(training, batch=2 * training.batch)
    if not training.chunked_loss:
        yield "--chunked-loss", replace(training, chunked_loss=True)
    if training.checkpointing:
        yield "--no-checkpointing", replace(training, checkpointing=False, offload_checkpoints=False)
    if found.training.offload_checkpoints is False and training.checkpointing and len(found.tiers) > 1:
        yield "--offload-checkpoints", replace(training, offload_checkpoints=True)


def remedies(subject: Subject, training: Training, most: int = 3) -> tuple[str, ...]:
    """Return changes after which a plan surely exists, the least intrusive first."""
    said = []
    for label, changed in islice(_changes(subject, training), most):
        need = max(bounds(subject, changed), key=lambda need: need.needed_bytes / need.available_bytes)
        other = ", as another model" if changed.untied_head and not training.untied_head else ""
        said.append(
            f"{label} (predicted: fits{other}; needs at least "
            f"{format_bytes(need.needed_bytes)} of {format_bytes(need.available_bytes)}, {need.where})"
        )
    return tuple(said)


def _changes(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    """Yield at most one change of each sort that fits, so that the suggestions differ in kind.

    If none on this computer fits, yield more memory on the accelerator together with host memory or a disk. More GPUs
    come last.
    """
    found = False
    for sort in (_options, _apart, _batches, _memories, _disks):
        for change in _first_that_fits(subject, sort(subject, training)):
            found = True
            yield change
    for sort in () if found else (_device_and_host, _device_and_disk):
        yield from _first_that_fits(subject, sort(subject, training))
    yield from _first_that_fits(subject, _clusters(subject, training))


def _first_that_fits(subject: Subject, changes: Iterator[tuple[str, Training]]) -> Iterator[tuple[str, Training]]:
    return islice((change for change in changes if surely_fits(subject, change[1])), 1)


def _options(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    if isinstance(subject, Trace):
        return
    leaner = training
    labels = []
    if not leaner.checkpointing:
        leaner = replace(leaner, checkpointing=True)
        labels.append("--checkpointing")
        yield " ".join(labels), leaner
    if not leaner.chunked_loss:
        leaner = replace(leaner, chunked_loss=True)
        labels.append("--chunked-loss")
        yield " ".join(labels), leaner
    if leaner.offload_checkpoints is False:
        leaner = replace(leaner, offload_checkpoints=True)
        labels.append("--offload-checkpoints")
        yield " ".join(labels), leaner


def _apart(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    """Yield ways to keep parts of the token table or the head off the accelerator.

    They help only where no matrix of a block is as large.
    """
    if isinstance(subject, Trace) or subject.family is Family.BERT or not training.cluster.device_memory:
        return
    model = model_of(subject, training)
    assert not isinstance(model, Trace), "a shape's model is a shape"
    whole = [] if training.keeps_table_apart else [model.vocabulary]
    whole += [] if model.tied_head else [model.vocabulary // training.head_tiles]
    blocks = (tensor.numel for tensor in placed_tensors(model) if tensor.part in (Part.ATTENTION, Part.MLP))
    if max(whole) * model.hidden <= max(blocks):
        return
    leaner = replace(training, untied_head=training.untied_head or model.tied_head, chunked_loss=True)
    labels = ["--untied-head"] * model.tied_head + ["--chunked-loss"] * (not training.chunked_loss)
    tiles = min(model.vocabulary, max(_TILES, 2 * training.head_tiles))
    for looked_up, count in ((True, training.head_tiles), (False, tiles), (True, tiles)):
        changed = replace(leaner, cpu_embedding=training.cpu_embedding or looked_up, head_tiles=count)
        table = changed.keeps_table_apart and not training.keeps_table_apart
        if (looked_up and not table) or (model.tied_head and count == 1):
            continue
        words = ["--cpu-embedding"] * table + [f"--head-tiles {count}"] * (count > training.head_tiles)
        yield " ".join([*labels, *words]), changed


def _batches(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    if isinstance(subject, Trace):
        return
    batch = training.batch // 2
    while batch:
        yield f"--batch {batch}", replace(training, batch=batch)
        batch //= 2


def _memories(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    cluster = training.cluster
    for quarters in (5, 6, 8, 16):
        size = -(-cluster.host_memory * quarters // 4 // _ROUND) * _ROUND
        if size:
            label = f"--host-memory {size // 2**30}GiB"
            yield label, replace(training, cluster=replace(cluster, host_memory=size))
    yield from _devices(subject, training)


def _devices(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    cluster = training.cluster
    if cluster.device_memory:
        reserve = _HUGE - replace(cluster, device_memory=_HUGE).tiers()[0].capacity_bytes
        enough = reserve + _SPARE * bounds(subject, training)[0].needed_bytes
        needs = (2 * cluster.device_memory, 4 * cluster.device_memory, enough)
        for size in sorted({math.ceil(need / 2**30) for need in needs}):
            label = f"--device-memory {size}GiB"
            yield label, replace(training, cluster=replace(cluster, device_memory=size * 2**30))


def _disks(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    cluster = training.cluster
    if not cluster.disk and cluster.host_memory:
        for disk in (2**37, 2**40, 2**42, 2**44):
            yield f"--disk {disk // 2**30}GiB", replace(training, cluster=replace(cluster, disk=disk))


def _device_and_host(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    for label, larger in _devices(subject, training):
        for size in _HOSTS:
            if size > training.cluster.host_memory:
                changed = replace(larger.cluster, host_memory=size)
                yield f"{label} --host-memory {size // 2**30}GiB", replace(training, cluster=changed)


def _device_and_disk(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    for label, larger in _devices(subject, training):
        for more, changed in _disks(subject, larger):
            yield f"{label} {more}", changed


def _clusters(subject: Subject, training: Training) -> Iterator[tuple[str, Training]]:
    cluster = training.cluster
    for factor in () if training.step_in_backward else (2, 4, 8, 16):  # such steps need one GPU
        gpus = cluster.gpus * factor
        for nodes in (cluster.nodes, cluster.nodes * factor):
            if gpus // nodes <= _NODE:
                changed = replace(cluster, gpus=gpus, nodes=nodes)
                label = f"--gpus {gpus}" + (f" --nodes {nodes}" if nodes > 1 else "")
                with suppress(InvalidInput):
                    changed.tiers()
                    yield label, replace(training, cluster=changed)
