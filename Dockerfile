# The dashboard on a machine of your own: CPU, and CUDA where the container is given a GPU.
#   docker build -t finetune .
#   docker run --rm -p 127.0.0.1:8501:8501 -v finetune:/data finetune
#   docker run --rm --gpus all -p 127.0.0.1:8501:8501 -v finetune:/data finetune
# Without a GPU a third of the size does: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t finetune .
FROM python:3.11-slim

ARG TORCH_INDEX=""
# of the trio in requirements.txt, without torch_xla, which a container without a TPU has no use for
ARG TORCH="torch==2.9.1 torchvision==0.24.1"

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 FINETUNE_HOME=/data

WORKDIR /app
COPY requirements-common.txt .
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} $TORCH && pip install -r requirements-common.txt
COPY app.py ./
COPY core core
COPY ui ui
COPY pages pages
COPY .streamlit .streamlit

RUN useradd --create-home --uid 1000 finetune && mkdir /data && chown finetune /data
USER finetune
VOLUME /data
EXPOSE 8501
# exec form: the container's SIGTERM reaches the launcher, which saves what trains; give it time with docker stop -t 30
ENTRYPOINT ["python", "-m", "core", "serve", "--address", "0.0.0.0"]
HEALTHCHECK --interval=30s --start-period=60s CMD ["python", "-c", "from core.serve.status import read_status; from pathlib import Path; import sys; s = read_status(Path('/data')); sys.exit(0 if s and s.state == 'ready' else 1)"]
