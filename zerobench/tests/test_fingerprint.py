"""Content is recognised in shards, views and casts, and nothing is recognised in noise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zerobench.probes.fingerprint import Fingerprints


def references() -> dict[str, list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    shapes = [(64, 48), (48,), (96, 64), (7, 31)]
    weights = [torch.randn(s, generator=g) * 0.05 for s in shapes]
    gradients = [torch.randn(s, generator=g) * 1e-3 for s in shapes]
    return {"weight": weights, "gradient": gradients, "second moment": [0.05 * t * t for t in gradients]}


@pytest.fixture(scope="module")
def prints() -> Fingerprints:
    return Fingerprints(references())


def flat(label: str) -> Tensor:
    return torch.cat([t.reshape(-1) for t in references()[label]])


@pytest.mark.parametrize("label", ["weight", "gradient", "second moment"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flat_shard_is_recognised_as_a_tensor_and_as_raw_bytes(
    prints: Fingerprints, label: str, dtype: torch.dtype
) -> None:
    whole = flat(label)
    for n, rank in ((1, 0), (3, 1), (4, 3)):
        shard = whole.tensor_split(n)[rank].to(dtype).clone()
        assert prints.label(shard) == label
        assert prints.label(shard.untyped_storage()) == label


def test_fp16_is_recognised_where_it_holds_the_values(prints: Fingerprints) -> None:
    assert prints.label(flat("weight").half().clone().untyped_storage()) == "weight"


def test_a_view_of_part_of_a_buffer_and_a_buffer_that_is_mostly_padding(prints: Fingerprints) -> None:
    buffer = torch.zeros(3 * 64 * 48)
    buffer[1000 : 1000 + 64 * 48] = references()["gradient"][0].reshape(-1)
    assert prints.label(buffer[1000:2000]) == "gradient"
    assert prints.label(buffer.untyped_storage()) == "gradient"
    assert prints.label(references()["weight"][2][:, 10:40]) == "weight"


def test_a_hole_at_an_odd_offset_is_read_where_it_can_be(prints: Fingerprints) -> None:
    raw = torch.zeros(4 * 3072 + 2, dtype=torch.uint8)
    raw[2:] = references()["weight"][0].reshape(-1).view(torch.uint8)
    assert prints.label(raw[2:]) is None, "four-byte values at a two-byte offset cannot be read as such"
    assert prints.label(raw[2:].clone()) == "weight"


def test_what_cannot_be_told_apart_is_named_together() -> None:
    master = flat("weight")
    both = Fingerprints({"weight": [master.bfloat16()], "master": [master], "gradient": [flat("gradient")]})
    assert both.label(master[100:2000].bfloat16()) == "weight|master"


def test_noise_of_the_same_distribution_gets_no_label(prints: Fingerprints) -> None:
    g = torch.Generator().manual_seed(2)
    labelled = []
    for i in range(100):
        scale = (0.05, 1e-3, 1.0, 5e-8)[i % 4]
        noise = torch.randn(200 + 97 * i, generator=g) * scale
        noise = noise.bfloat16() if i % 3 == 0 else noise.abs() if i % 3 == 1 else noise
        labelled.append(prints.label(noise.untyped_storage()))
    assert set(labelled) == {None}


def test_content_of_few_values_fits_anywhere_and_is_not_labelled() -> None:
    g = torch.Generator().manual_seed(3)
    ternary = Fingerprints({"weight": [torch.randint(1, 4, (5000,), generator=g).float()]})
    assert ternary.label(torch.randint(1, 4, (5000,), generator=g).float()) is None


@pytest.mark.parametrize(
    "empty", [torch.zeros(1000), torch.ones(1000), torch.empty(0), torch.ones(3), torch.arange(50)]
)
def test_zeros_constants_and_the_very_small_say_nothing(prints: Fingerprints, empty: Tensor) -> None:
    assert prints.label(empty) is None
    assert Fingerprints({}).label(empty) is None
    assert Fingerprints({"weight": []}).label(torch.randn(100)) is None
