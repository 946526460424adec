"""Codes of what runs need are short, and read back as what they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dstackweb.spec.units import Needs
from tests.support import examples

NAMES = st.from_regex(r"[A-Za-z][A-Za-z0-9 _.-]{0,9}", fullmatch=True).filter(lambda name: name not in ("CPU", "GPU"))
OF_GPUS = st.builds(
    lambda nodes, gpus, names, memory: Needs(nodes, gpus, tuple(names), memory if names else 0),
    st.integers(1, 100), st.integers(1, 100), st.lists(NAMES, max_size=3), st.integers(0, 1 << 30),
)  # fmt: skip
OF_CPUS = st.builds(lambda nodes, cpus: Needs(nodes, cpus=cpus), st.integers(1, 100), st.integers(0, 1000))


@pytest.mark.parametrize(
    ("nodes", "requirements", "code"),
    [
        (1, {"gpu_count_min": 0, "gpu_names": [], "cpu_min": 2}, "2xCPU"),
        (1, {"gpu_count_min": 1, "gpu_names": [], "gpu_memory_min_mib": 1024, "cpu_min": 2}, "1xGPU"),
        (1, {"gpu_count_min": 2, "gpu_names": ["A100"], "gpu_memory_min_mib": 40960, "cpu_min": 1}, "2xA100:40GB"),
        (4, {"gpu_count_min": 8, "gpu_names": ["H100", "H200"], "gpu_memory_min_mib": None, "cpu_min": 1},
         "4x8xH100,H200"),
        (1, {"gpu_count_min": 1, "gpu_names": ["RTX 4090"], "gpu_memory_min_mib": 1500, "cpu_min": 1},
         "1xRTX 4090:1500MB"),
    ],
)  # fmt: skip
def test_a_code_names_what_lists_show(nodes: int, requirements: dict[str, object], code: str) -> None:
    assert Needs.of({"requirements": requirements, "nodes": nodes}).code == code


@examples(300)
@given(OF_GPUS | OF_CPUS)
def test_a_code_reads_back_as_what_it_stands_for(needs: Needs) -> None:
    assert Needs.parse(needs.code) == needs


@pytest.mark.parametrize("text", ["", "2 CPUs", "x", "2x", "GPU", "2x2", "9999999999xGPU", "1xGPU:4TB", "2xGPU\n"])
def test_other_texts_are_no_codes(text: str) -> None:
    assert Needs.parse(text) is None
