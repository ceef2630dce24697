"""Check the numbers that torchrun hands to each process by environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from ps_core._errors import InvalidInput

_LOCAL = {"LOCAL_RANK": (0, 2**31), "LOCAL_WORLD_SIZE": (1, 2**31)}
_JOINING = {"WORLD_SIZE": (1, 2**31), "RANK": (0, 2**31), "MASTER_PORT": (0, 2**16)}
"""The least value of each variable, and the first that is too large."""


def check_variables(environment: Mapping[str, str], *, joins: bool) -> None:
    """Raise `InvalidInput` for a variable that is set to something else than such a number.

    ``joins``: the process uses the variables for joining the others, too; False: the program has joined them already.
    """
    numbers: dict[str, int] = {}
    for name, (least, end) in (_LOCAL | (_JOINING if joins else {})).items():
        text = environment.get(name)
        if text is None:
            continue
        numbers[name] = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not least <= numbers[name] < end:
            raise InvalidInput(
                f"the environment variable {name} must be a whole number from {least} to {end - 1}, found {text!r}; "
                "torchrun sets it"
            )
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if {name, size} <= numbers.keys() and numbers[name] >= numbers[size]:
            raise InvalidInput(
                f"the environment variable {name} must be less than {size}, which is {numbers[size]}; found "
                f"{numbers[name]}; torchrun sets both"
            )
