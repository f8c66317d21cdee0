"""Accelerators by name, what they are, and devices to compile for that are not there."""

import importlib.util
import math
from types import SimpleNamespace

import pytest

from tunix_lite.planning import hardware
from tunix_lite.planning.hardware import HARDWARE, devices_of, find_machine, memory_limit, of_device

NAMES = [  # as typed, hardware, devices
    ("h100", "h100", 1),
    (" a100x2 ", "a100", 2),
    ("h100x16", "h100", 16),
    ("v5e-16", "v5e", 16),
    ("v5litepod-4", "v5e", 4),
    ("v4-8", "v4", 4),  # cores, two in a device
    ("tpu7x-2", "tpu7x", 2),
]


@pytest.mark.parametrize("text, name, count", NAMES)
def test_names_say_how_many_devices_of_what(text, name, count):
    target = find_machine(text)
    assert (target.hardware.name, target.num_devices, target.name) == (name, count, text.strip())


@pytest.mark.parametrize(
    "text, right",
    [
        ("8xh100", "h100x8"),
        ("", "h100x8"),
        ("h100x12", "h100x8 or h100x16"),
        ("v5e-12", "v5e-8"),
        ("v4-4", "v4-8"),
    ],
)
def test_a_name_of_nothing_is_answered_with_one_that_would_do(text, right):
    with pytest.raises(ValueError) as error:
        find_machine(text)
    assert right in str(error.value)
    assert repr(text) in str(error.value)
    for name in right.split(" or "):
        assert find_machine(name)


@pytest.mark.parametrize("name", HARDWARE)
def test_slices_and_nodes_are_of_whole_hosts(name):
    part = HARDWARE[name]
    if part.platform == "cuda":
        assert part.node_bandwidth < part.link_bandwidth < part.memory_bandwidth
        return
    shapes = part.slices
    assert len(shapes) == len(part.chip.shapes)
    for n, shape in shapes.items():
        assert n < part.host_devices or n % part.host_devices == 0
        assert math.prod(map(int, shape.split("x"))) * part.chip.devices == n


KNOWN = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100", "TPU v4": "v4"}
KNOWN |= {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}


@pytest.mark.parametrize("kind", [*KNOWN, "cpu", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "TPU v3"])
def test_a_device_is_known_by_what_it_says_it_is_and_not_taken_for_its_neighbour(kind):
    assert of_device(SimpleNamespace(device_kind=kind)) is HARDWARE.get(KNOWN.get(kind))


def test_the_limit_is_what_the_runtime_says_where_it_says_something():
    assert memory_limit(SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 7})) == 7
    assert memory_limit(SimpleNamespace(platform="gpu", memory_stats=lambda: None)) is None


@pytest.mark.parametrize("name, extra", [("v5e-16", "plan-tpu"), ("h100x8", "plan-gpu")])
def test_without_the_compiler_the_message_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ValueError) as error:
        devices_of(find_machine(name))
    assert f"pip install -e '.[{extra}]'" in str(error.value)


# ---- with the compilers


def needs_compiler(target):
    modules = hardware.COMPILERS[target.hardware.platform]
    if not any(importlib.util.find_spec(module) for module in modules):
        pytest.skip(f"needs {' or '.join(modules)}: the {hardware.EXTRAS[target.hardware.platform]} extra")


ALL = ["a100", "h100", "h100x8", "h100x16", "h200x8"] + [
    f"{part.name}-{devices * part.chip.cores}"
    for part in HARDWARE.values()
    if part.platform == "tpu"
    for devices in part.slices
    if devices <= 1024  # larger ones work, too, and take long to list
]


@pytest.mark.aot
@pytest.mark.parametrize("name", ALL)
def test_absent_devices_are_as_many_as_the_name_says_and_say_what_they_are(name):
    target = find_machine(name)
    needs_compiler(target)
    devices = devices_of(target)
    assert len(devices) == len(set(devices)) == target.num_devices
    assert of_device(devices[0]) is target.hardware
    hosts = len({device.process_index for device in devices})
    assert hosts == max(1, target.num_devices // target.hardware.host_devices) or (hosts, target.num_devices) == (1, 8)
    assert memory_limit(devices[0]) is None
