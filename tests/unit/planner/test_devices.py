"""Tests of devices: built-in entries, user files, error messages and measurement of the local machine."""

import pytest
import yaml
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.errors import ConfigError
from hf_megatron.planner.devices import Device, device, device_names, read_device, write_device
from hf_megatron.planner.measured_device import measure_device

CUSTOM_DEVICE = {
    "name": "own",
    "memory_gib": 96,
    "peak_tflops": {"bf16": 500.0},
    "memory_tb_s": 4.0,
    "link_gb_s": 64.0,
    "devices_per_link": 4,
    "network_gb_s": 12.5,
    "host_gb_s": 50.0,
}


def test_built_in_devices():
    assert device_names() == ("a100-40", "a100-80", "h100", "h200", "b200", "gb200")
    for name in device_names():
        entry = device(name)
        assert entry == device(entry.name) and entry.note and entry.peak("bf16") > entry.peak("fp32")
        assert entry.network_gb_s < entry.link_gb_s and 0 < entry.matmul_share["bf16"] < 1
    assert device("H100").peak("fp8") == 1979e12
    assert device("h100").peak("fp16") == 989e12 and device("h100").reached("fp16") == device("h100").reached("bf16")
    assert device("h200").memory_gib > device("h100").memory_gib
    assert (device("h100").connection(8), device("h100").connection(9)) == ("link", "network")
    assert device("gb200").connection(64) == "link"


def test_device_files_round_trip(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(CUSTOM_DEVICE))
    loaded = device(path)
    assert loaded == Device(**CUSTOM_DEVICE) and loaded.matmul_share == {} and loaded.memory_share == 0.8
    for name in device_names():
        write_device(device(name), tmp_path / "other.yml")
        assert read_device(tmp_path / "other.yml") == device(str(tmp_path / "other.yml")) == device(name)


def test_unknown_names_and_files_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="device 'h101': expected one of a100-40, .*gb200, or the path of a YAML"):
        device("h101")
    with pytest.raises(ConfigError, match="none.yaml cannot be read"):
        device(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("name: [")
    with pytest.raises(ConfigError, match="broken.yaml is not valid YAML"):
        device(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected the fields name, memory_gib"):
        device(tmp_path / "list.yaml")
    with pytest.raises(
        ConfigError, match="precision = 'fp8' is not supported: Device 'A100-80' has peak_tflops for bf16, fp32 only"
    ):
        device("a100-80").peak("fp8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_gib": None}, "Device.memory_gib = None: expected a number above 0"),
        ({"memory_gib": -1}, "Device.memory_gib = -1: expected a number above 0"),
        ({"link_gb_s": "fast"}, "Device.link_gb_s = 'fast': expected a number above 0"),
        ({"memory_tb_s": float("nan")}, "Device.memory_tb_s = nan"),
        ({"devices_per_link": 2.5}, "Device.devices_per_link = 2.5: expected an integer of 1 or more"),
        ({"peak_tflops": {}}, "Device.peak_tflops = {}: expected a number above 0 for some of bf16, fp8"),
        ({"peak_tflops": {"int3": 1.0}}, "Device.peak_tflops = {'int3': 1.0}"),
        ({"matmul_share": {"bf16": 1.5}}, "Device.matmul_share = {'bf16': 1.5}: expected a share of the peak"),
        ({"memory_share": 2.0}, "Device.memory_share = 2.0: expected a share of the peak"),
        ({"name": ""}, "Device.name = '': expected a string"),
        ({"memory": 80}, "unknown memory; fields are name, memory_gib"),
    ],
)
def test_wrong_fields_are_named(tmp_path, change, words):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(CUSTOM_DEVICE | change))
    with pytest.raises(ConfigError) as error:
        device(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_missing_fields_are_named(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        yaml.safe_dump({name: value for name, value in CUSTOM_DEVICE.items() if not name.startswith("memory")})
    )
    with pytest.raises(ConfigError, match="missing memory_gib, memory_tb_s"):
        device(path)


def test_measure_local_device(tmp_path):
    measured = measure_device("cpu", seconds=0.0, is_tiny=True)
    assert measured.peak_tflops.keys() == {"bf16", "fp32"} and measured.memory_gib > 0.1 and measured.launch_us > 0
    write_device(measured, tmp_path / "found.yaml")
    assert device(tmp_path / "found.yaml") == measured
    like = device("h100")
    other = measure_device("cpu", like=like, seconds=0.0, is_tiny=True)
    copied_fields = ("memory_gib", "peak_tflops", "link_gb_s", "devices_per_link", "network_gb_s", "memory_tb_s")
    assert all(getattr(other, name) == getattr(like, name) for name in copied_fields)
    # Unmeasured values are copied from `like`.
    assert other.matmul_share["fp8"] == like.matmul_share["fp8"] and other.matmul_share["bf16"] < 0.1
    with pytest.raises(ConfigError, match="device_type = 'tpu': expected cuda .* or cpu"):
        measure_device("tpu")


def test_measure_command(tmp_path):
    path = tmp_path / "own.yaml"
    result = CliRunner().invoke(app, ["measure-device", str(path), "--device-type", "cpu", "--seconds", "0"])
    assert result.exit_code == 0 and result.stdout == path.read_text() and "(measured)" in device(path).name
    result = CliRunner().invoke(app, ["measure-device", str(path), "--like", "h101"])
    assert result.exit_code == 2 and "h101" in result.output
