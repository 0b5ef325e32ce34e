"""Chapter 5: what a checkpoint brings back. Digests of the run that saved and of the runs that loaded, by name."""

from __future__ import annotations

from zerobench.checks.check import Check, Judgement, NotApplicable, View, verdict
from zerobench.checks.features import exact
from zerobench.finding import Level
from zerobench.record import Record, Sample
from zerobench.scenarios import RESUME_AT

Bits = dict[tuple[int, str], str]


def bits(sample: Sample) -> Bits:
    """Digests of whole parameters and optimizer states by (step, name)."""
    return {(d.step, d.what): d.value for d in sample.digests if not d.what.startswith("replicated ")}


def resume(view: View) -> Judgement:
    """Right after loading, and after every step from there, the bits of the run that was not interrupted.

    Beyond two terms a sum depends on its order, and the order on buckets, which may begin anew with the process: DDP
    rebuilds its own after the first backward. So where n A > 2 what follows the load is compared on the exact model.
    """
    terms = view.n * view.main.run.case.micro_batches
    word = _compare(view.records["save"], view.records["resume"], after=terms <= 2)
    exact = [view.records.get(name) for name in ("save-exact", "resume-exact")]
    if word.claim is verdict(True) and exact[0] and exact[1]:
        return _compare(exact[0], exact[1], after=True)
    return word


def reshard(view: View) -> Judgement:
    """Right after loading at another n, the bits that were saved, Adam's too; then the oracle's, from there."""
    for saved, loaded in (
        ("save-exact", "reshard-half"),
        ("save-exact", "reshard-double"),
        ("save", "reshard-half-adam"),
        ("save", "reshard-double-adam"),
    ):
        word = _compare(view.records[saved], view.records[loaded], after=False)
        if word.claim is not verdict(True):
            return word
    resumed = View(view.case, {n: view.records[n] for n in ("reshard-half", "reshard-double")})
    return exact("gradient", "parameter")(resumed)


def dtype(view: View) -> Judgement:
    """Dtypes of optimizer states, and step counts, right after loading."""
    at = RESUME_AT - 1
    saved = _kinds(bits(view.records["save"].samples[0]), at)
    loaded = _kinds(bits(view.records["resume"].samples[0]), at)
    if not saved:
        raise NotApplicable("the optimizer has no state to compare")
    wrong = sorted(name for name in saved if saved[name] != loaded.get(name))
    return Judgement(
        verdict(not wrong),
        verdict(not wrong),
        "the dtypes and step counts that were saved",
        f"{wrong[0]}: {loaded.get(wrong[0], 'missing')}, was {saved[wrong[0]]}"
        if wrong
        else f"{len(saved)} states equal",
    )


def _kinds(found: Bits, step: int) -> dict[str, str]:
    """The dtype of each optimizer state at a step; of step counts the value's digest as well."""
    out = {}
    for (at, name), value in found.items():
        if at == step and not name.startswith("parameter "):
            out[name] = value if name.startswith("step ") else value.split(":")[0]
    return out


def _compare(saved: Record, loaded: Record, *, after: bool) -> Judgement:
    expected = "the bits that were saved" + (", and then the uninterrupted run's" if after else "")
    truth = bits(saved.samples[0])
    if not truth:
        raise NotApplicable("nothing was digested")
    for sample in loaded.samples:
        found = bits(sample)
        for (step, name), value in sorted(truth.items()):
            if step < RESUME_AT - 1 or (step > RESUME_AT - 1 and not after):
                continue
            if found.get((step, name)) != value:
                when = "right after loading" if step == RESUME_AT - 1 else f"after step {step}"
                how = "differs" if (step, name) in found else "is missing"
                return Judgement(
                    verdict(False),
                    verdict(False),
                    expected,
                    f"{loaded.run.scenario}: {name} {how} {when}, on rank {sample.rank} of {loaded.run.case.world_size} "
                    f"(saved by {saved.run.case.world_size})",
                    ranks=(sample.rank,),
                )
    return Judgement(verdict(True), verdict(True), expected, f"{len(truth)} digests equal")


CHECKS = (
    Check(
        "state.resume",
        Level.MUST,
        "==",
        "a run that is saved and loaded goes on as if it had not stopped",
        "all state compared before the first step, bitwise; then after every step: Adam's where n A <= 2, elsewhere on "
        "an exact model",
        ("save", "resume"),
        resume,
        also=("save-exact", "resume-exact"),
    ),
    Check(
        "state.reshard",
        Level.MUST,
        "==",
        "a checkpoint loads at n/2 and at 2n",
        "all state bitwise; then steps bitwise the oracle's, from there",
        ("save-exact", "reshard-half", "reshard-double", "save", "reshard-half-adam", "reshard-double-adam"),
        reshard,
    ),
    Check(
        "state.dtype",
        Level.MUST,
        "==",
        "dtypes and step counts survive a checkpoint",
        "of every optimizer state, right after loading",
        ("save", "resume"),
        dtype,
    ),
)
