"""Tests of faults in running jobs: every rank exits in bounded time with an error that names the failed rank.

Ranks are forks that exit like a script, through `sys.excepthook`, each in its own process.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import ConfigError, MegatronConfig, parallelize
from hf_megatron.compat.torch_distributed import default_store, set_group_timeouts
from hf_megatron.core.communication import watchdog
from hf_megatron.core.fork_harness import run_ranks, set_rank_environment
from hf_megatron.integrations.accelerate.process_group import ensure_process_group

ROOT = Path(__file__).parents[4]
# Seconds that ranks wait for each other; long enough for a slow rank on a busy machine.
TIMEOUT = 10.0
TP2 = MegatronConfig(tp_size=2, timeout=TIMEOUT)
DP2 = MegatronConfig(dp_size=2, timeout=TIMEOUT)
# Timeout for faults that are detected immediately, long before it expires.
LONG = 90.0
LONG_LAYOUTS = {"tp2": MegatronConfig(tp_size=2, timeout=LONG), "dp2": MegatronConfig(dp_size=2, timeout=LONG)}
# Additional seconds on a busy machine for loading the model, the first steps and exiting.
BUSY_SECONDS = 60.0


class Job:
    """Forked ranks that run `function(*args)`; the output of rank n is written to `directory/rankn.log`."""

    def __init__(self, directory, world_size, function, *args):
        self.directory = directory
        directory.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes, self.codes = {}, {}
        for rank in range(world_size):
            process = os.fork()
            if process == 0:
                self._be_rank(rank, world_size, port, function, args)
            self.processes[rank] = process

    def _be_rank(self, rank, world_size, port, function, args):
        status = 1
        try:
            log = os.open(self.directory / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.excepthook = sys.__excepthook__
            # An earlier test in the pytest process may have left an Accelerator state; a script starts without one.
            AcceleratorState._reset_state(reset_partial_state=True)
            set_rank_environment(rank, world_size)
            os.environ["MASTER_PORT"] = str(port)
            torch.set_num_threads(1)
            function(*args)
            # The exit handlers of this process belong to pytest: call only the watchdog's, as the interpreter would.
            watchdog.running_watch()._on_exit()
            sys.stdout.flush()
            status = 0
        except BaseException:  # noqa: BLE001 - as the interpreter does
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def wait(self, seconds, ranks=None):
        """Returns exit codes by rank: negative for a signal, `None` for a rank still running after `seconds`."""
        deadline = time.monotonic() + seconds
        waiting = set(self.processes if ranks is None else ranks) - set(self.codes)
        while waiting and time.monotonic() < deadline:
            for rank in list(waiting):
                process, status = os.waitpid(self.processes[rank], os.WNOHANG)
                if process:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
                    waiting.remove(rank)
            time.sleep(0.02)
        return {rank: self.codes.get(rank) for rank in self.processes}

    def kill(self):
        for rank, process in self.processes.items():
            if rank not in self.codes:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def text(self, rank):
        return (self.directory / f"rank{rank}.log").read_text()

    def seconds_after_fault(self, rank):
        """Returns the seconds between the fault and the last output of a rank."""
        [fault_at] = [float(at) for log in (self.text(0), self.text(1)) for at in re.findall(r"FAULT at ([\d.]+)", log)]
        return os.path.getmtime(self.directory / f"rank{rank}.log") - fault_at

    def wait_for(self, pattern, rank, seconds=BUSY_SECONDS):
        """Waits until the output of a rank matches `pattern`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if re.search(pattern, self.text(rank) if (self.directory / f"rank{rank}.log").exists() else ""):
                return
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} has not written {pattern!r}: {self.text(rank)[-3000:]}")


@pytest.fixture
def start(tmp_path):
    jobs = []

    def function(name, *args):
        jobs.append(Job(tmp_path / name, 2, *args))
        return jobs[-1]

    yield function
    for job in jobs:
        job.kill()


def train(stories, config, fault, steps=1000):
    """A plain Accelerate loop; `fault(step)` runs inside each forward."""
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(3, 512, (2, 17), generator=torch.Generator().manual_seed(0))
    done = 0
    # In a middle layer the other rank is inside a collective or about to enter one.
    model.model.layers[2].register_forward_pre_hook(lambda *_: fault(done))
    for step in range(steps):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1


def print_fault():
    print(f"FAULT at {time.time()}", flush=True)


def raise_in_forward(step):
    if step == 3 and dist.get_rank() == 1:
        print_fault()
        raise ValueError("boom on one rank")


def signal_self(number):
    def fault(step):
        if step == 3 and dist.get_rank() == 1:
            time.sleep(0.5)  # until the other rank is inside a collective
            print_fault()
            os.kill(os.getpid(), number)

    return fault


def be_slow(step):
    if step == 3 and dist.get_rank() == 1:
        print_fault()
        time.sleep(120)


def test_fault_17_one_rank_raises_in_forward(stories, start):
    jobs = {name: start(name, train, stories, config, raise_in_forward) for name, config in LONG_LAYOUTS.items()}
    for name, job in jobs.items():
        job.wait_for("FAULT", 1)
        assert job.wait(LONG + BUSY_SECONDS) == {0: 1, 1: 1}, (name, job.text(0))
        assert max(map(job.seconds_after_fault, (0, 1))) < LONG
        assert "rank 1 failed after 3 optimizer steps: ValueError: boom on one rank" in job.text(1)
        survivor = job.text(0)
        assert "rank 0 ends because rank 1 failed first, after 3 optimizer steps: ValueError: boom" in survivor
        assert survivor.count("Traceback") == 1 and "in raise_in_forward" in survivor, "the other rank's alone"
        assert re.search(WAITING[name], survivor), survivor


def fail_identically(path):
    AutoModelForCausalLM.from_pretrained(path, megatron_config=TP2)


def test_identical_failures_are_reported_once(stories, start, tmp_path):
    shutil.copytree(stories, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 300_000)
    job = start("alike", fail_identically, tmp_path / "cut")
    assert job.wait(LONG) == {0: 1, 1: 1}
    texts = [job.text(rank) for rank in (0, 1)]
    reported = [text for text in texts if "Traceback" in text]
    assert len(reported) == 1 and "cut/model.safetensors: tensor" in reported[0], texts
    [short] = [text.strip().splitlines()[-1] for text in texts if "Traceback" not in text]
    assert re.search(r"failed like rank \d: .*cut/model\.safetensors: tensor", short), texts


WAITING = {
    "tp2": r"waiting in all_reduce over \S+ in \w+\.\w+ \(test_watchdog\.py:\d+\)",
    "dp2": r"waiting in all_reduce over \S+ in BatchLoss\._mean \(test_watchdog\.py:\d+\)",
}


def test_fault_18_sigkill_mid_collective(stories, start):
    fault = signal_self(signal.SIGKILL)
    jobs = {name: start(name, train, stories, config, fault) for name, config in LONG_LAYOUTS.items()}
    for name, job in jobs.items():
        job.wait_for("FAULT", 1)
        assert job.wait(LONG + BUSY_SECONDS) == {0: 1, 1: -signal.SIGKILL}, (name, job.text(0))
        assert job.seconds_after_fault(0) < LONG
        survivor = job.text(0)
        assert re.search(WAITING[name].replace("waiting", "rank 0 was waiting"), survivor), survivor
        assert re.search(r"Rank 1 has gone silent \(killed or stopped\): last heartbeat \d\d:\d\d:\d\d", survivor)


def test_fault_19_sigstop_slow_rank(stories, start, monkeypatch):
    # A slow rank exits this long after it learns of the failure.
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 2.0)
    jobs = {
        "stopped": start("stopped", train, stories, TP2, signal_self(signal.SIGSTOP)),
        "stopped host": start("host", train, stories, DP2, stop_rank_0),
        "slow": start("slow", train, stories, DP2, be_slow),
    }
    for name, job in jobs.items():
        stuck = 0 if name == "stopped host" else 1
        job.wait_for("FAULT", stuck)
        codes = job.wait(TIMEOUT + BUSY_SECONDS, ranks=[1 - stuck])
        assert codes[1 - stuck] == 1, (name, job.text(1 - stuck))
        assert TIMEOUT - 1 < job.seconds_after_fault(1 - stuck) < TIMEOUT + BUSY_SECONDS
    assert re.search(WAITING["tp2"], jobs["stopped"].text(0))
    assert "Rank 1 has gone silent (killed or stopped)" in jobs["stopped"].text(0)
    # The stopped rank hosts the store, so no further diagnosis is available.
    assert "The job's store does not answer: its host process (rank 0 or the launcher)" in jobs["stopped host"].text(1)
    location = r"Rank 1 has not reached it and is in .*be_slow \(test_watchdog\.py:\d+\), after 3 optimizer steps"
    assert re.search(f"{WAITING['dp2']}.*{location}", jobs["slow"].text(0)), jobs["slow"].text(0)
    assert jobs["slow"].wait(BUSY_SECONDS)[1] == 1, "a rank that is alive ends as well"
    assert "Rank 0 detected this first" in jobs["slow"].text(1)


def stop_rank_0(step):
    if step == 3 and dist.get_rank() == 0:
        print_fault()
        os.kill(os.getpid(), signal.SIGSTOP)


def test_timeout_applies_to_every_group(stories):
    def check():
        model = AutoModelForCausalLM.from_pretrained(
            stories, megatron_config=MegatronConfig(tp_size=2, dp_size=2, timeout=TIMEOUT)
        )
        groups = [dist.group.WORLD, dist.new_group([0, 1, 2, 3])]
        mesh = parallelize.parallel_state(model).mesh
        groups += [mesh.tp_group, mesh.dp_group, mesh.group("dp_shard"), mesh.group("dp_replicate")]
        return all(
            group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=TIMEOUT) for group in groups
        )

    assert run_ranks(check, 4) == [True] * 4


def test_started_collective_times_out():
    seconds = 3.0

    def check():
        ensure_process_group(seconds)
        group, store = dist.new_group(), default_store("waited")
        starts = [
            lambda: dist.all_reduce(torch.ones(1), async_op=True),
            # The timeout of a receive is fixed when its group is created.
            lambda: dist.irecv(torch.ones(1), group=group, group_src=1),
        ]
        dist.barrier()
        if dist.get_rank() == 1:
            store.wait(["twice"], timedelta(seconds=BUSY_SECONDS))
            return []
        times = []
        for start in starts:
            at = time.monotonic()
            with pytest.raises(RuntimeError):
                start().wait()
            times.append(time.monotonic() - at)
        store.set("twice", "")
        return times

    times = run_ranks(check, 2)[0]
    assert len(times) == 2 and all(seconds - 0.5 < waited < seconds + BUSY_SECONDS for waited in times)


DIFFERENCES = {
    "MegatronConfig.seed": lambda patch: ({"seed": 7}, {}),
    "MegatronConfig.sequence_parallel": lambda patch: ({"sequence_parallel": True}, {}),
    "the model's config.rms_norm_eps": lambda patch: ({}, {"rms_norm_eps": 1e-3}),
    "the version of hf_megatron": lambda patch: patch.setattr(parallelize, "__version__", "9.9") or ({}, {}),
    "the version of torch": lambda patch: patch.setattr(torch, "__version__", "9.9") or ({}, {}),
    "the version of transformers": (
        lambda patch: patch.setattr(parallelize.transformers, "__version__", "9.9") or ({}, {})
    ),
}


def test_fault_20_ranks_started_differently(stories):
    def load(field):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
            config, model = DIFFERENCES[field](patch) if dist.get_rank() == 1 else ({}, {})
            AutoModelForCausalLM.from_pretrained(stories, megatron_config={"tp_size": 2} | config, **model)
        return str(error.value)

    start = time.monotonic()
    for messages in run_ranks(lambda: {field: load(field) for field in DIFFERENCES}, 2):
        for field, message in messages.items():
            assert message.startswith(f"The ranks disagree on {field}: rank 0: ") and ", rank 1: " in message
    assert time.monotonic() - start < BUSY_SECONDS


class LocalSamples(IterableDataset):
    """Iterable dataset with a given number of samples on this rank."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(torch.arange(self.rows))


# kind -> number of batches that every rank reads, beginning of rank 0's warning
ENDINGS = {
    "iterable": (3, "Rank 0 ran out of data first, after 3 batches; all ranks stop there and at least 1"),
    "uneven": (3, "Rank 1 ran out of data first, after 3 batches; all ranks stop there and at most 1"),
    "equal": (4, None),
}


def test_fault_21_data_ends_early_on_one_rank(stories):
    def read(kind):
        configuration = DataLoaderConfiguration(dispatch_batches=False, even_batches=kind != "uneven")
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        # Each rank reads every other batch of its own source: 3 batches on rank 0, 5 on rank 1.
        iterable = LocalSamples(12 + 8 * dist.get_rank())
        source = {"iterable": iterable, "uneven": torch.arange(14), "equal": torch.arange(16)}[kind]
        loader = accelerator.prepare(DataLoader(source, batch_size=2))
        last = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                last.append(accelerator.gradient_state.end_of_dataloader)
                dist.all_reduce(torch.ones(1))
        return last, [str(each.message) for each in caught if "ran out of data" in str(each.message)]

    def read_all():
        # An Accelerator takes the layout of an existing model.
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=DP2)
        endings = {kind: read(kind) for kind in ENDINGS}
        del model
        return endings

    results = run_ranks(read_all, 2)
    for rank, endings in enumerate(results):
        for kind, (batches, beginning) in ENDINGS.items():
            last, messages = endings[kind]
            assert last == [False] * (batches - 1) + [True]
            assert len(messages) == (rank == 0 and beginning is not None)
            assert all(message.startswith(beginning) for message in messages), messages


def leave_early(stories):
    train(stories, LONG_LAYOUTS["dp2"], lambda step: None, steps=3 if os.environ["RANK"] == "1" else 1000)
    print_fault()


def test_fault_21_one_rank_leaves_plain_loop_early(stories, start):
    job = start("early", leave_early, stories)
    job.wait_for("FAULT", 1)
    assert job.wait(LONG + BUSY_SECONDS) == {0: 1, 1: 0}, job.text(0)
    assert job.seconds_after_fault(0) < LONG
    assert "Rank 1 has ended: its script finished or left early, after 3 optimizer steps." in job.text(0)
    assert re.search(WAITING["dp2"], job.text(0))


def loop_until_requested():
    set_group_timeouts(TIMEOUT)
    with hf_megatron.TerminationSignal() as termination:
        for step in range(2000):
            time.sleep(0.01)
            if step == 5:
                print("READY", flush=True)
            if termination.requested():
                print(f"STOPPED at {step}", flush=True)
                break
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if dist.get_rank() == 0:
        return
    with hf_megatron.TerminationSignal():
        os.kill(os.getpid(), signal.SIGTERM)
        print("ALIVE", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * BUSY_SECONDS)


def loop_with_group():
    ensure_process_group(TIMEOUT, cpu=True)
    loop_until_requested()


def test_termination_signal_stops_all_ranks_at_same_step(start):
    job = start("loop", loop_with_group)
    job.wait_for("READY", 1)
    os.kill(job.processes[1], signal.SIGTERM)
    assert job.wait(BUSY_SECONDS) == {0: 0, 1: -signal.SIGTERM}, job.text(0) + job.text(1)
    stopped = [re.search(r"STOPPED at (\d+)", job.text(rank))[1] for rank in (0, 1)]
    assert stopped[0] == stopped[1] and "ALIVE" in job.text(1)


SCRIPT = """
import os, signal, sys
import hf_megatron, torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

torch.manual_seed(0)
ids = torch.randint(3, 512, (64, 17))
rows = [{{"input_ids": row, "labels": row}} for row in ids]
model = AutoModelForCausalLM.from_pretrained({stories!r}, megatron_config={{"tp_size": 2, "timeout": 60}})
arguments = TrainingArguments(
    {output!r}, max_steps=10000, save_strategy=sys.argv[1], save_steps=5000, save_only_model=True, report_to=[],
    disable_tqdm=True, per_device_train_batch_size=2, logging_steps=10000,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Tell()])
trainer.train()
os.write(1, f"RETURNED {{trainer.state.global_step}}\\n".encode())
"""


def test_sigterm_saves_and_exits(stories, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(stories=str(stories), output=str(tmp_path / "out")))
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), "steps"]
    result = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    steps = [int(step) for step in re.findall(r"RETURNED (\d+)", result.stdout)]
    assert len(steps) == 2 and steps[0] == steps[1] and 3 <= steps[0] <= 4
    checkpoint = tmp_path / "out" / f"checkpoint-{steps[0]}"
    assert list(checkpoint.glob("*.safetensors"))


def test_sigterm_without_save_strategy_only_stops(stories, tmp_path, start):
    def run():
        sys.argv = ["train.py", "no"]
        exec(SCRIPT.format(stories=str(stories), output=str(tmp_path / "out")), {})

    job = start("trainer", run)
    assert job.wait(2 * BUSY_SECONDS) == {0: 0, 1: 0}, job.text(0) + job.text(1)
    assert all(re.search("RETURNED [34]", job.text(rank)) for rank in (0, 1))
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_watchdog_is_unique_and_restores_hooks(stories):
    def check():
        before = sys.excepthook
        for _ in range(2):
            AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        running = [thread for thread in watchdog.threading.enumerate() if isinstance(thread, watchdog.RankWatchdog)]
        assert len(running) == 1 and running[0].daemon and sys.excepthook == running[0]._on_exception
        time.sleep(1.5)
        assert set(running[0]._read_beats()) == {1 - dist.get_rank()}
        dist.barrier()
        running[0].stop()
        assert sys.excepthook is before and watchdog.running_watch() is None

    run_ranks(check, 2)


ENDS = """
import sys
import torch.distributed as dist
from hf_megatron.core.communication import watchdog as watch

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, True), rank=0, world_size=1)
# The store answers too late for the end of the script, and its thread is always in a call of it.
watch._STORE_SECONDS = watch.INTERVAL = 0.0
watch.watch_ranks(5.0, None)
"""


def test_blocked_store_thread_does_not_abort_exit(tmp_path):
    (tmp_path / "script.py").write_text(ENDS, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = subprocess.run(
        [sys.executable, "script.py", str(port)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
