"""Predictions against the ZeRO paper's Table 2, and the two inverse questions against each other."""

from __future__ import annotations

import doctest
import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zerobench import predict
from zerobench.analytic import total
from zerobench.claims import Recipe
from zerobench.cli import main
from zerobench.predict import largest_psi, rows, smallest_n
from zerobench.recipes import PRESETS, named
from zerobench.terms import Category, Stage

PUBLISHED = yaml.safe_load((Path(__file__).parent / "data" / "published.yaml").read_text())
STAGE = {"base": Stage.DDP, "p_os": Stage.OPTIMIZER, "p_os_g": Stage.GRADIENT, "p_os_g_p": Stage.PARAMETER}


@pytest.mark.parametrize("row", PUBLISHED["zero_paper"]["table2"]["rows"], ids=lambda r: f"mp{r['mp']}")
def test_zero_table_2(row):
    """The largest model that fits 32 GB a rank; model parallelism of degree mp multiplies the memory."""
    table = PUBLISHED["zero_paper"]["table2"]
    for name, exact in row["exact"].items():
        largest = largest_psi(table["memory_bytes"] * row["mp"], Recipe(), STAGE[name], table["n"])
        assert largest / 10**9 == pytest.approx(exact, abs=1e-6)
        # printed: the first row, cut to one decimal, times mp (and 0.5T, 1T, 2T for 512, 1024 and 2048 billion)
        assert row["published"][name] == pytest.approx(exact, rel=0.025)
        if name in row["measured"]:
            assert row["measured"][name] * 10**9 < largest


def test_figure_1_with_its_traffic():
    """7.5e9 parameters on 64 ranks: Figure 1 of the paper, and what is sent."""
    by_stage = {row.stage: row for row in rows(7_500_000_000, 64, card_nbytes=80 * 10**9)}
    assert [float(row.total / 10**9) for row in by_stage.values()] == [120, 31.40625, 16.640625, 1.875]
    assert by_stage[Stage.OPTIMIZER].nbytes[Category.OPTIMIZER] == 7_500_000_000 * 12 // 64
    assert by_stage[Stage.PARAMETER].sent_numel == Fraction(3 * 7_500_000_000 * 63, 64)
    assert by_stage[Stage.PARAMETER].sent_nbytes == 2 * by_stage[Stage.PARAMETER].sent_numel
    assert by_stage[Stage.DDP].smallest_n is None
    assert by_stage[Stage.DDP].largest_psi == 5_000_000_000
    assert by_stage[Stage.PARAMETER].smallest_n == 2  # 120 GB of states on cards of 80 GB


def test_megatron_sends_six_bytes_a_parameter():
    published = PUBLISHED["megatron_comm_bytes_per_param"]
    n, psi = 1000, 1000  # on a ring each pass costs (n-1)/n
    sharded = rows(psi, n, "megatron")[Stage.OPTIMIZER]
    assert sharded.sent_nbytes == published["distributed_optimizer"] * (n - 1)
    assert rows(psi, n, "paper")[Stage.DDP].sent_nbytes == published["ddp_bf16_all_reduce"] * (n - 1)


@pytest.mark.parametrize(
    ("preset", "stage", "a", "b"),
    [
        ("paper", Stage.GRADIENT, 2, 14),
        ("fp32", Stage.GRADIENT, 4, 12),
        ("megatron", Stage.OPTIMIZER, 6, 12),
        ("megatron-fp16", Stage.OPTIMIZER, 4, 16),
        ("deepspeed", Stage.GRADIENT, 2, 18),
        ("deepspeed", Stage.PARAMETER, 0, 18),
        ("deepspeed-docs", Stage.GRADIENT, 4, 16),
        ("fsdp", Stage.PARAMETER, 0, 16),
    ],
)
def test_presets_cost_what_is_published(preset, stage, a, b):
    for n in (1, 2, 7):
        assert rows(100, n, preset)[stage].total == 100 * (a + Fraction(b, n))


def test_fsdp_holds_fp32_and_sends_bf16():
    row = rows(1000, 4, "fsdp", micro_batches=2)[Stage.PARAMETER]
    assert row.nbytes[Category.PARAMETER] == 1000
    assert row.sent_nbytes == 2 * row.sent_numel == 2 * 6 * 750


def test_claims_change_what_is_sent():
    def sent(**claims: object) -> list[Fraction]:
        return [row.volume for row in rows(8, 2, micro_batches=3, **claims)]

    assert sent() == [2, 2, 4, 9]
    assert sent(gathered=True) == [2, 2, 4, 6]
    assert sent(reduce_each=False) == [2, 2, 2, 7]
    hybrid = rows(64, 8, shard_size=4)[Stage.PARAMETER]
    assert hybrid.total == 16 * 64 // 4
    assert hybrid.sent_numel == 3 * 64 * Fraction(3, 4) + 2 * 16 * Fraction(1, 2)


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from(Stage), st.integers(1, 10**13), st.integers(1, 10**12))
def test_smallest_n_fits_and_one_rank_fewer_does_not(preset, stage, nbytes, psi):
    recipe, moments = named(preset).recipe, 2 + named(preset).extra
    n = smallest_n(nbytes, recipe, stage, psi, moments)
    if n is None:
        assert total(recipe, stage, psi, 10**30, moments) > nbytes
    else:
        assert total(recipe, stage, psi, n, moments) <= nbytes
        assert n == 1 or total(recipe, stage, psi, n - 1, moments) > nbytes


def test_a_card_that_the_replicated_states_fill_has_no_room_for_a_shard():
    assert smallest_n(2 * 10**9, Recipe(), Stage.GRADIENT, 10**9) is None
    assert smallest_n(2 * 10**9 + 1, Recipe(), Stage.GRADIENT, 10**9) == 14 * 10**9
    assert smallest_n(16 * 10**9, Recipe(), Stage.DDP, 10**9) == 1


@given(st.sampled_from(Stage), st.integers(1, 10**12), st.integers(1, 4096))
def test_largest_model_fits_and_one_parameter_more_does_not(stage, nbytes, n):
    psi = largest_psi(nbytes, Recipe(), stage, n)
    assert total(Recipe(), stage, psi, n) <= nbytes < total(Recipe(), stage, psi + 1, n)


presets, worlds = st.sampled_from(sorted(PRESETS)), st.integers(1, 512)
sizes, batches = st.integers(1, 10**12), st.integers(1, 16)


@given(presets, sizes, worlds, batches)
def test_a_hybrid_of_one_group_is_no_hybrid(preset, psi, n, batches):
    assert rows(psi, n, preset, micro_batches=batches, shard_size=n) == rows(psi, n, preset, micro_batches=batches)


@given(presets, sizes, worlds, worlds, batches)
def test_more_ranks_hold_no_more_and_send_no_less(preset, psi, n, m, batches):
    few, many = (rows(psi, k, preset, micro_batches=batches) for k in sorted((n, m)))
    for a, b in zip(few, many, strict=True):
        assert all(b.nbytes[c] <= a.nbytes[c] for c in a.nbytes)
        assert b.sent_nbytes >= a.sent_nbytes


@given(presets, sizes, worlds, batches, st.integers(1, 10**12))
def test_the_whole_is_the_sum_of_its_parts(preset, psi, n, batches, bandwidth):
    for row in rows(psi, n, preset, micro_batches=batches, bandwidth=bandwidth):
        assert row.total == sum(row.nbytes.values())
        assert row.sent_numel == sum(row.sent.values()) == row.volume * psi * Fraction(n - 1, n)
        assert row.least_s == max(row.sent_nbytes, row.received_nbytes) / bandwidth


def test_the_unit_in_use_leaves_less_of_the_card():
    """7.5e9 parameters on 80 GB: 0.2e9 in use cost 4 bytes each, and only at stage 3."""
    without, beside = (rows(7_500_000_000, 2, card_nbytes=60 * 10**9, unit_numel=u) for u in (None, 200_000_000))
    assert [row.unit_nbytes for row in beside] == [None, None, None, 800_000_000]
    assert [row.smallest_n for row in without] == [None, 3, 3, 2]
    assert [row.smallest_n for row in beside] == [None, 3, 3, 3]
    assert beside[3].largest_psi == without[3].largest_psi - 100_000_000


def test_dtypes_change_a_recipe_at_every_stage():
    for stage, cost in ((Stage.GRADIENT, 4 + Fraction(2 + 16, 8)), (Stage.PARAMETER, Fraction(4 + 16, 8))):
        preset = named("deepspeed").with_dtypes({"parameter": "fp32"})
        assert rows(8, 8, preset)[stage].total == 8 * cost
    assert rows(1, 1, named("paper").with_dtypes({"master": None}))[0].total == 12
    with pytest.raises(ValueError, match="a recipe has parameter, gradient"):
        named("paper").with_dtypes({"grad": "fp32"})


def test_the_example_of_the_module_runs():
    failed, tried = doctest.testmod(predict)
    assert tried > 3 and not failed


def test_the_command_says_what_it_was_asked_and_writes_it(tmp_path, capsys):
    out = tmp_path / "rows.json"
    asked = "predict --params 7.5e9 --world-size 64 --shard-size 8 --micro-batches 4 --recipe fsdp --bandwidth 100GB/s"
    assert main([*asked.split(), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    for words in ("shard groups of 8 (8 replicas)", "12 Psi x 7/8 + 8 Psi/8 x 7/8", "a lower bound: the larger of"):
        assert words in said
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    expected = rows(7_500_000_000, 64, "fsdp", micro_batches=4, shard_size=8, bandwidth=10**11)
    assert [line["total_nbytes"] for line in lines] == [row.total for row in expected]
    assert [line["least_s"] for line in lines] == [float(row.least_s) for row in expected]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--params seven --world-size 4", "'seven' is not a count"),
        ("--params 7B --world-size 0", "n: at least 1 rank, not 0"),
        ("--params 7B --world-size 8 --shard-size 3", "shard_size 3 does not divide n = 8"),
        ("--params 7B --world-size 8 --recipe papre", "known: paper, fp32"),
        ("--params 7B --world-size 8 --dtype gradient=fp33", "'fp33' is not a dtype"),
        ("--params 7B --world-size 8 --dtype gradient", "write it as gradient=fp32"),
        ("--params 7B --world-size 8 --bandwidth 100GB", "not a bandwidth such as 100GB/s"),
        ("--params 7B --world-size 8 --bandwidth 0GB/s", "more than 0 bytes a second"),
        ("--params 7B --world-size 8 --unit 8B", "unit: from 1 to Psi"),
        ("--params 7B --world-size 8 --recipe deepspeed --shard-size 4", "in shard groups is not published"),
        ("--params 7B --world-size 8 --recipe deepspeed --reduce-once", "reduces every micro-batch at stage 2"),
    ],
)
def test_bad_input_is_a_usage_error(words, said, capsys):
    assert main(["predict", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_what_is_refused():
    with pytest.raises(ValueError, match="known: paper, fp32"):
        rows(1, 1, "papre")
    with pytest.raises(ValueError, match="at least 1 parameter"):
        rows(0, 1)
    with pytest.raises(ValueError, match="at least 1 rank"):
        rows(1, 0)
