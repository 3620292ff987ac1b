"""Worker processes that stay alive for a full run and step on command, and the machine's counters around each step.

The parent imports torch and transformers once and forks the workers, which then start in milliseconds and share the
libraries' memory. The parent must stay single-threaded: an OpenMP pool does not survive a fork. An idle worker blocks
on its pipe and so takes no CPU time from the active variant.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from variants import Job

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Skipped(Exception):
    """Raised for a variant that cannot run here, with the reason to print."""


def busy_seconds():
    """CPU seconds of the machine since boot, without idle time and disk waits."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, *rest = (int(x) for x in file.readline().split()[1:9])
    return (user + nice + system + sum(rest)) / CLOCK_TICKS


def peak_memory_mib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def give_back_memory():
    """Returns free memory of this process to the operating system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak_memory():
    """Resets the peak to the current usage, so that loading the weights does not count as training."""
    give_back_memory()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def optimizer_bytes(optimizer, parameters):
    """Bytes held by the optimizer beyond the model's own parameters: its state, and main params if there are any."""
    optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps the state in an inner one

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    weights = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
    held = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    stepped_on = (tensor for group in optimizer.param_groups for tensor in group["params"])
    held += [tensor for tensor in stepped_on if local(tensor).untyped_storage().data_ptr() not in weights]
    return sum(local(tensor).numel() * tensor.itemsize for tensor in held)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train(parameters, loss_function, optimizer, steps):
    """Per step: start, end of backward, end of the optimizer step, CPU seconds of this process, loss."""
    records = []
    for _ in range(steps):
        cpu, start = time.process_time(), time.perf_counter()
        loss = loss_function()
        loss.backward()
        after_backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        records.append((start, after_backward, end, time.process_time() - cpu, loss.item()))
    return records


def serve(variant, job, port, pipe):
    """Main loop of a worker: builds the variant, runs a first step, then steps on command until the parent ends it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    try:
        torch.set_num_threads(variant.threads)
        os.environ["OMP_NUM_THREADS"] = str(variant.threads)  # accelerate warns and sets one thread without it
        if variant.needs_group:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(variant.ranks)}
            os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(variant.ranks)}
            dist.init_process_group("gloo")
        parameters, loss_function = variant.build(job)
        optimizer = variant.optimizer(parameters)
        forget_peak_memory()
        pipe.send(("ready", train(parameters, loss_function, optimizer, 1)[0][-1]))
        while True:
            command, argument = pipe.recv()
            if command == "memory":
                pipe.send(("done", peak_memory_mib()))
            elif command == "give_back_memory":
                pipe.send(("done", give_back_memory()))
            elif command == "optimizer_bytes":
                pipe.send(("done", optimizer_bytes(optimizer, parameters)))
            else:
                pipe.send(("done", train(parameters, loss_function, optimizer, argument)))
    except (ImportError, NotImplementedError) as error:
        pipe.send(("skipped", f"{type(error).__name__}: {error}"))
    except EOFError:
        pass
    except Exception:  # noqa: BLE001  the parent re-raises it with this traceback
        pipe.send(("failed", traceback.format_exc()))


class WorkerGroup:
    """The ranks of one variant, from the parent's side."""

    def __init__(self, name, variant, **job):
        self.name, self.variant, self.pipes, self.processes = name, variant, [], []
        port, context = free_port(), multiprocessing.get_context("fork")
        for rank in range(variant.ranks):
            ours, theirs = context.Pipe()
            arguments = (variant, Job(**job, rank=rank, ranks=variant.ranks), port, theirs)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        self.first_loss = sum(self.answers()) / variant.ranks

    def answers(self):
        """Returns one result per rank. Raises on the first failure, because the other rank may then wait forever."""
        results, waiting = {}, set(self.pipes)
        while waiting:
            for pipe in wait(waiting):
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "failed", "the process died"
                if kind in ("skipped", "failed"):
                    self.close()
                    raise Skipped(value) if kind == "skipped" else RuntimeError(f"{self.name}: {value}")
                results[pipe] = value
                waiting.remove(pipe)
        return [results[pipe] for pipe in self.pipes]

    def ask(self, command, argument=None):
        for pipe in self.pipes:
            pipe.send((command, argument))
        return self.answers()

    def sample(self, steps):
        """Medians over `steps` steps, and the share of the machine used by other processes in the meantime."""
        parent, busy, start = time.process_time(), busy_seconds(), time.perf_counter()
        ranks = self.ask("steps", steps)
        wall = time.perf_counter() - start
        own = sum(record[3] for rank in ranks for record in rank) + time.process_time() - parent
        other_processes = max(0.0, busy_seconds() - busy - own) / (wall * os.cpu_count())
        by_step = list(zip(*ranks, strict=True))
        # A late rank keeps the other waiting in a collective, so the longest time of the ranks is the step's.
        return {
            "step": median(max(r[2] - r[0] for r in step) for step in by_step),
            "forward_backward": median(max(r[1] - r[0] for r in step) for step in by_step),
            "cpu": median(sum(r[3] for r in step) for step in by_step),
            "foreign": other_processes,
        }

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


def median(values):
    return torch.tensor(list(values), dtype=torch.float64).quantile(0.5).item()
