"""A network that is nothing but hashes: any trace can be one, and one wrong byte changes everything after it."""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass

from ps_core._reference.training_rules import Call, Outcome
from ps_core._trace import Phase, Trace


def numbers(seed: bytes, count: int) -> array:
    """So many singles between -2 and 2, from a hash."""
    data = hashlib.shake_128(seed).digest(2 * count)
    return array("f", [value / 16384 for value in struct.unpack(f"<{count}h", data)])


def batch(iteration: int, micro: int, rank: int) -> bytes:
    """Data that is different for everyone."""
    return struct.pack("<iii", iteration, micro, rank)


@dataclass(frozen=True)
class Symbolic:
    """Gradients, activations and losses are hashes of all that a moment may look at."""

    trace: Trace

    def initial(self, tensor: int) -> array:
        return numbers(b"initial %d" % tensor, self.trace.tensors[tensor].numel)

    def run(self, call: Call) -> Outcome:
        moment = self.trace.moments[call.moment]
        digest = hashlib.sha256(repr((call.moment, call.batch, call.loss_scale, call.training)).encode())
        for tensor in moment.reads:
            digest.update(call.weights[tensor].tobytes())
        for name in moment.takes if call.training else ():
            digest.update(call.activations[name])
        digest.update(call.saved.get("so far", b""))
        so_far = digest.digest()
        learns = call.training
        return Outcome(
            grads={
                tensor: numbers(so_far + b"g%d" % tensor, self.trace.tensors[tensor].numel)
                for tensor in (moment.grads if learns else ())
            },
            activations={
                name: hashlib.shake_128(so_far + b"a%d" % name).digest(self.trace.activations[name].bytes)
                for name in (moment.makes if learns else ())
            },
            saved={"so far": so_far},
            loss=float(so_far[0]) if moment.phase is Phase.FORWARD else None,
        )
