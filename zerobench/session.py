"""A session: one engine on one rank, with the probes around it. The worker says what happens; the session does it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerobench.case import Run
from zerobench.claims import Claims, Recipe
from zerobench.digest import digest, whole_digests
from zerobench.implementations.answers import Answering
from zerobench.implementations.protocol import Implementation, Job, Unsupported
from zerobench.implementations.registry import BadPlugin, check_engine
from zerobench.models import Model
from zerobench.numerics import Clipping, Exact, Trajectory, watcher_of
from zerobench.oracle import Batch
from zerobench.probes import counters, wire
from zerobench.probes.bare import Bare, run_bare
from zerobench.probes.clock import time_steps
from zerobench.probes.fingerprint import fingerprints_of
from zerobench.probes.ledger import Ledger, with_labels
from zerobench.probes.resident import Residence
from zerobench.probes.steptrace import StepTrace, Untraced
from zerobench.probes.traffic import Tap
from zerobench.probes.work import UpdatedElements
from zerobench.rank import RankContext
from zerobench.readings import Links
from zerobench.record import Boundary, Digest, Flight, Holding, ModelFacts, Report, Sample, Wire
from zerobench.scenarios import RESUME_AT, Scenario
from zerobench.terms import MODEL_STATES, Category, Moment

FINGERPRINTED_NUMEL = 4_000_000
"""Models up to this many parameters have their bytes recognised by content, which needs every state gathered once."""


EVALUATION_STEP = 1_000
"""A step whose data no run trains on."""


class Session:
    def __init__(
        self,
        run: Run,
        scenario: Scenario,
        context: RankContext,
        tap: Tap,
        implementation: Implementation,
        job: Job,
        model: Model,
        facts: ModelFacts,
        claims: Claims,
        residence: Residence,
    ) -> None:
        self.device, self.residence = residence.device, residence
        self.run, self.scenario, self.context, self.tap = run, scenario, context, tap
        self.micro_batches = run.case.micro_batches  # A; the job says 1 where the caller accumulates
        self.implementation, self.job, self.model, self.facts, self.claims = implementation, job, model, facts, claims
        self.recipe = claims.recipe or Recipe.of(run.case.precision)
        self.last = scenario.first_step + run.case.warmup + run.case.measured - 1
        self.engine: Any = None  # Answering, once it is built
        self.ledger: Ledger | None = None
        self.watcher = watcher_of(scenario, job, claims, self.recipe, context.rank, self.last)
        self.changed: tuple[str, ...] = ()
        self._bare = Bare({}, {}, ())
        self.trace_into: Path | None = None  # a file for the trace of the last watched step
        self._trace = Untraced()
        self._watching = ExitStack()
        self._holdings: list[Holding] = []
        self._counted: list[int | None] = []  # for each of these, by the allocator
        self._boundaries: list[Boundary] = []
        self.flights: tuple[Flight, ...] | None = None
        self._digests: list[Digest] = []
        self._reports: list[Report] = []
        self._times: tuple[float, ...] = ()
        self._updated: int | None = None
        self._wire_before: Any = None
        self._wire: Wire | None = None
        self._counters_before: counters.Counts | None = None
        self._links: Links | None = None

    # -- the run, in order ---------------------------------------------------------------------------------------------

    def build(self, stack: ExitStack) -> None:
        """Enter the probes, then build the engine."""
        stack.enter_context(self._watching)
        if "memory" in self.scenario.watch:
            batch = self.model.batch(0, self.context.rank, 0)
            self._bare = run_bare(self.model, batch, self.job.dtype, self.claims.compute)
            self.ledger = self._watching.enter_context(Ledger(self.device.in_use, self.device.kind))
            self.ledger.baseline()
            self.ledger.adopt([*self.job.module.parameters(), *self.job.module.buffers()])
        if self.scenario.apart and self.context.rank:
            with torch.no_grad():
                for parameter in self.job.module.parameters():
                    parameter.mul_(2.0)
        self._at(-1, "build")
        with self._phase(-1, "build"):
            engine = self.implementation.build(self.job)
        check_engine(engine, self.claims)
        self.engine = Answering(engine)
        unread = self.job.options.unread()  # type: ignore[attr-defined]
        if deaf := set(unread) & dict(self.scenario.options).keys():
            raise Unsupported(f"unsupported: no option {', '.join(sorted(deaf))}")
        if unread:
            raise BadPlugin(f"{self.run.case.implementation}: options that build never read: {', '.join(unread)}")
        if self.scenario.checkpoint == "load":
            self._load()
        self._hold(-1, Moment.BUILT)
        self._digest(-1)
        with self._reading():
            if isinstance(self.watcher, Exact):
                self.watcher.built(self.engine)

    def step(self, step: int) -> None:
        """One optimizer step under the probes."""
        if step == self.run.case.warmup and "wire" in self.scenario.watch:
            self._wire_before = wire.read(self.context.control_ports)
            self._counters_before = self._counters()
        if step == self.last and self.trace_into is not None and self.ledger is not None:
            self._trace = StepTrace(self.ledger, self.tap, asynchronous=self.context.backend == "gloo")
            self._trace.begin(self.engine.model_states())
        poisoned = self.scenario.poison is not None and step == self.scenario.poisoned
        if self.scenario.lr_factors:
            self.engine.set_lr_factor(self.scenario.lr_factors[step])
            if isinstance(self.watcher, Exact):
                self.watcher.oracle.set_lr_factor(self.scenario.lr_factors[step])
        losses = self._micro_batches(step, poisoned=poisoned)
        self._hold(step, Moment.BACKWARD)
        with self._reading():
            if self.watcher:
                if not poisoned:
                    self.watcher.after_backward(self.engine, step, self._all_batches(step))
                if isinstance(self.watcher, Trajectory):
                    self.watcher.losses(step, losses, self._mine())
        self._at(step, "step")
        counting = UpdatedElements() if "work" in self.scenario.watch and step == self.last else None
        with self._phase(step, "step"), counting or nullcontext():
            report = self.engine.step()
        if counting is not None:
            self._updated = counting.numel
        self._reports.append(
            Report(
                step,
                sum(losses) / len(losses),
                report.skipped,
                report.grad_norm,
                report.loss_scale,
            )
        )
        if self.scenario.evaluated:
            self._evaluate(step)
        self._hold(step, Moment.STEPPED)
        if isinstance(self._trace, StepTrace) and self.trace_into is not None:
            self._trace.end()
            self._trace.write(self.trace_into)
            self._trace = Untraced()
        self._digest(step)
        with self._reading():
            if isinstance(self.watcher, Exact):
                self.watcher.counted(step, self.job.module, (step + 1) * self.micro_batches)
            if isinstance(self.watcher, Clipping):
                self.watcher.reported(step, self._reports[-1].grad_norm)
            if self.watcher:
                self.watcher.after_step(self.engine, step, **({"skipped": True} if poisoned else {}))
            if "bits" in self.scenario.watch:
                self._digests.extend(whole_digests(self.engine, self.claims, step))
        if self.scenario.checkpoint == "save" and step == RESUME_AT - 1:
            self._at(step, "save")
            self.engine.save(self.context.scratch)
        if step == self.last and self._wire_before is not None:
            after = wire.read(self.context.control_ports)
            self._wire = (
                wire.difference(self._wire_before, after, self.run.case.measured) if after is not None else None
            )
        if step == self.last and self._counters_before is not None and (now := self._counters()) is not None:
            settings = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
            self._links = counters.difference(self._counters_before, now, self.run.case.measured, settings)

    def stop_watching(self) -> None:
        """Leave the ledger: what follows runs bare."""
        self._watching.close()

    def time(self, steps: int, least_s: float) -> None:
        """Time whole bare steps after one that is not counted: `steps`, and more where they took less than `least_s`."""
        self._at(self.last + 1, "timed step")
        batches = [self.model.batch(self.last, self.context.rank, m) for m in range(self.micro_batches)]
        self.tap.uninstall()
        engine = self.engine.bare

        def one() -> None:
            for micro, batch in enumerate(batches):
                closes = micro == len(batches) - 1
                loss = engine.forward(batch, last=closes)
                engine.backward(loss, last=closes)
            engine.step()

        def meet() -> None:
            self._at(self.last + 1, "timed step")  # a sign of progress, outside of what is timed
            dist.barrier()

        one()
        self._times = time_steps(
            one, steps, least_s, barrier=meet, seconds=self.device.seconds, greatest=self._greatest
        )

    def close(self) -> None:
        self._at(self.last + 1, "close")
        self.engine.close()

    def sample(self, run_s: float) -> Sample:
        comparisons = getattr(self.watcher, "comparisons", [])
        return Sample(
            rank=self.context.rank,
            calls=tuple(self.tap.calls),
            holdings=tuple(self._holdings),
            allocator=tuple(self._counted),
            peaks=tuple(self.ledger.peaks) if self.ledger else (),
            boundaries=tuple(self._boundaries),
            bare_peaks=self._bare.peaks,
            flights=self.flights,
            wire=self._wire,
            times_s=self._times,
            comparisons=tuple(comparisons),
            digests=tuple(self._digests),
            reports=tuple(self._reports),
            updated_numel=self._updated,
            changed=self.changed,
            place=self.context.place,
            residents=tuple(self.residence.residents),
            device_peaks=tuple(self.residence.peaks),
            links=self._links,
            run_s=run_s,
        )

    # -- parts of a step -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Go on from what another run saved."""
        if not any(self.context.scratch.iterdir()):
            raise Unsupported("nothing was saved to load")
        self._at(RESUME_AT - 1, "load")
        self.engine.load(self.context.scratch)
        with self._reading():
            self._digests.extend(whole_digests(self.engine, self.claims, RESUME_AT - 1))
            if isinstance(self.watcher, Exact):
                self.watcher.adopt(self.engine)

    def _evaluate(self, step: int) -> None:
        """A forward without gradients, on a batch that training never sees."""
        self._at(step, "evaluation")
        batch = self.model.batch(EVALUATION_STEP, self.context.rank, 0)
        if self.ledger:
            self.ledger.ignore(batch)
        with torch.no_grad():
            self.engine.forward(batch, last=True)

    def _micro_batches(self, step: int, *, poisoned: bool = False) -> list[float]:
        losses = []
        for micro in range(self.micro_batches):
            closes = micro == self.micro_batches - 1
            batch = self.model.batch(step, self.context.rank, micro)
            if self.ledger:
                self.ledger.ignore(batch)
            self._at(step, "forward")
            watched = self.ledger is not None and step == self.last and closes
            if watched:
                self.model.observe_forward(partial(self._boundary, ahead=True))
            with self._phase(step, "forward"):
                loss = self.engine.forward(batch, last=closes)
            self.model.observe_forward(None)
            if poisoned and self.context.rank == self.context.world_size - 1 and closes:
                loss = loss * float(self.scenario.poison or "nan")
            if closes:
                self._hold(step, Moment.FORWARD)
            losses.append(float(loss.detach()))
            if self.scenario.by_caller:
                loss = loss / self.micro_batches
            self._at(step, "backward")
            if watched:
                self.model.observe(self._boundary)
            with self._phase(step, "backward"):
                self.engine.backward(loss, last=closes)
            self.model.observe(None)
            del loss
        return losses

    def _boundary(self, unit: str, *, ahead: bool = False) -> None:
        assert self.ledger is not None
        live, calls = self.ledger.live(), len(self.tap.calls)
        bare, phase = (self._bare.ahead, "forward") if ahead else (self._bare.back, "backward")
        self._boundaries.append(Boundary(self.last, unit, live, bare.get(unit, 0), phase, calls))
        self._trace.mark(f"forward has done {unit}" if ahead else f"backward reaches {unit}")

    def _all_batches(self, step: int) -> list[Batch]:
        """Every micro-batch of a step: all ranks' first, then all ranks' second, ..."""
        return [
            self.model.batch(step, rank, micro)
            for micro in range(self.micro_batches)
            for rank in range(self.context.world_size)
        ]

    def _mine(self) -> list[int]:
        n = self.context.world_size
        return [micro * n + self.context.rank for micro in range(self.micro_batches)]

    # -- the probes ----------------------------------------------------------------------------------------------------

    def _at(self, step: int, phase: str) -> None:
        self.tap.step, self.tap.phase = step, phase
        self.context.note(f"{phase} of step {step}" if step >= 0 else phase)

    def _phase(self, step: int, name: str) -> AbstractContextManager[Any]:
        if self.ledger is None:
            return nullcontext()
        stack = ExitStack()
        if self._resides:
            stack.enter_context(self.residence.phase(step, name))
        stack.enter_context(self.ledger.phase(step, name))
        stack.enter_context(self._trace.slice(name))
        return stack

    @property
    def _resides(self) -> bool:
        return "resident" in self.scenario.watch

    @property
    def _real(self) -> bool:
        """Whether tensors have values."""
        return self.context.simulation is None

    def _counters(self) -> counters.Counts | None:
        """The GPU's link counters once it is idle; None on a CPU."""
        tenancy = self.residence.eye.tenancy
        if tenancy is None:
            return None
        self.device.synchronize()
        return counters.read(tenancy)

    def _reading(self) -> ExitStack:
        """While the suite reads: its collectives and its tensors are not the subject's."""
        stack = ExitStack()
        stack.enter_context(self.tap.paused())
        if self.ledger:
            stack.enter_context(self.ledger.suspended())
        stack.enter_context(self._trace.reading())
        return stack

    def _hold(self, step: int, moment: Moment) -> None:
        if not self.ledger:
            return
        with self._trace.reading():
            claims = self.engine.model_states()
            self._trace.claim(claims)
            holding = self.ledger.holding(step, moment, claims)
        counted = self.ledger.witnessed
        if step == self.last and moment is Moment.BACKWARD and self._recognises:
            with self._reading():
                fingerprints = fingerprints_of(self.engine) if self._greatest(len(holding.pieces)) else None
            if fingerprints is not None:
                labelled = self.ledger.holding(step, moment, claims, fingerprints=fingerprints)
                holding = with_labels(holding, labelled)
        self._holdings.append(holding)
        self._counted.append(counted)
        if self._resides and step == self.last:
            self.residence.read(step, moment)

    def _greatest(self, here: float) -> float:
        """Collective."""
        value = torch.tensor(here, dtype=torch.float64, device=self.job.world.device)
        if self.ledger:
            self.ledger.ignore([value])  # a backend may hold it when this has returned
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    @property
    def _recognises(self) -> bool:
        known = {"full_gradients", "full_optimizer_state"} <= self.claims.supports
        # Not where the system's view is taken: the fingerprints themselves weigh more than the model.
        wanted = known and not self._resides and self.trace_into is None
        return wanted and self._real and self.facts.psi <= FINGERPRINTED_NUMEL

    def _digest(self, step: int) -> None:
        """What the claimed stage keeps whole on every rank has the same bits on every rank."""
        if not self._real or self.claims.shard_size is not None:
            return
        if self._resides:  # gigabytes on a GPU, and another run has them
            return
        states = self.engine.model_states()
        for category in MODEL_STATES:
            if category is not Category.GRADIENT and not self.claims.stage.shards(category):
                value, nbytes = digest(states.get(category, ()))
                self._digests.append(Digest(step, f"replicated {category.value}", value, nbytes))
