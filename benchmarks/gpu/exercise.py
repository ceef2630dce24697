"""Every CUDA kernel once on small arrays, aligned and not: what a memory checker is to watch."""

from __future__ import annotations

import torch

import ps_kernels

KINDS = (torch.float32, torch.bfloat16, torch.float16)


def exercise(numel: int, shift: int) -> None:
    def drawn(kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(numel + 8, device="cuda").to(kind)[shift : shift + numel]

    p, m, v = drawn(), drawn(), drawn()
    total = torch.zeros(2, device="cuda")
    for kind in KINDS:
        grad = drawn(kind)
        for out in (None, drawn(torch.bfloat16), drawn(torch.float16)):
            ps_kernels.adam_step(p, m, v, grad, out, step=1, lr=1e-3, backend="cuda")
            ps_kernels.sgd_step(p, m, grad, out, lr=1e-3, momentum_decay=0.9, backend="cuda")
        ps_kernels.accumulate(v, grad, scale=0.5)
        ps_kernels.sumsq_finite(grad, total)
        for other in KINDS:
            chunk = torch.zeros(2 * numel + 3, dtype=other, device="cuda")
            ps_kernels.gather([grad, grad.clone()], chunk, [0, numel + 3])
            ps_kernels.scatter(chunk, [1], [grad])
    torch.cuda.synchronize()
    assert total[1] == 0


if __name__ == "__main__":
    for length in (1, 1003, 70_001):
        for start in (0, 1):
            exercise(length, start)
    print("every kernel ran")
