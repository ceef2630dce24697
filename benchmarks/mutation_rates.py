"""How many wrong plans verify lets pass, and how many sound ones it refuses: the table in docs/verification.md.

    PYTHONPATH=tests/pure python benchmarks/mutation_rates.py [PLANS] [SEED]
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict

from _mutants import Tally, judge, mutate
from _plans import ORIGINS, random_plan


def main(plans: int, seed: str) -> None:
    rng = random.Random(seed)
    tallies: dict[str, Tally] = defaultdict(Tally)
    for turn in range(plans):
        origin = ORIGINS[turn % len(ORIGINS)]
        program, plan = random_plan(rng, origin)
        for _ in range(40):
            mutant = mutate(plan, rng)
            if mutant is None:
                continue
            verify_says, adversary_says = judge(program, mutant, rng)
            for row in (mutant.how, f"plans: {origin}", "all"):
                tallies[row].add(verify_says, adversary_says)
            if bool(verify_says) != bool(adversary_says):
                print(f"plan {turn} ({origin}), {mutant.how}: verify {verify_says}; adversary {adversary_says}")
    print("| mutation | matter | killed | equivalent | rejected |\n|---|---|---|---|---|")
    for how, row in sorted(tallies.items(), key=lambda item: (item[0].startswith("plans"), item[0] == "all", item[0])):
        matter, same = row.killed + row.survived, row.accepted + row.rejected
        print(f"| {how} | {matter:,} | {row.kill_rate:.2%} | {same:,} | {row.reject_rate:.2%} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300, sys.argv[2] if len(sys.argv) > 2 else "rates")
