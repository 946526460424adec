"""What `resources` means in numbers."""

from __future__ import annotations

import pytest

from dstackweb.spec.effective import Requirements
from dstackweb.spec.run_file import parse_run_file


def of(resources: object) -> Requirements:
    config = {"type": "task", "commands": ["a"], "resources": resources}
    return Requirements.of(parse_run_file(config).fields.resources)


def test_a_run_without_resources_needs_the_defaults() -> None:
    assert Requirements.of(None) == Requirements(cpu_min=1, cpu_max=None, memory_min_mib=256, gpu_count_min=0)


def test_all_of_it() -> None:
    assert of({"cpu": "2..8", "memory": "8GB..", "gpu": "A100,H100:40GB..80GB:2"}) == Requirements(
        cpu_min=2,
        cpu_max=8,
        memory_min_mib=8192,
        memory_max_mib=None,
        gpu_count_min=2,
        gpu_count_max=2,
        gpu_names=("A100", "H100"),
        gpu_memory_min_mib=40960,
        gpu_memory_max_mib=81920,
    )


@pytest.mark.parametrize(
    ("gpu", "least", "most"),
    [
        ("A100", 1, 1),
        ("24GB", 1, 1),
        (2, 2, 2),
        ("..2", 1, 2),
        ("..0", 0, 0),
        ("0..2", 0, 2),
        (0, 0, 0),
        ("1..", 1, None),
    ],
)
def test_how_many_gpus(gpu: object, least: int, most: int | None) -> None:
    found = of({"gpu": gpu})
    assert (found.gpu_count_min, found.gpu_count_max) == (least, most)


def test_the_mapping_and_the_short_form_are_equal() -> None:
    assert of({"gpu": {"name": ["A100"], "memory": "40GB..", "count": 2}}) == of({"gpu": "A100:40GB..:2"})
    assert of({"gpu": {"name": "A100, H100", "memory": 24}}) == of({"gpu": "A100,H100:24GB:1"})


@pytest.mark.parametrize(("memory", "least"), [("..8GB", 256), ("..128MB", 128)])
def test_the_least_memory_never_exceeds_the_most(memory: str, least: int) -> None:
    assert of({"memory": memory}).memory_min_mib == least


def test_requirements_survive_json() -> None:
    needs = of({"cpu": 2, "gpu": "A100:40GB:2"})
    assert Requirements.model_validate_json(needs.model_dump_json()) == needs
