# The steps are those of scripts/setup.sh, which CI and every reader of the README run; here on Debian's Python.
#   docker build -t embodyrl .
#   docker run --rm -it --user "$(id -u)" -v "$PWD/runs:/embodyrl/runs" embodyrl train
# For GPUs (ranks without peer access between GPUs exchange data in /dev/shm, which is 64 MB by default):
#   docker build -t embodyrl --build-arg TORCH_BUILD=cuda .
#   docker run --rm -it --gpus all --shm-size=16g -e NVIDIA_DRIVER_CAPABILITIES=all -v "$PWD/runs:/embodyrl/runs" embodyrl train
FROM python:3.11-slim-bookworm
ARG TORCH_BUILD=cpu
ARG EXTRAS=libero
WORKDIR /embodyrl
COPY . .
RUN TORCH_BUILD=$TORCH_BUILD EXTRAS=$EXTRAS bash -c 'source scripts/setup.sh'
# Any user may write runs and caches (docker run --user "$(id -u)").
RUN mkdir -m 1777 runs /home/embodyrl
ENV HOME=/home/embodyrl PATH=/embodyrl/.venv/bin:$PATH OMP_NUM_THREADS=1 LP_NUM_THREADS=1
ENTRYPOINT ["embodyrl"]
CMD ["--help"]
