"""Tensors without memory: what of them is known, what is made up, and that nothing outlives its last user."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import torch
from torch import nn

from zerobench.simulation.control import Simulation

HERE = Path(__file__).name


def made_up(simulation: Simulation) -> list[str]:
    """The operators whose answer was made up."""
    assert all(f" at {HERE}:" in what for what in simulation.faked)
    return [what.split(" at ")[0] for what in simulation.faked]


def test_numbers_of_the_program_s_own_are_known() -> None:
    with Simulation() as simulation:
        sizes = torch.tensor([3, 1, 2])
        assert sizes.sort()[0].tolist() == [1, 2, 3] and int(sizes.sum()) == 6
        count = torch.tensor(2.0)
        count += 1
        assert count.item() == 3.0
        assert not bool(torch.zeros((), dtype=torch.bool))
        assert simulation.faked == ()


def test_what_depends_on_data_is_made_up_and_said_so() -> None:
    with Simulation() as simulation:
        data = torch.randn(4)
        assert data[0].item() == 1.0
        assert bool((data > 0).any()) is True
        assert torch.equal(data, data + 1) is True
        item = "aten._local_scalar_dense.default"
        assert made_up(simulation) == [item, item, "aten.equal.default"]


def test_a_real_flag_is_unknown_once_data_went_into_it() -> None:
    with Simulation() as simulation:
        flag = torch.zeros((), dtype=torch.bool)
        assert flag.logical_or_(torch.randn(4).isnan().any()) is flag
        later = flag.clone() | torch.zeros((), dtype=torch.bool)
        assert bool(later) is True
        assert len(made_up(simulation)) == 1


def test_modules_are_copied_and_converted() -> None:
    with Simulation():
        module = copy.deepcopy(nn.Sequential(nn.Linear(2**20, 2**20)))
        module.to(torch.bfloat16)
        out = module(torch.randn(2, 2**20, dtype=torch.bfloat16))
        out.sum().backward()
        assert out.dtype is torch.bfloat16 and module[0].weight.grad.shape == (2**20, 2**20)


def test_a_storage_that_was_shown_to_an_operator_is_freed() -> None:
    with Simulation():
        tensor = torch.zeros(8)
        storage = weakref.ref(tensor.untyped_storage())
        again = torch.empty(0).set_(tensor.untyped_storage())
        assert again.untyped_storage() is storage()
        del tensor, again
        assert storage() is None


def test_attention_runs_by_the_kernel_that_the_cpu_would_choose() -> None:
    def kept(dtype: torch.dtype) -> list[tuple[int, ...]]:
        """Shapes that attention saves for backward."""
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
            given = [torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
            nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        return sorted(shapes)

    for dtype in (torch.float32, torch.bfloat16):
        with Simulation():
            without_memory = kept(dtype)
        assert without_memory == kept(dtype)
