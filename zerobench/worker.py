"""One run on one rank: the model, the implementation and a scenario go in, what the probes saw comes out.

The only training loop in the repository. Probes are entered before the engine is built; timed steps run bare.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from zerobench import device as devices
from zerobench import globalstate, nccl
from zerobench.case import Run
from zerobench.claims import OptimizerSpec, ParamGroup
from zerobench.difference import NAMED_DTYPES
from zerobench.implementations import answers
from zerobench.implementations.protocol import Job, Unsupported, World
from zerobench.implementations.registry import BadPlugin, resolve
from zerobench.launch import limits
from zerobench.libraries import libraries
from zerobench.models import build as build_model
from zerobench.options import Watched
from zerobench.probes import allocator, reference_process
from zerobench.probes.flight import Host
from zerobench.probes.resident import GpuEye, Residence
from zerobench.probes.timeline import Timeline
from zerobench.probes.traffic import Tap
from zerobench.rank import JOINING, CannotJoin, Outcome, RankContext
from zerobench.readings import Reading
from zerobench.record import Call, Failure, ModelFacts, Sample
from zerobench.scenarios import SCENARIOS, Scenario
from zerobench.session import Session

MAY_REFUSE = ("build", "load")
"""Where `Unsupported` makes a skip of a run. Later it is an exception like another: a step that ends half-way is not one
that was never asked for."""

LATE_S = 0.01
"""Far longer than a collective of a few kilobytes takes on a loopback."""


def work(run: Run, context: RankContext, *, trace: Path | None = None, timed: bool = True) -> Outcome:
    """Do `run` on this rank. Never raises for what the subject does: that is an Outcome.

    trace: a file for the events of the last watched step, where the run watches memory. timed: whether the bare steps
    are taken that a scenario which watches time asks for.
    """
    behind: dict[str, tuple[str, ...]] = {}
    outcome = _work(run, context, behind, trace, timed)
    return replace(outcome, sample=replace(outcome.sample, **behind))  # type: ignore[arg-type]


def _work(
    run: Run, context: RankContext, behind: dict[str, tuple[str, ...]], trace: Path | None, timed: bool
) -> Outcome:
    """behind: gets what stands behind the implementation, as fields of Sample, whatever comes of the run."""
    started = time.perf_counter()
    allocator.prepare()
    residence = _take_place(run, context)
    tap = Tap()
    late = _lateness(run, context, tap) if SCENARIOS[run.scenario].delayed else None

    def before(call: Call) -> None:
        context.entered(call)
        context.note(f"{tap.phase} of step {tap.step}: {describe(call)}")
        if late is not None:
            late()

    tap.on_call = before
    tap.install()
    session: Session | None = None
    try:
        session, reason = _prepare(run, context, tap, residence, behind)
        if session is None:
            return Outcome("skip", Sample(context.rank), reason=reason)
        session.trace_into = trace
        problems = tap.self_test(torch.device(context.device))
        if problems:
            return Outcome(
                "invalid", Sample(context.rank), reason="the traffic tap's self-test: " + "; ".join(problems)
            )
        _train(session, SCENARIOS[run.scenario], run, timed)
        status, reason = "ok", ""
        unknown = {"collectives that the traffic tap does not understand": tap.unknown}
        unknown["tensors that the ledger cannot count"] = session.ledger.unknown if session.ledger else []
        for what, found in unknown.items():
            if found:
                status, reason = "invalid", f"{what}: {', '.join(sorted(set(found)))}"
        return Outcome(status, session.sample(time.perf_counter() - started), reason, session.claims, session.facts)
    except Unsupported as error:
        if tap.phase not in MAY_REFUSE:
            return _raised(error, context, tap, started)
        return Outcome("skip", Sample(context.rank), reason=str(error) or "unsupported")
    except CannotJoin as error:
        failure = Failure("raised", str(error), phase=JOINING)
        return Outcome("error", Sample(context.rank, failure=failure), reason=failure.what)
    except BadPlugin as error:
        failure = Failure("refused", str(error))
        return Outcome("refused", Sample(context.rank, failure=failure), reason=str(error))
    except Exception as error:
        return _raised(error, context, tap, started)


def untimed(run: Run, context: RankContext) -> Outcome:
    """`work` without bare steps, for who judges no seconds."""
    return work(run, context, timed=False)


def _raised(error: Exception, context: RankContext, tap: Tap, started: float) -> Outcome:
    """What the subject raised, where, and the collective before it."""
    limits.relieve()  # it may have raised for want of memory
    failure = Failure(
        "raised",
        f"{type(error).__name__}: {error}",
        phase=tap.phase,
        step=tap.step,
        stack=traceback.format_exc(limit=-12),
        last_call=describe(tap.calls[-1]) if tap.calls else "",
    )
    sample = Sample(context.rank, failure=failure, run_s=time.perf_counter() - started)
    return Outcome("error", sample, reason=failure.what)


def describe(call: Call) -> str:
    """A collective in one phrase: "reduce-scatter of 4 096 bf16 in ranks 0,1"."""
    return f"{call.kind.value} of {call.numel} {call.dtype} in ranks {','.join(map(str, call.group))}"


def _lateness(run: Run, context: RankContext, tap: Tap) -> Callable[[], None]:
    """Makes one rank late for every collective of a step, another rank each step: the others run ahead of it, and what
    they forget to wait for is not there yet. Freed memory is overwritten, so that who reads it reads nonsense."""
    allocator.poison_freed()

    def late() -> None:
        if tap.step >= 0 and tap.step % run.case.world_size == context.rank:
            time.sleep(LATE_S)

    return late


def _take_place(run: Run, context: RankContext) -> Residence:
    """The rank on its device, in the order that this needs: the reference process comes and goes before this process
    has a context on the GPU, NVML is asked who is there before it has, and NCCL is set before there is a group."""
    watch, place = SCENARIOS[run.scenario].watch, context.place
    baseline: Mapping[str, Reading] = {}
    if "resident" in watch:
        context.note("starting a reference process")
        apart = partial(context.join, "reference process")
        baseline = reference_process.measure(place, context.rank, apart, NAMED_DTYPES[run.case.precision])
    if "wire" in watch and place.backend == "nccl":
        for name, value in nccl.CANONICAL.items():
            os.environ.setdefault(name, value)
    residence = Residence(devices.of(place), GpuEye(place), baseline)
    residence.device.use()
    return residence


def _prepare(
    run: Run, context: RankContext, tap: Tap, residence: Residence, behind: dict[str, tuple[str, ...]]
) -> tuple[Session | None, str]:
    """The session, before anything of the subject ran but its import; or None and why the run is skipped."""
    case, scenario = run.case, SCENARIOS[run.scenario]
    context.note("importing the implementation")
    implementation = resolve(case.reference)
    if reason := answers.reason(implementation.unavailable()):
        return None, f"unavailable: {reason}"
    if shimmed := answers.shim(getattr(implementation, "shimmed", None)):
        behind["shimmed"] = (shimmed,)
    needed_modules = answers.modules(getattr(implementation, "imports", ()))
    behind["libraries"] = libraries([*needed_modules, type(implementation).__module__])
    for name in needed_modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise BadPlugin(
                f"{case.implementation}: its imports name {name!r}, which cannot be imported: {error}"
            ) from error
    context.note(JOINING)
    context.join()
    context.note("building the model")
    model = build_model(case.model, world_size=case.world_size, micro_batches=case.micro_batches, device=context.device)
    if context.simulation is not None:
        model = context.simulation.data(model)
    facts = model_facts(model.module, model.units, scenario, examples=model.examples, tokens=model.tokens)
    options = Watched({**case.options, **dict(scenario.options)})
    job = Job(
        module=model.module,
        units=model.units,
        world=World(context.rank, context.world_size, torch.device(context.device), context.backend),
        precision=case.precision,
        optimizer=grouped(scenario.optimizer, facts) if scenario.grouped else scenario.optimizer,
        micro_batches=1 if scenario.by_caller else case.micro_batches,
        bucket_numel=facts.bucket_numel,
        clip_norm=scenario.clip_norm,
        loss_scale=scenario.loss_scale,
        initial_scale=scenario.initial_scale,
        features=scenario.features,
        options=options,
    )
    claims = answers.claimed(implementation.claims(job))
    needed = scenario.features | ({"simulable"} if context.simulation is not None else set())
    lacking = needed - claims.supports
    if lacking:
        return None, f"unsupported: {', '.join(sorted(lacking))}"
    return Session(run, scenario, context, tap, implementation, job, model, facts, claims, residence), ""


def model_facts(
    module: torch.nn.Module, units: tuple[torch.nn.Module, ...], scenario: Scenario, *, examples: int, tokens: int
) -> ModelFacts:
    """What the judging side needs to know of a model; Psi counts trainable elements, a tied weight once."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    psi = sum(p.numel() for p in trainable.values())
    sizes: list[int] = []
    seen: set[int] = set()
    for unit in units:
        mine = [p for p in unit.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in mine)
        sizes.append(sum(p.numel() for p in mine))
    if psi > sum(sizes):
        sizes.append(psi - sum(sizes))
    return ModelFacts(
        psi=psi,
        frozen=sum(p.numel() for p in module.parameters() if not p.requires_grad),
        buffers_nbytes=sum(b.numel() * b.itemsize for b in module.buffers()),
        units=tuple(sizes),
        parameters={name: p.numel() for name, p in trainable.items()},
        bucket_numel=bucket_numel(scenario.bucket, psi, tuple(sizes)),
        examples=examples,
        tokens=tokens,
    )


def grouped(spec: OptimizerSpec, facts: ModelFacts) -> OptimizerSpec:
    """Every other parameter in a group of half the learning rate and with weight decay, one group without members, the
    others left to the rest."""
    slow = ParamGroup(tuple(facts.parameters)[::2], {"lr": spec.lr / 2, "weight_decay": 0.5})
    return replace(spec, groups=(slow, ParamGroup((), {"lr": spec.lr * 2})))


def bucket_numel(bucket: str | None, psi: int, units: tuple[int, ...]) -> int | None:
    """The bucket, in elements, that a scenario's word asks for."""
    if bucket is None:
        return None
    if bucket == "unit":
        return max(units)
    if bucket.isdigit():
        return int(bucket)
    return -(-psi // int(bucket.removeprefix("Psi/")))


def _flying(session: Session) -> Host | Timeline:
    """How flights are seen: NCCL's run on the device, the others are waited for by the host."""
    if session.context.backend == "nccl":
        return Timeline(session.device)
    return Host(session.tap, session.model)


def _train(session: Session, scenario: Scenario, run: Run, timed: bool) -> None:
    before = globalstate.snapshot()
    with ExitStack() as stack:
        session.build(stack)
        first = scenario.first_step
        flying = _flying(session) if "flight" in scenario.watch else None
        for step in range(first, first + run.case.warmup + run.case.measured):
            with flying.step(last=step == session.last) if flying else nullcontext():
                session.step(step)
        session.flights = flying.flights if flying else None
        session.stop_watching()
        # Ranks that share a GPU take turns on it: how long that takes says nothing about the subject.
        shared, simulated = session.context.place.shared, session.context.simulation is not None
        if timed and "time" in scenario.watch and not (shared or simulated):
            session.time(scenario.timed, scenario.timed_s)
        session.close()
    session.changed = globalstate.changes(before, globalstate.snapshot())
