"""Notice that a tensor was changed in place after the user assigned it to ``parameter.grad``.

[Note: assigned tensors]
A copy of the tensor is stored. In plain PyTorch the tensor itself is the gradient, so later changes of it count. So its
version is compared before the gradient is read, added to or stepped. If it changed, the values are copied again. If the
gradient changed meanwhile too, that would undo a change that plain PyTorch makes to the tensor as well. Then an error
says what to do. Changes through ``.data`` raise no version, and nothing can notice them.
"""

from __future__ import annotations

import torch
from torch import nn

from ps_core._errors import InvalidInput


class AssignedGradient:
    """A tensor that was assigned, as another tensor of its memory, with its version at that time."""

    def __init__(self, value: torch.Tensor) -> None:
        self.tensor = value.detach()  # which shares the version
        self._version = value._version
        self.overtaken = False
        """True if the stored gradient changed since, other than by an assignment."""

    @staticmethod
    def of(value: torch.Tensor) -> AssignedGradient | None:
        """Watch a tensor that has a version; None: it has none."""
        watched = type(value) in (torch.Tensor, nn.Parameter) and not value.is_inference()
        return AssignedGradient(value) if watched else None

    @property
    def is_final(self) -> bool:
        """Return True if the tensor did not change, and cannot, since no other tensor has its memory."""
        if self.tensor._version != self._version:
            return False
        uses: int = torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata)
        return uses <= _OWN_USES

    def has_changed(self, name: str) -> bool:
        """Return True if the tensor is to be copied again; raise `InvalidInput` if both were changed."""
        if self.tensor._version == self._version:
            return False
        if self.overtaken:
            raise InvalidInput(
                f"the tensor given to {name!r} by parameter.grad = ... was changed in place, after the gradient was "
                "changed (by backward, or through parameter.grad): what is stored is a copy, so change parameter.grad "
                "itself, or assign the tensor again after its change"
            )
        return True

    def mark_stored(self) -> AssignedGradient:
        """Note that the tensor's present values are stored; return this object.

        A new one could miss later changes. Within an operator on the gradient, `detach` does not share the version.
        """
        self._version, self.overtaken = self.tensor._version, False
        return self

    def mark_overtaken(self) -> None:
        """Note that the stored gradient changes, and the tensor does not."""
        self.overtaken = True

    def overtake(self, name: str) -> None:
        """Do so; raise `InvalidInput` if the tensor changed before."""
        self.mark_overtaken()
        self.has_changed(name)


_OWN_USES = 2
"""Uses of a memory by one tensor: the tensor's, and that of the storage object that was asked."""
