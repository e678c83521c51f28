# docker build -t pipetrain . && docker run --gpus all --ipc=host -v "$PWD/runs:/home/trainer/runs" pipetrain model=vgg16
FROM python:3.11-slim
ENV PIP_NO_CACHE_DIR=1
WORKDIR /checkout
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY conf conf
COPY pipetrain pipetrain
RUN pip install -c constraints.txt .
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["pipetrain"]
