"""Programs drawn at random, which mix what ranks may do: the bits of one process that adds the same parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from _random_programs import execute


@pytest.mark.parametrize("seed", [*range(10), 38, 1005, 1022, 1130])
def test_a_random_program_gives_the_bits_of_one_process(seed: int, tmp_path: Path) -> None:
    """Seeds above 10 found defects."""
    execute(seed, tmp_path)


@pytest.mark.parametrize("seed", [0, 7, 11, 12, 33, 41, 75, 90])
def test_so_does_one_that_calls_the_model_several_times_or_its_layers(seed: int, tmp_path: Path) -> None:
    execute(seed, tmp_path, calls=True)
