# The steps are those of scripts/setup.sh, which CI and every reader of the README run; here on Debian's Python.
#   docker build -t embodyrl .                    add --build-arg TORCH_BUILD=cuda for a GPU
#   docker run --rm -it -v "$PWD/runs:/embodyrl/runs" embodyrl train
FROM python:3.11-slim-bookworm
ARG TORCH_BUILD=cpu
ARG EXTRAS=libero
WORKDIR /embodyrl
COPY . .
RUN TORCH_BUILD=$TORCH_BUILD EXTRAS=$EXTRAS bash -c 'source scripts/setup.sh'
ENV PATH=/embodyrl/.venv/bin:$PATH OMP_NUM_THREADS=1 LP_NUM_THREADS=1
ENTRYPOINT ["embodyrl"]
CMD ["--help"]
