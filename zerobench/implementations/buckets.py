"""Buckets: the parameters of a unit, flattened, and what a rank holds of them at a stage.

A bucket is a flat tensor of `padded` elements, a multiple of n where something is sharded; rank r owns the r-th n-th of
it, `own`. Every state of a bucket (weight, master, gradient) is laid out alike, and is whole or is the `own` part.
Padding stands behind the last parameter; no optimizer run covers it.

Weights and gradients that exist for a while only (stage 3's whole weights, the unsharded gradients of stages 2 and 3)
keep their tensor object and lose their storage: views of it, the module's parameters and what autograd saved of them
among these, are valid again once it is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerobench.implementations.protocol import Job, World
from zerobench.terms import Category, Stage

DEFAULT_BUCKET_NUMEL = 2**22


@dataclass(frozen=True)
class Slot:
    """A parameter's place: elements start to stop of its bucket."""

    name: str
    parameter: nn.Parameter
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a whole flat tensor, in the parameter's shape: a view."""
        return flat[self.start : self.stop].view(self.parameter.shape)


@dataclass(frozen=True)
class Layout:
    """What goes into one bucket: parameters of `unit`, and `padded` elements for them."""

    unit: nn.Module
    slots: tuple[Slot, ...]
    padded: int

    @property
    def padding(self) -> int:
        return self.padded - self.slots[-1].stop


def plan(job: Job, stage: Stage) -> list[Layout]:
    """The buckets of a job: of each unit, then of what is in none, at most job.bucket_numel elements each.

    Parameters go in in reverse order, about that in which backward yields their gradients. One that is larger than a
    bucket has its own. One that several units share (a tied weight) belongs to the rest, which every unit may use. A
    bucket's parameters are neighbours in the module: of the rest, what comes before the units and what comes after them
    get their gradients at the two ends of backward, and together would stay open, and unsharded, for all of it.
    """
    limit = job.bucket_numel or DEFAULT_BUCKET_NUMEL
    multiple = job.world.size if stage.shards(Category.OPTIMIZER) else 1
    units_of: dict[int, list[nn.Module]] = defaultdict(list)
    for unit in job.units:
        for parameter in unit.parameters():
            units_of[id(parameter)].append(unit)
    members: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {unit: [] for unit in (*job.units, job.module)}
    place: dict[str, int] = {}
    for name, parameter in job.module.named_parameters():
        if parameter.requires_grad:
            homes = units_of[id(parameter)]
            members[homes[0] if len(homes) == 1 else job.module].append((name, parameter))
            place[name] = len(place)
    layouts = []
    for unit, named in members.items():
        slots: list[Slot] = []
        for name, parameter in reversed(named):
            full = slots and slots[-1].stop + parameter.numel() > limit
            if full or (slots and place[slots[-1].name] != place[name] + 1):
                layouts.append(_layout(unit, slots, multiple))
                slots = []
            slots.append(Slot(name, parameter, slots[-1].stop if slots else 0))
        if slots:
            layouts.append(_layout(unit, slots, multiple))
    return layouts


def _layout(unit: nn.Module, slots: list[Slot], multiple: int) -> Layout:
    return Layout(unit, tuple(slots), -(-slots[-1].stop // multiple) * multiple)


class Bucket:
    """What one rank holds of one bucket. Shapes: (padded,), or (padded / n,) for a part.

    weight: in job.dtype, whole; the module's parameters are views of it. At stage 3 it has a storage while gathered.
    kept: the weights that this rank updates: all (stage 0), a view of its part (1, 2), or its part alone (3).
    master: fp32, of the elements of `kept`; the very same tensor in fp32.
    gradient: in job.dtype, whole; at stages 2 and 3 it has a storage only until it is reduced.
    reduced: where the mean gradient ends up: all (stage 0), a view of the part (1), or the part alone (2, 3).
    missing: slots whose gradient has not come in this backward. blank: slots of `gradient` that hold no sum yet.
    """

    def __init__(self, layout: Layout, world: World, dtype: torch.dtype, stage: Stage) -> None:
        self.unit, self.slots, self.padded = layout.unit, layout.slots, layout.padded
        self.n = world.size
        part = layout.padded // world.size
        own = slice(world.rank * part, (world.rank + 1) * part)
        self.mine = own if stage.shards(Category.OPTIMIZER) else slice(0, layout.padded)

        exact = torch.zeros(layout.padded, device=world.device)
        for slot in self.slots:
            slot.of(exact).copy_(slot.parameter.detach())
        self.weight = exact.to(dtype)  # in fp32 `exact` itself
        self.kept = self.weight[self.mine]
        if stage.shards(Category.PARAMETER):
            self.kept = self.kept.clone()
        self.master = self.kept
        if dtype != torch.float32:
            self.master = exact[self.mine].clone()
        for slot in self.slots:
            slot.parameter.data = slot.of(self.weight)
        if stage.shards(Category.PARAMETER):
            free(self.weight)

        self.gradient = torch.zeros(layout.padded, dtype=dtype, device=world.device)
        self.reduced = self.gradient[self.mine]
        if stage.shards(Category.GRADIENT):
            self.reduced = self.reduced.clone()
            free(self.gradient)
        self.missing = set(self.slots)
        self.blank = set(self.slots)
        self.partial = False  # stages 2, 3: `reduced` holds earlier micro-batches of this step

    def add(self, slot: Slot, gradient: Tensor) -> None:
        """Add one n-th of a parameter's gradient: what is summed over the ranks later is then the mean.

        Divided before the sum, so that the sum cannot overflow; divided, and not multiplied by 1/n, which is no binary
        fraction at n = 3.
        """
        self.missing.discard(slot)
        if slot in self.blank:
            torch.div(gradient, self.n, out=slot.of(self.gradient))
            self.blank.discard(slot)
        else:
            slot.of(self.gradient).add_(gradient / self.n)

    def open(self) -> None:
        """Give the whole gradient its storage, holding nothing."""
        allocate(self.gradient)
        self.gradient[self.slots[-1].stop :].zero_()
        self.blank = set(self.slots)

    def fill(self) -> None:
        """A parameter without a gradient (it is not in this loss's graph) has the gradient zero."""
        for slot in self.blank:
            slot.of(self.gradient).zero_()
        self.blank.clear()

    def runs(self, group_of: Mapping[int, int]) -> list[tuple[int, slice]]:
        """(option group, elements of `master`) for each stretch of this rank's elements that share options.

        group_of: by id of the parameter.
        """
        found: list[tuple[int, slice]] = []
        for slot in self.slots:
            place, group = self.stretch(slot), group_of[id(slot.parameter)]
            if place.start >= place.stop:
                continue
            start = found.pop()[1].start if found and found[-1][0] == group else place.start
            found.append((group, slice(start, place.stop)))
        return found

    def stretch(self, slot: Slot) -> slice:
        """The elements of `master` that are a parameter's; empty where this rank owns none."""
        start = max(slot.start, self.mine.start) - self.mine.start
        return slice(start, max(start, min(slot.stop, self.mine.stop) - self.mine.start))

    def first_element(self, slot: Slot) -> int:
        """Which element of the flattened parameter its stretch begins with."""
        return max(slot.start, self.mine.start) - slot.start


def allocate(flat: Tensor) -> None:
    """Give `flat` a storage of its own size again, of undefined content."""
    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)


def free(flat: Tensor) -> None:
    """Take the storage of `flat`, and so of all its views, away."""
    flat.untyped_storage().resize_(0)


def allocated(flat: Tensor) -> bool:
    return flat.untyped_storage().size() > 0
