"""The adapters of Megatron-core and Megatron-FSDP: exact on the dyadic model, honest about bytes, names and dtypes.

Tests that need a library are skipped without it; the two break each other in one environment.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from zerobench.implementations.answers import claimed
from zerobench.implementations.cuda_stand_in import SHIMMED
from zerobench.implementations.protocol import ENGINE_METHODS
from zerobench.implementations.registry import BadPlugin, check_engine, names, resolve
from zerobench.scenarios import ADAMW, SGD
from zerobench.terms import Category, Stage
from zerobench.tests.ranks import join, run_ranks
from zerobench.tests.test_reference import GROUPS, assert_same, fp64_history, train
from zerobench.tests.test_third_party import PATIENT_S, _adam, _job, available

CORE = ("megatron-core-ddp", "megatron-core-distopt")
FSDP = ("megatron-fsdp-0", "megatron-fsdp-1", "megatron-fsdp-2", "megatron-fsdp-3")
NAMES = CORE + FSDP


@pytest.mark.parametrize("name", NAMES)
def test_claims_can_be_judged_without_the_library(name: str) -> None:
    """The judging side asks for them where nothing is installed: no import of what is adapted."""
    implementation: Any = resolve(name)
    assert implementation.name == name and implementation.shimmed.startswith(SHIMMED)
    assert name in {entry.name for entry in names()}
    for precision in ("fp32", "bf16"):
        claimed(implementation.claims(_job(4, precision=precision)))


@pytest.mark.parametrize("name", NAMES)
def test_absence_has_a_reason_that_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    assert "pip install 'zerobench[megatron-" in (resolve(name).unavailable() or "")


@pytest.mark.parametrize("name", NAMES)
def test_what_an_adapter_would_import_can_be_imported(name: str) -> None:
    for module in available(name).imports:
        importlib.import_module(module)


def test_the_optimizer_is_the_jobs() -> None:
    from zerobench.implementations.megatron_core import optimizer_settings

    told = optimizer_settings(_job(2, optimizer=ADAMW), True)
    assert told["decoupled_weight_decay"] and told["adam_beta2"] == 0.95 and told["weight_decay"] == 0.1
    assert told["clip_grad"] == 0.0  # the library's default clips
    assert "loss_scale" not in told and "optimizer_cpu_offload" not in told
    assert not optimizer_settings(_job(2, optimizer=replace(ADAMW, kind="adam")), True)["decoupled_weight_decay"]
    assert optimizer_settings(_job(2, clip_norm=0.5), True)["clip_grad"] == 0.5
    assert optimizer_settings(_job(2, precision="fp16"), True)["loss_scale"] == 1.0  # else it would be dynamic
    assert optimizer_settings(_job(2, optimizer=SGD), True)["optimizer_offload_fraction"] == 0.0
    assert "optimizer_cpu_offload" not in optimizer_settings(_job(2, optimizer=SGD), False)


def test_units_are_the_jobs_and_what_is_beside_them() -> None:
    from zerobench.implementations.megatron_fsdp import unit_types

    kinds = [kind.__name__ for kind in unit_types(_job(2))]
    assert kinds == ["Block", "Embedding", "LayerNorm", "Linear"]


ROWS = [  # model, A, optimizer
    ("dyadic", 2, GROUPS),
    ("dyadic-unused", 1, SGD),
    ("dyadic-tied", 1, SGD),
]


def _dyadic(rank: int, n: int, store: str, name: str, precision: str) -> None:
    join(rank, n, store)
    for model, a, optimizer in ROWS:
        features = frozenset({"unused"} if model == "dyadic-unused" else ())
        expected = fp64_history(model, n, a, 3, optimizer)
        changes: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "features": features}
        engine, actual = train(resolve(name), model, rank, n, steps=3, a=a, **changes)
        for step, (_, _, parameters) in enumerate(actual):
            assert_same(parameters, expected[step], (model, n, a, precision, step))
            assert all(p.dtype == torch.float32 for p in parameters.values())  # the most precise copy there is
        engine.close()


@pytest.mark.timeout(2 * PATIENT_S)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_dyadic_is_bit_for_bit_fp64(name: str, precision: str) -> None:
    if "sgd" not in available(name).claims(_job(2, precision=precision)).supports:
        pytest.skip("claims no SGD")
    run_ranks(_dyadic, 2, name, precision, deadline_s=PATIENT_S)


@pytest.mark.timeout(2 * PATIENT_S)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_stages_and_states_are_ddps(name: str) -> None:
    implementation, n = available(name), 2
    job = _job(n, bucket_numel=5000)
    claims = implementation.claims(job)
    psi = sum(p.numel() for p in job.module.parameters())
    found = run_ranks(_adam, n, name, deadline_s=PATIENT_S)
    if name in CORE:  # fully_shard_optimizer takes a step of its own: see results/deviations.md
        _, right = run_ranks(_adam, n, "torch-ddp")[0]
        for _, states in found:
            assert states == right  # n A = 2 in fp32: the same bits
    cost = {Category.PARAMETER: 4, Category.GRADIENT: 4, Category.OPTIMIZER: 8 + 4 * (claims.recipe.master is not None)}
    for category, nbytes in cost.items():
        whole = 1 if claims.stage.shards(category) else n
        total = sum(held[category] for held, _ in found)
        assert nbytes * psi * whole <= total <= nbytes * (psi * whole + n * claims.padding_numel), category


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_that_lost_a_method_is_refused(name: str) -> None:
    """Which engine class serves a name stands here once more, so that a method that moved away is missed."""
    from zerobench.implementations.megatron_core import MegatronCoreEngine
    from zerobench.implementations.megatron_fsdp import MegatronFsdpEngine

    engine_class: Any = MegatronCoreEngine if name in CORE else MegatronFsdpEngine
    claims = resolve(name).claims(_job(2))
    check_engine(object.__new__(engine_class), claims)
    for method in (*ENGINE_METHODS, "full_gradients", "full_optimizer_state", "save", "load", "set_lr_factor"):
        with pytest.raises(BadPlugin, match=method):
            check_engine(object.__new__(type("Mutated", (engine_class,), {method: None})), claims)


def test_stages_are_what_the_libraries_document() -> None:
    assert [resolve(name).claims(_job(2)).stage for name in CORE] == [Stage.DDP, Stage.OPTIMIZER]
    assert [resolve(name).claims(_job(2)).stage for name in FSDP] == list(Stage)
