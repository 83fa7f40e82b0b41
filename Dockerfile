# From the wheel:   pip wheel --no-deps --wheel-dir dist . && docker build -t ringmaster .
# A run:            docker run --gpus all --shm-size=8g -v $PWD/runs:/ringmaster/runs ringmaster
# Its own status:   docker run ... --entrypoint ringmaster ringmaster launch=local     (0, 1, 2, 3 or 75; torchrun's is 0 or 1)
# With settings:    docker run ... ringmaster --standalone --nproc-per-node=2 -m trainer strategy=fsdp run_dir=runs/mine resume=auto
FROM python:3.12-slim
# train.compile=true compiles C and C++ while it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir /tmp/*.whl && rm /tmp/*.whl
WORKDIR /ringmaster
# torchrun is process 1 and gets the signals of `docker stop` itself; the ranks have 120 s to save:
# stop with `docker stop -t 130`.
ENTRYPOINT ["torchrun", "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGUSR1", "--shutdown-timeout", "120"]
# auto: a process for each GPU, or, without GPUs, for each core.
CMD ["--standalone", "--nproc-per-node=auto", "-m", "trainer"]
