"""Predictions against the ZeRO paper's Table 2, and the two inverse questions against each other."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from zerobench.analytic import total
from zerobench.claims import Recipe
from zerobench.predict import PRESETS, largest_psi, named, rows, smallest_n
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


def test_what_is_refused():
    with pytest.raises(ValueError, match="known: paper, fp32"):
        rows(1, 1, "papre")
    with pytest.raises(ValueError, match="at least 1 parameter"):
        rows(0, 1)
    with pytest.raises(ValueError, match="at least 1 rank"):
        rows(1, 0)
