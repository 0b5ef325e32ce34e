"""Every number of data/published.yaml: what `predict` says, within the rounding of who published it.

An entry is here with its call, or in NOT_PREDICTED with the reason. One that is in neither fails, and so does a reason
for an entry that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerobench.predict import Row, rows
from zerobench.terms import Category, Collective, Stage
from zerobench.tests.test_analytic import formula

PUBLISHED = yaml.safe_load((Path(__file__).parent / "data" / "published.yaml").read_text())
STAGE = {"dp": 0, "base": 0, "os": 1, "p_os": 1, "os_g": 2, "p_os_g": 2, "os_g_p": 3, "p_os_g_p": 3}
UNIT = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
GIVEN = {"psi", "n", "unit", "memory_bytes", "mp", "gpus", "recipe", "name", "P", "l", "g", "gpn", "nodes", "W", "G"}
GIVEN |= {"id", "counted", "schema"}
"""What a call is given, not what it says."""

NOT_PREDICTED = {
    "zero_paper.table2.rows.*.measured": "the largest model that ran; test_predict has the prediction above it",
    "deepspeed_estimator.buffer_factor_B": "pinned host buffers",
    "deepspeed_estimator.formulas.*.cpu": "host memory of offloading",
    "deepspeed_estimator.examples.*.cpu": "host memory of offloading",
    "deepspeed_estimator.formulas.zero2_offload_optimizer": "offloading moves states to the host: not ZeRO stage 1 to 3",
    "deepspeed_estimator.formulas.zero3_offload_*": "offloading moves states to the host: not ZeRO stage 1 to 3",
    "deepspeed_estimator.examples.*.gpu.*offload*": "offloading moves states to the host: not ZeRO stage 1 to 3",
    "fsdp_paper.cross_host_traffic_M.*.hybrid": "counts a ring over all W ranks for what replicas exchange; here the ring "
    "has the W/G replicas, 2 (W - G)/(G W)",
    "fsdp_paper.peak_parameter_elements": "a sentence, no formula to evaluate",
    "fsdp_paper.padding_elements_per_flat_parameter_max": "padding is what a claim allows; a prediction has none",
    "collective_weight": "of one collective, not of a stage: Collective.ring_passes, and test_analytic",
    "comm_elements_per_step.zero1_ar_bcast": "no recipe: torch's ZeroRedundancyOptimizer claims this volume itself",
    "comm_elements_per_step.zero1_reduce_*": "no recipe: an option that is off by default; fairscale",
    "comm_elements_per_step.zero2_reduce_ag": "no recipe: an option that is off by default",
    "comm_elements_per_step.fsdp2_default_one_micro_batch": "depends on the root unit's share of Psi",
    "collective_counts_fsdp2": "numbers of calls, which depend on units",
    "collective_counts_megatron_mfsdp_v2": "numbers of calls, which depend on units",
    "busbw_factors": "of one collective, not of a stage: Collective.wire_factor, and test_analytic",
}

Entry = tuple[str, Any, Callable[[], bool]]
"""(where, what is published, whether `predict` agrees)"""


def printed(got: Fraction | int, value: float) -> bool:
    """Whether `value` is `got`, rounded or cut off to the digits that it is printed with."""
    digit = Fraction(1, 10 ** len(str(value).partition(".")[2])) if isinstance(value, float) else Fraction(1)
    return -digit / 2 <= Fraction(got) - Fraction(str(value)) < digit


def rounded(got: Fraction | int, value: float) -> bool:
    """Whether `value` is `got` to the six digits of a recomputed number."""
    return abs(Fraction(got) - Fraction(str(value))) < Fraction(1, 10**6)


def same(got: Fraction | int, value: float) -> bool:
    return Fraction(got) == Fraction(str(value))


def everywhere(law: str, got: Callable[[int], Fraction], **names: int) -> bool:
    """Whether a formula of n holds at several n."""
    return all(formula(law, n=n, **names) == got(n) for n in (1, 2, 3, 8, 64, 1024))


def stage(number: int, *asked: Any, **more: Any) -> Row:
    return rows(*asked, **more)[number]


def paper() -> Iterator[Entry]:
    part, at = PUBLISHED["zero_paper"], "zero_paper"
    for (name, value), moments in zip(part["optimizer_bytes_K"].items(), (2, 1, 0), strict=True):
        k = stage(0, 1, 1, moments=moments).nbytes[Category.OPTIMIZER]
        yield f"{at}.optimizer_bytes_K.{name}", value, lambda k=k, v=value: same(k, v)
    for name, law in part["bytes_per_param"].items():
        yield (
            f"{at}.bytes_per_param.{name}",
            law,
            lambda s=STAGE[name], law=law: everywhere(law, lambda n: stage(s, 1, n).total, K=12),
        )
    far = 10**12
    for name, limit in part["reduction_limit"].items():
        saving = stage(0, 1, far).total / stage(STAGE[name], 1, far).total
        wanted = far if limit == "n" else int(limit)
        yield f"{at}.reduction_limit.{name}", limit, lambda s=saving, w=wanted: rounded(s, w)
    figure = part["figure1"]
    tables = [("figure1", figure), *((f"table1.rows.{i}", row) for i, row in enumerate(part["table1"]["rows"]))]
    for where, row in tables:
        for how, agrees in (("published", printed), ("exact", same)):
            for name, value in row[how].items():
                held = stage(STAGE[name], row["psi"], row["n"]).total / UNIT["GB"]
                yield f"{at}.{where}.{how}.{name}", value, lambda h=held, v=value, a=agrees: a(h, v)
    gpt2 = stage(0, part["gpt2"]["psi"], 1)
    yield f"{at}.gpt2.published.states", 24, lambda: same(gpt2.total / UNIT["GB"], part["gpt2"]["published"]["states"])
    weights = gpt2.nbytes[Category.PARAMETER] / UNIT["GB"]
    yield f"{at}.gpt2.published.fp16_weights", 3, lambda: same(weights, part["gpt2"]["published"]["fp16_weights"])
    for name, passes in part["communication_psi"].items():
        yield (
            f"{at}.communication_psi.{name}",
            passes,
            lambda s=STAGE[name], v=passes: same(stage(s, 1, 1).volume, v),
        )


def paper_table_2() -> Iterator[Entry]:
    table = PUBLISHED["zero_paper"]["table2"]
    for i, row in enumerate(table["rows"]):
        for how in ("published", "exact"):
            for name, value in row[how].items():
                largest = [
                    Fraction(stage(STAGE[name], 1, table["n"], card_nbytes=nbytes).largest_psi or 0, 10**9)
                    for nbytes in (table["memory_bytes"], table["memory_bytes"] * row["mp"])
                ]

                def agrees(one=largest[0], all_=largest[1], value=value, mp=row["mp"], how=how) -> bool:
                    if how == "exact":
                        return rounded(all_, value)
                    # printed: the first row, times mp; 0.5T, 1T and 2T stand for 512, 1024 and 2048 billion
                    return printed(one, value / mp) or float(f"{float(all_):.0e}") == value

                yield f"zero_paper.table2.rows.{i}.{how}.{name}", value, agrees


def bytes_a_parameter() -> Iterator[Entry]:
    recipes = {
        "paper_dp": ("paper", 0),
        "paper_os": ("paper", 1),
        "paper_os_g": ("paper", 2),
        "paper_os_g_p": ("paper", 3),
        "megatron_fp16_fp16grad": ("megatron-fp16", 1),
        "megatron_bf16_fp32grad": ("megatron", 1),
        "megatron_fp32": ("fp32", 1),
        "deepspeed_zero2_code": ("deepspeed", 2),
        "deepspeed_zero2_docs": ("deepspeed-docs", 2),
    }
    for name, (recipe, number) in recipes.items():
        law = PUBLISHED["bytes_per_param"][name]
        yield (
            f"bytes_per_param.{name}",
            law,
            lambda law=law, r=recipe, s=number: everywhere(law, lambda n: stage(s, 1, n, r).total),
        )
    law = PUBLISHED["bytes_per_param"]["deepspeed_zero3"]

    def unit_and_shard(n: int) -> Fraction:
        row = stage(3, 2, n, "deepspeed", unit_numel=2)  # the largest layer is all of the model
        return (row.total + (row.unit_nbytes or 0)) / 2

    yield "bytes_per_param.deepspeed_zero3", law, lambda: everywhere(law, unit_and_shard, largest=1)
    for i, row in enumerate(PUBLISHED["megatron_bytes_per_param"]):
        recipe = ("megatron-fp16", "megatron", "fp32")[i]
        at = f"megatron_bytes_per_param.{i}"
        yield f"{at}.plain", row["plain"], lambda r=recipe, v=row["plain"]: same(stage(0, 1, 1, r).total, v)
        yield (
            f"{at}.distributed",
            row["distributed"],
            lambda r=recipe, law=row["distributed"]: everywhere(law, lambda k: stage(1, 1, k, r).total),
        )
        for n, value in row["exact"].items():
            yield f"{at}.exact.{n}", value, lambda r=recipe, n=n, v=value: same(stage(1, 1, n, r).total, v)


def deepspeed() -> Iterator[Entry]:
    recipes = {
        "zero2": ("deepspeed", 2),
        "zero2_docs": ("deepspeed-docs", 2),
        "zero3_zero_init": ("deepspeed", 3),
        "zero3_no_zero_init": ("deepspeed", 3),
        "paper_zero2": ("paper", 2),
    }

    def held(name: str, psi: int, g: int, unit: int) -> Fraction:
        recipe, number = recipes[name]
        row = stage(number, psi, g, recipe, unit_numel=unit)
        return row.total + (row.unit_nbytes or 0)

    part = PUBLISHED["deepspeed_estimator"]
    for name, laws in part["formulas"].items():
        if name in recipes:
            yield (
                f"deepspeed_estimator.formulas.{name}.gpu",
                laws["gpu"],
                lambda k=name, law=laws["gpu"]: formula(law, P=1000, l=50, g=8) == held(k, 1000, 8, 50),
            )
    for i, example in enumerate(part["examples"]):
        for name, numbers in example["gpu"].items():
            for how, value in numbers.items() if name in recipes else ():
                got = held(name, example["P"], example["g"], example["l"]) / UNIT[example["unit"]]
                agrees = rounded if how == "exact" else printed
                yield (
                    f"deepspeed_estimator.examples.{i}.gpu.{name}.{how}",
                    value,
                    lambda g=got, v=value, a=agrees: a(g, v),
                )
    tutorial, at = part["tutorial_gpt2"], "deepspeed_estimator.tutorial_gpt2"
    for n, value in tutorial["published"].items():
        states = stage(1, tutorial["psi"], n).nbytes[Category.OPTIMIZER] / UNIT["GB"]
        yield f"{at}.published.{n}", value, lambda s=states, v=value: same(s, v)
    law = tutorial["formula"]
    yield (
        f"{at}.formula",
        law,
        lambda: everywhere(law, lambda n: stage(1, 7, n).nbytes[Category.OPTIMIZER], psi=7),
    )


def traffic() -> Iterator[Entry]:
    part, at = PUBLISHED["fsdp_paper"]["cross_host_traffic_M"], "fsdp_paper.cross_host_traffic_M"
    for name, number in (("full_replication", 0), ("full_sharding", 3)):
        W, value = part["example"]["W"], part["example"]["exact"][name]
        yield f"{at}.example.exact.{name}", value, lambda s=number, W=W, v=value: same(stage(s, 1, W).sent_numel, v)
        law = part["formulas"][name]
        yield (
            f"{at}.formulas.{name}",
            law,
            lambda s=number, law=law: all(formula(law, W=W) == stage(s, 1, W).sent_numel for W in (1, 2, 16)),
        )
    ours: dict[str, tuple[str, int, dict[str, bool]]] = {
        "ddp": ("paper", 0, {}),
        "zero1_rs_ag": ("paper", 1, {}),
        "zero1_ar_ag": ("deepspeed", 1, {}),
        "zero2_rs_ag": ("paper", 2, {}),
        "zero2_ar_ag": ("deepspeed", 2, {}),
        "zero3": ("paper", 3, {}),
        "fsdp2_reshard": ("fsdp", 3, {}),
        "fsdp2_no_reshard": ("fsdp", 3, {"gathered": True}),
        "fsdp2_reshard_deferred_sync": ("fsdp", 3, {"reduce_each": False}),
        "fsdp2_no_reshard_deferred_sync": ("fsdp", 3, {"gathered": True, "reduce_each": False}),
    }
    for row in PUBLISHED["comm_elements_per_step"]:
        if row["id"] not in ours:
            continue
        recipe, number, claims = ours[row["id"]]
        batches, n = (1, 2, 3, 8), 5

        def predicted(A: int, recipe=recipe, number=number, claims=claims, n=n) -> Row:
            return stage(number, n, n, recipe, micro_batches=A, **claims)

        where = f"comm_elements_per_step.{row['id']}"
        law = row["elements"]
        yield (
            f"{where}.elements",
            law,
            lambda p=predicted, law=law, b=batches: all(p(A).volume == formula(law, A=A) for A in b),
        )
        for kind, times in row["times"].items():
            which = Collective(kind.replace("_", "-"))
            yield (
                f"{where}.times.{kind}",
                times,
                lambda p=predicted, k=which, t=times, b=batches: all(
                    p(A).sent[k] == formula(t, A=A) * 5 * k.wire_factor(5) for A in b
                ),
            )
    part, far = PUBLISHED["megatron_comm_bytes_per_param"], 10**9  # (n-1)/n goes to 1
    for name, recipe, number in (("distributed_optimizer", "megatron", 1), ("ddp_bf16_all_reduce", "paper", 0)):
        sent = stage(number, 1, far, recipe).sent_nbytes
        yield f"megatron_comm_bytes_per_param.{name}", part[name], lambda s=sent, v=part[name]: abs(s - v) < 1e-6


ENTRIES = [e for part in (paper, paper_table_2, bytes_a_parameter, deepspeed, traffic) for e in part()]


@pytest.mark.parametrize(("where", "value", "agrees"), ENTRIES, ids=[where for where, _, _ in ENTRIES])
def test_predicted(where: str, value: object, agrees: Callable[[], bool]) -> None:
    assert agrees(), f"{where}: published {value}"


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted paths of all scalars; items of a list by their id, where they have one, else by number."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in GIVEN:
                yield from leaves(value, (*path, str(key)))
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from leaves(value, (*path, str(value.get("id", i) if isinstance(value, dict) else i)))
    else:
        yield ".".join(path)


def test_every_entry_is_predicted_or_has_a_reason_why_not() -> None:
    from fnmatch import fnmatch

    there = list(leaves(PUBLISHED))
    said = {where for where, _, _ in ENTRIES}
    assert len(said) == len(ENTRIES) > 200
    assert said <= set(there)
    excused = {p: {leaf for leaf in there if fnmatch(leaf, p) or fnmatch(leaf, p + ".*")} for p in NOT_PREDICTED}
    assert all(excused.values()), [p for p, found in excused.items() if not found]
    without = set().union(*excused.values())
    assert sorted(set(there) - said - without) == []
    assert sorted(said & without) == []


def test_stages_are_numbered_as_rows_are() -> None:
    assert [row.stage for row in rows(1, 1)] == list(Stage)
