"""The C allocator's own count, the ledger's witness on a CPU."""

from __future__ import annotations

import pytest
import torch

from zerobench.probes import allocator
from zerobench.probes.ledger import Ledger
from zerobench.tests.test_ledger import KB, OPT, PSI, P, hold, mlp


@pytest.mark.skipif(allocator.in_use() is None, reason="this C library does not say what is in use")
def test_malloc_agrees_with_the_ledger() -> None:
    assert allocator.prepare()
    with Ledger() as first:  # torch imports megabytes at the first use of a dispatch mode
        hold(first, {OPT: [torch.zeros(10)]})
    net, ignored = mlp(), torch.zeros(100_000)
    with Ledger() as ledger:
        ledger.baseline()
        ledger.adopt(net.parameters())
        kept = [torch.zeros(size) for size in (7, 1000, 50_000, 300_000)]
        batch = torch.zeros(20_000)
        ledger.ignore([batch])
        del ignored
        held = hold(ledger, {P: list(net.parameters()), OPT: kept})
        assert held.live == 4 * (PSI + 351_007)
        assert ledger.witnessed is not None
        assert abs(ledger.witnessed - held.live) < 64 * KB
        del kept
        hold(ledger, {P: list(net.parameters())})
        assert abs(ledger.witnessed - 4 * PSI) < 64 * KB
