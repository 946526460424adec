"""Which GPU is meant by a name and a size."""

from __future__ import annotations

import pytest

from dstackweb.backends.matching import gpu_matches, name_matches
from dstackweb.spec.effective import Requirements


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("a100", "NVIDIA A100 80GB PCIe"),
        ("A100-SXM4", "NVIDIA A100-SXM4-80GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("RTX3080Ti", "NVIDIA GeForce RTX 3080 Ti"),
        ("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("A4000", "NVIDIA RTX A4000"),
        ("T4", "Tesla T4"),
    ],
)
def test_a_name_is_found_whatever_its_case_spaces_and_dashes(asked: str, name: str) -> None:
    assert name_matches(asked, name)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H100", "NVIDIA GH100"),
        ("L40", "NVIDIA L40S"),
        ("A10", "NVIDIA A100-SXM4-80GB"),
        ("A100", "NVIDIA A10"),
        ("RTX3080", "NVIDIA GeForce RTX 3080 Ti"),
        ("RTX6000", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX4090", "NVIDIA GeForce RTX 4090 D"),
        ("A100-PCIe", "NVIDIA A100-SXM4-80GB"),
        ("-", "NVIDIA A10"),
    ],
)
def test_another_model_is_no_match(asked: str, name: str) -> None:
    assert not name_matches(asked, name)


MIG = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


@pytest.mark.parametrize("asked", ["MIG 1g.5gb", "mig-1g.5gb", "MIG"])
def test_part_of_a_card_is_found_by_its_profile(asked: str) -> None:
    assert name_matches(asked, MIG)


@pytest.mark.parametrize("asked", ["A100", "A100-SXM4-40GB", "MIG 2g.10gb"])
def test_a_slice_of_a_gpu_matches_neither_the_gpu_nor_another_slice(asked: str) -> None:
    assert not name_matches(asked, MIG)


@pytest.mark.parametrize(
    ("nominal_gb", "shown_mib"), [(80, 81559), (40, 40960), (24, 22731), (24, 24564), (16, 15360), (141, 143771)]
)
def test_a_card_has_the_size_it_is_sold_with(nominal_gb: int, shown_mib: int) -> None:
    assert gpu_matches("x", shown_mib, of_size(nominal_gb))


@pytest.mark.parametrize(("nominal_gb", "shown_mib"), [(12, 11264), (80, 49140), (40, 81559), (16, 24564)])
def test_a_card_of_another_size_is_no_match(nominal_gb: int, shown_mib: int) -> None:
    assert not gpu_matches("x", shown_mib, of_size(nominal_gb))


def of_size(nominal_gb: int) -> Requirements:
    return Requirements(gpu_memory_min_mib=nominal_gb * 1024, gpu_memory_max_mib=nominal_gb * 1024)


def test_any_of_several_names_will_do() -> None:
    needs = Requirements(gpu_names=("A100", "H100"))
    assert gpu_matches("NVIDIA H100 PCIe", 81559, needs)
    assert not gpu_matches("NVIDIA L4", 23034, needs)
