# amp-recipes for CUDA. This image was never built by its authors, who had neither Docker nor a GPU.
#
#     docker build -t amp-recipes .
#     docker run --rm --gpus all --shm-size=8g -u "$(id -u):$(id -g)" -v "$PWD:/runs" amp-recipes amp=bf16
#
# perf=compile needs a C compiler on a GPU: build with --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.2-cudnn9-devel.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.2-cudnn9-runtime
FROM ${BASE}

# Some base images use the Python of the system, into which pip else installs nothing.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
COPY . /opt/amp-recipes
# torch and torchvision are those of the base image: constraints.txt names the same versions.
RUN cd /opt/amp-recipes && pip install -c constraints.txt '.[vision,data,wandb,tensorboard,optuna,report]'

# Any user may run it: caches go where everybody may write, and user ids need no name.
ENV HOME=/tmp USER=amp-recipes
WORKDIR /runs
ENTRYPOINT ["amp-recipes"]
CMD ["--help"]
