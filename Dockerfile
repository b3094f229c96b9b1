# fedcore-fl[all] with reports, without development tools: see docs/install.md.
#
#   docker build -t fedcore .                            for the CPU
#   docker build -t fedcore --build-arg TORCH=default .  for CUDA: torch's wheels bring it; run with --gpus all
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" fedcore train --plugin moon --rounds 5
#
# TORCH_INDEX is the address of an index with torch's CPU wheels, needed where uv cannot be had.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH=cpu
ARG TORCH_INDEX=""

COPY . /opt/fedcore
WORKDIR /opt/fedcore
RUN python -m venv /opt/venv \
 && /opt/venv/bin/python tools/install.py --profile core --extra report \
      --torch "${TORCH}" --torch-index "${TORCH_INDEX}"
RUN useradd --uid 1000 --create-home fedcore && install -d -o fedcore /work

ENV PATH="/opt/venv/bin:${PATH}"
USER 1000
WORKDIR /work
ENTRYPOINT ["fedcore"]
CMD ["--help"]
