"""Every CUDA kernel once on small arrays, aligned and not: what a memory checker is to watch."""

from __future__ import annotations

import argparse

import torch

import ps_kernels

KINDS = (torch.float32, torch.bfloat16, torch.float16)


def exercise(numel: int, shift: int, device: str) -> None:
    backend = "cuda" if device == "cuda" else None

    def drawn(kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(numel + 8, device=device).to(kind)[shift : shift + numel]

    p, m, v = drawn(), drawn(), drawn()
    total = torch.zeros(2, device=device)
    for kind in KINDS:
        grad = drawn(kind)
        for out in (None, drawn(torch.bfloat16), drawn(torch.float16)):
            ps_kernels.adam_step(p, m, v, grad, out, step=1, lr=1e-3, backend=backend)
            ps_kernels.sgd_step(p, m, grad, out, lr=1e-3, momentum_decay=0.9, backend=backend)
            ps_kernels.sgd_step(p, None, grad, out, lr=1e-3, backend=backend)
        ps_kernels.accumulate(v, grad, scale=0.5, backend=backend)
        ps_kernels.sumsq_finite(grad, total, backend=backend)
        rows, spans = torch.zeros(3, 2, device=device), [(0, numel // 3), (numel // 3, numel // 3), (numel // 3, numel)]
        ps_kernels.sumsq_finite(grad, rows, spans=spans, backend=backend)
        columns, losses = max(1, numel // 3), torch.zeros(3, device=device)
        logits, labels = (
            torch.rand(3 * columns + 8, device=device).to(kind),
            torch.tensor([0, -100, columns - 1], device=device),
        )
        logits = logits[shift : shift + 3 * columns].view(3, columns)
        ps_kernels.cross_entropy(logits, labels, losses, backend=backend)
        for other in KINDS:
            chunk = torch.zeros(2 * numel + 3, dtype=other, device=device)
            ps_kernels.gather([grad, grad.clone()], chunk, [0, numel + 3], backend=backend)
            ps_kernels.scatter(chunk, [1], [grad], backend=backend)
            ps_kernels.Pieces([grad], chunk, [2], backend=backend).gather()
        assert bool((losses >= 0).all())
    assert total.tolist()[1] == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, by whatever kernels it has")
    where = "cpu" if parser.parse_args().dry_run else "cuda"
    for length in (1, 1003, 70_001):
        for start in (0, 1):
            exercise(length, start, where)
    print("every kernel ran")
