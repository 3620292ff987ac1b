# Image for NVIDIA GPUs: `docker build -t hf_megatron .`, then
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" hf_megatron \
#     torchrun --nproc_per_node 8 train.py
# PyTorch's wheels bring the CUDA libraries, so the host needs the driver and the NVIDIA container toolkit only.
FROM python:3.13-slim-bookworm

# Triton compiles its launchers with the system's compiler, against Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=2.15.0
RUN pip install --no-cache-dir "torch==${TORCH}"

COPY . /opt/hf_megatron
RUN pip install --no-cache-dir "/opt/hf_megatron[data,examples,liger,plots]" peft trl \
    && rm -rf /opt/hf_megatron

WORKDIR /work
CMD ["hf-megatron", "env"]
