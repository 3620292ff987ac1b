"""Host overhead of a layer: Python calls and CPU microseconds of forward, backward and optimizer, for every axis.

    python benchmarks/host_overhead.py --out benchmarks/results/host_overhead_cpu.json
    python benchmarks/host_overhead.py --before OLD/.venv/bin/python --after NEW/.venv/bin/python --out FILE

Two ranks over gloo train Llamas of two depths whose tensors are so small that arithmetic costs little; the difference
between the depths is the cost of a layer, the rest is the fixed cost of a call. Reported are the CPU time of the rank's
main thread, which also runs the autograd engine on CPUs, so that waiting for the other rank does not count; and the
number of Python function calls. Each result is the median over rounds, in which all variants (and both versions, if
there are two) take turns.
"""

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

DEPTHS = (2, 10)
BATCH, TOKENS = 2, 16
# variant -> fields of MegatronConfig; the other variants have their own builders.
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "dp2 zero1": {"dp_size": 2, "zero_stage": 1},
    "dp2 zero3": {"dp_size": 2, "zero_stage": 3},
    "cp2": {"cp_size": 2},
    "pp2": {"pp_size": 2, "num_microbatches": 1},
}
VARIANTS = ("stock", "plain_megatron", "transformers_tp", *LAYOUTS)
PHASES = ("forward", "backward", "optimizer")


def saved_models(folder):
    """Saves a tiny Llama of each depth; returns the folders."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folders = []
    for depth in DEPTHS:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=64, max_position_embeddings=64)
        LlamaForCausalLM(config).save_pretrained(os.path.join(folder, str(depth)))
        folders.append(os.path.join(folder, str(depth)))
    return folders


class Trained:
    """One variant at one depth: a loss, an optimizer, and the phases of a step."""

    def __init__(self, variant, folder, rank):
        import torch
        from variants import Job, plain_megatron, stock, transformers_tp

        import hf_megatron

        job = Job(folder, "fp32", BATCH, TOKENS, rank, 2)
        builders = {"stock": stock, "plain_megatron": plain_megatron, "transformers_tp": transformers_tp}
        if variant in builders:
            parameters, self.loss = builders[variant](job)
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)
            return
        from transformers import AutoModelForCausalLM

        layout = hf_megatron.MegatronConfig(**LAYOUTS[variant])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, megatron_config=layout).train()
        ids = job.token_ids(model.config)
        self.loss = lambda: model(input_ids=ids, labels=ids).loss
        self.optimizer = hf_megatron.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    def phases(self, measure):
        """Runs one step; `measure(function)` is called for each phase and returns its cost."""
        result = {}
        costs = [measure(lambda: result.update(loss=self.loss())), measure(lambda: result["loss"].backward())]
        costs.append(measure(lambda: (self.optimizer.step(), self.optimizer.zero_grad())))
        return costs


def cpu_seconds(function):
    start = time.thread_time()
    function()
    return time.thread_time() - start


def python_calls(function):
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def be_rank(variant, rank, folders, port, steps, commands, results):
    """Builds a variant, then measures one round per command."""
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo")
    models = [Trained(variant, folder, rank) for folder in folders]
    for model in models:
        for _ in range(2):
            model.phases(cpu_seconds)
    results.put("ready")
    while commands.get() == "round":
        seconds = []
        for model in models:
            rows = [model.phases(cpu_seconds) for _ in range(steps)]
            seconds.append([statistics.median(column) for column in zip(*rows, strict=True)])
        results.put({"cpu": seconds, "calls": [model.phases(python_calls) for model in models]})
    os._exit(0)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def serve(steps):
    """Starts two ranks per variant; each line on stdin starts a round, in which the variants take turns."""
    import torch  # noqa: F401 - before the fork
    import transformers  # noqa: F401

    import hf_megatron  # noqa: F401

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        # Save the models in a separate process: an OpenMP pool does not survive a fork.
        maker = context.Process(target=saved_models, args=(folder,))
        maker.start()
        maker.join()
        folders, pairs = [os.path.join(folder, str(depth)) for depth in DEPTHS], {}
        for variant in VARIANTS:
            port, pairs[variant] = free_port(), [(context.Queue(), context.Queue()) for _ in range(2)]
            for rank, queues in enumerate(pairs[variant]):
                arguments = (variant, rank, folders, port, steps, *queues)
                context.Process(target=be_rank, args=arguments, daemon=True).start()
            for _, results in pairs[variant]:
                results.get(timeout=600)
        print(json.dumps("ready"), flush=True)
        while sys.stdin.readline():
            found = {}
            for variant, queues in pairs.items():
                for commands, _ in queues:
                    commands.put("round")
                found[variant] = [results.get(timeout=600) for _, results in queues][0]
            print(json.dumps(found), flush=True)


class Side:
    """Server process of one installed version."""

    def __init__(self, python, steps):
        words = [python, __file__, "--serve", "--steps", str(steps)]
        environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a rank ended; run the script with --serve to see why")
        return json.loads(line)

    def round(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()


def summary(rounds):
    """Cost per layer and fixed cost per call, by variant and phase."""
    rows = {}
    between = DEPTHS[1] - DEPTHS[0]
    for variant in VARIANTS:
        rows[variant] = {}
        for number, phase in enumerate(PHASES):
            row = {}
            for unit, scale in (("cpu", 1e6), ("calls", 1)):
                pairs = [[depth[number] for depth in one[variant][unit]] for one in rounds]
                layer = statistics.median((deep - shallow) / between for shallow, deep in pairs) * scale
                fixed = statistics.median(shallow for shallow, _ in pairs) * scale - DEPTHS[0] * layer
                row[unit] = {"layer": round(layer, 1), "fixed": round(fixed, 1)}
            rows[variant][phase] = row
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="python of an earlier version, measured in turns with the other")
    parser.add_argument("--after", default=sys.executable, help="python of the version, this one's by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=9, help="steps of a variant in a round")
    parser.add_argument("--out", help="a JSON file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.serve:
        serve(wanted.steps)
        return
    pythons = {"before": wanted.before, "after": wanted.after}
    sides = {name: Side(python, wanted.steps) for name, python in pythons.items() if python}
    rounds = {name: [] for name in sides}
    for _ in range(wanted.rounds):
        for name, side in sides.items():
            rounds[name].append(side.round())
    summaries = {name: summary(found) for name, found in rounds.items()}
    print(f"{'':18}{'forward':>22}{'backward':>22}{'optimizer':>22}   us [calls] per layer, + per call")
    for name, rows in summaries.items():
        for variant, phases in rows.items():
            cells = (
                f"{cost['cpu']['layer']:8.0f} [{cost['calls']['layer']:4.0f}] +{cost['cpu']['fixed']:5.0f}"
                for cost in phases.values()
            )
            print(f"{name:7}{variant:15}{'   '.join(cells)}")
    if wanted.out:
        packages = ("torch", "transformers", "accelerate")
        described = {"versions": {package: version(package) for package in packages}, "cpu": platform.processor()}
        described |= {"cores": os.cpu_count(), "rounds": wanted.rounds, "steps": wanted.steps, "depths": DEPTHS}
        with open(wanted.out, "w") as file:
            json.dump({**described, "results": summaries}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
