"""What this process says to the others, and what it does where one of them had something else in mind.

See [Note: taking turns] in `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ps_core.engine._sharding.collective_order import CollectiveOp, CollectiveOrder
from ps_core.engine._sharding.in_flight import InFlightCollectives
from ps_core.engine._sharding.residency import ShardedResidency
from ps_core.engine._sharding.schedule import (
    Collective,
    Decision,
    Headroom,
    Proposal,
    ProposalKind,
    holders,
    is_settled,
)


class Negotiator:
    """The training thread's end of taking turns."""

    def __init__(
        self, residency: ShardedResidency, steps: InFlightCollectives, turns: CollectiveOrder, me: int
    ) -> None:
        self._shards, self._steps, self._turns, self._me = residency, steps, turns, me

    def say(self, turn: ProposalKind, arg: int = 0, room: int = Headroom.TIGHT) -> tuple[Decision, Sequence[Proposal]]:
        """Say a word; what all do next."""
        while True:
            pending = self._turns.speak(turn, arg, room)
            pending.wait()
            if all(step.done for step in self._steps.on_way):
                self._steps.take_in()
                return self._turns.take_choice()
            self.resolve()  # the word was not said: others had something in mind before

    def ask(self, turn: ProposalKind, arg: int) -> None:
        """Say what is not to be had by following; something is done then, if perhaps not that yet."""
        choice, words = self.say(turn, arg)
        self.serve(choice, words)

    def wait(self, step: CollectiveOp) -> None:
        """Until a step is done."""
        while not self._steps.wait(step):
            if self._turns.parked:
                self.resolve()
        self._steps.take_in()

    def resolve(self) -> None:
        """Do what somebody asked for, then what was left for it."""
        self._steps.take_in()
        choice, words = self._turns.take_choice()
        self.serve(choice, words)

    def serve(self, choice: Decision, words: Sequence[Proposal]) -> None:
        """Do what all chose out of order; steps that were left for it come after it."""
        group = self._shards.groups[choice.arg]
        if choice.turn is ProposalKind.SUM and not is_settled(words, choice.arg):
            self._turns.speak(ProposalKind.READY).wait()
            _, words = self._turns.take_choice()
        act, left = Collective(choice.turn, choice.arg), list(self._steps.on_way)
        same = [step for step in left if step.act == act]
        needed = self._steps.sum_bytes(group) if act.turn is ProposalKind.SUM else group.chunks[group.weight].bytes
        if not self._steps.finds_hole(needed):
            for each in reversed(left):
                if each not in same:
                    self._steps.take_apart(each)
        if act.turn is ProposalKind.GATHER:
            takes = self._me in self._turns.takers(act, words)
            old = next((step for step in same if step.whole is not None), None) if takes else None
            step = self._steps.gather(group, None, wanted=takes) if old is None else self._instead(old)
        else:
            gives = self._me in holders(words, group.index)
            step = self._instead(same[0]) if same else self._steps.sum(group, None, gives=gives)
            for each in left:  # the sum may take the place of the weight's shard
                if each.act == Collective(ProposalKind.GATHER, group.index) and each.whole is None and not each.slots:
                    self._steps.offer(each)
        step.words = words
        self._steps.on_way.appendleft(step)
        self._turns.submit(step)
        if left:
            self.wait(step)
        for each in left:
            if each.act.turn is ProposalKind.SUM and each.slot is None:
                self._steps.fill_in(each)
            self._turns.submit(each)

    def _instead(self, old: CollectiveOp) -> CollectiveOp:
        """A step of the schedule done before its turn; when that comes there is nothing left for it."""
        step = replace(old, position=None, pending=None)
        old.whole = old.slot = old.staged = None
        old.slots = ()
        if old.act.turn is ProposalKind.GATHER:
            assert old.position is not None, "only such are left"
            self._turns.leave(old.position)
            self._steps.ahead[old.group] = step
            self._steps.offer(old)
        else:
            self._steps.fill_in(old, alone=False)
        return step

    def settle(self) -> None:
        """Have everything that is under way done, and let go of what nobody uses yet: between two moments."""
        with torch.no_grad():
            while self._steps.on_way:
                self.wait(self._steps.on_way[0])
            self._steps.drop_unused()
