"""How many wrong plans verify lets pass, and how many sound ones it refuses: the table in docs/verification.md.

PYTHONPATH=tests/pure python benchmarks/mutation_rates.py [PLANS] [SEED]
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict

from _mutants import Mutant, Tally, judge, mutate
from _plans import ORIGINS, random_plan
from ps_core._plan import Plan
from ps_core._program import Program

SINGLE, SEVERAL = 40, 60
"""Mutants tried of each plan with one change, and of every tenth with two to four."""
ORDER = ("drop a wait", "redirect a wait", "swap any two", "swap in a queue", "swap neighbours", "other queue")


def several(plan: Plan, rng: random.Random) -> Mutant:
    """Two to four changes to order and waits at once."""
    left = rng.randint(2, 4)
    while left:
        mutant = mutate(plan, rng)
        if mutant is not None and mutant.how in ORDER:
            plan, left = mutant.plan, left - 1
    return Mutant(plan, "two to four at once", None)


def main(plans: int, seed: str) -> None:
    rng, other = random.Random(seed), random.Random(f"{seed}, several")
    tallies: dict[str, Tally] = defaultdict(Tally)

    def try_out(program: Program, mutant: Mutant, rng: random.Random, rows: tuple[str, ...]) -> None:
        verify_says, adversary_says = judge(program, mutant, rng)
        for row in rows:
            tallies[row].add(verify_says, adversary_says)
        if bool(verify_says) != bool(adversary_says):
            print(f"{rows}: verify {verify_says}; adversary {adversary_says}")

    for turn in range(plans):
        origin = ORIGINS[turn % len(ORIGINS)]
        program, plan = random_plan(rng, origin)
        for _ in range(SINGLE):
            mutant = mutate(plan, rng)
            if mutant is not None:
                try_out(program, mutant, rng, (mutant.how, f"plans: {origin}", "all"))
        for _ in range(SEVERAL if turn % 10 == 0 else 0):
            mutant = several(plan, other)
            try_out(program, mutant, other, (mutant.how,))
    print("| mutation | matter | killed | equivalent | rejected |\n|---|---|---|---|---|")
    for how, row in sorted(tallies.items(), key=lambda item: (item[0].startswith("plans"), item[0] == "all", item[0])):
        matter, same = row.killed + row.survived, row.accepted + row.rejected
        print(f"| {how} | {matter:,} | {row.kill_rate:.2%} | {same:,} | {row.reject_rate:.2%} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, sys.argv[2] if len(sys.argv) > 2 else "rates")
