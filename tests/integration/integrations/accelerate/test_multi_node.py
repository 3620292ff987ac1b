"""Test of `accelerate launch` on two hosts, simulated by network namespaces with a virtual Ethernet link."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[4]
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 29731

PROBE = """
import json, os, sys
import hf_megatron, torch
import torch.distributed as dist
from accelerate import Accelerator
accelerator = Accelerator()
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
host = os.readlink("/proc/self/ns/net")
hosts = [None] * dist.get_world_size()
dist.all_gather_object(hosts, host)
tp = dist.get_process_group_ranks(accelerator.torch_device_mesh["tp"].get_group())
result = {
    "rank": dist.get_rank(),
    "world": dist.get_world_size(),
    "total": total.item(),
    "layout": hf_megatron.config_from_environment().to_dict(),
    "hosts": len(set(hosts)),
    "tp_hosts": len({hosts[rank] for rank in tp}),
    "gathered": accelerator.gather(torch.tensor([dist.get_rank()])).tolist(),
}
with open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w") as file:
    json.dump(result, file)
accelerator.end_training()
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


@pytest.fixture
def hosts():
    """Names of two network namespaces that can reach only each other, at ADDRESSES."""
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command to make network namespaces")
    names = [f"hfm{os.getpid()}a", f"hfm{os.getpid()}b"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def start(host, machine, config, probe, output):
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=host)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    place = ["--machine_rank", str(machine), "--main_process_ip", ADDRESSES[0], "--main_process_port", str(PORT)]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *launch, *place, str(probe), str(output)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("start_by", ["static", "c10d"])
def test_two_hosts_form_one_job(hosts, start_by, tmp_path):
    values = yaml.safe_load((ROOT / "examples" / "multi_node.yaml").read_text())
    assert values["num_machines"] == 2 and values["megatron_lm_config"]["megatron_lm_tp_degree"] == 2
    # Unlike in the example: four CPU ranks instead of sixteen GPUs.
    values |= {"num_processes": 4, "use_cpu": True, "mixed_precision": "no"}
    if start_by == "c10d":
        values |= {"rdzv_backend": "c10d", "same_network": False}
    config, probe = tmp_path / "config.yaml", tmp_path / "probe.py"
    config.write_text(yaml.safe_dump(values))
    probe.write_text(PROBE)
    launchers = [start(host, machine, config, probe, tmp_path) for machine, host in enumerate(hosts)]
    try:
        outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(outputs)[-6000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, result in enumerate(results):
        assert result["rank"] == rank and result["world"] == 4 and result["total"] == 0 + 1 + 2 + 3
        assert result["layout"]["tp_size"] == 2 and result["layout"]["zero_stage"] == 1
        assert result["hosts"] == 2, "the ranks were on two hosts"
        assert result["tp_hosts"] == 1, "tensor parallel ranks share a host"
        assert result["gathered"] == [rank % 2, rank % 2 + 2], "one rank of each host, in dp order"
